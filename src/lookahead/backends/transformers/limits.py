"""Where a model's tokens, positions, and places in the cache end or change, so that no step reaches across it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers import TRANSFORMERS
from lookahead.backends.transformers.masks import INDEXED
from lookahead.backends.transformers.model_state import of_config

_CONTEXTS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len")
"""What configurations call the number of positions."""

_RECOMPUTING = ("phi3", "phimoe")
"""Model types whose `prepare_inputs_for_generation` drops the cache once the text passes the original context."""

_BROKEN = ("phi4_multimodal",)
"""Model types that drop the cache there, too, but go on to read the last token alone, as if it were a whole text."""

_PICKING = {"doge": "keep_window_size", "moshi": "sliding_window"}
"""Model types of which a layer sees fewer keys than its mask shows in longer texts, and what they call that length.
Doge picks the best of them; Moshi's cache drops the first, of which its mask knows nothing."""

_FROM_ONE = ("paligemma",)
"""Model types whose `prepare_inputs_for_generation` counts positions from one."""

_MENDED = (5, 20)
"""The version of transformers before which those of `_RECOMPUTING` read the last token alone, too."""


class Limits:
    """How far ahead of the text a tree may reach.

    Plain decoding sends one position at a time. A tree sends several, and five kinds of models would notice:
    one with a table of positions cannot look beyond its end; one with long RoPE switches to other frequencies
    for the whole pass once any position passes the original context; one with dynamic RoPE scaling changes
    them at every position beyond it; and one that attends to the best of its keys (DeepSeek V3.2) or compressed
    entries (DeepSeek V4), many of whose scores are exactly 0, chooses others among equal ones in a pass with further
    ones, even where a mask hides these.

    The nodes of a tree lie one after another in the cache, so a branch lies further on than its position ids say. Two
    kinds of models go by that place: Llama 4 scales queries by the number of places before them, in periods of
    `floor_scale` (attention temperature tuning); GPT-Neo cuts its local layers' masks from a table, by the numbers of
    the keys. A chain is read as plain decoding reads it wherever it lies.

    Args:
        config: The model's configuration.
        positions_end: Whether the model fails beyond its context, if it has no RoPE.

    Attributes:
        first_position: Where texts begin: as distances count in RoPE, it shows in keys alone, which caches hand on.
        context: Positions the model was made for, if its configuration says so.
        last_length: Text length at which a model with a table of positions can read no further token; `None`
            for models that compute their positions.
        changes_after: Longest text that is read with the frequencies for short texts; `None` if there are no others.
        recompute_at: Text length at which transformers computes the whole cache anew for this model, because
            its keys were made with the frequencies for short texts (Phi-3 and its kin); `None` for all others.
        broken_after: Longest text that plain decoding reads as a whole; `None` for any.
        picks_after: Longest text of which a layer attends to all keys; `None` for models whose layers do not pick.
        places_after: Longest text in which no place in the cache matters; `None` if none ever does.
    """

    def __init__(self, config: PreTrainedConfig, positions_end: bool = True) -> None:
        text_config = config.get_text_config(decoder=True)
        self.first_position = int(config.model_type in _FROM_ONE)
        self.context = next(filter(None, (_length(text_config, name) for name in _CONTEXTS)), None)
        ropes = _rope_parameters(text_config)
        # The token that ends such a text has no position to be read at.
        ends = self.context is not None and not any(ropes) and positions_end
        self.last_length = self.context + 1 if self.context is not None and ends else None
        originals = [(str(rope.get("rope_type", "default")), self._original(rope, text_config)) for rope in ropes]
        self._changes = [
            (kind, end) for kind, end in originals if end is not None and (kind == "longrope" or "dynamic" in kind)
        ]
        self.changes_after = shortest(*(end for _, end in self._changes))
        original = (self._changes or originals)[0][1]
        drops = config.model_type in _RECOMPUTING and hasattr(config, "original_max_position_embeddings")
        is_mended = TRANSFORMERS >= _MENDED
        self.recompute_at = original + 1 if drops and is_mended and original is not None else None
        self.broken_after = original if config.model_type in _BROKEN or (drops and not is_mended) else None
        picks_by_indexer = INDEXED in (getattr(text_config, "layer_types", None) or ())
        picks = "index_topk" if picks_by_indexer else _PICKING.get(text_config.model_type, "")
        self.picks_after = _length(text_config, picks)
        # A text's last token is not read.
        self._chooses_after = _compresses_after(text_config) if self.picks_after is None else self.picks_after + 1
        self._period = _scale_period(text_config)
        self._places_end = _mask_table_end(text_config)
        self.places_after = self._places_end if self._period is None else self._period - 1

    def deepest(self, root_position: int, shift: int = 0) -> int | None:
        """Largest position id in a tree whose root is at `root_position`; `None` for any.

        Keys are counted by their index in the text, which is the position less `shift`.
        Beyond its context a model is on its own, as in transformers; a table of positions fails there.
        """
        limits = [self.context - 1] if self.context is not None and root_position < self.context else []
        if self._chooses_after is not None:
            limits.append(max(root_position, self._chooses_after - 2 + shift))  # its last token may come with others
        for kind, original in self._changes:
            # A longer text leaves its frequencies behind; a pass with dynamic RoPE takes the first ones again if its
            # last position lies before the last one of the context.
            last = original - 1 if kind == "longrope" else original - 2
            if root_position <= last:
                limits.append(last)
            elif kind != "longrope":
                limits.append(root_position)
        return min(limits) if limits else None

    def rooms(self, positions: NDArray[np.int64], shifts: Sequence[int]) -> NDArray[np.int64]:
        """Levels of nodes that fit below roots at these positions, `[rows]`; see `deepest`."""
        if self._chooses_after is None and not self._changes:
            if self.context is None:
                return np.full(len(positions), sys.maxsize)
            return np.where(positions < self.context, self.context - 1 - positions, sys.maxsize)
        deepest = [self.deepest(*row) for row in zip(positions.tolist(), shifts, strict=True)]
        levels = [sys.maxsize if one is None else one - at for one, at in zip(deepest, positions.tolist(), strict=True)]
        return np.array(levels, dtype=np.int64)

    def allows(self, start: int, nodes: int) -> bool:
        """Whether `nodes` nodes of a tree may lie in the cache behind `start` kept tokens."""
        if self._places_end is not None and start + nodes > self._places_end:
            return False
        # The scale changes with the place that makes a multiple of the period, itself included.
        return self._period is None or (start + 1) // self._period == (start + nodes) // self._period

    def _original(self, rope: dict[str, object], text_config: PreTrainedConfig) -> int | None:
        """Where a kind of RoPE changes, if it does."""
        if "dynamic" in str(rope.get("rope_type")):
            return self.context  # where transformers begins to scale, whatever the settings call original
        named = rope.get("original_max_position_embeddings")
        named = named or getattr(text_config, "original_max_position_embeddings", None) or self.context
        return named if isinstance(named, int) else None


