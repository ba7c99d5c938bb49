"""What a call runs on: the model's engine, a cache, and static buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.api.chain_resources import ChainResources
from lookahead.api.gguf.model import GGUFModel
from lookahead.api.gguf.resources import GGUFResources
from lookahead.api.prompts import Prompts
from lookahead.api.text_limits import check_text
from lookahead.backends.step_clock import step_clock
from lookahead.backends.transformers import (
    ModelRunner,
    StaticBuffers,
    TreeCache,
    adopt_cache,
    engine_model,
    equivalence,
    return_cache,
    runs_on_chains,
    runs_static,
)
from lookahead.backends.transformers.invariant.modules import least_rows
from lookahead.backends.transformers.static_steps import FIXED_ROWS
from lookahead.config import MAX_NODES_PER_STEP, LookaheadConfig
from lookahead.errors import UnsupportedArgumentError


class CallResources(Protocol):
    """What a call runs on, for any engine.

    Attributes:
        runner: Runs the trees, with the interface of `ModelRunner`.
        chains: Whether it runs chains alone.
        clock: The clock for its steps, in seconds.
        keeps_cache: Whether the cache that a call leaves can be handed on.
        most_nodes: Nodes that the tree of each row may have.
        invariant_rows: See `Statistics.invariant_rows`.
    """

    runner: Any
    chains: bool
    clock: Callable[[], float]
    keeps_cache: bool
    most_nodes: int
    invariant_rows: int

    @property
    def state_bytes(self) -> int:
        """Bytes of running states that were copied so far."""
        ...

    def restore(self) -> None:
        """Put back what a call that failed has changed."""

    def release(self, keep_cache: bool) -> Cache | None:
        """Release the buffers; returns the caller's cache, if it is to be kept."""


def acquire(
    model: PreTrainedModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
) -> CallResources:
    """Acquire what a call with `model` needs.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """
    if isinstance(model, GGUFModel):
        return GGUFResources(model, prompts, config, generation_config)
    kind = ChainResources if runs_on_chains(model) else Resources
    return kind(model, prompts, config, generation_config)


class Resources:
    """Acquired when a call begins, and released when it ends.

    Args:
        model: The model.
        prompts: What the rows begin with.
        config: How to draft.
        generation_config: The configuration of the call.

    Attributes:
        runner: Runs the trees.
        clock: The clock for its steps.
        keeps_cache: Whether the cache that a call leaves can be handed on; see `Equivalence.padded_caches`.
        most_nodes: Nodes that the tree of each row may have.
        invariant_rows: See `Statistics.invariant_rows`.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """

    most_nodes = MAX_NODES_PER_STEP
    chains = False
    state_bytes = 0

    def __init__(
        self, model: PreTrainedModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        is_static = runs_static(model, config.engine, config.invariant)
        engine = engine_model(model, config.pack_weights, is_static, config.invariant)
        kind = equivalence(model)
        self._prompts = prompts
        cache: TreeCache | None = None
        if prompts.cache is not None:
            cache = adopt_cache(prompts.cache, prompts.mask)
        elif not bool(prompts.mask.all()):  # hidden tokens are laid out again in the cache that the caller gets
            cache = TreeCache()
        self._buffers = _static_buffers(engine, config, prompts, generation_config) if is_static else None
        steps = self._buffers.steps if self._buffers else None
        self.invariant_rows = 0
        if config.invariant:
            self.invariant_rows = FIXED_ROWS if steps is not None else least_rows(engine)
        self.runner = ModelRunner(
            engine,
            prompts.rows,
            cache,
            prompts.before,
            prompts.padding,
            prompts.input_ids.device,
            steps,
            most_nodes=config.max_nodes,
            positions_end=kind.positions_end,
        )
        self._cache = self.runner.prompt_cache
        self._lengths, self._saved = self._cache.lengths(prompts.rows), self._cache.saved()
        self.clock = step_clock(model.device)
        self.keeps_cache = prompts.all_count or kind.padded_caches
        check_text(self.runner, kind, type(model).__name__, prompts, generation_config)

    def restore(self) -> None:
        """Leave the caller's cache as it was before the call, which failed."""
        self._cache.restore(self._lengths, self._saved)

    def release(self, keep_cache: bool) -> Cache | None:
        """Release the buffers; returns the caller's cache, if it is to be kept."""
        if self._buffers is not None:
            if keep_cache:
                self._buffers.copy_cache(self._cache)
            self._buffers.release()
        return return_cache(self._cache, self._prompts.cache, self._prompts.mask) if keep_cache else None


def _static_buffers(
    engine: PreTrainedModel, config: LookaheadConfig, prompts: Prompts, generation_config: GenerationConfig
) -> StaticBuffers | None:
    """The buffers of a static engine; `None` if the model cannot be run so, and need not.

    Raises:
        UnsupportedArgumentError: Its passes would not be invariant without.
    """
    longest = max(prompts.before) + generation_config.max_length
    compiler = "inductor" if config.engine == "compiled" else None
    buffers = StaticBuffers(engine, prompts.rows, longest, config.max_nodes, compiler, config.invariant)
    if buffers.steps is not None:
        return buffers
    if config.invariant and engine.device.type == "cuda":
        raise UnsupportedArgumentError(
            f"invariant=True is not possible for this {type(engine).__name__} and texts of {longest} tokens: it cannot "
            "be run with fixed shapes; use invariant=False"
        )
    return None
