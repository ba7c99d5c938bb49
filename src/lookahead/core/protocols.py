"""Protocols of the parts that a step is made of.

A `Backend` runs trees on a model, a `Sampler` selects tokens after nodes, a `Drafter` adds candidates to a tree, and a
`StepBudget` decides how many candidates are sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.core.forest import Forest
from lookahead.core.ranking import UNRANKED
from lookahead.core.results import EarlyTokens, ForestOutputs, NodeOutputs, StepResult, StepResults
from lookahead.core.roots import Roots
from lookahead.core.token_tree import Noise, TokenTree
from lookahead.values import finite_number, whole_number


class Backend(Protocol):
    """Runs the trees of a batch on a model, and keeps the keys and values of each row's text.

    A backend whose rows are not walked one by one has a method `walk` with the signature of `walk_trees`.
    """

    def begin_step(self, texts: Sequence[Sequence[int] | None]) -> Roots:
        """The pending tokens of the coming step.

        Args:
            texts: The text of each row; `None` for a finished one.
        """
        rows = enumerate(texts)
        return Roots([self.idle_tree() if text is None else self.begin_tree(row, text) for row, text in rows])

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

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep `paths`, for each sequence a path of nodes from its tree's first one downwards; forget the others."""


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
    def look_ahead_rows(
        cls, rows: Sequence[tuple[Any, int]], forest: Forest, outputs: ForestOutputs
    ) -> Sequence[EarlyTokens]:
        """Sample after nodes of several trees that a pass has run, before their walks.

        Args:
            rows: Each sequence, and its row in the forest.
            forest: The trees.
            outputs: The outputs of the pass.

        Returns:
            Selected tokens; `select` and `advance` of their samplers take them.
        """

    def advance(self, tokens: int) -> None:
        """Advance over tokens that `look_ahead_rows` has selected, without `select`."""

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
    """Drafts and learns for several sequences in one call, instead of `propose` and `observe` of their drafters.

    It is the attribute `together` of these drafters; they also have a `budget`, a `StepBudget`. Drafters with the same
    group and budget have a common call. After an exception each of them has its own.
    """

    def top_k_of(self, drafters: Sequence[Any]) -> int:
        """The largest `top_k` of several drafters."""

    def find_rows(
        self, drafters: Sequence[Any], rows: Sequence[int], roots: Roots
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
        """Search candidates for some rows of a step, ascending.

        Returns:
            Probability that each candidate is accepted, row after row in the order of sending; and the candidates of
            each row, `[rows]`. `None` without a search.
        """

    def send_rows(self, drafters: Sequence[Any], rows: Sequence[int], roots: Roots, counts: NDArray[np.int64]) -> None:
        """Add the first candidates of each row to its tree, `counts` of each, `[rows]`."""

    def observe_rows(self, drafters: Sequence[Any], rows: Sequence[int], step: StepResults) -> None:
        """`observe` of several drafters, for these rows of a step."""


class StepBudget(Protocol):
    """Decides how many candidates a step sends for its rows: for one row, or for several whose candidates compete."""

    ranking: NDArray[np.int64]
    """Ranking of the candidates of the step; see `lookahead.core.ranking`."""

    @property
    def backs_off(self) -> bool:
        """Whether this step goes without a draft, so that nothing need be offered or learned."""

    @property
    def min_probability(self) -> float:
        """Minimum predicted probability of a candidate in the search."""

    @property
    def max_candidates(self) -> int:
        """Most candidates that are sent; no more need be looked for."""

    def begin(self, teaches: int = True) -> None:
        """Begin a step: set the attributes.

        Args:
            teaches: Whether the drafter learns the predictions after its nodes; for several rows, in how many.
        """

    def choose(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], roots: Roots, rows: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the number of candidates of each row to send, the first ones, `[rows]`.

        Args:
            likely: Probability that each is accepted, row after row in the order of sending, `[candidates]`.
            counts: Candidates of each row, `[rows]`.
            roots: The trees of the step so far.
            rows: The rows in them.
        """


class StepPace(Protocol):
    """Decides by the time of steps how many nodes they have; its budgets ask it."""

    @property
    def searches(self) -> bool:
        """Whether the coming step searches for drafts."""

    def begin_step(self, rows: int, temperature: float = 0.0) -> None:
        """Begin a step.

        Args:
            rows: Number of rows.
            temperature: Mean temperature of their sampling, 0 for greedy decoding.
        """

    def skip(self) -> bool:
        """Count a step of a long rest without timing it; return whether the step was part of one."""

    def book(self, step: Any) -> None:
        """Learn from a finished step, a `StepTime`."""


class FixedBudget:
    """Sends all candidates up to a number of nodes.

    Args:
        nodes: Nodes of a step, the root included. At least 1.
        min_probability: Minimum probability of a candidate.
        least: Deprecated name of `min_probability`.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    backs_off = False
    ranking = UNRANKED

    def __init__(self, nodes: int, min_probability: float = 0.0, *, least: float | None = None) -> None:
        if least is not None:
            warnings.warn("least is deprecated; use min_probability", FutureWarning, stacklevel=2)
            min_probability = least
        self.max_candidates = whole_number("nodes", nodes, 1, meaning="a step has at least its root") - 1
        if not self.max_candidates:  # nothing learned would ever be sent
            self.backs_off = True
        self.min_probability = finite_number("min_probability", min_probability, "must be a probability, 0 for any")

    def begin(self, teaches: int = True) -> None:
        """See `StepBudget`."""

    def choose(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], roots: Roots, rows: Sequence[int]
    ) -> NDArray[np.int64]:
        """See `StepBudget`."""
        return np.minimum(counts, self.max_candidates)


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
