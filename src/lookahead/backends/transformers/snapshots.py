"""Fingerprints of weights, and passes that leave no trace in a model."""

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
"""Words of 32 bits that go into one number."""

_KEYS = np.random.default_rng().integers(1 << 32, size=_LENGTH, dtype=np.uint32) | np.uint32(1)
"""Random in each process, so that no two weights have equal fingerprints in every process. As many bits as words have,
since processors multiply those into 64 bits as fast as they read them."""


def fingerprint(tensor: torch.Tensor) -> NDArray[np.uint64]:
    """A number for each 4 KiB of the tensor's bits: the sum of its words times random odd keys, modulo 2**64.

    The change of one word is always seen, as its product with a key is less than 2**64. That of several goes unnoticed
    with a probability of at most 2**-31 for each number that they go into: whatever the other keys are, one of them has
    at most one value at which the changes cancel out. A sum without keys would miss rows that changed places.

    Args:
        tensor: On the CPU.

    Returns:
        `[bytes // 4096 + 1]` uint64; comparable within a process.
    """
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    full_rows = octets.nbytes // (4 * _LENGTH)
    words = octets[: full_rows * 4 * _LENGTH].view(np.uint32).reshape(full_rows, _LENGTH)
    rest = np.zeros((1, 4 * _LENGTH), dtype=np.uint8)
    rest[0, : octets.nbytes - words.nbytes] = octets[words.nbytes :]
    sums = np.empty(full_rows + 1, dtype=np.uint64)
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
    """Restore what passes change meanwhile: attributes and buffers of the modules of `model`, and torch's generators.

    Hooks are not put back but for those of transformers: another thread may have registered or removed one.

    The rotary embeddings of a model with dynamic RoPE, for one, keep the frequencies of the longest text so far, and
    a short text puts them back: after a check pass, plain decoding would go on with other frequencies.
    """
    written: set[tuple[int, str]] = set()
    kept = [(m, dict(vars(m)), dict(m._buffers), set(m._forward_hooks)) for m in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {weight.device for weight in model.parameters() if weight.is_cuda and torch.cuda.is_available()}
    try:
        with torch.random.fork_rng(devices=devices):
            yield written
    finally:
        for module, attributes, buffers, hooks in kept:
            now = vars(module)
            names = now.keys() | attributes.keys()
            written |= {(id(module), name) for name in names if now.get(name) is not attributes.get(name)}
            hold_only(now, attributes)
            hold_only(module._buffers, buffers)
            for key in [key for key in module._forward_hooks if key not in hooks]:
                if collects_outputs(module._forward_hooks[key]):
                    del module._forward_hooks[key]
        for buffer, saved in values:
            if not buffer.is_meta and not torch.equal(buffer, saved):  # on the meta device there are no values
                with torch.no_grad():
                    buffer.copy_(saved)


def hold_only(target: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """Let a dict hold these items alone. A thread that reads it meanwhile misses none of them."""
    target.update(items)
    if len(target) != len(items):
        for name in target.keys() - items.keys():
            del target[name]


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`function` of each item, in as many threads as torch has; it has to release Python's lock."""
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2:
        return list(map(function, items))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
