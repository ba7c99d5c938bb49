"""Which module the engine runs for a model: the model itself, or a twin of it that is faster here."""

from __future__ import annotations

from importlib.util import find_spec
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.engine import folded_attention, tree_attention
from lookahead.engine.folded_attention import FOLDED_SDPA
from lookahead.engine.model_check import check_model
from lookahead.engine.model_runner import ModelRunner
from lookahead.engine.packed_linear import check_packing
from lookahead.engine.trial import agree, trial_logits
from lookahead.engine.twin import Twin, can_have_twin
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

_twins: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], Twin | None]] = WeakKeyDictionary()
"""What was made for each model; `None` for a twin that did not do what the model does."""


def engine_model(model: PreTrainedModel, pack_weights: bool = False, static: bool = False) -> PreTrainedModel:
    """The module that runs the trees of `model`, which itself stays as it is. Made and tried once per model object.

    Args:
        model: A causal language model of transformers.
        pack_weights: See `LookaheadConfig.pack_weights`.
        static: Whether it is for the static engine, whose masks are packed.

    Raises:
        UnsupportedModelError: The model cannot be run on token trees.
        UnsupportedArgumentError: `pack_weights` cannot be had for this model or machine.
    """
    check_model(model)
    attention = _attention_for_trees(model, static)
    if attention is None and not pack_weights:
        return model
    if pack_weights:
        _check_packing(model)
    elif not can_have_twin(model):
        return model
    settings = (model.config._attn_implementation, attention, model.dtype, pack_weights)
    twins = _twins.setdefault(model, {})
    twin = twins.get(settings)
    if twin is not None and not twin.fits(model):
        del twin, twins[settings]  # before a new one is made: packed weights are large
    if settings not in twins:
        twins[settings] = _tried_twin(model, attention, pack_weights)
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


def _attention_for_trees(model: PreTrainedModel, static: bool) -> str | None:
    """What is faster here than the model's `sdpa`; whoever chose another implementation meant it.

    On a GPU with the static engine it is our kernel: its masks are small and keep their shape, and it skips the empty
    part of the cache, which `sdpa` with a dense mask would read. On a CPU query heads are folded, if they share heads
    of keys.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return None
    if model.device.type == "cuda":
        return tree_attention.NAME if static and find_spec("triton") is not None else None
    sizes = config.to_dict()  # as a dict: some configurations refuse to name a size that differs between layers
    heads, shared = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    folds = model.device.type == "cpu" and isinstance(heads, int) and isinstance(shared, int) and shared < heads
    return FOLDED_SDPA if folds else None


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


def _tried_twin(model: PreTrainedModel, attention: str | None, pack_weights: bool) -> Twin | None:
    """A twin that does what the model does; `None` if there is none."""
    if attention is not None:
        (tree_attention if attention == tree_attention.NAME else folded_attention).register()
    twin = Twin(model, attention, pack_weights)
    try:
        check_model(twin.module)
    except UnsupportedModelError:
        return None
    with torch.no_grad():
        same = agree(_plain_logits(twin.module), _plain_logits(model), model.dtype) and agree(
            trial_logits(ModelRunner(twin.module, 1)), trial_logits(ModelRunner(model, 1)), model.dtype
        )
    return twin if same else None


def _plain_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a pass without any mask of ours."""
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.tensor([[token % vocabulary for token in (5, 11, 7, 3)]], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
