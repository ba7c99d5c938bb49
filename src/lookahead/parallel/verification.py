"""Verification on several ranks: the walk that one process would make.

For greedy decoding of raw logits, every rank walks by itself, over predictions that are the same everywhere.
Otherwise a token is selected by the rank that has the logits: rank 0 selects the one after the root, and the rank that
runs the branch it leads into continues to the end of the walk. The selected tokens are sent to the other ranks, which
repeat the selection: stateful processors and criteria see every token, in order, and the random state advances by as
many samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lookahead.backends.forward_result import ForwardResult
from lookahead.backends.transformers.sampler import TextSequence
from lookahead.core.step import Batch, Walk, select_token, verify
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.parallel.exchange import Exchange
from lookahead.parallel.runner import ParallelRunner

_NOTHING = -1
"""What a message holds behind its tokens; a token is sent as twice its id, plus 1 if the text is complete."""


@dataclass
class _Row:
    """A walk in progress."""

    number: int
    sequence: TextSequence
    result: ForwardResult
    walk: Walk


def walks_alone(batch: Batch, asks_others: bool) -> bool:
    """Whether every rank can select tokens from the predictions alone, without logits.

    Args:
        batch: Whose samplers select the tokens.
        asks_others: Whether ranks may disagree on when a text is complete, as with a time limit.
    """
    needs_logits = any(sequence.sampler.needs_logits for sequence in batch.sequences)
    return not asks_others and not needs_logits


class SharedVerification:
    """Verification on several ranks, as `lookahead.core.step.verify`.

    Tokens are selected row after row, as in one process, since all rows sample from one random state. A rank
    continues from row to row while the walks stay in its own branches. So one sequence takes at most two exchanges,
    and a batch one more for each walk that leads to another rank than the walk before it.

    Args:
        runner: Has run the trees.
        exchange: Communication with the other ranks, for logits if a caller wants them.
        alone: Whether every rank can walk by itself; see `walks_alone`.
    """

    def __init__(self, runner: ParallelRunner, exchange: Exchange, alone: bool) -> None:
        self._runner = runner
        self._exchange = exchange
        self._alone = alone

    def __call__(
        self, sequences: Sequence[Any], trees: Sequence[TokenTree], outputs: Sequence[ForwardResult]
    ) -> list[Walk | None]:
        """Walk the trees of all sequences; the same walks on every rank."""
        if self._alone:
            self._runner.share(np.empty(0, dtype=np.int32))
            return verify(sequences, trees, outputs)
        walks = [None if sequence.finished else Walk(tree) for sequence, tree in zip(sequences, trees, strict=True)]
        parts = zip(sequences, outputs, walks, strict=True)
        rows = [
            _Row(number, sequence, result, walk)
            for number, (sequence, result, walk) in enumerate(parts)
            if walk is not None
        ]
        self._walk(rows)
        return walks

    def _walk(self, rows: list[_Row]) -> None:
        room = sum(_most_tokens(row.walk.tree) for row in rows)
        keeps = any(row.sequence.sampler.keeps for row in rows)
        walker, shared = 0, False
        while not shared or not all(row.walk.done for row in rows):
            message = np.full(room, _NOTHING, dtype=np.int32)
            logits: list[torch.Tensor] = []
            if self._runner.rank == walker:
                codes = self._select(rows, logits)
                message[: len(codes)] = codes
            received = (self._runner.tell(message) if shared else self._runner.share(message))[walker]
            shared = True
            codes = received[received != _NOTHING].tolist()
            given = self._broadcast_logits(logits, codes, rows, walker) if keeps else None
            if self._runner.rank != walker:
                _repeat(rows, codes, given)
            ahead = next((row for row in rows if not row.walk.done), None)
            if ahead is not None:
                walker = self._runner.owner(ahead.number, ahead.walk.node)

    def _select(self, rows: list[_Row], logits: list[torch.Tensor]) -> list[int]:
        """Select tokens while this rank has the logits; returns their codes for the other ranks."""
        codes: list[int] = []
        for row in rows:
            sequence = row.sequence
            while not row.walk.done:
                if (
                    row.walk.node != row.walk.tree.root
                    and self._runner.owner(row.number, row.walk.node) != self._runner.rank
                ):
                    return codes
                token = select_token(sequence, row.result, row.walk.node)
                if sequence.sampler.keeps:
                    logits.append(row.result.logits_after(row.walk.node))
                row.walk.take(token, sequence.append(token))
                codes.append(2 * token + row.walk.stopped)
        return codes

    def _broadcast_logits(
        self, logits: list[torch.Tensor], codes: list[int], rows: list[_Row], walker: int
    ) -> torch.Tensor | None:
        """The logits `[tokens, vocabulary]` that the tokens were selected from, for a caller who wants them."""
        if not codes:
            return None
        mine = self._runner.rank == walker
        given = torch.cat(logits).cpu() if mine else torch.empty(len(codes), rows[0].result.logits.shape[-1])
        self._exchange.broadcast(given, walker)
        return given


def _repeat(rows: list[_Row], codes: list[int], given: torch.Tensor | None) -> None:
    """Repeat the steps of the rank that selected these tokens."""
    unfinished = iter([row for row in rows if not row.walk.done])
    row = next(unfinished)
    for place, code in enumerate(codes):
        if row.walk.done:
            row = next(unfinished)
        token, stopped = code >> 1, bool(code & 1)
        sampler = row.sequence.sampler
        if sampler.needs_logits:
            # The token sampled here is discarded, but processors see the text, and the random state advances by an
            # amount that depends on the vocabulary size alone.
            logits = torch.zeros(row.result.logits.shape[-1]) if given is None else given[place]
            sampler.choose(row.sequence.ids, logits[None].to(row.sequence.ids.device))
        row.sequence.append(token)
        row.walk.take(token, stopped)


def _most_tokens(tree: TokenTree) -> int:
    """Most tokens that a walk of `tree` may select."""
    kinds = zip(tree.depths, tree.kinds, strict=True)
    return 1 + max((depth for depth, kind in kinds if kind is NodeKind.CANDIDATE), default=tree.root) - tree.root
