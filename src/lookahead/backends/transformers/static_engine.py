"""Static steps for a model: whether it can have them, made once and kept for its next call."""

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
"""Tokens behind a prompt that memory is taken for at first: few calls write more, and growing captures all sizes
again."""


def acquire_steps(
    model: PreTrainedModel, config: LookaheadConfig, batch: int, longest: int, start: int | None = None
) -> StaticSteps | str:
    """Static steps for one call, those that the last one released if they fit; why there can be none, if so.

    Args:
        model: The module that runs the trees.
        config: How steps are run, and the nodes of the largest tree.
        batch, longest: Rows, and tokens that the longest text may come to.
        start: Tokens of the longest prompt. With `engine="auto"` memory is taken for some more than these, and a size
            is captured only if enough tokens are left to pay for it; else for all of the text, and as soon as a
            step has that size.
    """
    shapes = _static_shapes(model)
    if isinstance(shapes, str):
        return shapes
    sizes = pass_sizes(config.max_nodes)
    most = None
    if config.invariant:
        sizes = fixed_sizes(batch)
        most = sizes[0] + config.max_nodes  # a part of a prompt, and what is drafted
    patient = config.engine == "auto" and not config.invariant and start is not None
    text = min(longest, start + GROWS_BY) if patient and start is not None else longest
    capacity = rounded(text + (most or 0) + sizes[-1])
    first = limits_of(model).places_after
    picked = limits_of(model).picks_after
    if picked is not None and longest > picked:
        return f"it does not attend to all keys of a text of more than {picked} tokens"
    if first is not None and rounded(longest + (most or 0) + sizes[-1]) > first:
        return f"it would take memory beyond {first} tokens for text"
    made_for = (_wiring(model), batch, sizes, most)
    state = state_of(model)
    steps: StaticSteps | None
    with state.lock:
        steps = state.trials.static_steps
        state.trials.static_steps = None
    if steps is None or steps.made_for != made_for or not capacity <= steps.cache.capacity <= 4 * capacity:
        del steps  # before new memory is taken
        steps = StaticSteps(model, shapes, batch, capacity, sizes, most)
        steps.made_for = made_for
    steps.last = longest if patient else None
    return steps


def fixed_sizes(batch: int) -> tuple[int, ...]:
    """The only size of passes for so many rows: `FIXED_ROWS` nodes over all of them.

    Raises:
        UnsupportedArgumentError: There are more rows than that.
    """
    if batch > FIXED_ROWS:
        raise UnsupportedArgumentError(
            f"a batch of {batch} rows is more than the {FIXED_ROWS} that every invariant static pass has; send fewer "
            "at a time, or use invariant=False"
        )
    return (FIXED_ROWS // padded_batch(batch),)


def fixed_runner(model: PreTrainedModel, batch: int) -> ModelRunner:
    """A runner with static passes of one size, for short texts.

    Raises:
        UnsupportedModelError: The model cannot be run with fixed shapes.
    """
    shapes = _static_shapes(model)
    if isinstance(shapes, str):
        raise UnsupportedModelError(shapes)
    sizes = fixed_sizes(batch)
    capacity = 2 * FIXED_ROWS + CHECK_LENGTH
    steps = StaticSteps(model, shapes, batch, capacity, sizes, most=2 * sizes[0])
    return ModelRunner(model, batch, steps=steps)


def pooled_runner(
    rows: ModelRunner, alone: PreTrainedModel, clock: PausingClock, records: bool
) -> tuple[ModelRunner, str]:
    """What runs rows that come and go over pages of one memory, where that can be.

    Args:
        rows, alone: What runs each over its own memory, and what runs one text of the model.
        clock: The clock for steps.
        records: Whether passes are to be recorded.

    Returns:
        The runner, without its memory, or `rows`; and why no passes are recorded, if that is so.
    """
    model = rows.model
    if not rows.packed or rows.is_invariant:
        return rows, "its rows do not lie one behind another in a pass"
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
    """What the layers keep of a token; why rows cannot lie in a pool, if so. Tried once per model."""
    return _tried(rows.model, ("rows", records), partial(_try_pool, rows, alone, records))


def _static_shapes(model: PreTrainedModel) -> Shapes | str:
    """What the layers keep of a token; why the model cannot be run with fixed shapes, if it cannot. Tried once per
    model."""
    return _obstacle(model) or _tried(model, ("texts",), partial(_try_static, model))


@torch.no_grad()
def _tried(
    model: PreTrainedModel, kind: tuple[object, ...], compare: Callable[[], tuple[Shapes, bool]]
) -> Shapes | str:
    """The shapes of layers, if passes of fixed shapes give the logits of others; why they do not, if so."""

    def shapes_or_why() -> Shapes | str:
        try:
            shapes, same = compare()
            return shapes if same else "passes of fixed shapes give other logits"
        except Exception as error:
            # Whatever it is, a model that needs shapes or contents to be other than fixed runs as it did before.
            return f"passes of fixed shapes fail ({type(error).__name__}: {error})"

    return once(model, (*kind, *model_setting(model)), shapes_or_why)


def _try_pool(rows: ModelRunner, alone: PreTrainedModel, records: bool) -> tuple[Shapes, bool]:
    """Compare logits of rows in a pool with those of each text alone."""
    model = rows.model
    shapes = layer_shapes(rows.run_token().cache)
    pooled = PooledRunner(rows, shapes, records, PausingClock(model.device))
    pooled.take_memory(4 * CHECK_LENGTH, CHECK_LENGTH // 3, 3, SMALLEST_TREE)
    return shapes, reads_rows_alike(pooled, alone, exactly=False)


def _try_static(model: PreTrainedModel) -> tuple[Shapes, bool]:
    """Compare logits of static steps with those of dynamic ones."""
    dynamic = ModelRunner(model, 1)
    expected = check_logits(dynamic)
    shapes = layer_shapes(dynamic.rows[0].cache)
    sizes = pass_sizes(SMALLEST_TREE)
    most = None
    capacity = CHECK_LENGTH
    if dynamic.is_invariant:
        sizes = fixed_sizes(1)
        most = FIXED_ROWS
        capacity = CHECK_LENGTH + FIXED_ROWS
    steps = StaticSteps(model, shapes, 1, capacity, sizes, most)
    return shapes, agree(check_logits(ModelRunner(model, 1, steps=steps)), expected, model.dtype)


def _obstacle(model: PreTrainedModel) -> str:
    """What a pass does that a device does not: what Python does is not done by a captured graph. Empty if nothing.

    So models are left alone that have hooks, adapters that can be switched, or frequencies of positions that are
    chosen anew when a text becomes long.
    """
    if model.device.type == "meta":
        return "its weights are loaded when they are needed"
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
    """What a captured pass depends on: where weights lie, and how the model is set."""
    tensors = (
        tensor for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
    )
    places = tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)
    return model.training, model.dtype, model.config._attn_implementation, places
