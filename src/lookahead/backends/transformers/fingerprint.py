"""The fingerprint of a tensor's bits: equal bits give equal fingerprints, and others do not."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.core.compiled import IS_COMPILED, compiled

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
    whole = octets.nbytes // (4 * _LENGTH)
    words = octets[: whole * 4 * _LENGTH].view(np.uint32).reshape(whole, _LENGTH)
    rest = np.zeros((1, 4 * _LENGTH), dtype=np.uint8)
    rest[0, : octets.nbytes - words.nbytes] = octets[words.nbytes :]
    sums = np.empty(whole + 1, dtype=np.uint64)
    add_up = _add_up_compiled if IS_COMPILED else _add_up_arrays
    add_up(words, _KEYS, sums[:whole])
    add_up(rest.view(np.uint32), _KEYS, sums[whole:])
    return sums


def _add_up(words: NDArray[np.uint32], keys: NDArray[np.uint32], sums: NDArray[np.uint64]) -> None:
    for row in range(words.shape[0]):
        total = np.uint64(0)
        for column in range(words.shape[1]):
            total += np.uint64(words[row, column]) * np.uint64(keys[column])
        sums[row] = total


_add_up_compiled = compiled(_add_up, releases_gil=True)


def _add_up_arrays(words: NDArray[np.uint32], keys: NDArray[np.uint32], sums: NDArray[np.uint64]) -> None:
    """The same without a compiler, in four times the time."""
    np.einsum("ij,j->i", words, keys.astype(np.uint64), out=sums)
