"""One process, which decodes by itself: what a call uses in place of a `ParallelGroup`."""

from __future__ import annotations

from transformers import PreTrainedModel

from lookahead.backends.transformers import ModelRunner
from lookahead.config import LookaheadConfig
from lookahead.core.decoder import Batch


class Alone:
    """A group of one rank, with the interface of `ParallelGroup`: nobody to agree with or to tell."""

    rank = 0

    def drafting(self, config: LookaheadConfig) -> LookaheadConfig:
        """`config` itself: a process may go by its own clock and memory."""
        return config

    def check(self, model: PreTrainedModel, local: object) -> None:
        """One process may run anything that has a backend."""

    def begin(self, *_: object) -> None:
        """Nothing to compare."""

    def backend(self, local: ModelRunner, batch: Batch, asks_others: bool) -> ModelRunner:
        """`local` itself."""
        return local

    def fail(self, error: BaseException) -> None:
        """Nobody waits."""
