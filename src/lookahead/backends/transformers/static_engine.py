"""Static steps of a model: trials of their support, creation, and reuse by the next call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from lookahead.backends.machine import PausingClock
from lookahead.backends.transformers.comparisons import CHECK_LENGTH, agree, check_logits, reads_rows_alike
from lookahead.backends.transformers.fixed_passes import (
    FIXED_ROWS,
    SMALLEST_TREE,
    StaticSteps,
    padded_batch,
    pass_sizes,
    rounded,
)
from lookahead.backends.transformers.limits import limits_of
from lookahead.backends.transformers.model_state import model_setting, once, state_of
from lookahead.backends.transformers.pooled_rows import PooledRunner
from lookahead.backends.transformers.rows import LayerShape, layer_shapes
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.shared_clone import can_be_cloned
from lookahead.config import LookaheadConfig
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

Shapes = tuple[LayerShape | None, ...]

GROWS_BY = 1024
"""Tokens after a prompt in the initial memory. Few calls need more; growth captures all sizes again."""


def acquire_steps(
    model: PreTrainedModel, config: LookaheadConfig, batch: int, longest: int, start: int | None = None
) -> StaticSteps | str:
    """Return static steps for a call, reused from the last one if they fit; the reason if there are none.

    Args:
        model: Module that runs the trees.
        config: Configuration of steps and of the largest tree.
        batch: Number of rows.
        longest: Largest number of tokens of a text.
        start: Tokens of the longest prompt. With `engine="auto"` it determines the initial memory, and sizes are
            captured only if enough tokens remain. Otherwise memory is for whole texts, and sizes are captured at first
            use.
    """
    shapes = _static_shapes(model)
    if isinstance(shapes, str):
        return shapes
    sizes = pass_sizes(config.max_nodes)
    max_nodes = None
    if config.invariant:
        sizes = fixed_sizes(batch)
        max_nodes = sizes[0] + config.max_nodes  # a chunk of a prompt, and a draft
    patient = config.engine == "auto" and not config.invariant and start is not None
    text = min(longest, start + GROWS_BY) if patient and start is not None else longest
    capacity = rounded(text + (max_nodes or 0) + sizes[-1])
    limits = limits_of(model)
    if limits.picks_after is not None and longest > limits.picks_after:
        return f"it does not attend to all keys of a text of more than {limits.picks_after} tokens"
    if limits.columns_after is not None and rounded(longest + (max_nodes or 0) + sizes[-1]) > limits.columns_after:
        return f"its memory would exceed {limits.columns_after} columns"
    made_for = (_wiring(model), batch, sizes, max_nodes)
    state = state_of(model)
    steps: StaticSteps | None
    with state.lock:
        steps = state.trials.static_steps
        state.trials.static_steps = None
    if steps is None or steps.made_for != made_for or not capacity <= steps.cache.capacity <= 4 * capacity:
        del steps  # frees memory first
        steps = StaticSteps(model, shapes, batch, capacity, sizes, max_nodes)
        steps.made_for = made_for
    steps.last = longest if patient else None
    return steps


def fixed_sizes(batch: int) -> tuple[int, ...]:
    """Return the only size of invariant passes for a batch: `FIXED_ROWS` nodes over all rows.

    Raises:
        UnsupportedArgumentError: The batch has more rows.
    """
    if batch > FIXED_ROWS:
        raise UnsupportedArgumentError(
            f"a batch of {batch} rows is more than the {FIXED_ROWS} that every invariant static pass has; send fewer "
            "at a time, or use invariant=False"
        )
    return (FIXED_ROWS // padded_batch(batch),)


def fixed_runner(model: PreTrainedModel, batch: int) -> ModelRunner:
    """Return a runner with static passes of one size, for short texts.

    Raises:
        UnsupportedModelError: The model does not support fixed shapes.
    """
    shapes = _static_shapes(model)
    if isinstance(shapes, str):
        raise UnsupportedModelError(shapes)
    sizes = fixed_sizes(batch)
    capacity = 2 * FIXED_ROWS + CHECK_LENGTH
    steps = StaticSteps(model, shapes, batch, capacity, sizes, max_nodes=2 * sizes[0])
    return ModelRunner(model, batch, steps=steps)


def pooled_runner(
    rows: ModelRunner, alone: PreTrainedModel, clock: PausingClock, records: bool
) -> tuple[ModelRunner, str]:
    """Return a runner for rows in pages of one memory, if possible.

    Args:
        rows: Runner of rows with separate memories.
        alone: Module for one text of the model.
        clock: Clock of steps.
        records: Whether to record passes.

    Returns:
        The runner without its memory, or `rows`; and the reason for unrecorded passes, empty if they are recorded.
    """
    model = rows.model
    if not rows.packed or rows.is_invariant:
        return rows, "its rows are not packed"
    if find_spec("triton") is None:
        return rows, "Triton is not installed"
    if limits_of(model).picks_after is not None:
        return rows, "its layers pick keys"
    obstacle = _obstacle(model) if records else "engine='dynamic'"
    shapes = obstacle or _pool_shapes(rows, alone, records=True)
    if isinstance(shapes, str):
        obstacle = shapes
        shapes = _pool_shapes(rows, alone, records=False)
    if isinstance(shapes, str):
        return rows, obstacle
    return PooledRunner(rows, shapes, not obstacle, clock), obstacle


def _pool_shapes(rows: ModelRunner, alone: PreTrainedModel, records: bool) -> Shapes | str:
    """Return the shapes of the layers' keys and values in a pool, or the reason if it is impossible; tried once."""
    return _shapes_by_trial(rows.model, ("rows", records), partial(_try_pool, rows, alone, records))


