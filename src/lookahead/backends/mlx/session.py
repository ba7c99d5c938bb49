"""Resources of models of mlx-lm for calls of `generate` and for engines."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from transformers import GenerationConfig

from lookahead.backends.base import Call, Prompts, Session, check_settings
from lookahead.backends.mlx.caches import Caches
from lookahead.backends.mlx.model import MLXModel
from lookahead.backends.mlx.runner import MLXRunner
from lookahead.backends.mlx.sampler import selector_of
from lookahead.backends.wrapped_model import refuse_cache
from lookahead.config import LookaheadConfig


class MLXSession(Session):
    """Session of a model of mlx-lm. The model was checked when it was loaded."""

    refuses_inputs = "a model of MLX reads token ids only; leave it out"

    def __init__(self, model: MLXModel) -> None:
        self._model = model
        # MLX computes in threads of its own.
        self.clock = process_time if mx.default_device() == mx.cpu else perf_counter

    @property
    def number_type(self) -> str:
        """See `Session`."""
        return self._model.number_type

    def runner(self, rows: int) -> MLXRunner:
        """Return a runner of this number of empty rows."""
        return self.runner_of([make_prompt_cache(self._model.mlx) for _ in range(rows)])

    def runner_of(self, caches: Sequence[Caches]) -> MLXRunner:
        """Return a runner of texts that begin with the content of mlx-lm's caches."""
        return MLXRunner(self._model.mlx, caches, self._model, self._model.way)

    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> Call:
        """Check a call, and make the caches of its rows."""
        check_settings(config, "a model of MLX")
        refuse_cache(prompts.cache)
        call = Call()
        call.clock, call.runner = self.clock, self.runner(prompts.rows)
        return call

    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[MLXRunner, int | None, int]:
        """Return a runner of rows that join and leave, and the given limits."""
        check_settings(config, "a model of MLX")
        return self.runner(0), kv_bytes, prefix_bytes

    def selector(self, processors: Sequence[Any], samples: bool, seed: int | None, rows: int) -> Any:
        """Return an object that selects tokens with mlx-lm's functions. Rows of a call have their own random states."""
        if seed is None and samples and rows > 1:
            seed = int(mx.random.randint(0, 2**31 - 1).item())
        return selector_of(processors, samples, seed, self._model.vocabulary)

    def seed(self, seed: int) -> None:
        """Seed `mx.random` in the calling thread."""
        mx.random.seed(seed % 2**64)

    def sharing_weights(self) -> MLXModel:
        """Return another object of the same loaded model."""
        model = self._model
        return MLXModel(model.mlx, model.mlx_tokenizer, model.description)
