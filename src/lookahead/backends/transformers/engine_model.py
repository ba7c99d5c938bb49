"""Choice of the module that runs trees of a model: the model itself, or a faster clone."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.attention import (
    BY_POSITION,
    FOLDED_SDPA,
    INVARIANT,
    INVARIANT_ROWS,
    MIN_NODES,
    PACKED_ROWS,
    TREE_ATTENTION,
)
from lookahead.backends.transformers.checks import check_model, check_setting, not_possible
from lookahead.backends.transformers.comparisons import (
    computes_the_same,
    is_invariant,
    reads_parts,
    reads_rows_alike,
    trial_runner,
)
from lookahead.backends.transformers.equivalence import equivalence
from lookahead.backends.transformers.invariant import min_rows
from lookahead.backends.transformers.model_state import model_setting, once
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.shared_clone import (
    DIFFERS,
    FORWARD_IS_REPLACED,
    SharedClone,
    can_be_cloned,
    clone_for,
)
from lookahead.backends.transformers.snapshots import preserved_state
from lookahead.backends.transformers.static_engine import fixed_runner
from lookahead.config import MAX_NODES_PER_STEP
from lookahead.errors import UnsupportedModelError


def engine_model(model: PreTrainedModel, pack_weights: bool = False, invariant: bool = False) -> PreTrainedModel:
    """Return the module that runs the trees of `model`: made and checked once per model object.

    Args:
        model: A causal language model of transformers, which stays unchanged.
        pack_weights: See `LookaheadConfig.pack_weights`; `chosen_packing` chooses the smallest number of rows.
        invariant: See `LookaheadConfig.invariant`.

    Raises:
        UnsupportedModelError: The model does not support token trees.
        UnsupportedArgumentError: `pack_weights` or `invariant` is not possible for this model or machine.
    """
    check_model(model)
    settings = [name for name, is_set in (("invariant", invariant), ("pack_weights", pack_weights)) if is_set]
    for name in settings:
        check_setting(model, name)
    if invariant:
        attention: str | None = INVARIANT if model.device.type == "cpu" else BY_POSITION
    else:
        attention = _attention_for_trees(model)
        if not pack_weights and attention is None:
            return model
    clone = clone_for(model, attention, pack_weights, _computes_the_same)
    if isinstance(clone, SharedClone):
        return clone.module
    if settings:
        raise not_possible(model, settings[0], clone)
    return model


def _attention_for_trees(model: PreTrainedModel) -> str | None:
    """Return our attention in place of the model's `sdpa`, if it is faster; other implementations stay.

    On a GPU it is our kernel: its masks are small with a fixed shape, and it skips the empty part of the cache. On a
    CPU it folds query heads that share a key-value head.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return None
    if model.device.type == "cuda":
        return TREE_ATTENTION if find_spec("triton") is not None else None
    sizes = vars(config)  # as a dict: some configurations raise for a size that differs between layers
    heads = sizes.get("num_attention_heads")
    shared = sizes.get("num_key_value_heads")
    folds = model.device.type == "cpu" and isinstance(heads, int) and isinstance(shared, int) and shared < heads
    return FOLDED_SDPA if folds else None


def runs_static(model: PreTrainedModel, engine: str, invariant: bool) -> bool:
    """Return whether steps have fixed shapes: with `engine="static"`, and on CUDA also with "auto" or `invariant`."""
    return engine == "static" or (model.device.type == "cuda" and (engine == "auto" or invariant))


def _computes_the_same(model: PreTrainedModel, clone: PreTrainedModel, packing: int) -> str | None:
    """Return why a clone differs from the model or is not invariant as requested; `None` if it passes."""
    attention = clone.config._attn_implementation
    trees = attention in (INVARIANT, BY_POSITION)  # they support only trees
    fixed = partial(fixed_runner, clone) if attention == BY_POSITION else None
    if not computes_the_same(clone, model, reads_plainly=not trees):
        return DIFFERS
    if trees and not is_invariant(clone, fixed):
        return "a token has other bits in other company: one of its sums has no fixed order"
    if attention == INVARIANT and min_rows(clone) > 1:
        vars(clone)[MIN_NODES] = 4 if packing else 2
    return None


