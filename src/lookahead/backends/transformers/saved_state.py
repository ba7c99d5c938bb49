"""A cache of transformers as it was at one moment: what a pass does to it can be undone."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from lookahead.errors import UnsupportedModelError

_RUNNING_STATES = ("conv_states", "recurrent_states")
"""What layers of transformers write in place; everything else in them is replaced by new tensors."""


class SavedState:
    """What a cache holds when this is made, until `restore` puts it back.

    Running states are written in place, so they are copied. Keys and values are not: a pass puts longer tensors in
    their place, and keeping the old ones costs nothing. In caches that are not transformers' `Cache`, such as the list
    of tensors of RWKV, everything is copied.

    Args:
        content: The cache.
        buffers: Tensors of an earlier one of the same cache, to copy to; copies that fit none are added.

    Attributes:
        copied_bytes: Bytes of states that were copied.
    """

    def __init__(self, content: Any, buffers: list[torch.Tensor]) -> None:
        self.copied_bytes = 0
        self._containers: list[tuple[Any, Any]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._buffers = buffers
        self._visit(content, copies=not isinstance(content, Cache), opens=True)

    def restore(self) -> None:
        """Put the cache back.

        Raises:
            UnsupportedModelError: The model wrote into a tensor that was not copied.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise UnsupportedModelError("the model writes into a part of its cache that transformers only replaces")
        for container, content in self._containers:
            if isinstance(container, dict):
                container.clear()
                container.update(content)
            else:
                container[:] = content
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def _visit(self, value: Any, copies: bool, opens: bool = False) -> None:
        if isinstance(value, torch.Tensor):
            if copies:
                self._copy(value)
            elif not value.is_inference():
                self._versions.append((value, value._version))
        elif isinstance(value, dict):
            self._containers.append((value, dict(value)))
            for item in value.values():
                self._visit(item, copies)
        elif isinstance(value, list):
            self._containers.append((value, list(value)))
            for item in value:
                self._visit(item, copies)
        elif isinstance(value, tuple):
            for item in value:
                self._visit(item, copies)
        elif opens or isinstance(value, CacheLayerMixin | LinearAttentionCacheLayerMixin):
            attributes = vars(value)
            self._containers.append((attributes, dict(attributes)))
            running = _RUNNING_STATES if isinstance(value, LinearAttentionCacheLayerMixin) else ()
            for name, item in attributes.items():
                self._visit(item, copies or name in running)

    def _copy(self, tensor: torch.Tensor) -> None:
        number = len(self._copies)
        if number == len(self._buffers):
            self._buffers.append(torch.empty_like(tensor))
        elif not _fits(self._buffers[number], tensor):
            self._buffers[number] = torch.empty_like(tensor)
        self._copies.append((tensor, self._buffers[number].copy_(tensor)))
        self.copied_bytes += tensor.numel() * tensor.element_size()


def _fits(buffer: torch.Tensor, tensor: torch.Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype and buffer.device == tensor.device
