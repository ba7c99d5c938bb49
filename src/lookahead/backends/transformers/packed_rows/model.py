"""What runs the rows of many requests on a model."""

from __future__ import annotations

from transformers import PreTrainedModel

from lookahead.backends.transformers.checks.clones import reads_rows_alike
from lookahead.backends.transformers.checks.kinds import equivalence
from lookahead.backends.transformers.checks.models import check_model, checked_setting
from lookahead.backends.transformers.engine_model import clone_for, engine_model
from lookahead.backends.transformers.invariant.attention import PACKED_ROWS as INVARIANT
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.packed_rows import attention
from lookahead.backends.transformers.packed_rows.padded_runner import PaddedRowsRunner
from lookahead.backends.transformers.packed_rows.rows_runner import RowsRunner
from lookahead.backends.transformers.packed_rows.runner import PackedRowsRunner
from lookahead.backends.transformers.preserved_state import preserved_state
from lookahead.backends.transformers.shared_clone import SharedClone, can_be_cloned
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError


def rows_runner(model: PreTrainedModel, pack_weights: bool = False, invariant: bool = False) -> RowsRunner:
    """What runs rows of `model` that come and go: packed into one row of tokens, or padded where that cannot be.

    Args:
        model: A causal language model of transformers.
        pack_weights: See `LookaheadConfig.pack_weights`.
        invariant: See `LookaheadConfig.invariant`.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model cannot be run on token trees, or its rows give other logits together.
    """
    clone = packed_clone(model, pack_weights, invariant)
    ends = equivalence(model).holds("positions_end")
    if not isinstance(clone, str):
        return PackedRowsRunner(clone, ends)
    if invariant:
        raise _unsupported(model, clone)
    engine = engine_model(model, pack_weights)
    runner = PaddedRowsRunner(engine, ends, equivalence(model).holds("batches"))
    state, setting = state_of(model), ("padded rows", *checked_setting(model))
    with state.lock:
        if setting not in state.checked:
            with preserved_state(model):
                same = reads_rows_alike(runner, engine, exactly=False)
            if not same:
                raise _unsupported(model, f"{clone}, and padded ones gave other logits together than each alone")
            state.checked.add(setting)
    return runner


def packed_rows_model(model: PreTrainedModel, pack_weights: bool = False, invariant: bool = False) -> PreTrainedModel:
    """A clone of `model` for `PackedRowsRunner`, with the model's own weights. Made and tried once per model object.

    Arguments as for `rows_runner`.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model cannot be run on token trees, or not with packed rows.
    """
    clone = packed_clone(model, pack_weights, invariant)
    if isinstance(clone, str):
        raise _unsupported(model, clone)
    return clone


def packed_clone(model: PreTrainedModel, pack_weights: bool, invariant: bool) -> PreTrainedModel | str:
    """What `packed_rows_model` gives, or why there is none.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    check_model(model)
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return (
            f"its attention, {implementation!r}, is not called through transformers' AttentionInterface as 'sdpa'; "
            "load it with attn_implementation='sdpa' if it has that"
        )
    if not can_be_cloned(model):
        return "it was compiled, or a hook stands in for the forward pass of one of its modules"
    if not equivalence(model).holds("packed_rows"):
        return "a small copy of it gave other logits for rows that share a pass than for each alone"
    if invariant and model.device.type != "cpu":
        raise UnsupportedArgumentError(
            f"invariant=True is not possible for rows that share a pass on {model.device}, but on CPUs only; use "
            "lookahead.generate, or invariant=False"
        )
    if invariant:  # refused where passes of one text cannot be
        engine_model(model, pack_weights, invariant=True)
    clone = clone_for(model, INVARIANT if invariant else attention.NAME, pack_weights, _tried_clone)
    return clone.module if isinstance(clone, SharedClone) else str(clone)


def _tried_clone(model: PreTrainedModel, name: str | None, pack_weights: bool | str) -> SharedClone | str:
    attention.register()
    clone = SharedClone(model, name, pack_weights)
    packed = PackedRowsRunner(clone.module)
    invariant = name == INVARIANT
    with preserved_state(model):
        try:
            alone = engine_model(model, bool(pack_weights), invariant=True) if invariant else model
            same = reads_rows_alike(packed, alone, exactly=invariant)
        except UnsupportedModelError as error:
            return str(error)
    if not same or clone.keeps_state(model):
        return "its rows gave other logits together than each alone"
    return clone


def _unsupported(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model={type(model).__name__} cannot be run with the rows of many requests in one: {why}. Use "
        "lookahead.generate"
    )
