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

from lookahead.backends.forward_result import ForwardResult, Listed
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSequence
from lookahead.core.step import Walk, follow, take_token, verify
from lookahead.core.token_tree import NodeKind, TokenTree
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
        self._trees: list[TokenTree] = []
        self._splits: list[Split] = []
        self._said: list[NDArray[Any]] = []  # for each row what ranks say of the nodes of its tree
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

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> list[ForwardResult]:
        """Run this rank's parts of `trees`.

        Returns:
            Results for the whole trees, of which the logits, and until `verify` everything else, are there only
            after the nodes that this rank answers for, and after the root.
        """
        self._trees = list(trees)
        self._splits, self._places, local_trees = [], [], []
        for row, tree in enumerate(trees):
            local_tree = self._local_trees.pop(row, self.idle_tree())
            split = split_tree(tree, [tree.root + 1 + behind for behind in self._behind[row]])
            self._splits.append(split)
            self._places.append(_grow(local_tree, tree, split, self.rank))
            local_trees.append(local_tree)
        results = self._local.forward(local_trees, top_k)
        rows = zip(results, self._splits, self._places, strict=True)
        self._said = [_said(result, split, places, self.rank) for result, split, places in rows]
        return [_spread(*row) for row in zip(results, self._said, self._places, strict=True)]

    def verify(
        self, sequences: Sequence[Any], trees: Sequence[TokenTree], outputs: Sequence[ForwardResult]
    ) -> list[Walk | None]:
        """Walk the trees of all sequences, as `lookahead.core.step.verify`; the same walks on every rank.

        Tokens are selected row after row, as in one process, since all rows sample from one random state.

        Raises:
            ParallelError: A rank does not come, or has drafted something else.
        """
        self._share()
        if self._alone:
            return verify(sequences, trees, outputs)
        return [
            None if sequence.finished else follow(tree, partial(self._take, sequence, result, split.owners))
            for sequence, tree, result, split in zip(sequences, trees, outputs, self._splits, strict=True)
        ]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """As `ModelRunner.commit`: every rank keeps what it has of the paths, and all of its pending tokens."""
        local_kept: list[list[int]] = []
        for row, (nodes, tree, split) in enumerate(zip(kept, self._trees, self._splits, strict=True)):
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
        size = self._exchange.size
        answers = [
            [np.flatnonzero(split.owners == rank) for split in self._splits] for rank in range(size)
        ]  # [ranks][rows], nodes
        local = np.concatenate([said[nodes] for said, nodes in zip(self._said, answers[self.rank], strict=True)])
        padded = np.zeros(max(sum(map(len, rows)) for rows in answers), dtype=local.dtype)
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
            news, start = message[len(checksum) :].view(local.dtype), 0
            for said, nodes in zip(self._said, answers[rank], strict=True):
                said[nodes], start = news[start : start + len(nodes)], start + len(nodes)

    def _take(
        self, sequence: TextSequence, result: ForwardResult, owners: NDArray[np.int64], node: int
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
        value = 0
        for tree in self._trees:
            value = zlib.crc32(np.array([tree.tokens, tree.parents], dtype=np.int64).tobytes(), value)
        return np.array([value], dtype=np.uint32).view(np.uint8)


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


def _said(result: ForwardResult, split: Split, places: dict[int, int], rank: int) -> NDArray[Any]:
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


def _spread(result: ForwardResult, said: NDArray[Any], places: dict[int, int]) -> ForwardResult:
    """The result for this rank's tree as one for the whole tree. What it lists is read when all ranks have said theirs,
    and its logits are there only after nodes that this rank runs."""
    rows = {node: result.rows[place] for node, place in places.items() if place in result.rows}

    def find() -> Listed:
        ids, chances = said["ids"].astype(np.int64), said["chances"].astype(np.float32)
        return Listed(ids, chances, said["likeliest"].astype(np.int64))

    return ForwardResult(result.logits, rows, find, result.borrowed)
