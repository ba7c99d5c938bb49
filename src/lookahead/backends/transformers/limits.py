"""Limits of a model: the lengths where its positions, attention or cache end or change. No step crosses them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers import TRANSFORMERS
from lookahead.backends.transformers.masks import INDEXED
from lookahead.backends.transformers.model_state import of_config

_CONTEXTS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len")
"""Names of the number of positions in configurations."""

_RECOMPUTING = ("phi3", "phimoe")
"""Model types that drop the cache in `prepare_inputs_for_generation` beyond the original context."""

_BROKEN = ("phi4_multimodal",)
"""Model types that drop the cache there too, and then process only the last token: a bug."""

_PICKING = {"doge": "keep_window_size", "moshi": "sliding_window"}
"""Model types with fewer keys in longer texts than the mask shows, and their names of this length."""

_FROM_ONE = ("paligemma",)
"""Model types that count positions from one in `prepare_inputs_for_generation`."""

_EXPANDING = ("big_bird",)
"""Model types that expand a table of their context to the tokens of a pass."""

_MENDED = (5, 20)
"""First version of transformers that recomputes the cache of `_RECOMPUTING` models; earlier ones have the same bug."""


class Limits:
    """Limits for the positions and cache columns of a tree.

    Plain decoding sends one position at a time. A tree sends several, which changes these models:

    - A table of positions ends.
    - Long RoPE uses other frequencies for the whole pass if a position is beyond the original context.
    - Dynamic RoPE scaling changes frequencies at every position beyond it.
    - A choice of the best keys (DeepSeek V3.2) or compressed entries (DeepSeek V4) depends on further nodes, even
      hidden ones, because many scores are exactly 0.

    Nodes of a tree are adjacent in the cache, so the column of a branch is larger than its position. Two models use the
    column: Llama 4 scales queries by it in periods of `floor_scale`; GPT-Neo cuts the masks of local layers from a
    table by it. Chains are not affected.

    Args:
        config: Configuration of the model.
        positions_end: Whether the model fails beyond its context, if it has no RoPE.

    Attributes:
        first_position: Position of the first token. It affects only cached keys, since RoPE uses distances.
        context: Number of positions in the configuration, if it has one.
        last_length: Text length at the end of a table of positions; `None` for computed positions.
        changes_after: Longest text with the frequencies for short texts; `None` if there are no others.
        recompute_at: Text length where transformers recomputes the cache with other frequencies (Phi-3 and related
            models); `None` for other models.
        broken_after: Longest text that plain decoding processes as a whole; `None` without a limit.
        picks_after: Longest text with attention to all keys; `None` for models that do not pick keys.
        columns_after: Longest text without an effect of cache columns; `None` for models that ignore them.
        grows_after: Longest text before a table of positions grows with the cache; `None` without such a table.
    """

    def __init__(self, config: PreTrainedConfig, positions_end: bool = True) -> None:
        text_config = config.get_text_config(decoder=True)
        self.first_position = int(config.model_type in _FROM_ONE)
        self.context = next(filter(None, (_length(text_config, name) for name in _CONTEXTS)), None)
        ropes = _rope_parameters(text_config)
        # The last token of a text needs no position.
        ends = self.context is not None and not any(ropes) and positions_end
        self.last_length = self.context + 1 if self.context is not None and ends else None
        self._widest = self.context if config.model_type in _EXPANDING else None
        self.grows_after = None if any(ropes) or positions_end else self.context
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
        # The last token of a text is not sent.
        self._chooses_after = _compresses_after(text_config) if self.picks_after is None else self.picks_after + 1
        self._period = _scale_period(text_config)
        self._columns_end = _mask_table_end(text_config)
        self.columns_after = self._columns_end if self._period is None else self._period - 1

    def deepest(self, root_position: int, shift: int = 0) -> int | None:
        """Return the largest position id of a tree with its root at `root_position`; `None` without a limit.

        Picked keys are counted by index in the text, which is the position minus `shift`. Beyond its context a model
        continues as in transformers; a table of positions fails there.
        """
        limits = [self.context - 1] if self.context is not None and root_position < self.context else []
        if self._chooses_after is not None:
            limits.append(max(root_position, self._chooses_after - 2 + shift))  # the last index may be a node
        for kind, original in self._changes:
            # A longer text changes the frequencies; dynamic RoPE restores them if the last position of a pass is
            # before the last one of the context.
            last = original - 1 if kind == "longrope" else original - 2
            if root_position <= last:
                limits.append(last)
            elif kind != "longrope":
                limits.append(root_position)
        return min(limits) if limits else None

    def rooms(self, positions: Sequence[int], shifts: Sequence[int]) -> list[int]:
        """Levels of nodes that fit below roots at these positions, `[rows]`; see `deepest`."""
        if self._chooses_after is None and not self._changes:
            last = sys.maxsize if self.context is None else self.context - 1
            return [last - at if at <= last else sys.maxsize for at in positions]
        deepest = map(self.deepest, positions, shifts)
        return [sys.maxsize if one is None else one - at for one, at in zip(deepest, positions, strict=True)]

    def allows(self, start: int, nodes: int) -> bool:
        """Return whether `nodes` nodes of a tree may follow `start` cached tokens."""
        if self._columns_end is not None and start + nodes > self._columns_end:
            return False
        if self._widest is not None and nodes > self._widest:
            return False
        # The scale changes when the number of columns, the query's included, is a multiple of the period.
        return self._period is None or (start + 1) // self._period == (start + nodes) // self._period

    def _original(self, rope: dict[str, object], text_config: PreTrainedConfig) -> int | None:
        """Return the original context of a kind of RoPE, if it has one."""
        if "dynamic" in str(rope.get("rope_type")):
            return self.context  # transformers scales beyond it, regardless of the settings
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(text_config, "original_max_position_embeddings", None) or self.context
        return original if isinstance(original, int) else None


def limits_of(model: PreTrainedModel, positions_end: bool = True) -> Limits:
    """Return the limits of `model`, from a cache."""
    return of_config(model, ("limits", positions_end), lambda: Limits(model.config, positions_end))


def shortest(*lengths: int | None) -> int | None:
    """Return the shortest length; `None` means unlimited."""
    return min((length for length in lengths if length is not None), default=None)


def _length(config: PreTrainedConfig, name: str) -> int | None:
    """Return a length in a configuration; `None` if it has none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _compresses_after(config: PreTrainedConfig) -> int | None:
    """Return the longest text with attention to all compressed entries; `None` for other models."""
    rate = (getattr(config, "compress_rates", None) or {}).get("compressed_sparse_attention")
    return None if rate is None else int((config.index_topk + 1) * rate - 1)


def _rope_parameters(text_config: PreTrainedConfig) -> list[dict[str, object]]:
    """Return the rotary settings of each kind of layer, which may be nested."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [dict(value) for value in rope.values() if isinstance(value, dict)]
    return kinds or [dict(rope)]


def _scale_period(config: PreTrainedConfig) -> int | None:
    """Return the number of columns between changes of Llama 4's query scale; `None` for other models."""
    if not getattr(config, "attn_temperature_tuning", False) or all(getattr(config, "no_rope_layers", None) or [1]):
        return None
    return _length(config, "floor_scale")


def _mask_table_end(config: PreTrainedConfig) -> int | None:
    """Return the number of columns that every layer of a GPT-Neo sees; `None` for other models."""
    layers = getattr(config, "attention_layers", None)
    if not layers or not hasattr(config, "window_size"):
        return None
    ends = [config.max_position_embeddings, *([config.window_size] if "local" in layers else [])]
    return int(min(ends))
