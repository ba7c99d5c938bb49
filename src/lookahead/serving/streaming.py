"""Handing tokens to a streamer, position by position."""

from __future__ import annotations

from collections import deque

import torch
from transformers.generation.streamers import BaseStreamer

from lookahead.core.statistics import StepRecord


class StreamFeeder:
    """Gives a streamer what transformers would: first the prompts, then for each position one token of every row.

    Rows of a batch get ahead of each other; a position is handed over when all rows have reached it.

    Args:
        streamer: The caller's streamer.
        rows: Sequences in the batch.
        pad_token: Stands for the tokens of a row that is finished; `None` if all rows go on to the end.
    """

    def __init__(self, streamer: BaseStreamer, rows: int, pad_token: int | None) -> None:
        self._streamer = streamer
        self._waiting: list[deque[int]] = [deque() for _ in range(rows)]
        self._finished = [False] * rows
        self._pad_token = pad_token

    def start(self, prompts: torch.Tensor) -> None:
        """Hand over the prompts, `[rows, tokens]`."""
        self._streamer.put(prompts.cpu())

    def add(self, step: StepRecord) -> None:
        """Take the tokens of a step, and hand over the positions that are complete with them."""
        self._waiting[step.index].extend(step.tokens)
        self._finished[step.index] = step.finished and self._pad_token is not None
        while any(self._waiting) and all(
            tokens or finished for tokens, finished in zip(self._waiting, self._finished, strict=True)
        ):
            column = [tokens.popleft() if tokens else self._pad_token for tokens in self._waiting]
            self._streamer.put(torch.tensor(column))

    def end(self) -> None:
        """Tell the streamer that this was all."""
        self._streamer.end()
