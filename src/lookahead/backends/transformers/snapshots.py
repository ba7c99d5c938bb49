"""Fingerprints of weights, and the restoration of a model after trial passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.transformers.composition import collects_outputs
from lookahead.core.compiled import compiled

T = TypeVar("T")
R = TypeVar("R")

_LENGTH = 1024
"""32-bit words per sum."""

_KEYS = np.random.default_rng().integers(1 << 32, size=_LENGTH, dtype=np.uint32) | np.uint32(1)
"""Odd factors of the words, random in each process, so that no pair of weights collides in every process."""


def fingerprint(tensor: torch.Tensor) -> NDArray[np.uint64]:
    """Return a sum for each 4 KiB of a tensor: its words times random odd keys, modulo 2**64.

    A change of one word always changes the sum. Changes of several words cancel out with a probability of at most
    2**-31. The keys also reveal exchanged rows.

    Args:
        tensor: Tensor on the CPU.

    Returns:
        `[bytes // 4096 + 1]` uint64, comparable within a process.
    """
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    full_rows = octets.nbytes // (4 * _LENGTH)
    words = octets[: full_rows * 4 * _LENGTH].view(np.uint32).reshape(full_rows, _LENGTH)
    rest = np.zeros((1, 4 * _LENGTH), dtype=np.uint8)
    rest[0, : octets.nbytes - words.nbytes] = octets[words.nbytes :]
    sums = np.empty(full_rows + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):  # plain Python warns of wrapped sums
        _add_up(words, _KEYS, sums[:full_rows])
        _add_up(rest.view(np.uint32), _KEYS, sums[full_rows:])
    return sums


@partial(compiled, releases_gil=True)
def _add_up(words: NDArray[np.uint32], keys: NDArray[np.uint32], sums: NDArray[np.uint64]) -> None:
    for row in range(words.shape[0]):
        total = np.uint64(0)
        for column in range(words.shape[1]):
            total += np.uint64(words[row, column]) * np.uint64(keys[column])
        sums[row] = total


@contextmanager
def preserved_state(model: torch.nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Restore changes by trial passes: attributes and buffers of the modules of `model`, and torch's generators.

    Example: dynamic RoPE stores the frequencies of the longest text so far, and a trial would change them. Only hooks
    of transformers are removed, since another thread may register hooks. It yields the set of written attributes,
    filled at the end.
    """
    written: set[tuple[int, str]] = set()
    saved_modules = [(m, dict(vars(m)), dict(m._buffers), set(m._forward_hooks)) for m in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {weight.device for weight in model.parameters() if weight.is_cuda and torch.cuda.is_available()}
    try:
        with torch.random.fork_rng(devices=devices):
            yield written
    finally:
        for module, attributes, buffers, hooks in saved_modules:
            now = vars(module)
            names = now.keys() | attributes.keys()
            written |= {(id(module), name) for name in names if now.get(name) is not attributes.get(name)}
            replace_items(now, attributes)
            replace_items(module._buffers, buffers)
            for key in [key for key in module._forward_hooks if key not in hooks]:
                if collects_outputs(module._forward_hooks[key]):
                    del module._forward_hooks[key]
        for buffer, saved in values:
            if not buffer.is_meta and not torch.equal(buffer, saved):  # meta tensors have no values
                with torch.no_grad():
                    buffer.copy_(saved)


def replace_items(target: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Replace all items of a dict; concurrent readers always see the new ones."""
    target.update(items)
    if len(target) != len(items):
        for name in target.keys() - items.keys():
            del target[name]


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Map `function` over items in torch's number of threads; it must release Python's lock."""
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2:
        return list(map(function, items))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
