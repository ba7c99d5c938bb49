"""The rows of a step before drafting: pending tokens, room for drafts, and the drafts that are added."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from lookahead.core.forest import Forest, Integers
from lookahead.core.token_tree import Noise, TokenTree

_NONE = np.empty(0, dtype=np.int64)


class Roots:
    """The beginning of each tree of a step.

    A row with one pending token is an entry of arrays. Other rows have a `TokenTree`, and rows whose drafter adds nodes
    one by one.

    Args:
        trees: The trees that are objects already; `None` for a row with one pending token that is read.
        tokens: Last decided token of each text, `[rows]`; empty if all trees are objects.
        rooms: Returns the levels of nodes that the model allows below each root, `[rows]`, when a draft needs them;
            `None` if all trees are objects.
        vocabulary: Number of tokens that the model reads.

    Attributes:
        trees, tokens: The arguments.
        vocabulary: Number of tokens that the model reads; larger ones are not drafted.
        levels: Most levels of nodes that the text allows below the root, of rows without an object; set before `rooms`.
        foresee: For sampled rows a function that returns the noise of the given number of tokens below the root; see
            `Sampler.foresee`.
    """

    def __init__(
        self,
        trees: Sequence[TokenTree | None],
        tokens: Sequence[int] = (),
        rooms: Callable[[], list[int]] | None = None,
        vocabulary: int = sys.maxsize,
    ) -> None:
        self.trees = list(trees)
        self.tokens = tokens
        self._find_rooms = rooms
        self.vocabulary = min([vocabulary, *[tree.vocabulary for tree in trees if tree is not None]])
        self.levels: dict[int, int] = {}
        self.foresee: dict[int, Callable[[int], Noise | None]] = {}
        self._drafts: list[tuple[Integers, Integers, Integers, Integers]] = []

    @cached_property
    def rooms(self) -> list[int]:
        """Levels of nodes that fit below each root, `[rows]`; empty if all trees are objects."""
        rooms = [] if self._find_rooms is None else self._find_rooms()
        for row, level in self.levels.items():
            rooms[row] = min(rooms[row], level)
        return rooms

    @property
    def nodes(self) -> int:
        """Number of nodes so far, over all rows, without drafts that were added as arrays."""
        return sum([1 if tree is None else len(tree.tokens) for tree in self.trees])

    def pending_of(self, row: int) -> int:
        """Pending tokens of a row."""
        tree = self.trees[row]
        return 1 if tree is None else tree.root + 1

    def rooms_of(self, rows: Sequence[int]) -> list[int]:
        """Levels of nodes that fit below the roots of some rows."""
        trees = self.trees
        return [self.rooms[row] if (tree := trees[row]) is None else tree.room for row in rows]

    def tree(self, row: int) -> TokenTree:
        """The tree of a row as an object, which is used from now on."""
        tree = self.trees[row]
        if tree is None:
            tree = TokenTree([self.tokens[row]], self.rooms[row])
            tree.vocabulary = self.vocabulary
            self.trees[row] = tree
        return tree

    def add(self, rows: Integers, counts: Integers, tokens: Integers, parents: Integers) -> None:
        """Add candidates to some rows, to each row once.

        Args:
            rows: The rows, ascending.
            counts: Candidates of each, `[len(rows)]`.
            tokens: Their tokens, row after row.
            parents: The parent of each: 1 is the first candidate of the row, 0 the root or its last certain token.
        """
        if any(map(self.trees.__getitem__, rows.tolist())):
            self._add_to_objects(rows, counts, tokens, parents)
        elif len(tokens):
            self._drafts.append((rows, counts, tokens, parents))

    def _add_to_objects(self, rows: Integers, counts: Integers, tokens: Integers, parents: Integers) -> None:
        end = 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            begin = end
            end = end + count
            if count:
                tree = self.tree(row)
                above = tree.root + tree.certain
                tree.add_new_candidates(tokens[begin:end].tolist(), (parents[begin:end] + above).tolist())

    def remove_drafts(self, rows: Sequence[int]) -> None:
        """Remove all drafts of some rows."""
        for row in rows:
            tree = self.trees[row]
            if tree is not None:
                tree.keep_path(())
        left = []
        for of_rows, counts, tokens, parents in self._drafts:
            keeps = ~np.isin(of_rows, rows)
            nodes = np.repeat(keeps, counts)
            left.append((of_rows[keeps], counts[keeps], tokens[nodes], parents[nodes]))
        self._drafts = left

    def forest(self) -> Forest:
        """The trees of the step."""
        if None not in self.trees:
            return Forest([tree for tree in self.trees if tree is not None])
        drafts: Any = self._drafts[0] if self._drafts else (_NONE, _NONE, _NONE, _NONE)
        if len(self._drafts) > 1:
            drafts = tuple(map(np.concatenate, zip(*self._drafts, strict=True)))
        if not len(drafts[2]) and not any(self.trees):
            return Forest.of_tokens(self.tokens)
        return Forest.of_rows(self.trees, self.tokens, drafts)
