"""A model's configuration with its sizes, windows and contexts made small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from lookahead.backends.transformers.miniature.sizes import (
    CONTEXTS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    OTHERS,
    SIZES,
    TOWER_SIZES,
    VOCABULARY,
    WINDOWS,
)

WINDOW = 12
"""Length of every window, chunk and period of a miniature."""

CONTEXT = 48
"""Length of its position table, or what RoPE takes for the longest text."""

ORIGINAL_CONTEXT = 24
"""Length from which scaled RoPE counts a text as long, where a configuration tells that from `CONTEXT`."""

_LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config", "text_encoder", "decoder", "vlm_config")
"""What composite configurations call the part that reads and writes text."""

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_LEFT_OUT = (
    *("quantization_config", "auto_map", "transformers_version", "architectures", "dtype", "torch_dtype"),
    "hybrid_layer_ids",  # follows from the kinds of the layers
)


def miniature_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A small configuration of the same class, with the same kinds of layers, positions and attention.

    Raises:
        Exception: Whatever the configuration's class raises at sizes that do not go together.
    """
    return type(config).from_dict(_shrunk(config, tower=False))


def _shrunk(config: PreTrainedConfig, tower: bool) -> dict[str, Any]:
    fields = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    depth = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    layers = _layers(fields, depth, 1 if tower else 2)
    small = dict(fields)
    for name, value in fields.items():
        part = vars(config).get(name)
        if isinstance(part, PreTrainedConfig):
            small[name] = _shrunk(part, tower or name not in _LANGUAGE)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            small[name] = _rope(value, fields)
        elif isinstance(value, list) and depth and len(value) == depth:
            small[name] = [value[layer] for layer in layers]
        elif name == "per_layer_config" and value:
            small[name] = _layer_sizes(value, fields, layers, tower)
        elif name in OTHERS and value is not None:
            small[name] = OTHERS[name]
        elif value is None and name == "head_dim":
            small[name] = HEAD_DIM
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _size(name, value, fields, len(layers), tower)
    return small


def _size(name: str, value: int, fields: dict[str, Any], layers: int, tower: bool) -> int:
    sizes = TOWER_SIZES if tower else SIZES
    if name == "head_dim" and value == fields.get("qk_rope_head_dim"):  # latent attention calls it that
        return sizes["qk_rope_head_dim"]
    if name in ("attention_hidden_size", "attention_head_dim") and is_doubled(fields):
        return 2 * sizes[name]
    if name in LAYERS:
        return layers
    if name in WINDOWS and not tower:
        return WINDOW
    if name == "original_max_position_embeddings":
        return ORIGINAL_CONTEXT
    if name in CONTEXTS:
        return 16 if tower else CONTEXT
    if name in _KEY_VALUE_HEADS and not tower:
        heads = next((fields[name] for name in ("num_attention_heads", "n_head") if fields.get(name)), value)
        return HEADS if value == heads else min(value, 2)
    if name.endswith(("token_id", "token_index")):
        return min(value, VOCABULARY - 1)
    return min(value, sizes.get(name, value)) if value > 0 else value


def _layer_sizes(
    sizes: Mapping[str, Mapping[str, Any]], fields: dict[str, Any], layers: list[int], tower: bool
) -> dict[int, dict[str, Any]]:
    """What some of the layers have instead of the model's own sizes, by their numbers in the miniature."""
    by_layer = {int(layer): dict(changes) for layer, changes in sizes.items()}
    return {
        place: {
            name: _size(name, value, fields | by_layer[layer], len(layers), tower) if type(value) is int else value
            for name, value in by_layer[layer].items()
        }
        for place, layer in enumerate(layers)
        if layer in by_layer
    }


def is_doubled(fields: Mapping[str, Any]) -> bool:
    """Whether attention works in twice the hidden size, as in Zamba, which puts the embeddings beside the states."""
    return fields.get("attention_hidden_size") == 2 * (fields.get("hidden_size") or 0) != 0


def _layers(fields: dict[str, Any], depth: int | None, least: int) -> list[int]:
    """Which layers a miniature has: one of each kind, and at least two."""
    if depth is None:
        return list(range(least))
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == depth]
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(repr([values[layer] for values in lists]), layer)
    first = list(kinds.values())
    return sorted([*first, *(layer for layer in range(depth) if layer not in first)][: max(least, len(first))])


def _rope(rope: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    if "rope_type" not in rope:  # one for each type of layers
        return {name: _rope(value, fields) if isinstance(value, dict) else value for name, value in rope.items()}
    rope = dict(rope)
    partial = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    half = int((SIZES["qk_rope_head_dim"] if fields.get("qk_rope_head_dim") else HEAD_DIM) * partial) // 2
    if "mrope_section" in rope:
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][:half]
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = ORIGINAL_CONTEXT
    return rope
