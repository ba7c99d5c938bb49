"""Between the host and a device: what a step brings there goes in one copy, and what it gives comes back in one.

Each copy that is not asked for in this way makes the host wait until the device has done all that it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 8
"""Bytes of the largest number that is sent."""

Read = Callable[[], NDArray[np.int32]]
"""Gives what a tensor holds, once it has come to the host."""


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """The arrays on `device`: on CUDA by one copy, for which the host does not wait; on a CPU in the same memory."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    ends = np.cumsum(sizes).tolist()
    staged = torch.empty(max(ends[-1], 1), dtype=torch.uint8, pin_memory=True)
    on_host = staged.numpy()
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        on_host[end - size : end - size + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # Pinned memory is not given to others until the copy is done.
    there = staged.to(device, non_blocking=True)
    found = []
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        found.append(there[end - size : end - size + array.nbytes].view(dtype).view(array.shape))
    return found


class Downloads:
    """Small tensors that come to the host together, when one of them is first read."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, dict[str, NDArray[np.int32]]]] = []

    def add(self, tensor: torch.Tensor) -> Read:
        """Have a tensor of int32 come with the others; it must hold what it does until one of them is read."""
        if tensor.device.type == "cpu":
            return tensor.numpy
        found: dict[str, NDArray[np.int32]] = {}
        self._waiting.append((tensor, found))

        def read() -> NDArray[np.int32]:
            if not found:
                self._bring()
            return found["values"]

        return read

    def _bring(self) -> None:
        waiting, self._waiting = self._waiting, []
        parts = [tensor.reshape(-1) for tensor, _ in waiting]
        values = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu().numpy()
        start = 0
        for tensor, found in waiting:
            found["values"] = values[start : start + tensor.numel()].reshape(tensor.shape)
            start += tensor.numel()