def limits_of(model: PreTrainedModel, positions_end: bool = True) -> Limits:
    """What the configuration of `model` says; kept for the next call."""
    return of_config(model, ("limits", positions_end), lambda: Limits(model.config, positions_end))


def shortest(*lengths: int | None) -> int | None:
    """The shortest of some lengths, of which `None` is any; `None` if all are."""
    return min((length for length in lengths if length is not None), default=None)


def _length(config: PreTrainedConfig, name: str) -> int | None:
    """A length that a configuration names; `None` if it does not."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _compresses_after(config: PreTrainedConfig) -> int | None:
    """Longest text all of whose compressed entries are attended to; `None` for models that do not choose."""
    rate = (getattr(config, "compress_rates", None) or {}).get("compressed_sparse_attention")
    return None if rate is None else int((config.index_topk + 1) * rate - 1)


def _rope_parameters(text_config: PreTrainedConfig) -> list[dict[str, object]]:
    """The rotary settings of each kind of layers, which may be nested; one for a model that has one kind alone."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [dict(value) for value in rope.values() if isinstance(value, dict)]
    return kinds or [dict(rope)]


def _scale_period(config: PreTrainedConfig) -> int | None:
    """Consecutive places for which Llama 4 scales queries by the same factor; `None` for other models."""
    if not getattr(config, "attn_temperature_tuning", False) or all(getattr(config, "no_rope_layers", None) or [1]):
        return None
    return _length(config, "floor_scale")


def _mask_table_end(config: PreTrainedConfig) -> int | None:
    """Places that every layer of a GPT-Neo sees in full; `None` for other models."""
    layers = getattr(config, "attention_layers", None)
    if not layers or not hasattr(config, "window_size"):
        return None
    ends = [config.max_position_embeddings, *([config.window_size] if "local" in layers else [])]
    return int(min(ends))
