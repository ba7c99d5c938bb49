"""Data and protocols of a step: outputs of a pass, results of a step, and the parts that a step is made of.

A `Backend` runs trees on a model, a `Sampler` selects tokens after nodes, a `Drafter` adds candidates to a tree, and a
`StepBudget` decides how many candidates are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lookahead.core.forest import Forest
from lookahead.core.token_tree import Noise, TokenTree
from lookahead.values import finite_number, whole_number


class NodeOutputs(Protocol):
    """The outputs of a forward pass for the nodes of one sequence's tree."""

    @property
    def predictions(self) -> NDArray[np.int64]:
        """The likeliest token after each node, `[nodes]`; -1 where nothing was read."""

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """The likeliest tokens after each node, likeliest first, `[nodes, top_k]`; -1 where nothing was read."""

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """Their probabilities, `[nodes, top_k]`; 0 where nothing was read."""

    def logits_after(self, node: int) -> Any:
        """Logits of the token after `node`, `[1, vocabulary]` float32, in the backend's own kind of array."""


class ForestOutputs(Protocol):
    """The outputs of a forward pass over the trees of a step."""

    @property
    def predictions(self) -> NDArray[np.int64]:
        """The likeliest token after each node of a `Forest`, `[nodes]`; -1 where nothing was read."""

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """The likeliest tokens after each node, likeliest first, `[nodes, top_k]`; -1 where nothing was read."""

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """Their probabilities, `[nodes, top_k]`; 0 where nothing was read."""

    def __getitem__(self, row: int, /) -> NodeOutputs:
        """The outputs for the nodes of one tree."""

    def __iter__(self) -> Iterator[NodeOutputs]: ...


class JoinedOutputs:
    """The outputs of the trees of a step that were found apart (`ForestOutputs`).

    Args:
        outputs: Those of each tree.
    """

    def __init__(self, outputs: Sequence[NodeOutputs]) -> None:
        self._outputs = outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def __getitem__(self, row: int) -> Any:
        """The outputs for the nodes of one tree."""
        return self._outputs[row]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._outputs)

    @property
    def predictions(self) -> NDArray[np.int64]:
        """See `ForestOutputs`."""
        return np.concatenate([of_tree.predictions for of_tree in self._outputs])

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """See `ForestOutputs`."""
        return np.concatenate([of_tree.top_ids for of_tree in self._outputs])

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """See `ForestOutputs`."""
        return np.concatenate([of_tree.top_probabilities for of_tree in self._outputs])


class Walk(NamedTuple):
    """A walk from the root of a tree along drafted tokens that were selected.

    Attributes:
        tree: The tree that was sent.
        path: Accepted candidate nodes, from below the root downwards.
        tokens: The selected tokens: the tokens of `path`, and one more, the root of the next step.
        stopped: Whether the text is complete.
    """

    tree: TokenTree
    path: list[int]
    tokens: list[int]
    stopped: bool

    @property
    def certain_tokens(self) -> int:
        """Number of `tokens` that are accepted nodes added by `TokenTree.add_certain`."""
        return sum(node <= self.tree.root + self.tree.certain for node in self.path) if self.tree.certain else 0


class StepResult(NamedTuple):
    """Results of one step for one sequence.

    Attributes:
        tree: The tree that was sent.
        predicted: `predictions`, or a function that finds them: a drafter that rests has no use for them.
        path: The accepted candidate nodes, from below the root downwards.
        tokens: The tokens that the step added to the text: the tokens of `path`, and the one selected after it.
        top_ids: For each node the model's likeliest next tokens, likeliest first, `[nodes, top_k]` int64; -1 where
            the prediction was not read. `top_k` is the largest of the drafters of the batch.
        top_probabilities: Their probabilities (softmax of the unprocessed logits), `[nodes, top_k]` float32; 0
            where the prediction was not read.
    """

    tree: TokenTree
    predicted: NDArray[np.int64] | Callable[[], NDArray[np.int64]]
    path: list[int]
    tokens: list[int]
    top_ids: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)
    top_probabilities: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)

    @property
    def predictions(self) -> NDArray[np.int64]:
        """For each node of the tree the model's likeliest next token after it (greedy, from the unprocessed logits),
        `[nodes]` int64; -1 where the prediction was not read."""
        return self.predicted() if callable(self.predicted) else self.predicted

    def beyond(self, certain: int) -> StepResult:
        """The same step, with its first `certain` tokens taken as decided before it; see `TokenTree.beyond`."""
        if not certain:
            return self
        return self._replace(tree=self.tree.beyond(certain), path=self.path[certain:], tokens=self.tokens[certain:])

    @property
    def selected_after(self) -> list[int]:
        """The node before each of `tokens`: the root, and the nodes of the path."""
        return [self.tree.root, *self.path][: len(self.tokens)]


