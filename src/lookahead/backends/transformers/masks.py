"""Attention masks of token trees, one for each kind of layer a model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, TREE_ATTENTION
from lookahead.backends.transformers.tree_attention.packed_mask import Sight, along_paths, sight, unpack
from lookahead.errors import UnsupportedModelError

PACKED_MASKS = (TREE_ATTENTION, INVARIANT, BY_POSITION)
"""Attention that reads packed masks, or what is made of them."""

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
INDEXED = "indexed_attention"
"""Of the keys that the mask shows, an indexer picks those with the largest scores; see `Limits`."""


class MaskBuilder:
    """Turns which-sees-which into the masks that a model's layers take.

    Args:
        config: The model's configuration: which kinds of layers there are and how far each of them sees.

    Attributes:
        kinds: The kinds of layers, in a fixed order.
        layers: The kind of each layer; one stands for all of a model that does not list them.

    Raises:
        UnsupportedModelError: A layer is of a kind that has no per-token keys and values.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        text_config = config.get_text_config(decoder=True)
        window: int | None = getattr(text_config, "sliding_window", None)
        chunk: int | None = getattr(text_config, "attention_chunk_size", None)
        # Tokens that a layer of each kind sees; `None` for all.
        self._sizes = {FULL: None, INDEXED: None, SLIDING: window, CHUNKED: chunk}
        layer_types: list[str] | None = getattr(text_config, "layer_types", None)
        # As transformers does it: a model that lists its layers takes a dict of masks, any other a single one.
        self._takes_dict = layer_types is not None
        self._attention = config._attn_implementation
        of_all = FULL
        if window is not None:
            of_all = SLIDING
        elif chunk is not None:
            of_all = CHUNKED
        self.layers = [of_all] if layer_types is None else list(layer_types)
        self.kinds = sorted(set(self.layers))
        for kind in self.kinds:
            if kind not in self._sizes:
                raise UnsupportedModelError(
                    f"{type(config).__name__} has layers of the kind {kind!r}, whose state is not a key-value cache "
                    "per token; such a state cannot take back a token that was not accepted. Lookahead decoding "
                    f"needs layers of the kinds {FULL}, {INDEXED}, {SLIDING} or {CHUNKED}"
                )

    def sights(
        self, ancestors: NDArray[np.bool_], lengths: Sequence[int] | NDArray[np.int64], positions: NDArray[np.int64]
    ) -> dict[str, Sight]:
        """What the nodes of a step see in layers of each kind.

        Args:
            ancestors: Which slots each slot may attend to, `[batch, nodes, nodes]`; none of padding.
            lengths: Cached tokens of each row.
            positions: Position ids of the nodes, `[batch, nodes]`.
        """
        return {kind: sight(ancestors, lengths, positions, *self.reach(kind)) for kind in self.kinds}

    def dense(self, sights: Mapping[str, Sight], dtype: torch.dtype, device: torch.device, dropped: int = 0) -> Any:
        """The masks of one step, made on the host.

        Args:
            sights: What its nodes see.
            dtype: Number type of the model; masked keys get its lowest number, the others 0.
            dropped: How many of the first keys the layers with a window have forgotten.

        Returns:
            A mask `[batch, 1, nodes, keys]`, or a dict of one for each kind of layer: behind the longest text lie the
            nodes.
        """
        masks = [of_kind.dense(dtype, dropped if self._sizes[kind] else 0) for kind, of_kind in sights.items()]
        return self._arrange([mask.to(device) for mask in masks])

    def of_packed(self, packed: Sequence[torch.Tensor], keys: int, dtype: torch.dtype, dropped: int = 0) -> Any:
        """The masks of one step, as `dense` gives them, of packed ones; nothing is read back from their device.

        Args:
            packed: The packed mask of each kind of layer; see `Sight`.
            keys: Columns of keys, for attention that takes dense masks.
            dtype, dropped: As for `dense`.
        """
        if self._attention == BY_POSITION:
            packed = [along_paths(mask) for mask in packed]
        elif self._attention not in PACKED_MASKS:
            kinds = zip(packed, self.kinds, strict=True)
            packed = [_dense(mask, keys, dtype)[..., dropped if self._sizes[kind] else 0 :] for mask, kind in kinds]
        return self._arrange(packed)

    @property
    def windows(self) -> list[int | None]:
        """The tokens that each layer needs to keep, as transformers counts them: those of its window or of a chunk;
        `None` for all. One entry stands for all layers of a model that does not list them."""
        return [self._sizes[kind] for kind in self.layers]

    def reach(self, kind: str) -> tuple[int | None, int | None]:
        """How far layers of this kind see: the window of a sliding one, and the chunk size of a chunked one."""
        size = self._sizes[kind]
        return (size, None) if kind == SLIDING else (None, size)

    @property
    def shortest_reach(self) -> int | None:
        """Tokens that a layer of the shortest sight sees; `None` if all layers see all."""
        return min((size for size in self.windows if size is not None), default=None)

    def _arrange(self, masks: Sequence[torch.Tensor]) -> Any:
        """The masks of all kinds in the form that the model takes: a dict, or the only one."""
        return dict(zip(self.kinds, masks, strict=True)) if self._takes_dict else masks[0]


def _dense(packed: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of `keys` columns, `[batch, 1, nodes, keys]`, where the packed mask is."""
    visible = unpack(packed, keys)
    return torch.zeros(visible.shape, dtype=dtype, device=packed.device).masked_fill_(~visible, torch.finfo(dtype).min)
