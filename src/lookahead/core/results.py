"""Outputs of a pass, walks down its trees, and results of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast, overload

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, typed
from lookahead.core.forest import Forest, Integers
from lookahead.core.token_tree import TokenTree


class Predictions(Protocol):
    """The likeliest tokens after nodes, as a forward pass predicts them."""

    @property
    def predictions(self) -> NDArray[np.int64]:
        """The likeliest token after each node, `[nodes]`; -1 where nothing was read."""

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """The likeliest tokens after each node, likeliest first, `[nodes, top_k]`; -1 where nothing was read."""

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """Their probabilities, `[nodes, top_k]`; 0 where nothing was read."""


class NodeOutputs(Predictions, Protocol):
    """The outputs of a forward pass for the nodes of one sequence's tree."""

    def logits_after(self, node: int) -> Any:
        """Logits of the token after `node`, `[1, vocabulary]` float32, in the backend's own kind of array."""


class ForestOutputs(Predictions, Protocol):
    """The outputs of a forward pass for the nodes of a `Forest`, the trees of a step."""

    def __getitem__(self, row: int, /) -> NodeOutputs:
        """The outputs for the nodes of one tree."""

    def __iter__(self) -> Iterator[NodeOutputs]: ...


class JoinedOutputs:
    """Outputs of trees from several passes of a step (`ForestOutputs`).

    Args:
        outputs: Outputs of each tree.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs = outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def __getitem__(self, row: int) -> Any:
        """The outputs for the nodes of one tree."""
        return self._outputs[row]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._outputs)

    @property
    def logit_rows(self) -> NDArray[np.int64]:
        """Row of the logits after each node, in the logits of its own tree, `[nodes]`; -1 where nothing was read."""
        return np.concatenate([of_tree.logit_rows for of_tree in self._outputs])

    @property
    def predictions(self) -> NDArray[np.int64]:
        """See `Predictions`."""
        return np.concatenate([of_tree.predictions for of_tree in self._outputs])

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """See `Predictions`."""
        return _joined([of_tree.top_ids for of_tree in self._outputs], -1)

    @property
    def top_probabilities(self) -> NDArray[np.float32]:
        """See `Predictions`."""
        return _joined([of_tree.top_probabilities for of_tree in self._outputs], 0)


def _joined(parts: Sequence[NDArray[Any]], unread: int) -> NDArray[Any]:
    """Join lists of several trees, `[nodes, listed]`; idle trees list less than others."""
    widest = max([part.shape[1] for part in parts])
    joined = np.full((sum(map(len, parts)), widest), unread, dtype=parts[0].dtype)
    end = 0
    for part in parts:
        begin = end
        end = end + len(part)
        joined[begin:end, : part.shape[1]] = part
    return joined


class EarlyTokens(NamedTuple):
    """Tokens that samplers selected for several rows of a step before the walks.

    Attributes:
        rows: Rows with walks that need nothing else.
        nodes: Nodes of the forest with a selected token.
        read: Returns the token after each node, `[nodes]`; -1 if its probabilities are invalid.
    """

    rows: Sequence[int]
    nodes: Integers
    read: Callable[[], NDArray[Any]]


class Walk(NamedTuple):
    """A walk from the root of a tree along drafted tokens that were selected.

    Attributes:
        path: Accepted candidate nodes, from below the root downwards.
        tokens: The selected tokens: the tokens of `path`, and one more, the root of the next step.
        stopped: Whether the text is complete.
    """

    path: list[int]
    tokens: list[int]
    stopped: bool


class Walks(Sequence["Walk | None"]):
    """The walks down all trees of a step, as arrays; as a sequence, the walk of each row, `None` where no text went on.

    Args:
        forest: The trees.

    Attributes:
        counts: Number of tokens selected in each row, `[rows]`; 0 where no text went on.
        stopped: Whether the text of each row is complete, `[rows]` bool.
        tokens: Selected tokens; those of a row begin at the first node of its tree, `[nodes]`.
        paths: Accepted nodes, laid out in the same way, `[nodes]`.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self.counts = np.zeros(forest.rows, dtype=np.int64)
        self.stopped = np.zeros(forest.rows, dtype=np.bool_)
        self.tokens = np.empty(len(forest.tokens), dtype=np.int64)
        self.paths = np.empty(len(forest.tokens), dtype=np.int64)

    @overload
    def __getitem__(self, row: int) -> Walk | None: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Walk | None]: ...

    def __getitem__(self, row: int | slice) -> Walk | Sequence[Walk | None] | None:
        if isinstance(row, slice):
            return [self[place] for place in range(*row.indices(len(self)))]
        if not self.counts[row]:
            return None
        begin = self._forest.firsts[row]
        path = self.paths[begin : begin + self.counts[row] - 1].tolist()
        return Walk(path, self.tokens_of(row), bool(self.stopped[row]))

    def __len__(self) -> int:
        return len(self.counts)

    def tokens_of(self, row: int) -> list[int]:
        """The tokens selected in a row."""
        begin = self._forest.firsts[row]
        tokens: list[int] = self.tokens[begin : begin + self.counts[row]].tolist()
        return tokens

    def set(self, row: int, walk: Walk) -> None:
        """Set the walk of a row."""
        begin = self._forest.firsts[row]
        count = len(walk.tokens)
        self.counts[row], self.stopped[row] = count, walk.stopped
        self.tokens[begin : begin + count] = walk.tokens
        self.paths[begin : begin + len(walk.path)] = walk.path

    @property
    def certain_tokens(self) -> int:
        """Number of selected tokens that are accepted nodes added by `TokenTree.add_certain`."""
        if not self._forest.has_certain:
            return 0
        rows = zip(self._forest, self, strict=True)
        paths = [(tree, walk.path) for tree, walk in rows if walk is not None and tree.certain]
        return sum(node <= tree.root + tree.certain for tree, path in paths for node in path)

    def committed(self, sequences: Sequence[Any]) -> Sequence[Sequence[int]]:
        """The nodes to keep in the cache: pending tokens and accepted paths. The next step sends the last selected
        token of a text as its root.

        Args:
            sequences: The texts (`SequenceState`). All pending tokens of a part of a prompt are kept.
        """
        forest = self._forest
        if forest.rows == 1 and forest.is_plain:  # plain steps of one text are short
            return [range(len(forest.tokens) if self.counts[0] or not sequences[0].finished else 0)]
        counts = forest.roots + np.maximum(self.counts, 1)
        if not self.counts.all():
            for row in (self.counts == 0).nonzero()[0].tolist():
                counts[row] = 0 if sequences[row].finished else forest.counts[row]
        return CommittedNodes(forest, counts, self.paths)


