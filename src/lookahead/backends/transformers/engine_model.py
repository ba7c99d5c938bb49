"""Which module the engine runs for a model: the model itself, or a clone of it that is faster here."""

from __future__ import annotations

from importlib.util import find_spec
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers import folded_attention, tree_attention
from lookahead.backends.transformers.folded_attention import FOLDED_SDPA
from lookahead.backends.transformers.model_check import check_model, check_trees
from lookahead.backends.transformers.model_runner import ModelRunner
from lookahead.backends.transformers.packed_linear import check_packing
from lookahead.backends.transformers.preserved_state import preserved_state
from lookahead.backends.transformers.shared_clone import SharedClone, can_be_cloned, structure
from lookahead.backends.transformers.trial import agree, trial_logits
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

_Known = tuple[list[object], SharedClone | None]

_clones: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], _Known]] = WeakKeyDictionary()
"""For each model and setting the structure that a clone was made of, and the clone; `None` in its place where it did
not do what the model does."""


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
    elif not can_be_cloned(model):
        return model
    clone = _clone_for(model, attention, pack_weights)
    if clone is None:
        if pack_weights:
            raise UnsupportedArgumentError(
                f"pack_weights=True cannot be had for this {type(model).__name__}: with packed weights it did not "
                "compute what it computes without; use pack_weights=False"
            )
        return model
    return clone.module


def _clone_for(model: PreTrainedModel, attention: str | None, pack_weights: bool) -> SharedClone | None:
    """The clone that is kept for these settings, brought up to date; a new one if there is none that fits."""
    settings = (model.config._attn_implementation, attention, model.dtype, pack_weights)
    known = _clones.setdefault(model, {})
    parts = structure(model, pack_weights)
    if settings in known and known[settings][0] == parts:
        clone = known[settings][1]
        if clone is not None:
            clone.refresh(model)
        return clone
    known.pop(settings, None)
    if pack_weights:  # packed weights are large: the old ones go before there are new ones
        for other in [other for other in known if other[-1]]:
            del known[other]
    clone = _tried_clone(model, attention, pack_weights)
    known[settings] = (parts, clone)
    return clone


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
    if not can_be_cloned(model):
        raise UnsupportedArgumentError(
            f"pack_weights=True cannot be had for this {name}: it was compiled, or a hook stands in for the forward "
            "pass of one of its modules; use pack_weights=False"
        )


def _tried_clone(model: PreTrainedModel, attention: str | None, pack_weights: bool) -> SharedClone | None:
    """A clone that does what the model does; `None` if there is none."""
    if attention is not None:
        (tree_attention if attention == tree_attention.NAME else folded_attention).register()
    clone = SharedClone(model, attention, pack_weights)
    with preserved_state(model), torch.no_grad():
        try:
            check_trees(clone.module)
        except UnsupportedModelError:
            return None
        same = agree(_plain_logits(clone.module), _plain_logits(model), model.dtype) and agree(
            trial_logits(ModelRunner(clone.module, 1)), trial_logits(ModelRunner(model, 1)), model.dtype
        )
    return clone if same and not clone.keeps_state(model) else None


def _plain_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a pass without any mask of ours."""
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.tensor([[token % vocabulary for token in (5, 11, 7, 3)]], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
