"""Attention masks of token trees, one for each kind of layer a model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, TREE_ATTENTION
from lookahead.backends.transformers.tree_attention import Pages, along_paths, unpack
from lookahead.core.tree_masks import SCRATCH, MaskedTrees, dense_masks, packed_masks, packed_width
from lookahead.errors import UnsupportedModelError

PACKED_MASKS = (TREE_ATTENTION, INVARIANT, BY_POSITION)
"""Attention with packed masks, or masks derived from them."""

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
INDEXED = "indexed_attention"
"""Layers with an indexer that picks the visible keys with the largest scores; see `Limits`."""


class MaskBuilder:
    """Makes the attention masks of a model from the ancestors of each node.

    Args:
        config: Configuration of the model, with the kinds and windows of its layers.

    Attributes:
        kinds: The kinds of layers, in a fixed order.
        layers: The kind of each layer; a single entry for models that do not list their layers.

    Raises:
        UnsupportedModelError: A kind of layer has no keys and values for each token.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        text_config = config.get_text_config(decoder=True)
        window: int | None = getattr(text_config, "sliding_window", None)
        chunk: int | None = getattr(text_config, "attention_chunk_size", None)
        # Tokens that a layer of each kind sees; `None` for all.
        self._sizes = {FULL: None, INDEXED: None, SLIDING: window, CHUNKED: chunk}
        layer_types: list[str] | None = getattr(text_config, "layer_types", None)
        # As in transformers: models that list their layers accept a dict of masks, others a single mask.
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
                    f"{type(config).__name__} has layers of the kind {kind!r}, without a key-value cache for each "
                    "token; their state cannot take back a token that was not accepted. Token trees need layers of "
                    f"the kinds {FULL}, {INDEXED}, {SLIDING} or {CHUNKED}"
                )
            if self._sizes[kind] == 1:
                raise UnsupportedModelError(
                    f"{type(config).__name__} has layers of the kind {kind!r} with a window of 1 token, but "
                    "caches of transformers keep all tokens of such layers; use model.generate"
                )

    def packed(self, trees: MaskedTrees) -> list[NDArray[np.int32]]:
        """Return the packed masks of padded trees for each kind of layer, `[rows, 1, nodes, 3 + words]` int32."""
        rows = len(trees.lengths)
        nodes = len(trees.places) // rows
        masks = []
        for kind in self.kinds:
            mask = packed_masks(trees, *self.reach(kind), packed_width(nodes))
            mask[:, SCRATCH] = trees.lengths.max()
            masks.append(mask.reshape(rows, 1, nodes, -1))
        return masks

    def dense(self, trees: MaskedTrees, dtype: torch.dtype, device: torch.device, dropped: int = 0) -> Any:
        """Return the dense masks of padded trees.

        Args:
            trees: The trees.
            dtype: Number type of the model; hidden keys get its lowest number, visible ones 0.
            device: Device of the masks.
            dropped: Number of first keys that layers with a window have dropped.

        Returns:
            A mask `[rows, 1, nodes, keys]`, or a dict of one for each kind of layer; nodes follow the longest text.
        """
        rows = len(trees.lengths)
        scratch = trees.lengths if rows == 1 else np.full(rows, trees.lengths.max())
        lowest = torch.finfo(dtype).min
        masks = []
        for kind in self.kinds:
            mask, _ = dense_masks(trees, scratch, self.reach(kind), lowest, dropped if self._sizes[kind] else 0)
            masks.append(torch.from_numpy(mask).to(device, dtype).view(rows, 1, len(trees.places) // rows, -1))
        return self._arrange(masks)

    def of_packed(
        self,
        packed: Sequence[torch.Tensor],
        keys: int,
        dtype: torch.dtype,
        dropped: int = 0,
        pages: Pages | None = None,
    ) -> Any:
        """Return the masks of a step like `dense`, from packed masks on the device.

        Args:
            packed: The packed mask of each kind of layer; see `lookahead.core.tree_masks`.
            keys: Columns of keys, for attention with dense masks.
            dtype: As for `dense`.
            dropped: As for `dense`.
            pages: Pages of the texts, for several texts in one row.
        """
        if self._attention == BY_POSITION:
            packed = [along_paths(mask, pages is not None) for mask in packed]
        elif self._attention not in PACKED_MASKS:
            first = [dropped if self._sizes[kind] else 0 for kind in self.kinds]
            packed = [_dense(mask, keys, dtype, pages)[..., at:] for mask, at in zip(packed, first, strict=True)]
        return self._arrange(packed)

    @property
    def windows(self) -> list[int | None]:
        """Tokens that each layer keeps, as transformers counts them: its window or chunk; `None` for all tokens.

        There is a single entry for models that do not list their layers."""
        return [self._sizes[kind] for kind in self.layers]

    def reach(self, kind: str) -> tuple[int | None, int | None]:
        """Return window and chunk size of layers of this kind; one of them is `None`."""
        size = self._sizes[kind]
        return (size, None) if kind == SLIDING else (None, size)

    @property
    def shortest_reach(self) -> int | None:
        """Smallest window or chunk size of a layer; `None` if all layers see all tokens."""
        return min((size for size in self.windows if size is not None), default=None)

    def _arrange(self, masks: Sequence[torch.Tensor]) -> Any:
        """Return the masks as the model accepts them: a dict, or a single mask."""
        return dict(zip(self.kinds, masks, strict=True)) if self._takes_dict else masks[0]


def _dense(packed: torch.Tensor, keys: int, dtype: torch.dtype, pages: Pages | None) -> torch.Tensor:
    """Convert a packed mask to a dense one, `[batch, 1, nodes, keys]`, on its device."""
    visible = unpack(packed, keys, pages)
    return torch.zeros(visible.shape, dtype=dtype, device=packed.device).masked_fill_(~visible, torch.finfo(dtype).min)
