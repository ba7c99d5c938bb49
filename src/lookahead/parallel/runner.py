"""Split the trees of a step among ranks, run this rank's part, and verify the drafts with the predictions of all ranks.

The decoder sees the same tree as in a single process. Each branch of candidates is assigned to one rank; large branches
are cut first. Each column of the window is assigned to one rank, with its ancestors in the trunk (section 3.4 of the
paper, Figure 3). Ranks compute these ancestors, the root, and the tokens above a cut in duplicate. The split depends
only on the trees, so every rank finds the same one.

Keys and values are never sent between ranks. A rank that did not run the accepted tokens has a shorter cache, and its
next tree begins with more pending tokens.

In greedy decoding of raw logits, every rank verifies by itself, with the same predictions. Otherwise the rank with the
logits selects the token and sends it to the others. They repeat the selection, so that stateful processors and criteria
see every token in order, and all random states advance alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.forward_result import Listed, PassResult, TreeResult
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSequence
from lookahead.core.forest import Forest
from lookahead.core.protocols import Backend
from lookahead.core.results import EarlyTokens, Walks
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.core.walk import follow, take_token, walk_trees
from lookahead.errors import ParallelError
from lookahead.parallel.exchange import Bytes, Exchange


@dataclass(frozen=True)
class Split:
    """Assignment of the nodes of a tree to ranks.

    Attributes:
        owners: Rank that provides the prediction after each node, `[nodes]` int64; -1 where none is needed.
        nodes_by_rank: For each rank the nodes below the root that it runs, ascending, ancestors included.
    """

    owners: NDArray[np.int64]
    nodes_by_rank: list[list[int]]


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
    smallest_load = max(max(pending), -(-(sum(pending) + len(tree) - tree.root - 1) // ranks))
    branches = _branches(tree, len(tree) if ranks == 1 else max(1, smallest_load // 2))
    loads = range(smallest_load, max(pending) + len(tree) + 1)  # at the last one a single rank can run all nodes
    return next(split for load in loads if (split := _deal(tree, branches, columns, pending, load)) is not None)


def _branches(tree: TokenTree, limit: int) -> list[set[int]]:
    """Subtrees of candidates below the root, cut at branching nodes while larger than `limit`; largest first.

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
        if below and len(nodes) > limit:  # cut it where it branches
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
    ancestors: set[int] = set()
    for node in range(len(tree) - 1, tree.root, -1):
        if tree.kinds[node] is not NodeKind.WINDOW or not tree.needs_logits[node] or node in ancestors:
            continue
        column = set()
        above = node
        while above > tree.root:
            column.add(above)
            above = tree.parents[above]
        ancestors |= column
        columns.append(column)
    return columns


def _deal(
    tree: TokenTree, branches: list[set[int]], columns: list[set[int]], pending: Sequence[int], limit: int
) -> Split | None:
    """Assign columns and branches so that no rank runs more than `limit` nodes; `None` if that fails."""
    nodes_by_rank: list[set[int]] = [set() for _ in pending]

    def takes(rank: int, piece: set[int]) -> bool:
        new = piece - nodes_by_rank[rank]
        if pending[rank] + len(nodes_by_rank[rank]) + len(new) > limit:
            return False
        nodes_by_rank[rank] |= new
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
    for rank, nodes in reversed(list(enumerate(nodes_by_rank))):  # the first rank that runs a node owns it
        owners[list(nodes)] = rank
    owners[: tree.root + 1] = 0  # every rank runs these; one of them decides, as rounding may differ
    owners[~np.array(tree.needs_logits)] = -1
    return Split(owners, [sorted(nodes) for nodes in nodes_by_rank])


