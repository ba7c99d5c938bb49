"""Static steps for a model: whether it can have them, made once and kept for its next call."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.checks.clones import CHECK_LENGTH, agree, check_logits
from lookahead.backends.transformers.graph_recorder import recorder_for
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.position_limit import PositionLimit
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.shared_clone import can_be_cloned
from lookahead.backends.transformers.slot_limit import SlotLimit
from lookahead.backends.transformers.static_cache import LayerShape, layer_shapes
from lookahead.backends.transformers.static_steps import (
    FIXED_ROWS,
    SMALLEST_TREE,
    StaticSteps,
    padded_batch,
    pass_sizes,
    rounded,
)
from lookahead.backends.transformers.tree_cache import TreeCache
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

Shapes = tuple[LayerShape | None, ...]


class StaticBuffers:
    """Static steps, acquired for one call.

    Args:
        model: The module that runs the trees.
        batch: Rows.
        text: Tokens that the longest text may come to.
        nodes: Nodes of the largest tree.
        compiler: See `StaticSteps`.
        one_size: Whether all passes are of one size, for steps that are invariant.

    Attributes:
        steps: The steps; `None` if the model cannot be run with fixed shapes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        text: int,
        nodes: int,
        compiler: str | None = None,
        one_size: bool = False,
    ) -> None:
        self.steps: StaticSteps | None = None
        shapes = _static_shapes(model, compiler is not None)
        if shapes is None:
            return
        sizes, most = pass_sizes(nodes), None
        if one_size:
            sizes = fixed_sizes(batch)
            most = sizes[0] + nodes  # a part of a prompt, and what is drafted
        capacity = rounded(text + (most or 0) + sizes[-1])
        first = SlotLimit(model.config).first
        if first is not None and capacity > first:  # such a model would take the whole buffer for text
            return
        self._state = state_of(model)
        self._made_for = (_wiring(model), batch, sizes, compiler, most)
        with self._state.lock:
            kept, self._state.static_steps = self._state.static_steps, None
        if kept is not None and kept[0] == self._made_for and capacity <= kept[1].cache.capacity <= 4 * capacity:
            self.steps = kept[1]
            self.steps.cache.reset()
            return
        del kept  # before new memory is taken
        self.steps = StaticSteps(model, shapes, batch, capacity, sizes, recorder_for(model.device), compiler, most)

    def copy_cache(self, cache: TreeCache) -> None:
        """Copy the texts' keys and values to `cache`, for callers who keep it."""
        if self.steps is not None:
            self.steps.cache.copy_to(cache)

    def release(self) -> None:
        """Keep the steps for the model's next call, in place of earlier ones. Not after a call that failed."""
        if self.steps is not None:
            self._state.static_steps = (self._made_for, self.steps)


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
    if shapes is None:
        raise UnsupportedModelError("its static passes fail, or differ from dynamic ones")
    sizes, recorder = fixed_sizes(batch), recorder_for(model.device)
    steps = StaticSteps(model, shapes, batch, 2 * FIXED_ROWS + CHECK_LENGTH, sizes, recorder, most=2 * sizes[0])
    return ModelRunner(model, batch, steps=steps)


def _static_shapes(model: PreTrainedModel, compiled: bool = False) -> Shapes | None:
    """What the layers keep of a token; `None` if the model cannot be run with fixed shapes. Tried once per model."""
    if not _is_free_of_python(model):
        return None
    state = state_of(model)
    setting = (model.config._attn_implementation, model.dtype, model.device, compiled)
    with state.lock:
        if setting not in state.static_shapes:
            # What Dynamo makes of the model is what may fail; a backend that does no more takes little time.
            state.static_shapes[setting] = _try_static(model, "eager" if compiled else None)
        return state.static_shapes[setting]


def _is_free_of_python(model: PreTrainedModel) -> bool:
    """Whether all that a pass does is done by the device: what Python does is not done by a captured graph.

    So models are left alone that have hooks, adapters that can be switched, or frequencies of positions that are
    chosen anew when a text becomes long.
    """
    return (
        model.device.type != "meta"
        and can_be_cloned(model)
        and PositionLimit(model.config).changes_after is None
        and not any(
            module._forward_hooks or module._forward_pre_hooks or type(module).__module__.startswith("peft.")
            for module in model.modules()
        )
    )


@torch.no_grad()
def _try_static(model: PreTrainedModel, compiler: str | None = None) -> Shapes | None:
    """Compare logits of static steps with those of dynamic ones."""
    dynamic = ModelRunner(model, 1)
    expected = check_logits(dynamic)
    shapes = layer_shapes(dynamic.cache)
    try:
        sizes, recorder = pass_sizes(SMALLEST_TREE), recorder_for(model.device)
        most, capacity = None, CHECK_LENGTH
        if dynamic.is_invariant:
            sizes, most, capacity = fixed_sizes(1), FIXED_ROWS, CHECK_LENGTH + FIXED_ROWS
        steps = StaticSteps(model, shapes, 1, capacity, sizes, recorder, compiler, most)
        logits = check_logits(ModelRunner(model, 1, steps=steps))
    except Exception:
        # Whatever it is, a model that needs shapes or contents to be other than fixed runs as it did before.
        return None
    return shapes if agree(logits, expected, model.dtype) else None


def _wiring(model: PreTrainedModel) -> tuple[object, ...]:
    """What a captured pass depends on: where weights lie, and how the model is set."""
    tensors = (
        tensor for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
    )
    places = tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)
    return model.training, model.dtype, model.config._attn_implementation, places
