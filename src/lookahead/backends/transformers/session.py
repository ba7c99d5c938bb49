"""Session of a transformers model: runners for calls of `generate` and for engines."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import chain

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.backends.base import Call, Prompts, Session
from lookahead.backends.machine import PausingClock, step_clock
from lookahead.backends.transformers.attention import TREE_ATTENTION
from lookahead.backends.transformers.chain_cache import ChainRow, SavedState, check_states, empty_cache, source_of_row
from lookahead.backends.transformers.checks import (
    check_chain_settings,
    check_texts,
    not_possible,
    runs_on_chains,
    runs_rows,
)
from lookahead.backends.transformers.engine_model import (
    check_parts,
    engine_model,
    packed_runner,
    rows_runner,
    runs_static,
)
from lookahead.backends.transformers.equivalence import equivalence
from lookahead.backends.transformers.fixed_passes import FIXED_ROWS
from lookahead.backends.transformers.invariant import min_rows
from lookahead.backends.transformers.limits import limits_of
from lookahead.backends.transformers.model_state import follow, state_of
from lookahead.backends.transformers.pooled_rows import PooledRunner
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.backends.transformers.shared_clone import chain_engine
from lookahead.backends.transformers.static_engine import call_runner, engine_runner
from lookahead.backends.transformers.tree_cache import adopt_cache, return_cache
from lookahead.backends.transformers.watch import ModelWatch
from lookahead.config import LookaheadConfig
from lookahead.errors import LookaheadWarning


class TransformersSession(Session):
    """Session of a transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.clock = self._clock = PausingClock(model.device)

    @property
    def number_type(self) -> str:
        """See `Session`."""
        return str(self._model.dtype).removeprefix("torch.")

    def check(self) -> None:
        """Refuse a model that supports neither trees nor chains."""
        follow(self._model)
        runs_on_chains(self._model)

    def prepare(self, config: LookaheadConfig) -> None:
        """Make and try the module that runs trees."""
        follow(self._model)
        if not runs_on_chains(self._model):
            engine_model(self._model, config.pack_weights, config.invariant)

    def begin(
        self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> TreeCall | ChainCall:
        """Prepare a call of the checked model."""
        composition = state_of(self._model).trials.composition or follow(self._model)
        kind = ChainCall if runs_on_chains(self._model) else TreeCall
        call = kind(self._model, prompts, config, generation_config)
        call.model_holds = partial(composition.holds, self._model, after_passes=True)
        return call

    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[ModelRunner | ChainRunner, int | None, int]:
        """Return a runner for rows that join and leave, and its limits of memory in bytes."""
        follow(self._model)
        on_chains, drafts = runs_rows(self._model, falls_back=config.fallback == "plain")
        check_parts(self._model, on_chains)
        if on_chains:
            check_chain_settings(self._model, config)
            ends = equivalence(self._model).holds("positions_end")
            engine = chain_engine(self._model) if drafts else None
            return ChainRunner(self._model, (), None, ends, engine, drafts), kv_bytes, 0
        rows = rows_runner(self._model, config.pack_weights, config.invariant)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # memory of earlier engines is free
            records = config.engine == "auto"
            rows, obstacle = engine_runner(rows, engine_model(self._model), self._clock, records)
            if obstacle and records:
                _warn_of_eager_steps(self._model, obstacle)
        return rows, kv_bytes, prefix_bytes

    def watch(self, runner: ModelRunner | ChainRunner, compares_bits: bool) -> ModelWatch:
        """Return a watch for changes of the model."""
        state = state_of(self._model)
        state.passes_write |= limits_of(self._model).changes_after is not None
        is_recorded = runner.engine == "static"
        return ModelWatch(self._model, runner.model, compares_bits, follow(self._model), state, is_recorded)

    def sharing_weights(self) -> PreTrainedModel:
        """Copy the model without its tensors."""
        tensors = chain(self._model.parameters(), self._model.buffers())
        return copy.deepcopy(self._model, {id(tensor): tensor for tensor in tensors})


class TreeCall(Call):
    """Call of a model that supports trees; see `Session.begin` for arguments and errors."""

    runner: ModelRunner

    def __init__(
        self, model: PreTrainedModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        engine = engine_model(model, config.pack_weights, config.invariant)
        kind = equivalence(model)
        self._prompts = prompts
        texts = None if prompts.cache is None else adopt_cache(prompts.cache, prompts.mask)
        ends = kind.holds("positions_end")
        pooled = _pooled_runner(engine, config, prompts, generation_config, ends)
        if config.invariant:
            self.invariant_rows = min_rows(engine) if pooled is None else FIXED_ROWS
        has_rows = pooled is None and prompts.rows > 1
        eager = _packed_runner(model, prompts, config)
        if eager is None:
            held = 0 if has_rows else prompts.rows
            eager = ModelRunner(engine, held, prompts.input_ids.device, config.max_nodes, ends)
        self.runner = runner = pooled or eager
        self.rows = [eager.new_row() for _ in range(prompts.rows)] if has_rows else None
        if texts is not None:
            with nullcontext() if self.rows is None else runner.serving(self.rows):
                runner.begin(texts)
        for row, before, padding in zip(self.rows or runner.rows, prompts.before, prompts.padding, strict=True):
            row.before = before
            row.padding = padding
        self._model = model
        self._engine = engine
        self.clock = step_clock(model.device) if pooled is None else pooled.passes.clock
        self.keeps_cache = prompts.all_count or kind.holds("padded_caches")
        check_texts(model, runner, prompts, generation_config)

    def release(self, keep_cache: bool) -> Cache | None:
        """Release the buffers; return the filled cache if `keep_cache`."""
        cache = None
        if keep_cache:
            cache = self._prompts.cache
            cache = empty_cache(self._model) or DynamicCache() if cache is None else cache
            cache = return_cache(self.rows or self.runner.texts, cache, self._prompts.mask)
        if isinstance(self.runner, PooledRunner) and self.runner.engine == "static":  # keep passes for the next call
            state_of(self._engine).trials.fixed_passes = self.runner.end_call()
        return cache


def _packed_runner(model: PreTrainedModel, prompts: Prompts, config: LookaheadConfig) -> ModelRunner | None:
    """Return a runner for packed rows; `None` if rows are padded.

    On a GPU rows are in a pool. Packed weights exist once per model, for the other clone.
    """
    if prompts.rows == 1 or prompts.inputs or model.device.type != "cpu":
        return None
    if config.engine not in ("auto", "dynamic") or config.invariant or config.pack_weights:
        return None
    runner = packed_runner(model)
    return None if isinstance(runner, str) else runner


def _pooled_runner(
    engine: PreTrainedModel, config: LookaheadConfig, prompts: Prompts, generation_config: GenerationConfig, ends: bool
) -> PooledRunner | None:
    """Return a runner with fixed passes, or of several rows with our attention; `None` if the model supports neither.

    Fixed passes that the model does not support cause a warning.

    Raises:
        UnsupportedArgumentError: `invariant=True` needs them.
    """
    before = max(prompts.before)
    longest = before + generation_config.max_length
    make = partial(call_runner, engine, config, prompts.rows, longest, before + prompts.width, ends)
    if runs_static(engine, config.engine, config.invariant):
        runner = make()
        if not isinstance(runner, str):
            return runner
        if config.invariant and engine.device.type == "cuda":
            raise not_possible(engine, "invariant", f"texts of {longest} tokens cannot have fixed shapes: {runner}")
        _warn_of_eager_steps(engine, runner)
    if prompts.rows == 1 or engine.config._attn_implementation != TREE_ATTENTION:
        return None
    runner = make(records=False)
    return None if isinstance(runner, str) else runner


def _warn_of_eager_steps(model: PreTrainedModel, obstacle: str) -> None:
    warnings.warn(
        f"steps of this {type(model).__name__} are run one kernel at a time, without fixed shapes or CUDA graphs: "
        f"{obstacle}. engine='dynamic' avoids this warning",
        LookaheadWarning,
        stacklevel=3,
    )


class ChainCall(Call):
    """Call of a model that `runs_on_chains`; see `Session.begin` for arguments and errors."""

    runner: ChainRunner

    def __init__(
        self, model: PreTrainedModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        check_chain_settings(model, config)
        if prompts.cache is not None:
            check_states(model, prompts.cache)
        sources = [source_of_row(prompts.source, row, prompts.rows) for row in range(prompts.rows)]
        rows = zip(prompts.before, sources, strict=True)
        self._rows = [ChainRow(model, prompts.cache, before, source) for before, source in rows]
        self._before = None if prompts.cache is None else SavedState(prompts.cache)
        for row, tokens in zip(self._rows, prompts.tokens, strict=True):
            row.declare_prompt(len(tokens))
        ends = equivalence(model).holds("positions_end")
        self.runner = runner = ChainRunner(model, self._rows, prompts.input_ids.device, ends, chain_engine(model))
        self.clock = step_clock(model.device)
        self.keeps_cache = prompts.rows == 1 and prompts.all_count  # caches are per row and without padding
        check_texts(model, runner, prompts, generation_config)

    @property
    def state_bytes(self) -> int:
        """Bytes of copied states."""
        return sum(row.copied_bytes for row in self._rows)

    def restore(self, error: BaseException) -> None:
        """Restore the caller's cache after a failed call."""
        if self._before is not None:
            self._before.restore()

    def release(self, keep_cache: bool) -> Cache | None:
        """Return the filled cache if `keep_cache`: the caller's own, or a new one."""
        return self._rows[0].content if keep_cache else None