class ParallelRunner(Backend):
    """Run one batch of sequences on the models of all ranks, with the interface of `ModelRunner`.

    `forward` leaves the predictions of other ranks' nodes empty; `walk` fills them in.

    Args:
        local: Runner of the model on this rank.
        exchange: Communication with the other ranks.
        rows: Number of sequences.
        alone: Whether every rank can select tokens from predictions, without logits.

    Attributes:
        prefill, serving: Methods of `local`, as every rank reads the prompts itself.
        complete: Method of `local`; it also runs accepted tokens that only other ranks have run.
    """

    def __init__(self, local: ModelRunner, exchange: Exchange, rows: int, alone: bool) -> None:
        self.rank = exchange.rank
        self._local = local
        self.prefill = local.prefill
        self.complete = local.complete
        self.serving = local.serving
        self._exchange = exchange
        self._alone = alone
        # For each row and rank: accepted tokens missing from the rank's cache.
        self._behind: list[list[int]] = [[0] * exchange.size for _ in range(rows)]
        self._local_trees: dict[int, TokenTree] = {}  # of the coming step, by row: this rank's pending tokens
        self._forest = Forest(())
        self._splits: list[Split] = []
        self._owners = np.empty(0, dtype=np.int64)  # the rank that provides the prediction after each node
        self._predictions: NDArray[Any] = np.empty(0)  # predictions of all ranks after each node of the forest
        self._places: list[dict[int, int]] = []  # for each row, node of the tree -> node of this rank's tree

    def idle_tree(self) -> TokenTree:
        """See `Backend`."""
        return self._local.idle_tree()

    def wants_draft(self, tree: TokenTree) -> bool:
        """See `Backend`."""
        return self._local.wants_draft(tree)

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """Return the tree of pending tokens that a single process would have, the same on every rank."""
        local_row = self._local.rows[row]
        level = [0] * self._exchange.size
        cached = local_row.length
        local_tree = self._local.begin_tree(row, text)
        if local_row.length < cached:  # the text is computed anew, by every rank
            self._behind[row] = level
        changes_after = self._local.changes_after
        if changes_after is not None and local_row.before + len(text) > changes_after:
            # The model changes at this length: tokens before it need a separate pass.
            if behind := self._behind[row][self.rank]:
                self._catch_up(row, local_tree.tokens[:behind])
                local_tree = self._local.begin_tree(row, text)
            self._behind[row] = level
        self._local_trees[row] = local_tree
        pending = local_tree.tokens[self._behind[row][self.rank] :]
        tree = TokenTree(pending, local_tree.room + len(pending) - 1)
        tree.vocabulary = local_tree.vocabulary
        return tree

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult:
        """Run this rank's parts of `trees`.

        Returns:
            The result for the whole trees. Logits exist only after nodes that this rank runs. Predictions exist only
            after nodes that this rank owns, until `walk` adds the others.
        """
        self._forest = forest = Forest.of(trees)
        self._splits = []
        self._places = []
        local_trees = []
        for row, tree in enumerate(forest):
            local_tree = self._local_trees.pop(row, self.idle_tree())
            split = split_tree(tree, [tree.root + 1 + behind for behind in self._behind[row]])
            self._splits.append(split)
            self._places.append(_grow(local_tree, tree, split, self.rank))
            local_trees.append(local_tree)
        results = self._local.forward(local_trees, top_k)
        self._owners = np.concatenate([split.owners for split in self._splits])
        rows = zip(results, self._splits, self._places, strict=True)
        parts = [_own_predictions(result, split, places, self.rank) for result, split, places in rows]
        self._predictions = predictions = np.concatenate(parts)
        logit_rows = [_rows(*row) for row in zip(results, self._splits, self._places, strict=True)]

        def find() -> Listed:
            ids = predictions["ids"].astype(np.int64)
            chances = predictions["chances"].astype(np.float32)
            return Listed(ids, chances, predictions["likeliest"].astype(np.int64))

        whole = results[0].whole
        return PassResult(forest, whole.logits, np.concatenate(logit_rows), find, whole.borrowed)

    def walk(
        self, sequences: Sequence[Any], forest: Forest, outputs: PassResult, early: Sequence[EarlyTokens] = ()
    ) -> Walks:
        """Verify the drafts of all sequences, like `walk_trees`, with the same outcome on every rank.

        Tokens are selected row after row, as in one process, since all rows sample from one random state.

        Raises:
            ParallelError: A rank does not take part, or has drafted another tree.
        """
        self._share()
        if self._alone:
            return walk_trees(sequences, forest, outputs, early)
        walks = Walks(forest)
        for row, (sequence, result, split) in enumerate(zip(sequences, outputs, self._splits, strict=True)):
            if not sequence.finished:
                walks.set(row, follow(forest[row], partial(self._take, sequence, result, split.owners)))
        return walks

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep this rank's pending tokens and its part of the accepted paths in its cache."""
        local_kept: list[list[int]] = []
        for row, (nodes, tree, split) in enumerate(zip(paths, self._forest, self._splits, strict=True)):
            if not nodes:
                local_kept.append([])
                continue
            places = self._places[row]
            path = nodes[tree.root + 1 :]
            run = [_common_length(path, nodes) for nodes in split.nodes_by_rank]
            self._behind[row] = [len(path) - count for count in run]
            local_kept.append([*range(places[tree.root] + 1), *(places[node] for node in path[: run[self.rank]])])
        self._local.commit(local_kept)

    def _catch_up(self, row: int, tokens: Sequence[int]) -> None:
        """Run accepted tokens of `row` that this rank has not run, in a separate pass."""
        trees = [self.idle_tree() for _ in self._local.rows]
        trees[row] = TokenTree(tokens)
        self._local.forward(trees)
        self._local.commit([range(len(tokens)) if place == row else [] for place in range(len(trees))])

    def _share(self) -> None:
        answers = [np.flatnonzero(self._owners == rank) for rank in range(self._exchange.size)]  # nodes of all trees
        local = self._predictions[answers[self.rank]]
        padded = np.zeros(max(map(len, answers)), dtype=local.dtype)
        padded[: len(local)] = local
        checksum = self._checksum()
        received = self._exchange.gather(np.concatenate([checksum, padded.view(np.uint8)]))
        for rank, message in enumerate(received):
            if not np.array_equal(message[: len(checksum)], checksum):
                error = ParallelError(
                    f"rank {rank} drafted another tree than rank {self.rank}: the sources of drafts, ngram_pool "
                    "for example, must be the same on all ranks"
                )
                self._exchange.fail(error, blamed=True)
                raise error
            news = message[len(checksum) :].view(local.dtype)
            self._predictions[answers[rank]] = news[: len(answers[rank])]

    def _take(
        self, sequence: TextSequence, result: TreeResult, owners: NDArray[np.int64], node: int
    ) -> tuple[int, bool]:
        """Select the token after `node` on the rank that owns it, and append it on all ranks, like `take_token`."""
        owner = int(owners[node])
        sampler = sequence.sampler
        mine = self.rank == owner
        message = np.zeros(2, dtype=np.int32)
        if mine:
            message[:] = take_token(sequence, result, node)
        token, stopped = self._exchange.gather(message.view(np.uint8))[owner].view(np.int32).tolist()
        if mine and sampler.records:
            logits = result.logits_after(node).cpu()
        else:
            logits = torch.zeros(1, result.logits.shape[-1], device="cpu")
        if sampler.records:
            self._exchange.broadcast(logits, owner)
        if not mine:
            if sampler.needs_logits:
                # The token sampled here is discarded. But processors see the text, and the random state advances by an
                # amount that depends only on the vocabulary size.
                sampler.choose(sequence.ids, logits.to(sequence.device))
            sequence.append(token)
        return token, bool(stopped)

    def _checksum(self) -> Bytes:
        drafted = np.concatenate([self._forest.firsts, self._forest.tokens, self._forest.parents])
        return np.array([zlib.crc32(drafted.tobytes())], dtype=np.uint32).view(np.uint8)


