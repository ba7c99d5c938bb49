"""The token tree: everything that one decoding step sends to the model.

Whatever drafted them, the tokens of a step come after the text decided so far and form a tree. The first
nodes are the *pending* tokens: decided, but not yet in the KV cache. They form a chain, and its last one is
the *root*. *Candidate* nodes hang from the root and may be accepted; *window* nodes hang from the root too,
are read, and never accepted. Position ids and the attention mask (Fig. 2(b) of the paper) follow from the
parents alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, LOOPS, at_once, compiled
from lookahead.errors import InvalidArgumentError


class NodeKind(IntEnum):
    """What a node is there for."""

    PENDING = 0
    """Decided text whose keys and values are not in the cache yet."""
    CANDIDATE = 1
    """A guess that verification may accept."""
    WINDOW = 2
    """A token of the lookahead window: read for what follows it, never accepted."""


class Noise(NamedTuple):
    """The noise of the coming tokens: sampling selects the token with the largest log p / temperature - log q.

    Attributes:
        places: q of the next token, of the one after it, ..., as far as it is known, `[vocabulary]` each.
        temperature: Divides what the model says.
    """

    places: Sequence[NDArray[np.float32]]
    temperature: float


class TokenTree:
    """A tree of tokens, built node by node; a node is identified by the number that adding it returned.

    Parents are added before their children, so `parents[i] < i`.

    Args:
        pending: The decided tokens that are not in the cache yet, in order; the last one is the root.
        max_depth: Deepest place a node may have (see `depths`); unbounded if not given. A model with a table
            of 1,024 positions cannot run a node beyond the last of them.

    Attributes:
        tokens: Token id of each node.
        parents: Parent of each node; -1 for the first pending token, whose parent is the cached text.
        kinds: `NodeKind` of each node.
        depths: Distance of each node from the cached text, 0 for the first pending token. The position id of
            a node is the length of the cached text plus its depth.
        needs_logits: Whether the model's prediction after each node is wanted.
        root: The node of the last decided token.
        certain: How many of the first candidates were added by `add_certain`.
        foresee: Tells what so many tokens below the root are sampled with, if they are; see `Sampler.foresee`.
        vocabulary: How many tokens the model reads. Larger ones are not drafted, whoever remembers them.

    Raises:
        InvalidArgumentError: `pending` is empty.
    """

    def __init__(self, pending: Sequence[int], max_depth: int | None = None) -> None:
        if not pending:
            raise InvalidArgumentError("pending=[] is empty; a token tree needs at least its root")
        count = len(pending)
        self.tokens: list[int] = list(pending)
        self.parents: list[int] = list(range(-1, count - 1))
        self.kinds: list[NodeKind] = [NodeKind.PENDING] * count
        self.depths: list[int] = list(range(count))
        self.needs_logits: list[bool] = [False] * (count - 1) + [True]
        self.root = count - 1
        self.certain = 0
        self.foresee: Callable[[int], Noise | None] | None = None
        self.vocabulary = sys.maxsize
        self._max_depth = sys.maxsize if max_depth is None else max_depth

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def room(self) -> int:
        """How many levels of nodes fit below the root."""
        return self._max_depth - self.depths[self.root]

    def limit(self, room: int) -> None:
        """Limit the tree to `room` levels below the root."""
        self._max_depth = min(self._max_depth, self.depths[self.root] + room)

    @property
    def is_chain(self) -> bool:
        """Whether nothing was drafted, so that the step is plain decoding of the pending tokens."""
        return len(self.tokens) == self.root + 1

    def add_certain(self, tokens: Sequence[int]) -> None:
        """Add the tokens that will be selected after the root whatever the model says, before any other candidate, as
        far as there is room."""
        self.add_candidates(tokens)
        self.certain = len(self) - self.root - 1

    def beyond(self, certain: int) -> TokenTree:
        """This tree with its first `certain` nodes below the root already decided; the last of them is the root.

        Both have the same nodes: what is added to the one is added to the other.
        """
        if not certain:
            return self
        tree = copy(self)
        tree.root, tree.certain = self.root + certain, 0
        return tree

    def add_candidates(self, tokens: Iterable[int], parent: int | None = None) -> list[int]:
        """Add a path of candidates under `parent` (the root if not given), sharing nodes that are already there.

        Returns:
            The nodes of the path in order, new or shared; shorter than `tokens` where the room ends, or before a token
            that the model does not know.
        """
        node = self.root if parent is None else parent
        path = []
        for token in tokens:
            child = self.child(node, token)
            if child is None:
                if self.depths[node] >= self._max_depth or token >= self.vocabulary:
                    break
                child = self._add(token, node, NodeKind.CANDIDATE, needs_logits=True)
            node = child
            path.append(node)
        return path

    def add_new_candidates(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Add many candidates that the tree does not have yet, each after its parent.

        Args:
            tokens: Their tokens, which the model knows; different ones under one parent.
            parents: The node that each follows, which may be one of those before it here; `room` says how deep.
        """
        for parent in parents:
            self.depths.append(self.depths[parent] + 1)
        self.tokens += tokens
        self.parents += parents
        self.kinds += [NodeKind.CANDIDATE] * len(tokens)
        self.needs_logits += [True] * len(tokens)

    def keep_path(self, path: Sequence[int]) -> None:
        """Remove all nodes below the root but those of a path of candidates from there, each the parent of the next."""
        tokens = [self.tokens[node] for node in path]
        for of_nodes in (self.tokens, self.parents, self.kinds, self.depths, self.needs_logits):
            del of_nodes[self.root + 1 :]
        self.certain = min(self.certain, len(path))
        self.add_candidates(tokens)

    def add_window_node(self, token: int, parent: int, needs_logits: bool) -> int:
        """Add a window node; `needs_logits` says whether the model's prediction after it is wanted.

        Raises:
            InvalidArgumentError: The node would be deeper than `max_depth`; ask `room` first.
        """
        if self.depths[parent] >= self._max_depth:
            raise InvalidArgumentError(f"parent={parent} is at the deepest place a node may have: {self._max_depth}")
        return self._add(token, parent, NodeKind.WINDOW, needs_logits)

    def child(self, node: int, token: int) -> int | None:
        """The candidate under `node` that holds `token`, if there is one."""
        child = node
        try:
            while True:  # trees are small: an index of them would take longer to make
                child = self.tokens.index(token, child + 1)
                if self.parents[child] == node and self.kinds[child] is NodeKind.CANDIDATE:
                    return child
        except ValueError:  # no further one has this token
            return None

    def _add(self, token: int, parent: int, kind: NodeKind, needs_logits: bool) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append(kind)
        self.depths.append(self.depths[parent] + 1)
        self.needs_logits.append(needs_logits)
        return len(self.tokens) - 1