def _static_shapes(model: PreTrainedModel) -> Shapes | str:
    """Return the shapes of the layers' keys and values, or the reason against fixed shapes; tried once."""
    return _obstacle(model) or _shapes_by_trial(model, ("texts",), partial(_try_static, model))


@torch.no_grad()
def _shapes_by_trial(
    model: PreTrainedModel, kind: tuple[object, ...], compare: Callable[[], tuple[Shapes, bool]]
) -> Shapes | str:
    """Return the shapes of layers if passes of fixed shapes have equal logits; the reason otherwise."""

    def shapes_or_why() -> Shapes | str:
        try:
            shapes, same = compare()
            return shapes if same else "passes of fixed shapes give other logits"
        except Exception as error:  # the model runs without fixed shapes then
            return f"passes of fixed shapes fail ({type(error).__name__}: {error})"

    return once(model, (*kind, *model_setting(model)), shapes_or_why)


def _try_pool(rows: ModelRunner, alone: PreTrainedModel, records: bool) -> tuple[Shapes, bool]:
    """Compare logits of rows in a pool with logits of single texts."""
    model = rows.model
    shapes = layer_shapes(rows.run_token().cache)
    pooled = PooledRunner(rows, shapes, records, PausingClock(model.device), is_trial=True)
    pooled.take_memory(4 * CHECK_LENGTH, CHECK_LENGTH // 3, 3, SMALLEST_TREE)
    return shapes, reads_rows_alike(pooled, alone, exactly=False)


def _try_static(model: PreTrainedModel) -> tuple[Shapes, bool]:
    """Compare logits of static and dynamic steps."""
    dynamic = ModelRunner(model, 1)
    expected = check_logits(dynamic)
    shapes = layer_shapes(dynamic.rows[0].cache)
    sizes = pass_sizes(SMALLEST_TREE)
    max_nodes = None
    capacity = CHECK_LENGTH
    if dynamic.is_invariant:
        sizes = fixed_sizes(1)
        max_nodes = FIXED_ROWS
        capacity = CHECK_LENGTH + FIXED_ROWS
    steps = StaticSteps(model, shapes, 1, capacity, sizes, max_nodes, is_trial=True)
    return shapes, agree(check_logits(ModelRunner(model, 1, steps=steps)), expected, model.dtype)


def _obstacle(model: PreTrainedModel) -> str:
    """Return the reason against captured graphs, which skip Python code: hooks, adapters, or changes of positions.

    It is empty if there is none.
    """
    if model.device.type == "meta":
        return "its weights are loaded on demand"
    if not can_be_cloned(model):
        return "the forward of a module in it was replaced"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast chooses number types while it runs"
    if limits_of(model).changes_after is not None:
        return "its positions change when a text becomes long"
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"its {type(module).__name__} has hooks"
        if type(module).__module__.startswith("peft."):
            return "it has adapters"
    return ""


def _wiring(model: PreTrainedModel) -> tuple[object, ...]:
    """Return the settings and the addresses of weights that a captured pass depends on."""
    tensors = (
        tensor for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
    )
    addresses = tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)
    return model.training, model.dtype, model.config._attn_implementation, addresses