def rows_runner(model: PreTrainedModel, pack_weights: bool = False, invariant: bool = False) -> ModelRunner:
    """Return a runner for rows that join and leave: packed, or padded if that is not possible.

    Args:
        model: A causal language model of transformers.
        pack_weights: See `LookaheadConfig.pack_weights`.
        invariant: See `LookaheadConfig.invariant`.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model does not support token trees, or has other logits for rows in a shared pass.
    """
    packed = packed_runner(model, pack_weights, invariant)
    if isinstance(packed, ModelRunner):
        return packed
    if invariant:
        raise _unsupported(model, packed)
    engine = engine_model(model, pack_weights)
    kind = equivalence(model)
    ends = kind.holds("positions_end")
    together = kind.holds("batches")
    runner = ModelRunner(engine, most_nodes=MAX_NODES_PER_STEP, positions_end=ends, together=together)

    def check() -> None:
        with preserved_state(model):
            same = reads_rows_alike(runner, engine, exactly=False)
        if not same:
            raise _unsupported(model, f"{packed}, and padded rows had other logits together than each alone")

    once(model, ("padded rows", *model_setting(model)), check)
    return runner


def check_parts(model: PreTrainedModel, on_chains: bool) -> None:
    """Refuse a model with other logits for chunks of a prompt than for one pass: requests share steps and prefixes.

    Raises:
        UnsupportedModelError: It has other logits, or its passes write into weights, as changes by the caller do.
    """

    def check() -> None:
        make = partial(trial_runner, model) if on_chains else partial(ModelRunner, model, 1)
        weights = [weight for weight in model.parameters() if not weight.is_inference()]
        versions = [weight._version for weight in weights]
        with torch.no_grad(), preserved_state(model):
            same = reads_parts(model, make)
        if not same:
            raise _unsupported(model, "a prompt that is read in parts has other logits than in one pass")
        if versions != [weight._version for weight in weights]:
            raise _unsupported(model, "its passes write into its weights, which an Engine takes for a change")

    once(model, ("parts", *model_setting(model)), check)


def packed_runner(model: PreTrainedModel, pack_weights: bool = False, invariant: bool = False) -> ModelRunner | str:
    """Return a runner for packed rows, on a clone made and tried once per model object; the reason if there is none.

    Arguments are as for `rows_runner`.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model does not support token trees.
    """
    check_model(model)
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return (
            f"its attention, {implementation!r}, is not called through transformers' AttentionInterface as 'sdpa'; "
            "load it with attn_implementation='sdpa' if it supports that"
        )
    if not can_be_cloned(model):
        return FORWARD_IS_REPLACED
    if not equivalence(model).holds("packed_rows"):
        return "a small copy of it has other logits for rows in a shared pass than for each alone"
    if invariant and model.device.type != "cpu":
        raise not_possible(model, "invariant", f"rows share a pass on {model.device}, and not on a CPU")
    if invariant:  # raises if passes of one text cannot be invariant
        engine_model(model, pack_weights, invariant=True)
    attention = INVARIANT_ROWS if invariant else PACKED_ROWS
    clone = clone_for(model, attention, pack_weights, _reads_rows)
    if not isinstance(clone, SharedClone):
        return clone
    return ModelRunner(clone.module, positions_end=equivalence(model).holds("positions_end"))


def _reads_rows(model: PreTrainedModel, clone: PreTrainedModel, packing: int) -> str | None:
    """Return why packed rows of a clone differ from single ones; `None` if they do not."""
    invariant = clone.config._attn_implementation == INVARIANT_ROWS
    alone = engine_model(model, bool(packing), invariant=True) if invariant else model
    same = reads_rows_alike(ModelRunner(clone), alone, exactly=invariant)
    return None if same else "its rows have other logits together than each alone"


def _unsupported(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model={type(model).__name__} does not support many requests in one pass: {why}. Use lookahead.generate"
    )
