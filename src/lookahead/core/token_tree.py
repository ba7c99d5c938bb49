"""The token tree: everything that one decoding step sends to the model.

Whatever drafted them, the tokens of a step come after the text decided so far and form a tree. The first
nodes are the *pending* tokens: decided, but not yet in the KV cache. They form a chain, and its last one is
the *root*. *Candidate* nodes hang from the root and may be accepted; *window* nodes hang from the root too,
are read, and never accepted. Position ids and the attention mask (Fig. 2(b) of the paper) follow from the
parents alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import InvalidArgumentError


class NodeKind(IntEnum):
    """Purpose of a node."""

    PENDING = 0
    """Decided text that is not in the cache yet."""
    CANDIDATE = 1
    """A guess that verification may accept."""
    WINDOW = 2
    """A token of the lookahead window: the prediction after it is read, the token is never accepted."""


_PENDING = NodeKind.PENDING


class Noise(NamedTuple):
    """The noise of the coming tokens: sampling selects the token with the largest log p / temperature - log q.

    Attributes:
        places: q of the next token, of the one after it, ..., as far as it is known, `[vocabulary]` each.
        temperature: Divides the log-probabilities.
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
        parents: Parent of each node; -1 for the first pending token, which follows the cached text.
        kinds: `NodeKind` of each node.
        depths: Distance of each node from the cached text, 0 for the first pending token. The position id of
            a node is the length of the cached text plus its depth.
        needs_logits: Whether the model's prediction after each node is wanted.
        root: The node of the last decided token.
        certain: Number of the first candidates that were added by `add_certain`.
        has_window: Whether it has window nodes.
        vocabulary: How many tokens the model reads. Larger ones are not drafted, whoever remembers them.

    Raises:
        InvalidArgumentError: `pending` is empty.
    """

    def __init__(self, pending: Sequence[int], max_depth: int | None = None) -> None:
        if not pending:
            raise InvalidArgumentError("pending=[] is empty; a token tree needs at least its root")
        count = len(pending)
        self.tokens: list[int] = list(pending)
        self.parents: list[int] = [*range(-1, count - 1)]
        self.kinds: list[NodeKind] = [_PENDING] * count
        self.depths: list[int] = [*range(count)]
        self.needs_logits: list[bool] = [False] * (count - 1) + [True]
        self.root = count - 1
        self.certain = 0
        self.has_window = False
        self.vocabulary = sys.maxsize
        self._max_depth = sys.maxsize if max_depth is None else max_depth

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def reads_root(self) -> bool:
        """Whether the model's prediction after the root is wanted: not where the step sends a part of a prompt."""
        return self.needs_logits[self.root]

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
        """Remove all nodes below the root except a path of candidates, each the parent of the next."""
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
        self.has_window = True
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
