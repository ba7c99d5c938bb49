"""Runs this rank's part of each tree, puts together what all ranks found, and walks the trees with them.

What the decoder sees is the tree that one process would send. Each rank runs its own part of it, on its own cache. A
rank that did not run an accepted run of tokens has a shorter cache than others, and its next tree begins with more
pending tokens; nothing of that is ever sent between ranks.

For greedy decoding of raw logits, every rank walks by itself, over predictions that are the same everywhere. Otherwise
each token is selected by the rank that has the logits, and sent to the others, which repeat the selection: stateful
processors and criteria see every token, in order, and the random state advances by as many samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.forward_result import Listed, PassResult, TreeResult
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSequence
from lookahead.core.forest import Forest
from lookahead.core.protocols import Walk
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.core.walk import follow, take_token, walk_trees
from lookahead.errors import ParallelError
from lookahead.parallel.exchange import Bytes, Exchange
from lookahead.parallel.split import Split, split_tree


class ParallelRunner:
    """One batch of sequences on the models of all ranks, with the interface of `ModelRunner`.

    `forward` leaves the predictions of other ranks' nodes open; `verify` fills them in.

    Args:
        local: The model of this rank.
        exchange: Communication with the other ranks.
        alone: Whether every rank can select tokens from predictions alone, without logits.

    Attributes:
        prefill, idle_tree, wants_draft: Those of `local`, as every rank reads the prompts itself.
        complete: Likewise; it also sends what other ranks ran and this one did not.
    """

    def __init__(self, local: ModelRunner, exchange: Exchange, alone: bool) -> None:
        self.rank = exchange.rank
        self._local = local
        self.prefill, self.complete = local.prefill, local.complete
        self.idle_tree, self.wants_draft = local.idle_tree, local.wants_draft
        self._exchange = exchange
        self._alone = alone
        # For each row how many of the tokens that one process would have in its cache each rank has not run.
        self._behind: list[list[int]] = [[0] * exchange.size for _ in local.rows]
        self._local_trees: dict[int, TokenTree] = {}  # of the coming step, by row: this rank's pending tokens
        self._forest = Forest(())
        self._splits: list[Split] = []
        self._owners = np.empty(0, dtype=np.int64)  # the rank that answers for each node of the forest
        self._said: NDArray[Any] = np.empty(0)  # predictions of all ranks after each node of the forest
        self._places: list[dict[int, int]] = []  # for each row, node of the tree -> node of this rank's tree

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """As `ModelRunner.begin_tree` gives it in one process: the same tree on every rank."""
        local_row, level = self._local.rows[row], [0] * self._exchange.size
        cached = local_row.length
        local_tree = self._local.begin_tree(row, text)
        if local_row.length < cached:  # the text is computed anew, by every rank
            self._behind[row] = level
        changes_after = self._local.changes_after
        if changes_after is not None and local_row.before + len(text) > changes_after:
            # What comes before that length must not be run together with what comes after.
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
            The result for the whole trees, of which the logits, and until `verify` everything else, are there only
            after the nodes that this rank answers for, and after the root.
        """
        self._forest = forest = Forest.of(trees)
        self._splits, self._places, local_trees = [], [], []
        for row, tree in enumerate(forest):
            local_tree = self._local_trees.pop(row, self.idle_tree())
            split = split_tree(tree, [tree.root + 1 + behind for behind in self._behind[row]])
            self._splits.append(split)
            self._places.append(_grow(local_tree, tree, split, self.rank))
            local_trees.append(local_tree)
        results = self._local.forward(local_trees, top_k)
        self._owners = np.concatenate([split.owners for split in self._splits])
        rows = zip(results, self._splits, self._places, strict=True)
        self._said = said = np.concatenate([_said(result, split, places, self.rank) for result, split, places in rows])
        logit_rows = [_rows(*row) for row in zip(results, self._splits, self._places, strict=True)]

        def find() -> Listed:
            ids, chances = said["ids"].astype(np.int64), said["chances"].astype(np.float32)
            return Listed(ids, chances, said["likeliest"].astype(np.int64))

        whole = results[0].whole
        return PassResult(forest, whole.logits, np.concatenate(logit_rows), find, whole.borrowed)

    def verify(self, sequences: Sequence[Any], trees: Sequence[TokenTree], outputs: PassResult) -> list[Walk | None]:
        """Walk the trees of all sequences, as `walk_trees`; the same walks on every rank.

        Tokens are selected row after row, as in one process, since all rows sample from one random state.

        Raises:
            ParallelError: A rank does not come, or has drafted something else.
        """
        self._share()
        if self._alone:
            return walk_trees(sequences, trees, outputs)
        return [
            None if sequence.finished else follow(tree, partial(self._take, sequence, result, split.owners))
            for sequence, tree, result, split in zip(sequences, trees, outputs, self._splits, strict=True)
        ]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """As `ModelRunner.commit`: every rank keeps what it has of the paths, and all of its pending tokens."""
        local_kept: list[list[int]] = []
        for row, (nodes, tree, split) in enumerate(zip(kept, self._forest, self._splits, strict=True)):
            if not nodes:
                local_kept.append([])
                continue
            places, path = self._places[row], nodes[tree.root + 1 :]
            run = [_held(path, held) for held in split.held]
            self._behind[row] = [len(path) - count for count in run]
            local_kept.append([*range(places[tree.root] + 1), *(places[node] for node in path[: run[self.rank]])])
        self._local.commit(local_kept)

    def _catch_up(self, row: int, tokens: Sequence[int]) -> None:
        """Run accepted tokens of `row` that this rank has not run, by themselves."""
        trees = [self.idle_tree() for _ in self._local.rows]
        trees[row] = TokenTree(tokens)
        self._local.forward(trees)
        self._local.commit([range(len(tokens)) if place == row else [] for place in range(len(trees))])

    def _share(self) -> None:
        """Tell the other ranks what this one predicts; take in what they predict."""
        answers = [np.flatnonzero(self._owners == rank) for rank in range(self._exchange.size)]  # nodes of all trees
        local = self._said[answers[self.rank]]
        padded = np.zeros(max(map(len, answers)), dtype=local.dtype)
        padded[: len(local)] = local
        checksum = self._checksum()
        received = self._exchange.gather(np.concatenate([checksum, padded.view(np.uint8)]))
        for rank, message in enumerate(received):
            if not np.array_equal(message[: len(checksum)], checksum):
                error = ParallelError(
                    f"rank {rank} drafted another tree than rank {self.rank}: what drafts are made from, ngram_pool "
                    "for example, must be the same on all ranks"
                )
                self._exchange.fail(error, blamed=True)
                raise error
            news = message[len(checksum) :].view(local.dtype)
            self._said[answers[rank]] = news[: len(answers[rank])]

    def _take(
        self, sequence: TextSequence, result: TreeResult, owners: NDArray[np.int64], node: int
    ) -> tuple[int, bool]:
        """As `take_token`, by the rank that answers for `node`; the others repeat it."""
        owner = int(owners[node])
        sampler, mine = sequence.sampler, self.rank == owner
        message = np.zeros(2, dtype=np.int32)
        if mine:
            message[:] = take_token(sequence, result, node)
        token, stopped = self._exchange.gather(message.view(np.uint8))[owner].view(np.int32).tolist()
        logits = result.logits_after(node).cpu() if mine and sampler.keeps else torch.zeros(1, result.logits.shape[-1])
        if sampler.keeps:
            self._exchange.broadcast(logits, owner)
        if not mine:
            if sampler.needs_logits:
                # The token sampled here is discarded, but processors see the text, and the random state advances by an
                # amount that depends on the vocabulary size alone.
                sampler.choose(sequence.ids, logits.to(sequence.device))
            sequence.append(token)
        return token, bool(stopped)

    def _checksum(self) -> Bytes:
        """A few bytes that differ where trees do: drafts must be the same on every rank."""
        drafted = np.concatenate([self._forest.firsts, self._forest.tokens, self._forest.parents])
        return np.array([zlib.crc32(drafted.tobytes())], dtype=np.uint32).view(np.uint8)


