"""Split the tree of a step into one tree for each rank (section 3.4 of the paper, Figure 3).

Each branch of candidates is assigned to one rank; large branches are cut first. Each column of the window is assigned
to one rank, with its ancestors in the trunk. Ranks compute these ancestors, the root, and the tokens above a cut in
duplicate. The split depends only on its arguments, so every rank finds the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.core.token_tree import NodeKind, TokenTree


@dataclass(frozen=True)
class Split:
    """Assignment of the nodes of a tree to ranks.

    Attributes:
        owners: Rank that provides the prediction after each node, `[nodes]` int64; -1 where none is needed.
        held: For each rank the nodes below the root that it runs, ascending, ancestors included.
    """

    owners: NDArray[np.int64]
    held: list[list[int]]


def split_tree(tree: TokenTree, pending: Sequence[int]) -> Split:
    """Split `tree` so that the largest number of nodes on a rank is small.

    Candidates are assigned from rank 0 upwards, window columns from the last rank downwards. So rank 0, which selects
    the token after the root, runs the likeliest path, and few ranks compute the trunk.

    Args:
        pending: Number of decided tokens that each rank has to run, the root included. It differs between ranks: a rank
            did not run accepted tokens that another rank drafted.
    """
    ranks = len(pending)
    columns = _columns(tree)
    least = max(max(pending), -(-(sum(pending) + len(tree) - tree.root - 1) // ranks))
    branches = _branches(tree, len(tree) if ranks == 1 else max(1, least // 2))
    loads = range(least, max(pending) + len(tree) + 1)  # at the last one a single rank can run all nodes
    return next(split for load in loads if (split := _deal(tree, branches, columns, pending, load)) is not None)


def _branches(tree: TokenTree, most: int) -> list[set[int]]:
    """Subtrees of candidates below the root, cut at branching nodes while larger than `most`; largest first.

    Each piece also holds the ancestors below the root, since its rank has to run them.
    """
    children: dict[int, list[int]] = {}
    for node in range(tree.root + 1, len(tree)):
        if tree.kinds[node] is NodeKind.CANDIDATE:
            children.setdefault(tree.parents[node], []).append(node)
    pieces = []
    waiting: list[tuple[list[int], int]] = [([], top) for top in reversed(children.get(tree.root, []))]
    while waiting:
        above, top = waiting.pop()
        nodes = [top]
        for node in nodes:  # grows as it goes
            nodes.extend(children.get(node, ()))
        chain = [top]
        while len(below := children.get(chain[-1], [])) == 1:
            chain += below
        if below and len(nodes) > most:  # cut it where it branches
            waiting.extend(([*above, *chain], child) for child in reversed(below))
        else:
            pieces.append({*above, *nodes})
    return sorted(pieces, key=len, reverse=True)


def _columns(tree: TokenTree) -> list[set[int]]:
    """Window nodes with logits, last one first, each with all its ancestors below the root.

    A node that is an ancestor of another has no column of its own. Neighbouring columns share most of the trunk, so a
    rank with several of them runs it once.
    """
    columns: list[set[int]] = []
    seen: set[int] = set()
    for node in range(len(tree) - 1, tree.root, -1):
        if tree.kinds[node] is not NodeKind.WINDOW or not tree.needs_logits[node] or node in seen:
            continue
        column = set()
        above = node
        while above > tree.root:
            column.add(above)
            above = tree.parents[above]
        seen |= column
        columns.append(column)
    return columns


def _deal(
    tree: TokenTree, branches: list[set[int]], columns: list[set[int]], pending: Sequence[int], most: int
) -> Split | None:
    """Assign columns and branches so that no rank runs more than `most` nodes; `None` if that fails."""
    held: list[set[int]] = [set() for _ in pending]

    def takes(rank: int, piece: set[int]) -> bool:
        new = piece - held[rank]
        if pending[rank] + len(held[rank]) + len(new) > most:
            return False
        held[rank] |= new
        return True

    rank = len(pending) - 1
    for column in columns:
        while not takes(rank, column):
            if rank == 0:
                return None
            rank -= 1
    for branch in branches:
        if not any(takes(rank, branch) for rank in range(len(pending))):
            return None
    owners = np.full(len(tree), -1, dtype=np.int64)
    for rank, nodes in reversed(list(enumerate(held))):  # the first rank that runs a node owns it
        owners[list(nodes)] = rank
    owners[: tree.root + 1] = 0  # every rank runs these; one of them decides, as rounding may differ
    owners[~np.array(tree.needs_logits)] = -1
    return Split(owners, [sorted(nodes) for nodes in held])
