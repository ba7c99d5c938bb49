"""Between the host and a device: what a step brings there goes in one copy, and what it gives comes back in one.

Each copy that is not asked for in this way makes the host wait until the device has done all that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Staged:
    """Arrays of int32 that stay where they are on a device, and come there again and again, all by one copy.

    Args:
        device: As above; on a CPU both are the same memory.
        shapes: Their shapes.

    Attributes:
        here: To be written to.
        there: What they held when they were last sent.
    """

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> None:
        # Each begins at 16 bytes: kernels are compiled for where their arguments lie.
        sizes = [-(-int(np.prod(shape)) // 4) * 4 for shape in shapes]
        # An inference tensor could not be written to by a later call outside of inference mode.
        with torch.inference_mode(False):
            self._host = torch.zeros(sum(sizes), dtype=torch.int32)
            self._device = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
            parts = zip(torch.split(self._device, sizes), shapes, strict=True)
            self.there = [part[: int(np.prod(shape))].view(shape) for part, shape in parts]
        on_host = zip(np.split(self._host.numpy(), np.cumsum(sizes)[:-1]), shapes, strict=True)
        self.here = [part[: int(np.prod(shape))].reshape(shape) for part, shape in on_host]

    def send(self) -> None:
        """Bring all of them to the device."""
        if self._device is not self._host:
            # Pinned memory of its own, which is not given to others until the copy is done: nobody waits for that.
            sent = torch.empty_like(self._host, pin_memory=self._device.is_cuda).copy_(self._host)
            self._device.copy_(sent, non_blocking=True)


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
