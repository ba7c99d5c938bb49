"""Models that go by a token's place in the cache instead of its position id, and where a tree may be sent to them."""

from __future__ import annotations

from transformers import PreTrainedConfig


class SlotLimit:
    """Where the places of a tree's nodes in the cache begin to matter.

    The nodes of a tree lie one after another, so a branch lies further on than its position ids say. Two kinds of
    models notice: Llama 4 scales queries by the number of places before them, in periods of `floor_scale` (attention
    temperature tuning); GPT-Neo cuts its local layers' masks from a table, by the numbers of the keys. A chain is read
    as plain decoding reads it wherever it lies.

    Args:
        config: The model's configuration.

    Attributes:
        first: Longest text in which no place matters; `None` if none ever does.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        text_config = config.get_text_config(decoder=True)
        self._period = _scale_period(text_config)
        self._end = _mask_table_end(text_config)
        self.first: int | None = self._end if self._period is None else self._period - 1

    def allows(self, start: int, nodes: int) -> bool:
        """Whether `nodes` nodes of a tree may lie behind `start` kept tokens."""
        if self._end is not None and start + nodes > self._end:
            return False
        # The scale changes with the place that makes a multiple of the period, itself included.
        return self._period is None or (start + 1) // self._period == (start + nodes) // self._period


def _scale_period(config: PreTrainedConfig) -> int | None:
    """Consecutive places for which Llama 4 scales queries by the same factor; `None` for other models."""
    if not getattr(config, "attn_temperature_tuning", False) or all(getattr(config, "no_rope_layers", None) or [1]):
        return None
    period = getattr(config, "floor_scale", None)
    return period if isinstance(period, int) else None


def _mask_table_end(config: PreTrainedConfig) -> int | None:
    """Places that every layer of a GPT-Neo sees in full; `None` for other models."""
    layers = getattr(config, "attention_layers", None)
    if not layers or not hasattr(config, "window_size"):
        return None
    return int(
        min(config.window_size, config.max_position_embeddings) if "local" in layers else config.max_position_embeddings
    )
