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
        prompts: What it gets first, `[rows, tokens]`.
        pad_token: Stands for the tokens of a row that is finished; `None` if all rows go on to the end.
    """

    def __init__(self, streamer: BaseStreamer, prompts: torch.Tensor, pad_token: int | None) -> None:
        self._streamer = streamer
        self._prompts: torch.Tensor | None = prompts
        self._waiting: list[deque[int]] = [deque() for _ in prompts]
        self._finished = [False] * len(prompts)
        self._pad_token = pad_token

    def start(self) -> None:
        """Hand over the prompts, if that was not done."""
        if self._prompts is not None:
            self._streamer.put(self._prompts.cpu())
            self._prompts = None

    def add(self, step: StepRecord) -> None:
        """Take the tokens of a step, and hand over the positions that are complete with them.

        The prompts come with the first one: until then the call may be refused.
        """
        self.start()
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