def first_path(nodes: Iterable[int], parents: Iterable[int], root: int) -> list[int]:
    """The first of some nodes that follows `root`, the first that follows that one, and so on: the likeliest path,
    where the likeliest node comes first."""
    path = []
    for node, parent in zip(nodes, parents, strict=True):
        if parent == root:
            path.append(node)
            root = node
    return path


class Layout(NamedTuple):
    """The order in which the nodes of a tree are sent. A node's place in that order is its *slot*.

    Attributes:
        order: Node in each slot, `[nodes]`.
        slots: Slot of each node, `[nodes]`, the inverse of `order`.
        tokens: Token id in each slot, `[nodes]` int64.
        depths: Depth of the node in each slot, `[nodes]` int64.
        read_slots: Slots whose prediction is wanted, ascending.
        parent_slots: Slot of the parent of the node in each slot, `[nodes]`; -1 for the first pending token.
        pending: How many pending tokens there are.
    """

    order: NDArray[np.int64]
    slots: NDArray[np.int64]
    tokens: NDArray[np.int64]
    depths: NDArray[np.int64]
    read_slots: NDArray[np.int64]
    parent_slots: NDArray[np.int64]
    pending: int

    @property
    def is_chain(self) -> bool:
        """See `TokenTree.is_chain`."""
        return len(self.order) == self.pending

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """Which slots each slot may attend to: its ancestors and itself, `[nodes, nodes]` bool."""
        mask = np.zeros((len(self.order), len(self.order)), dtype=np.bool_)
        if not LOOPS.awaited:
            _see_ancestors(self.parent_slots, self.pending, mask)
            return mask
        for slot, parent in enumerate(self.parent_slots):  # of long prompts: numpy's rows take less time than at_once
            mask[slot] = mask[parent]
            mask[slot, slot] = True
        return mask


@compiled
def _see_ancestors(parent_slots: NDArray[np.int64], pending: int, mask: NDArray[np.bool_]) -> None:
    for slot in range(len(parent_slots)):
        parent = slot - 1 if slot < pending else parent_slots[slot]
        for other in range(parent + 1):  # what its parent sees lies before that
            mask[slot, other] = mask[parent, other]
        mask[slot, slot] = True


def lay_out(tree: TokenTree) -> Layout:
    """Choose the order in which the nodes of `tree` are sent.

    Pending tokens come first, then the others depth first, each node followed by the child that was added first, the
    candidates below the root before its window. Drafters add the likeliest path first, so the accepted path most often
    lies directly behind the root, where its keys and values need not be moved.
    """
    if tree.is_chain:
        return _lay_out_chain(tree)
    order, slots, parent_slots, *_ = found = np.full((5, len(tree)), -1, dtype=np.int64)
    in_window = np.array(tree.kinds) == int(NodeKind.WINDOW)
    at_once(_depth_first)(np.array(tree.parents), in_window, tree.root, found)
    return Layout(
        order=order,
        slots=slots,
        tokens=np.array(tree.tokens, dtype=np.int64)[order],
        depths=np.array(tree.depths, dtype=np.int64)[order],
        read_slots=np.flatnonzero(np.array(tree.needs_logits)[order]),
        parent_slots=parent_slots,
        pending=tree.root + 1,
    )


@compiled
def _depth_first(parents: NDArray[np.int64], in_window: NDArray[np.bool_], root: int, found: NDArray[np.int64]) -> None:
    """Write order, slots and slots of parents; the last two rows of `found` are room for the first child of each node
    and for its next sibling, -1 where there is none."""
    order, slots, parent_slots, child, sibling = found[0], found[1], found[2], found[3], found[4]
    for window in (True, False):  # whatever is put in later comes before
        for node in range(len(parents) - 1, root, -1):
            parent = parents[node]
            if (parent == root and in_window[node]) == window:
                sibling[node], child[parent] = child[parent], node
    place = node = FIRST
    while place < len(parents):
        order[place], slots[node] = node, place
        parent_slots[place] = slots[parents[node]] if node else -1
        place += 1
        if node < root:
            node += 1
        elif child[node] >= 0:
            node = child[node]
        else:
            while node > root and sibling[node] < 0:
                node = parents[node]
            node = sibling[node] if node > root else node


def _lay_out_chain(tree: TokenTree) -> Layout:
    """The pending tokens as they are: the layout of a step of plain decoding, which has little time for one."""
    tokens = np.array(tree.tokens, dtype=np.int64)
    places = np.arange(len(tokens))
    is_read = len(tokens) == 1 and tree.needs_logits[0]
    read_slots = places if is_read else np.flatnonzero(np.array(tree.needs_logits))
    return Layout(places, places, tokens, places, read_slots, places - 1, len(tokens))
