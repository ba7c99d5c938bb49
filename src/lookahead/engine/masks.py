"""Attention masks of token trees, one for each kind of layer a model has."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from lookahead.errors import UnsupportedModelError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class MaskBuilder:
    """Turns which-sees-which into the masks that a model's layers take.

    Args:
        config: The model's configuration: which kinds of layers there are and how far each of them sees.

    Raises:
        UnsupportedModelError: A layer is of a kind that has no per-token keys and values.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        text_config = config.get_text_config(decoder=True)
        self._sliding_window: int | None = getattr(text_config, "sliding_window", None)
        self._chunk_size: int | None = getattr(text_config, "attention_chunk_size", None)
        layer_types: list[str] | None = getattr(text_config, "layer_types", None)
        # As transformers does it: a model that lists its layers takes a dict of masks, any other a single one.
        self._takes_dict = layer_types is not None
        if layer_types is not None:
            self._kinds = sorted(set(layer_types))
        elif self._sliding_window is not None:
            self._kinds = [SLIDING]
        elif self._chunk_size is not None:
            self._kinds = [CHUNKED]
        else:
            self._kinds = [FULL]
        for kind in self._kinds:
            if kind not in (FULL, SLIDING, CHUNKED):
                raise UnsupportedModelError(
                    f"{type(config).__name__} has layers of the kind {kind!r}, whose state is not a key-value cache "
                    "per token; such a state cannot take back a token that was not accepted. Lookahead decoding "
                    f"needs layers of the kinds {FULL}, {SLIDING} or {CHUNKED}"
                )

    def build(
        self,
        visible: NDArray[np.bool_],
        query_positions: NDArray[np.int64],
        key_positions: NDArray[np.int64],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """The masks of one step.

        Args:
            visible: Which keys each query may see if its layer sees all the text, `[batch, queries, keys]`.
            query_positions: Position ids of the queries, `[batch, queries]`.
            key_positions: Position ids of the keys, `[batch, keys]`.
            dtype: Number type of the model; masked keys get its lowest number, the others 0.
            device: Where the masks go.

        Returns:
            A mask `[batch, 1, queries, keys]`, or a dict of one for each kind of layer.
        """
        masks = {}
        for kind in self._kinds:
            seen = self._narrow(kind, visible, query_positions[:, :, None], key_positions[:, None, :])
            allowed = torch.from_numpy(seen).to(device)[:, None]
            mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
            masks[kind] = mask.masked_fill_(~allowed, torch.finfo(dtype).min)
        return masks if self._takes_dict else masks[self._kinds[0]]

    def _narrow(
        self, kind: str, visible: NDArray[np.bool_], queries: NDArray[np.int64], keys: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        if kind == SLIDING and self._sliding_window is not None:
            return np.asarray(visible & (queries - keys < self._sliding_window))
        if kind == CHUNKED and self._chunk_size is not None:
            return np.asarray(visible & (queries // self._chunk_size == keys // self._chunk_size))
        return visible
