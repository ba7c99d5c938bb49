"""What a call runs on where the model keeps a running state."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.api.prompts import Prompts
from lookahead.api.text_limits import check_chain_text
from lookahead.backends.step_clock import step_clock
from lookahead.backends.transformers import ChainCache, ChainRunner, SavedState, chain_engine, check_states, equivalence
from lookahead.config import MAX_NODES_PER_STEP, LookaheadConfig
from lookahead.errors import UnsupportedArgumentError


class ChainResources:
    """As `Resources`, for a model that `runs_on_chains`.

    Args:
        model: The model.
        prompts: What the row begins with.
        config: How to draft.
        generation_config: The configuration of the call.

    Attributes:
        runner: Runs the chains.
        clock: The clock for its steps.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """

    chains = True
    keeps_cache = True
    most_nodes = MAX_NODES_PER_STEP
    invariant_rows = 0

    def __init__(
        self, model: PreTrainedModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        _check_settings(model, config)
        if prompts.cache is not None:
            check_states(model, prompts.cache)
        self._cache = ChainCache(model, prompts.cache)
        self._before = None if prompts.cache is None else SavedState(prompts.cache, [])
        ends = equivalence(model).positions_end
        device, engine = prompts.input_ids.device, chain_engine(model)
        self.runner = ChainRunner(model, self._cache, prompts.before[0], device, ends, engine)
        self.clock = step_clock(model.device)
        check_chain_text(model, self.runner, prompts, generation_config)

    @property
    def state_bytes(self) -> int:
        """Bytes of states that were copied."""
        return self._cache.copied_bytes

    def restore(self) -> None:
        """Leave the caller's cache as it was before the call, which failed."""
        if self._before is not None:
            self._before.restore()

    def release(self, keep_cache: bool) -> Cache | None:
        """The cache that the caller gets, if it is to be kept: the one that was passed, if one was."""
        return self._cache.content if keep_cache else None


def _check_settings(model: PreTrainedModel, config: LookaheadConfig) -> None:
    name = type(model).__name__
    for setting in ("pack_weights", "invariant"):
        if value := getattr(config, setting):
            raise UnsupportedArgumentError(
                f"{setting}={value!r} is not possible for {name}, which keeps a running state; use {setting}=False"
            )
