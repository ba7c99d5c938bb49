"""What runs the rows of an engine: a model of transformers, or a GGUF model in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from lookahead.api.gguf.model import GGUFModel
from lookahead.api.gguf.resources import check_settings, gguf_clock
from lookahead.backends.llama_cpp.rows_runner import LlamaRowsRunner
from lookahead.backends.step_clock import step_clock
from lookahead.backends.transformers.model_watch import ModelWatch
from lookahead.backends.transformers.packed_rows import RowsRunner
from lookahead.backends.transformers.packed_rows.model import rows_runner
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedModelError
from lookahead.serving.free_memory import free_bytes

EngineRunner = RowsRunner | LlamaRowsRunner

_SHARE = 2
"""Part of the free memory that the cells of llama.cpp take at most where nothing is said about it."""

_KEPT_SHARE = 4
"""Part of the memory for keys and values that finished texts take at most which lie outside of llama.cpp's cells."""


def engine_runner(
    model: PreTrainedModel, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
) -> tuple[EngineRunner, int | None, int]:
    """What runs rows of `model` that come and go.

    Args:
        model: The model.
        config: How its weights are set.
        max_rows: Most rows of a step.
        kv_bytes: Most bytes of keys and values; any number if `None`.
        prefix_bytes: Most bytes of finished texts.

    Returns:
        The runner, and the most bytes of keys and values, and of finished texts. llama.cpp takes room for running texts
        at once, so that there is a number even where none was given; finished ones have a share of their own.

    Raises:
        LookaheadError: The model or the settings cannot do what is asked for.
    """
    if not isinstance(model, GGUFModel):
        return rows_runner(model, config.pack_weights, config.invariant), kv_bytes, prefix_bytes
    check_settings(config)
    if model.llama.has_states:
        raise UnsupportedModelError(
            f"path={str(model.llama.path)!r}: the model has layers with a running state, and is run on chains of "
            "tokens, one text at a time, which an Engine does not; use lookahead.generate"
        )
    size = model.llama.token_bytes
    most = free_bytes(torch.device("cpu")) // _SHARE if kv_bytes is None else kv_bytes
    prefix_bytes = min(prefix_bytes, most // _KEPT_SHARE)
    most -= prefix_bytes
    if kv_bytes is None:
        most = min(most, size * max_rows * model.llama.trained_context)
    runner = LlamaRowsRunner(model.llama, model, max(most // size, 1), max_rows)
    check_nodes(runner, config)
    return runner, most, prefix_bytes


def engine_watch(model: PreTrainedModel, runner: EngineRunner, compares_bits: bool) -> ModelWatch | None:
    """Notices changes of `model`; `None` where there can be none, as a GGUF model has nothing that is set from here."""
    return None if isinstance(model, GGUFModel) else ModelWatch(model, runner.model, compares_bits)


def engine_clock(model: PreTrainedModel) -> Callable[[], float]:
    """The clock for steps of `model`."""
    return gguf_clock(model) if isinstance(model, GGUFModel) else step_clock(model.device)


def check_nodes(runner: EngineRunner, config: LookaheadConfig) -> None:
    """Refuse methods whose trees have a fixed shape, for which llama.cpp has not enough sequence ids.

    Raises:
        InvalidArgumentError: There are not enough.
    """
    if config.preset in ("paper", "jacobi") and config.max_nodes > runner.most_nodes:
        raise InvalidArgumentError(
            f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each row, but llama.cpp has sequences "
            f"for {runner.most_nodes}; choose smaller sizes, or an Engine with a smaller max_rows"
        )