_NONE = np.empty(0, dtype=np.int64)


class CommittedNodes(Sequence[Sequence[int]]):
    """Nodes to keep of each tree: the first ones up to the root, and a path below it. As a sequence, lists of nodes.

    Args:
        forest: The trees.
        counts: Number of nodes to keep of each tree, `[rows]`.
        paths: Nodes below the root, those of a row from the first node of its tree on, `[nodes]`.
    """

    def __init__(self, forest: Forest, counts: Integers, paths: Integers) -> None:
        self._forest = forest
        self.counts = counts
        self._paths = paths

    @overload
    def __getitem__(self, row: int) -> Sequence[int]: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[Sequence[int]]: ...

    def __getitem__(self, row: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        if isinstance(row, slice):
            return [self[place] for place in range(*row.indices(len(self)))]
        forest = self._forest
        count = int(self.counts[row])
        below = count - int(forest.roots[row]) - 1
        if below <= 0:
            return range(count)
        begin = int(forest.firsts[row])
        return [*range(count - below), *self._paths[begin : begin + below].tolist()]

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, forest: Forest, nodes_to_keep: Sequence[Sequence[int]]) -> CommittedNodes:
        """Lists of nodes, which may be a `CommittedNodes` already."""
        if isinstance(nodes_to_keep, cls):
            return nodes_to_keep
        counts = np.array(list(map(len, nodes_to_keep)), dtype=np.int64)
        paths = np.empty(len(forest.tokens), dtype=np.int64)
        if forest.is_plain:
            return cls(forest, counts, paths)
        for nodes, begin, root in zip(nodes_to_keep, forest.firsts, forest.roots, strict=False):
            below = nodes[root + 1 :]
            paths[begin : begin + len(below)] = below
        return cls(forest, counts, paths)

    def misplaced(self) -> tuple[Integers, Integers, Integers]:
        """Accepted nodes whose slot is not the one behind the nodes kept before them: their row, their slot, and the
        slot where they belong, three arrays."""
        forest = self._forest
        if forest.is_plain:
            return _NONE, _NONE, _NONE
        moved = np.empty((3, len(self._paths)), dtype=np.int64)
        count = _write_misplaced(self.counts, forest.roots, forest.firsts, forest.slots, self._paths, moved)
        rows, slots, targets = moved[:, :count]
        return rows, slots, targets


@typed
def _write_misplaced(
    counts: Integers, roots: Integers, firsts: Integers, slots: Integers, paths: Integers, moved: Integers
) -> int:
    """Write rows, slots and targets of misplaced nodes, `[3, nodes]`; return their number."""
    count = FIRST
    for row in range(len(counts)):
        begin = firsts[row]
        target = roots[row] + 1
        for index in range(counts[row] - target):
            slot = slots[begin + paths[begin + index]]
            if slot != target + index:
                moved[0, count], moved[1, count], moved[2, count] = row, slot, target + index
                count += 1
    return count


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

    @property
    def selected_after(self) -> list[int]:
        """The node before each of `tokens`: the root, and the nodes of the path."""
        return [self.tree.root, *self.path][: len(self.tokens)]


class StepResults(NamedTuple):
    """Results of one step for all sequences of a batch.

    Attributes:
        forest: The trees that were sent.
        outputs: The outputs of the pass.
        walks: The walks down the trees.
    """

    forest: Forest
    outputs: ForestOutputs
    walks: Walks

    @property
    def nodes(self) -> Integers:
        """Nodes of each tree, without the pending tokens above the root, `[rows]`."""
        return self.forest.counts - self.forest.roots

    @classmethod
    def of_one(cls, result: StepResult) -> StepResults:
        """Results of a step of one sequence."""
        forest = Forest([result.tree])
        walks = Walks(forest)
        walks.set(0, Walk(result.path, result.tokens, False))
        return cls(forest, cast(ForestOutputs, result), walks)

    def of(self, row: int) -> StepResult | None:
        """Results for one sequence; `None` if the step added nothing to its text."""
        walk = self.walks[row]
        if walk is None:
            return None
        outputs = self.outputs[row]
        listed = outputs.top_ids, outputs.top_probabilities
        return StepResult(self.forest[row], lambda: outputs.predictions, walk.path, walk.tokens, *listed)