def _held(path: Sequence[int], held: Sequence[int]) -> int:
    """How many nodes of `path`, from the root downwards, are among `held`."""
    run_here = set(held)
    return next((place for place, node in enumerate(path) if node not in run_here), len(path))


def _grow(local_tree: TokenTree, tree: TokenTree, split: Split, rank: int) -> dict[int, int]:
    """Add to `local_tree`, this rank's pending tokens, the nodes of `tree` that it runs.

    Returns:
        The place in `local_tree` of each node of `tree` that this rank runs.
    """
    extra = local_tree.root - tree.root
    places = {node: node + extra for node in range(tree.root + 1)}
    for node in range(tree.root):
        local_tree.needs_logits[node + extra] = bool(split.owners[node] == rank)
    for node in split.held[rank]:
        parent, token = places[tree.parents[node]], tree.tokens[node]
        if tree.kinds[node] is NodeKind.CANDIDATE:
            (places[node],) = local_tree.add_candidates([token], parent)
        else:
            places[node] = local_tree.add_window_node(token, parent, needs_logits=bool(split.owners[node] == rank))
    return places


def _said(result: TreeResult, split: Split, places: dict[int, int], rank: int) -> NDArray[Any]:
    """What this rank has to say of each node of a tree, as it is sent: nothing of those that others answer for.

    That is the likeliest token after it, and the `top_k` likeliest with their probabilities. These are in half
    precision, also those of this rank, so that they are the same on all.
    """
    top_k = (result.top_ids.shape[1],)
    fields = [("likeliest", np.int32), ("ids", np.int32, top_k), ("chances", np.float16, top_k)]
    said = np.zeros(len(split.owners), dtype=fields)
    said["likeliest"] = said["ids"] = -1
    nodes = np.flatnonzero(split.owners == rank)
    local_rows = [places[node] for node in nodes.tolist()]
    said["likeliest"][nodes] = result.predictions[local_rows]
    said["ids"][nodes], said["chances"][nodes] = result.top_ids[local_rows], result.top_probabilities[local_rows]
    return said


def _rows(result: TreeResult, split: Split, places: dict[int, int]) -> NDArray[np.int64]:
    """Row of the logits after each node of the whole tree, -1 for nodes that other ranks run."""
    rows = np.full(len(split.owners), -1, dtype=np.int64)
    rows[[*places]] = result.logit_rows[[*places.values()]]
    return rows
