"""Runners with fixed passes: trials of their support, creation, and reuse of passes by the next call."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lookahead.backends.machine import PausingClock
from lookahead.backends.transformers.attention import INVARIANT, TREE_ATTENTION
from lookahead.backends.transformers.comparisons import CHECK_LENGTH, agree, check_logits, reads_rows_alike
from lookahead.backends.transformers.fixed_passes import FIXED_ROWS, SMALLEST_TREE, FixedPasses, rounded
from lookahead.backends.transformers.limits import limits_of
from lookahead.backends.transformers.masks import PACKED_MASKS
from lookahead.backends.transformers.model_state import model_setting, once, state_of
from lookahead.backends.transformers.pooled_rows import PAGE, PooledRunner
from lookahead.backends.transformers.row_pool import LayerShape, layer_shapes
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.shared_clone import can_be_cloned
from lookahead.config import LookaheadConfig
from lookahead.errors import UnsupportedModelError, not_of_signal

MOST_MASKED = 1 << 14
"""Largest number of tokens of several rows whose attention reads the memory of all rows, with a mask."""

Shapes = tuple[LayerShape | None, ...]

GROWS_BY = 1024
"""Tokens after a prompt in the initial memory. Few calls need more; growth captures all sizes again."""


def call_runner(
    model: PreTrainedModel,
    config: LookaheadConfig,
    batch: int,
    longest: int,
    start: int | None = None,
    positions_end: bool = True,
    records: bool = True,
) -> PooledRunner | str:
    """Return a runner for the rows of a call in pages of one memory; the reason if there is none.

    It has the passes of the last call if they fit.

    Args:
        model: Module that runs the trees.
        config: Configuration of steps and of the largest tree.
        batch: Number of rows.
        longest: Largest number of tokens of a text.
        start: Tokens of the longest prompt. With `engine="auto"` it determines the initial memory, and sizes are
            captured only if enough tokens remain. Otherwise memory is for whole texts, and sizes are captured at first
            use.
        positions_end: See `Limits`.
        records: Whether passes have fixed sizes, and are recorded.
    """
    if batch > 1 and model.config._attn_implementation == INVARIANT:
        return "invariant rows on a CPU are padded"
    shapes = _shapes(model, batch > 1, records)
    if isinstance(shapes, str):
        return shapes
    patient = config.engine != "static" and not config.invariant and start is not None
    text = min(longest, start + GROWS_BY) if patient and start is not None else longest
    capacity = rounded(text + config.max_nodes)
    limits = limits_of(model, positions_end)
    if limits.grows_after is not None and longest > limits.grows_after:
        return f"its table of positions grows beyond {limits.grows_after} tokens"
    if limits.picks_after is not None and longest > limits.picks_after:
        return f"it does not attend to all keys of a text of more than {limits.picks_after} tokens"
    if limits.columns_after is not None and batch * rounded(longest + config.max_nodes) > limits.columns_after:
        return f"its memory would exceed {limits.columns_after} columns"
    if batch > 1 and batch * capacity > MOST_MASKED and model.config._attn_implementation not in PACKED_MASKS:
        return f"without Triton and 'sdpa' each row would read the memory of all {batch} rows"
    made_for = (_wiring(model), batch, config.max_nodes, records)
    state = state_of(model)
    passes: FixedPasses | None
    with state.lock:
        passes = state.trials.fixed_passes
        state.trials.fixed_passes = None
    if passes and (passes.made_for != made_for or not 1 <= (passes.cache.capacity - PAGE) / (batch * capacity) <= 4):
        passes = None  # frees memory first
    clock = PausingClock(model.device) if passes is None else passes.clock
    runner = PooledRunner(model, shapes, clock, positions_end, records)
    runner.begin_call(batch, config.max_nodes, capacity, longest if patient else None, passes)
    runner.passes.made_for = made_for
    return runner


def fixed_runner(model: PreTrainedModel, batch: int) -> PooledRunner:
    """Return a runner with passes of one size, for short texts.

    Raises:
        UnsupportedModelError: The model does not support fixed shapes.
    """
    shapes = _shapes(model, batch > 1)
    if isinstance(shapes, str):
        raise UnsupportedModelError(shapes)
    runner = PooledRunner(model, shapes, PausingClock(model.device))
    runner.begin_call(batch, FIXED_ROWS, CHECK_LENGTH)
    return runner


def engine_runner(
    rows: ModelRunner, model: PreTrainedModel, clock: PausingClock, records: bool
) -> tuple[ModelRunner, str]:
    """Return a runner for rows of an engine in pages of one memory, if possible.

    Args:
        rows: Runner of rows with separate memories.
        model: Module for trees of the model.
        clock: Clock of steps.
        records: Whether to record passes.

    Returns:
        The runner without its memory, or `rows`; and the reason for unrecorded passes, empty if they are recorded.
    """
    if rows.is_invariant or model.config._attn_implementation != TREE_ATTENTION:
        return rows, "its attention is not 'sdpa', or Triton is not installed"
    if limits_of(model).picks_after is not None:
        return rows, "its layers pick keys"
    shapes = _shapes(model, several=True) if records else "engine='dynamic'"
    obstacle = shapes if isinstance(shapes, str) else ""
    if obstacle:
        shapes = _shapes(model, several=True, records=False)
    if isinstance(shapes, str):
        return rows, obstacle
    return PooledRunner(model, shapes, clock, rows.positions_end, not obstacle), obstacle


def _shapes(model: PreTrainedModel, several: bool, records: bool = True) -> Shapes | str:
    """Return the shapes of the layers' keys and values in a pool, or the reason if it is impossible; tried once.

    The trial compares logits of rows in a pool with logits of single texts.

    Args:
        model: The model.
        several: Whether there are several rows.
        records: Whether passes are recorded.
    """

    @torch.no_grad()
    def shapes_or_why() -> Shapes | str:
        try:
            shapes = layer_shapes(ModelRunner(model).run_token().cache)
            pooled = PooledRunner(model, shapes, PausingClock(model.device), records=records, is_trial=True)
            if several:
                pooled.take_memory(4 * CHECK_LENGTH, CHECK_LENGTH // 3, 3, SMALLEST_TREE)
                same = reads_rows_alike(pooled, model, exactly=False)
            else:
                pooled.begin_call(1, SMALLEST_TREE, CHECK_LENGTH)
                same = agree(check_logits(pooled), check_logits(ModelRunner(model, 1)), model.dtype)
        except Exception as error:  # the model runs without fixed shapes then
            not_of_signal(error)
            return f"passes of fixed shapes fail ({type(error).__name__}: {error})"
        return shapes if same else "passes of fixed shapes give other logits"

    obstacle = _obstacle(model) if records else ""
    return obstacle or once(model, ("pool", several, records, *model_setting(model)), shapes_or_why)


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
