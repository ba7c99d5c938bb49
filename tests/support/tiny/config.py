"""Default configurations of families with small sizes."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers.miniature import (
    CONTEXTS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    OTHERS,
    SIZES,
    TOWER_SIZES,
    VOCABULARIES,
    VOCABULARY,
    WINDOWS,
    is_doubled,
)
from tiny.encoder_decoders import START_TOKEN
from tiny.sizes import MROPE, SPECIAL
from tiny.variant import Variant

LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config", "text_encoder", "decoder", "vlm_config")
"""Names of the text model's configuration within composite ones."""

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_END_TOKENS = ("bos_token_id", "eos_token_id")


def tiny_config(kind: str, model_class: type[PreTrainedModel], variant: Variant) -> PreTrainedConfig:
    """Return the configuration of model type `kind` for `model_class` and `variant`.

    If `model_class` is the language model of a composite type, return the language model's configuration.
    """
    config_class = CONFIG_MAPPING[kind]
    config = config_class(**_changes(_default(kind, config_class), variant))
    if model_class.config_class is not None and not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "is_decoder"):  # encoders that can also run as decoders
        config.is_decoder = True
    if config.is_encoder_decoder:  # generate needs one
        config.decoder_start_token_id = START_TOKEN
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        for name in _END_TOKENS:
            with suppress(StrictDataclassFieldValidationError):  # some require one
                setattr(part, name, None)
    return config


def _default(kind: str, config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    return config_class(**SPECIAL.get(kind, {}).get("for default", {}))


def _changes(default: PreTrainedConfig, variant: Variant, tower: bool = False) -> dict[str, Any]:
    """Return arguments for the configuration's class."""
    sizes = TOWER_SIZES if tower else SIZES
    fields = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    depth = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    layers = 1 if tower else variant.layers
    chosen = _chosen_layers(fields, depth, layers, variant.pick)
    changes: dict[str, Any] = {}
    for number, (name, value) in enumerate(fields.items()):
        if isinstance(value, PreTrainedConfig):
            changes[name] = type(value)(**_changes(value, variant, tower or name not in LANGUAGE))
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            if not tower:
                changes[name] = _rope(value, default.model_type, fields, variant)
        elif isinstance(value, list) and depth and len(value) == depth:
            changes[name] = [value[layer] for layer in chosen]
        elif name in OTHERS and value is not None:
            changes[name] = OTHERS[name]
        elif value is None and name in ("head_dim", *_KEY_VALUE_HEADS):
            changes[name] = HEAD_DIM if name == "head_dim" else variant.key_value_heads
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif name == "head_dim" and value == fields.get("qk_rope_head_dim"):  # the same size in latent attention
            changes[name] = sizes["qk_rope_head_dim"]
        elif name in ("attention_hidden_size", "attention_head_dim") and is_doubled(fields):
            changes[name] = 2 * sizes[name]
        elif name in LAYERS:
            changes[name] = layers
        elif name in WINDOWS and not tower:
            changes[name] = variant.window
        elif name in CONTEXTS:
            changes[name] = 16 if tower else variant.context
        elif name in _KEY_VALUE_HEADS and not tower:
            changes[name] = HEADS if "kv_lora_rank" in fields else variant.key_value_heads
        elif name.endswith(("token_id", "token_index")):
            changes[name] = _special_token(name, value, number)
        elif name in VOCABULARIES:
            changes[name] = variant.vocabulary
        elif name in sizes:
            changes[name] = sizes[name]
    if not tower:
        changes |= {name: variant.biases for name in ("attention_bias", "mlp_bias", "use_bias") if name in fields}
        if "tie_word_embeddings" in fields:
            changes["tie_word_embeddings"] = False
        if fields.get("use_sliding_window") is False:
            changes["use_sliding_window"] = variant.pick % 2 == 0
            if changes["use_sliding_window"] and "sliding_window" in fields:
                changes["sliding_window"] = variant.window
    special = SPECIAL.get(default.model_type, {})
    return changes | {name: value for name, value in special.items() if name != "for default"}


def _chosen_layers(fields: dict[str, Any], depth: int | None, layers: int, seed: int) -> list[int]:
    """Choose layers of the default configuration for a smaller model: first one of each kind, then any."""
    if depth is None:
        return []
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == depth]
    random = Random(seed)
    order = random.sample(range(depth), depth)
    kinds: dict[str, int] = {}
    for layer in order:
        kinds.setdefault(repr([values[layer] for values in lists]), layer)
    first = list(kinds.values())
    return sorted([*first, *(layer for layer in order if layer not in first)][:layers])


def _special_token(name: str, value: int, number: int) -> int | None:
    if name in _END_TOKENS:
        return 1
    if name == "pad_token_id":
        return 0
    return VOCABULARY + number  # tokens for images and similar: never generated


def _rope(default: dict[str, Any], kind: str, fields: dict[str, Any], variant: Variant) -> dict[str, Any]:
    if "rope_type" not in default:  # one per type of layer
        return {
            name: _rope(value, kind, fields, variant) if isinstance(value, dict) else value
            for name, value in default.items()
        }
    rope = dict(default)
    head = SIZES["qk_rope_head_dim"] if fields.get("qk_rope_head_dim") else HEAD_DIM
    partial = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    half = int(head * partial) // 2
    if "mrope_section" in rope or kind in MROPE:
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        return rope
    if rope["rope_type"] != "default" or variant.rope == "default":
        return rope
    return rope | _SCALED[variant.rope](variant.rope_context, half)


def _scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "factor": 4.0, **values}


_SCALED = {
    "linear": lambda context, half: _scaled("linear"),
    "dynamic": lambda context, half: _scaled("dynamic"),
    "yarn": lambda context, half: _scaled("yarn", original_max_position_embeddings=context),
    "longrope": lambda context, half: _scaled(
        "longrope",
        original_max_position_embeddings=context,
        short_factor=[1.0] * half,
        long_factor=[1.0 + place for place in range(half)],
    ),
    "llama3": lambda context, half: _scaled(
        "llama3", original_max_position_embeddings=context, low_freq_factor=1.0, high_freq_factor=4.0
    ),
}
