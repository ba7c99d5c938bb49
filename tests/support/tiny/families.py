"""Tiny models of every family of causal language models in transformers.

A family has the name of its model type; `type/multimodal` is the class that also takes images or sound. Names, classes
and configurations come from transformers, so new families are included automatically; only sizes are set here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from lookahead.backends.transformers.miniature import quiet
from tiny.config import tiny_config
from tiny.encoder_decoders import ENCODER, NAMES, START_TOKEN, is_encoder_decoder
from tiny.variant import Variant
from tiny.weights import draw_weights

MULTIMODAL = "/multimodal"
_MULTIMODAL_NAMES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}

_STATEFUL = ("lfm", "inkling")
"""Prefixes of model types with running states that their classes do not declare."""

INDEXED = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
"""Model types with layers that select keys to attend to."""


class CannotBuild(Exception):
    """A tiny model cannot be built; the message gives the reason."""


def family_names() -> list[str]:
    """Return the sorted names of all families."""
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    both = [kind + MULTIMODAL for kind, name in _MULTIMODAL_NAMES.items() if causal.get(kind) != name]
    return sorted([*causal, *both])


def image_families() -> list[str]:
    """Return the sorted names of families with image input."""
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    return sorted(kind if causal.get(kind) == name else kind + MULTIMODAL for kind, name in names)


def keeps_running_state(family: str) -> bool:
    """Return whether the models of a family keep a state other than keys and values of each token."""
    if family.endswith(ENCODER):
        return False
    kind = family.removesuffix(MULTIMODAL)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == family else _MULTIMODAL_NAMES
    return (
        kind == "minimax"
        or kind.startswith(_STATEFUL)
        or bool(getattr(getattr(transformers, names[kind]), "_is_stateful", False))
    )


def build(family: str, variant: Variant, attention: str, double: bool = False) -> PreTrainedModel:
    """Return the model of `family` for `variant`, in float32 or float64 and evaluation mode.

    Kinds of RoPE and numbers of heads that the family does not support are ignored; an unsupported attention
    implementation is replaced by `eager`.

    Raises:
        CannotBuild: The model cannot be built.
    """
    plain_rope = replace(variant, rope="default")
    cautious = replace(plain_rope, key_value_heads=4, window=8)
    attempts = ((variant, attention), (plain_rope, attention), (cautious, "eager"))
    reason = ""
    for attempt, implementation in dict.fromkeys(attempts):
        try:
            model = _build(family, attempt, implementation, "eager" if double else variant.experts)
            return model.double() if double else model
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    raise CannotBuild(" ".join(reason.split())[:200])


def _build(family: str, variant: Variant, attention: str, experts: str) -> PreTrainedModel:
    kind = family.removesuffix(MULTIMODAL).removesuffix(ENCODER)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == family else _MULTIMODAL_NAMES
    if family.endswith(ENCODER):
        names = NAMES
    model_class: type[PreTrainedModel] = getattr(transformers, names[kind])
    with quiet(), _defined_memory():
        config = tiny_config(kind, model_class, variant)
        if attention == "sdpa" and not model_class._supports_sdpa:
            attention = "eager"
        model = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
        with suppress(ValueError):  # the model has none
            model.set_experts_implementation(experts)
        draw_weights(model.eval(), variant)
    for token in ("bos", "eos", "pad", "forced_bos", "forced_eos", "decoder_start"):
        setattr(model.generation_config, f"{token}_token_id", None)
    if is_encoder_decoder(model):
        model.generation_config.decoder_start_token_id = START_TOKEN
    return model


@contextmanager
def _defined_memory() -> Iterator[None]:
    """Fill uninitialised memory of a model with NaN, so that no case depends on its old contents."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
