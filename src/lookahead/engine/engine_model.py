"""Which module the engine runs for a model: the model itself, or a twin of it that is faster here."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.engine.folded_attention import register
from lookahead.engine.model_check import check_model
from lookahead.engine.packed_linear import check_packing
from lookahead.engine.twin import Twin, can_have_twin
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

_twins: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], Twin | None]] = WeakKeyDictionary()
"""What was made for each model; `None` for a twin that did not do what the model does."""


def engine_model(model: PreTrainedModel, pack_weights: bool = False) -> PreTrainedModel:
    """The module that runs the trees of `model`, which itself stays as it is. Made and tried once per model object.

    Args:
        model: A causal language model of transformers.
        pack_weights: See `LookaheadConfig.pack_weights`.

    Raises:
        UnsupportedModelError: The model cannot be run on token trees.
        UnsupportedArgumentError: `pack_weights` cannot be had for this model or machine.
    """
    check_model(model)
    fold = _gains_from_folding(model)
    if not fold and not pack_weights:
        return model
    if pack_weights:
        _check_packing(model)
    elif not can_have_twin(model):
        return model
    settings = (model.config._attn_implementation, model.dtype, pack_weights)
    twins = _twins.setdefault(model, {})
    twin = twins.get(settings)
    if twin is not None and not twin.fits(model):
        del twin, twins[settings]  # before a new one is made: packed weights are large
    if settings not in twins:
        twins[settings] = _tried_twin(model, fold, pack_weights)
    twin = twins[settings]
    if twin is None:
        if pack_weights:
            raise UnsupportedArgumentError(
                f"pack_weights=True cannot be had for this {type(model).__name__}: with packed weights it did not "
                "compute what it computes without; use pack_weights=False"
            )
        return model
    twin.refresh(model)
    return twin.module


def _gains_from_folding(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config(decoder=True)
    heads, shared = getattr(config, "num_attention_heads", 1), getattr(config, "num_key_value_heads", None)
    return (
        model.device.type == "cpu"
        and config._attn_implementation == "sdpa"
        and bool(getattr(model, "_supports_attention_backend", False))
        and isinstance(shared, int)
        and shared < heads
    )


def _check_packing(model: PreTrainedModel) -> None:
    name = type(model).__name__
    check_packing()
    if model.device.type != "cpu":
        raise UnsupportedArgumentError(
            f"pack_weights=True is for models on the CPU; this {name} is on {model.device}: use pack_weights=False"
        )
    if not can_have_twin(model):
        raise UnsupportedArgumentError(
            f"pack_weights=True cannot be had for this {name}: it was compiled, or a hook stands in for the forward "
            "pass of one of its modules; use pack_weights=False"
        )


def _tried_twin(model: PreTrainedModel, fold: bool, pack_weights: bool) -> Twin | None:
    """A twin that does what the model does; `None` if there is none."""
    register()
    twin = Twin(model, fold, pack_weights)
    try:
        check_model(twin.module)
    except UnsupportedModelError:
        return None
    tokens = torch.tensor([[token % model.get_input_embeddings().num_embeddings for token in (5, 11, 7, 3)]])
    with torch.no_grad():
        expected, logits = (module(input_ids=tokens, use_cache=False).logits.float() for module in (model, twin.module))
    tolerance = 64 * torch.finfo(model.dtype).eps * float(expected.abs().max())
    return twin if float((logits - expected).abs().max()) <= tolerance else None