def _common_length(path: Sequence[int], nodes: Sequence[int]) -> int:
    """Number of first nodes of `path`, from the root downwards, that are in `nodes`."""
    run_here = set(nodes)
    return next((place for place, node in enumerate(path) if node not in run_here), len(path))


def _grow(local_tree: TokenTree, tree: TokenTree, split: Split, rank: int) -> dict[int, int]:
    """Add the nodes of `tree` that this rank runs to `local_tree`, which holds its pending tokens.

    Returns the index in `local_tree` of each of these nodes.
    """
    extra = local_tree.root - tree.root
    places = {node: node + extra for node in range(tree.root + 1)}
    for node in range(tree.root):
        local_tree.needs_logits[node + extra] = bool(split.owners[node] == rank)
    for node in split.nodes_by_rank[rank]:
        parent = places[tree.parents[node]]
        token = tree.tokens[node]
        if tree.kinds[node] is NodeKind.CANDIDATE:
            (places[node],) = local_tree.add_candidates([token], parent)
        else:
            places[node] = local_tree.add_window_node(token, parent, needs_logits=bool(split.owners[node] == rank))
    return places


def _own_predictions(result: TreeResult, split: Split, places: dict[int, int], rank: int) -> NDArray[Any]:
    """Message of this rank for each node of a tree; empty for nodes that other ranks own.

    It holds the likeliest token after the node, and the `top_k` likeliest tokens with their probabilities. The latter
    are in half precision, also on this rank, so that all ranks have the same values.
    """
    top_k = (result.top_ids.shape[1],)
    fields = [("likeliest", np.int32), ("ids", np.int32, top_k), ("chances", np.float16, top_k)]
    message = np.zeros(len(split.owners), dtype=fields)
    message["likeliest"] = message["ids"] = -1
    nodes = np.flatnonzero(split.owners == rank)
    local_rows = [places[node] for node in nodes.tolist()]
    message["likeliest"][nodes] = result.predictions[local_rows]
    message["ids"][nodes], message["chances"][nodes] = result.top_ids[local_rows], result.top_probabilities[local_rows]
    return message


def _rows(result: TreeResult, split: Split, places: dict[int, int]) -> NDArray[np.int64]:
    """Row in the logits for each node of the whole tree; -1 for nodes that only other ranks run."""
    rows = np.full(len(split.owners), -1, dtype=np.int64)
    rows[[*places]] = result.logit_rows[[*places.values()]]
    return rows
