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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.forward_result import ForwardResult, Listed
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSequence
from lookahead.core.step import Walk, select_token, verify
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.errors import ParallelError
from lookahead.parallel.exchange import Bytes, Exchange
from lookahead.parallel.split import Split, split_tree

_HEAD = np.dtype(np.int32).itemsize
"""Bytes of the checksum that a message begins with."""


class ParallelRunner:
    """One batch of sequences on the models of all ranks, with the interface of `ModelRunner`.

    `forward` leaves the predictions of other ranks' nodes open; `verify` fills them in.

    Args:
        local: The model of this rank.
        exchange: Communication with the other ranks.
        alone: Whether every rank can select tokens from predictions alone, without logits.
    """

    def __init__(self, local: ModelRunner, exchange: Exchange, alone: bool) -> None:
        self.rank = exchange.rank
        self._local = local
        self._exchange = exchange
        self._alone = alone
        # For each row how many of the tokens that one process would have in its cache each rank has not run.
        self._behind: list[list[int]] = [[0] * exchange.size for _ in local.rows]
        self._local_trees: dict[int, TokenTree] = {}  # of the coming step, by row: this rank's pending tokens
        self._trees: list[TokenTree] = []
        self._splits: list[Split] = []
        self._results: list[ForwardResult] = []
        self._places: list[dict[int, int]] = []  # for each row, node of the tree -> node of this rank's tree

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """As `ModelRunner.prefill`; every rank reads the prompts itself."""
        return self._local.prefill(texts, chunk_size)

    def idle_tree(self) -> TokenTree:
        """As `ModelRunner.idle_tree`."""
        return self._local.idle_tree()

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
        return TokenTree(pending, local_tree.room + len(pending) - 1)

    def wants_draft(self, tree: TokenTree) -> bool:
        """As `ModelRunner.wants_draft`."""
        return self._local.wants_draft(tree)

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
        self._results = [
            _spread(result, tree, split, places, self.rank)
            for result, tree, split, places in zip(results, trees, self._splits, self._places, strict=True)
        ]
        return self._results

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
        walks = [None if sequence.finished else Walk(tree) for sequence, tree in zip(sequences, trees, strict=True)]
        for sequence, result, walk, split in zip(sequences, outputs, walks, self._splits, strict=True):
            while walk is not None and not walk.done:
                walk.take(*self._select(sequence, result, walk.node, int(split.owners[walk.node])))
        return walks

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """As `ModelRunner.commit`: every rank keeps what it has of the paths, and all of its pending tokens."""
        own_kept: list[list[int]] = []
        for row, (nodes, tree, split) in enumerate(zip(kept, self._trees, self._splits, strict=True)):
            if not nodes:
                own_kept.append([])
                continue
            places, path = self._places[row], nodes[tree.root + 1 :]
            run = [_held(path, held) for held in split.held]
            self._behind[row] = [len(path) - count for count in run]
            own_kept.append([*range(places[tree.root] + 1), *(places[node] for node in path[: run[self.rank]])])
        self._local.commit(own_kept)

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """As `ModelRunner.complete`, which also sends what other ranks ran and this one did not."""
        self._local.complete(texts)

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
        most = max(sum(map(len, rows)) for rows in answers)
        received = self._exchange.gather(self._packed(answers[self.rank], most))
        for rank, message in enumerate(received):
            if message[:_HEAD].view(np.int32)[0] != self._checksum():
                self._disagree(rank)
            self._take(answers[rank], message[_HEAD:].view(self._said))

    def _select(self, sequence: TextSequence, result: ForwardResult, node: int, owner: int) -> tuple[int, bool]:
        """The token after `node`, and whether the text is complete with it, as the rank `owner` has it."""
        sampler, mine = sequence.sampler, self.rank == owner
        message = np.zeros(2, dtype=np.int32)
        if mine:
            selected = select_token(sequence, result, node)
            message[:] = selected, sequence.append(selected)
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

    def _packed(self, nodes: list[NDArray[np.int64]], most: int) -> Bytes:
        """One message: checksum, and what is said of each of `nodes`, of which `most` have room."""
        said = np.zeros(most, dtype=self._said)
        count = sum(map(len, nodes))
        pairs = list(zip(self._results, nodes, strict=True))
        said["likeliest"][:count] = np.concatenate([result.predictions[rows] for result, rows in pairs])
        said["ids"][:count] = np.concatenate([result.top_ids[rows] for result, rows in pairs])
        said["chances"][:count] = np.concatenate([result.top_probabilities[rows] for result, rows in pairs])
        head = np.array([self._checksum()], dtype=np.int32)
        return np.concatenate([head.view(np.uint8), said.view(np.uint8)])

    def _take(self, nodes: list[NDArray[np.int64]], said: NDArray[Any]) -> None:
        """Take in what one rank says of `nodes`; also this one, so that rounding is the same everywhere."""
        start = 0
        for result, rows in zip(self._results, nodes, strict=True):
            mine, start = said[start : start + len(rows)], start + len(rows)
            result.predictions[rows] = mine["likeliest"]
            result.top_ids[rows], result.top_probabilities[rows] = mine["ids"], mine["chances"]

    @property
    def _said(self) -> np.dtype[Any]:
        """What is said of a node: the likeliest token after it, and the `top_k` likeliest with their probabilities."""
        top_k = (self._results[0].top_ids.shape[1],)
        return np.dtype([("likeliest", np.int32), ("ids", np.int32, top_k), ("chances", np.float16, top_k)])

    def _checksum(self) -> int:
        """A number that differs where trees do: drafts must be the same on every rank."""
        value = 0
        for tree in self._trees:
            value = zlib.crc32(np.array([tree.tokens, tree.parents], dtype=np.int64).tobytes(), value)
        return int(np.uint32(value).view(np.int32))

    def _disagree(self, rank: int) -> None:
        error = ParallelError(
            f"rank {rank} drafted another tree than rank {self.rank}: what drafts are made from, ngram_pool for "
            "example, must be the same on all ranks"
        )
        self._exchange.fail(error, blamed=True)
        raise error


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


def _spread(result: ForwardResult, tree: TokenTree, split: Split, places: dict[int, int], rank: int) -> ForwardResult:
    """The result for this rank's tree as a result for all of `tree`, with nothing where other ranks answer."""
    top_k = result.top_ids.shape[1]
    predictions = np.full(len(tree), -1, dtype=np.int64)
    top_ids = np.full((len(tree), top_k), -1, dtype=np.int64)
    chances = np.zeros((len(tree), top_k), dtype=np.float32)
    nodes = np.flatnonzero(split.owners == rank)
    local_rows = [places[node] for node in nodes.tolist()]
    predictions[nodes] = result.predictions[local_rows]
    top_ids[nodes], chances[nodes] = result.top_ids[local_rows], result.top_probabilities[local_rows]
    rows = {node: result.rows[place] for node, place in places.items() if place in result.rows}
    listed = Listed(top_ids, chances, predictions)
    return ForwardResult(result.logits, rows, lambda: listed, result.borrowed)