class StepResults(NamedTuple):
    """Results of one step for all sequences of a batch.

    Attributes:
        forest: The trees that were sent.
        outputs: The outputs of the pass.
        walks: The walk down each tree; `None` where no text went on.
    """

    forest: Forest
    outputs: ForestOutputs
    walks: Sequence[Walk | None]

    def of(self, row: int) -> StepResult | None:
        """Results for one sequence; `None` if the step added nothing to its text."""
        walk = self.walks[row]
        if walk is None:
            return None
        outputs = self.outputs[row]
        listed = outputs.top_ids, outputs.top_probabilities
        return StepResult(walk.tree, lambda: outputs.predictions, walk.path, walk.tokens, *listed)


class Backend(Protocol):
    """Runs the trees of a batch on a model, and keeps the keys and values of each row's text."""

    def idle_tree(self) -> TokenTree:
        """The tree of a finished row while others continue: one token without a read output."""

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step of a sequence: its pending tokens.

        Of many it may be the first ones alone; the last of these is then not read.
        """

    def wants_draft(self, tree: TokenTree) -> bool:
        """Whether anything should be drafted onto `tree`."""

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> ForestOutputs:
        """Run the model on one tree for each sequence. Keys and values of the nodes wait for `commit`.

        Args:
            trees: One for each sequence.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.
        """

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep `kept`, for each sequence a path of nodes from its tree's first one downwards; forget the others."""


class Sampler(Protocol):
    """Selects each next token as plain decoding would: one after another, each once and in order."""

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, instead of taking the likeliest ones."""

    @property
    def needs_logits(self) -> bool:
        """Whether more is wanted than the likeliest token of the raw logits."""

    def foresee(self, tokens: int) -> Noise | None:
        """The noise that the next `tokens` tokens will be sampled with, without drawing it; `None` if unknown."""

    @classmethod
    def look_ahead_rows(cls, rows: Sequence[tuple[Any, TokenTree, NodeOutputs]]) -> None:
        """Begin to sample after nodes of several trees that a pass has run, before any token is selected.

        Args:
            rows: Sequence, tree and outputs of each.
        """

    def select(self, sequence: Any, outputs: NodeOutputs, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`, a `SequenceState` of the sampler's own kind."""


class Drafter(Protocol):
    """Proposes tokens for one sequence. Proposals change the number of steps, never the text."""

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; 0 if the likeliest alone will do."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self, tree: TokenTree) -> None:
        """Add candidate and window nodes to the tree of the coming step, likeliest path first."""

    def observe(self, result: StepResult) -> None:
        """Learn from the step. Called after every step, also after one without `propose` (a long prefill)."""

    def statistics(self) -> dict[str, Any]:
        """Sizes and hit counts of the drafter's data, as plain numbers and lists."""


class RowsDrafter(Protocol):
    """Drafts and learns for several sequences in one call. It is the attribute `together` of their drafters; `None` for
    a drafter without a group. After an exception the drafters are called one by one."""

    def propose_rows(self, drafters: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        """`propose` of several drafters."""

    def observe_rows(self, drafters: Sequence[Any], rows: Sequence[int], step: StepResults) -> None:
        """`observe` of several drafters, for these rows of a step."""


Send = Callable[[int], None]
"""Sends this number of candidates, the likeliest ones."""


class StepBudget(Protocol):
    """Decides how many candidates a step sends for one row."""

    @property
    def backs_off(self) -> bool:
        """Whether this step goes without a draft, so that nothing need be offered or learned."""

    @property
    def least(self) -> float:
        """Minimum predicted probability of a candidate in the search."""

    @property
    def most(self) -> int:
        """Most candidates that are sent; no more need be looked for."""

    def begin(self, teaches: bool = True) -> None:
        """Begin a step: set the attributes.

        Args:
            teaches: Whether the drafter learns the predictions after its nodes.
        """

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """Choose among the candidates of a step.

        Args:
            likely: Probability that each is accepted, in the order of sending: about falling, `[candidates]`.
            send: Called with how many are sent: at once, or when other rows have offered theirs.
            pending: Nodes of the row without them.
        """


@runtime_checkable
class RowsBudget(Protocol):
    """A `StepBudget` that chooses among the candidates of several rows."""

    def offer_rows(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], send: Callable[[NDArray[np.int64]], None]
    ) -> None:
        """Choose among the candidates of several rows.

        Args:
            likely: Probability that each is accepted, row after row, `[candidates]`.
            counts: Candidates of each row, `[rows]`.
            send: Called with the number of candidates that are sent of each row, when other rows have offered theirs.
        """


class FixedBudget:
    """Sends all candidates up to a number of nodes.

    Args:
        nodes: Nodes of a step, the root included. At least 1.
        least: How likely a candidate must be.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    backs_off = False

    def __init__(self, nodes: int, least: float = 0.0) -> None:
        self.most = whole_number("nodes", nodes, 1, meaning="a step has at least its root") - 1
        if not self.most:  # nothing learned would ever be sent
            self.backs_off = True
        self.least = finite_number("least", least, "must be a probability, 0 for any")

    def begin(self, teaches: bool = True) -> None:
        """See `StepBudget`."""

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """See `StepBudget`."""
        send(min(len(likely), self.most))


class NoDrafter:
    """Proposes nothing: plain autoregressive decoding, one token a step."""

    top_k = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to begin."""

    def propose(self, tree: TokenTree) -> None:
        """The tree stays as it is."""

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""

    def statistics(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}
