"""What a call runs on: the model's engine, a cache, and buffers that are used again."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.api.prompts import Prompts
from lookahead.api.text_limits import check_text
from lookahead.backends.transformers import (
    ModelRunner,
    StaticBuffers,
    TreeCache,
    adopt_cache,
    engine_model,
    equivalence,
    return_cache,
)
from lookahead.backends.transformers.model_state import making
from lookahead.config import LookaheadConfig


class Resources:
    """Taken when a call begins, and given back when it ends.

    Args:
        model: The model.
        prompts: What the rows begin with.
        config: How to draft.
        generation_config: The configuration of the call.

    Attributes:
        runner: Runs the trees.
        keeps_cache: Whether the cache that a call leaves can be handed on; see `Equivalence.padded_caches`.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        with making(model):
            engine = engine_model(model, config.pack_weights, static=config.engine != "dynamic")
            kind = equivalence(model)
        self._prompts = prompts
        self._cache = TreeCache() if prompts.cache is None else adopt_cache(prompts.cache, prompts.mask)
        self._lengths = self._cache.lengths(prompts.rows)
        self._buffers = _static_buffers(engine, config, prompts, generation_config)
        self.runner = ModelRunner(
            engine,
            prompts.rows,
            self._cache,
            prompts.before,
            prompts.padding,
            prompts.input_ids.device,
            self._buffers.steps if self._buffers else None,
            most_nodes=config.max_nodes,
            positions_end=kind.positions_end,
        )
        self.keeps_cache = bool(prompts.mask.all()) or kind.padded_caches
        check_text(self.runner, kind, type(model).__name__, prompts, generation_config)

    def restore(self) -> None:
        """Leave the caller's cache as it was before the call, which failed."""
        self._cache.restore(self._lengths)

    def release(self, keep_cache: bool) -> Cache | None:
        """Give back what was taken; the cache that the caller gets, if it is to be kept."""
        if self._buffers is not None:
            if keep_cache:
                self._buffers.copy_cache(self._cache)
            self._buffers.release()
        return return_cache(self._cache, self._prompts.cache, self._prompts.mask) if keep_cache else None


def _static_buffers(
    engine: PreTrainedModel, config: LookaheadConfig, prompts: Prompts, generation_config: GenerationConfig
) -> StaticBuffers | None:
    """What the engine that was chosen needs beforehand, if it is not the dynamic one."""
    if config.engine == "dynamic" or config.tie_margin > 0:
        return None
    longest = max(prompts.before) + generation_config.max_length
    compiler = "inductor" if config.engine == "compiled" else None
    buffers = StaticBuffers(engine, prompts.rows, longest, config.max_nodes, compiler)
    return buffers if buffers.steps is not None else None
