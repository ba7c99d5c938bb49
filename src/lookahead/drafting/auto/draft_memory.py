"""What drafting learns about a model: its predictions after short contexts, and their file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import BytesIO
from math import log
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lookahead.drafting.auto.ngrams import (
    ENTRY,
    EVIDENCE_PRIOR,
    FOLLOWER,
    WAYS,
    WRITTEN,
    Entries,
    Writing,
)
from lookahead.drafting.auto.texts import MATCH_CLASSES
from lookahead.drafting.auto.weights import MODEL_WEIGHTS, TEXT_WEIGHTS, build_weights
from lookahead.errors import InvalidArgumentError

_FORMAT = 2
_NO_MEMORY = "is no saved memory"
_ADVICE = "delete the file or choose another"


class _DamagedFileError(ValueError):
    """A file is of no use; the message says what it is, but not which file that is."""


class DraftMemory:
    """The model's `top_k` likeliest next tokens and their probabilities after contexts of 1, 2, ... tokens.

    A set-associative hash table for each context length, in arrays of fixed size: a context belongs to one set, which
    keeps `WAYS` contexts, identified by a 62-bit hash. A context that comes again takes the new prediction
    (that of a single token keeps `old_share` of the old one); in a full set the one that was written longest ago makes
    room. An entry takes 16 + 8 * top_k bytes (80 for the usual eight), so the whole memory takes
    `orders * capacity * 80` bytes, allocated at the beginning; an operating system that fills pages on first use,
    as Linux does, charges less until then.

    Attributes:
        entries: The arrays, as compiled loops take them.
        writing: How they write them.
        lock: Held by whoever reads or changes the arrays, if several threads may. A drafter holds it for one proposal
            or one observation at a time, the methods here as long as they need it.
        batches: The `DraftBatch` of those who draft from it, by their settings.
        clock: How often something was inserted, here or in what this memory came from; it dates the entries.

    Args:
        orders: Longest context, in tokens. At least 1.
        capacity: Contexts kept for each context length; rounded up to a power of two, at least `WAYS`.
        top_k: Next tokens kept for each context. At least 1.
        old_share: How far the prediction after a single token keeps what it was before, from 0 to below 1: so short a
            context comes again in other surroundings.
        observed: What is inserted are tokens of texts that were seen to follow, not predictions of a model. Contexts
            of all lengths keep `old_share` of what they were then, and a token that followed once counts `1 -
            old_share`: so tokens that come often count most, and lately more than long ago.

    Raises:
        InvalidArgumentError: A size is out of range.
    """

    def __init__(
        self,
        orders: int = 4,
        capacity: int = 1 << 15,
        top_k: int = 8,
        old_share: float = 0.3,
        observed: bool = False,
    ) -> None:
        if not 0 <= old_share < 1:
            raise InvalidArgumentError(f"old_share={old_share} is out of range; it must be at least 0 and below 1")
        for name, value in (("orders", orders), ("capacity", capacity), ("top_k", top_k)):
            if value < 1:
                raise InvalidArgumentError(f"{name}={value} is out of range; it must be at least 1")
        self.orders, self.top_k = orders, top_k
        self.old_share, self.observed = old_share, observed
        #: Contexts kept for each context length.
        self.capacity = WAYS << max((capacity - 1).bit_length() - (WAYS - 1).bit_length(), 0)
        self.entries = Entries(
            np.zeros((orders, self.capacity), dtype=ENTRY),
            np.zeros((orders, self.capacity, top_k), dtype=FOLLOWER),
            np.full((1 + len(MATCH_CLASSES), orders + 1, 2), EVIDENCE_PRIOR),
        )
        self.clock = 0
        self.lock = RLock()
        self.batches: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
        blended, first_log = (orders, log(1 - old_share)) if observed else (1, 0.0)
        room, places = np.zeros(2 * top_k, dtype=WRITTEN), np.zeros((2, orders), dtype=np.int64)
        self.writing = Writing(float(old_share), blended, first_log, room, *places)

    def clear(self) -> None:
        """Forget everything. Takes far less time than arrays of another one, whose pages the system has to fill."""
        self.batches.clear()
        if self.clock:
            self.entries.heads.view(np.uint8).fill(0)  # numpy fills records one by one
            self.clock = 0
        self.entries.evidence.fill(EVIDENCE_PRIOR)

    def occupy(self) -> None:
        """Have the system fill all pages now, rather than one by one when they are first written to."""
        if not self.clock:
            self.entries.heads.view(np.uint8).fill(0)
            self.entries.followers.view(np.uint8).fill(0)

    def tick(self) -> int:
        """The time of what is inserted next."""
        self.clock += 1
        return self.clock

    @property
    def weights(self) -> NDArray[np.float64]:
        """What weighs proposals: those for a model's predictions, or for texts."""
        return build_weights(self.orders, TEXT_WEIGHTS if self.observed else MODEL_WEIGHTS)

    def statistics(self) -> dict[str, Any]:
        """How many contexts of each length are kept, how many fit, and the size of the arrays in bytes."""
        heads, followers, _ = self.entries
        with self.lock:
            entries = np.count_nonzero(heads["tag"], axis=1).tolist()
        return {"entries": entries, "capacity": self.capacity, "bytes": heads.nbytes + followers.nbytes}

    def merge(self, other: DraftMemory) -> None:
        """Take in the entries of another memory of the same model, which stays as it is.

        Of one context the newest entry stays, and in a full set the newest ones.

        Raises:
            InvalidArgumentError: The sizes differ.
        """
        if (self.orders, self.capacity, self.top_k) != (other.orders, other.capacity, other.top_k):
            raise InvalidArgumentError(
                f"a memory of orders={other.orders}, capacity={other.capacity}, top_k={other.top_k} cannot be merged "
                f"into one of orders={self.orders}, capacity={self.capacity}, top_k={self.top_k}; use equal sizes"
            )
        with self.lock:
            self.clock = max(self.clock, other.clock)
            heads, followers = (
                np.concatenate([one.reshape(-1, WAYS, *one.shape[2:]), two.reshape(-1, WAYS, *two.shape[2:])], axis=1)
                for one, two in zip(self.entries[:2], other.entries[:2], strict=True)
            )  # of each set both sides, `[sets, 2 * ways, ...]`
            tags, stamps = heads["tag"], np.where(heads["tag"], heads["stamp"].astype(np.int64), -1)
            same = (tags[:, :WAYS, None] == tags[:, None, WAYS:]) & (tags[:, :WAYS, None] != 0)
            newer = stamps[:, None, WAYS:] > stamps[:, :WAYS, None]
            stamps[:, :WAYS][(same & newer).any(axis=2)] = -1
            stamps[:, WAYS:][(same & ~newer).any(axis=1)] = -1
            tags[stamps < 0] = 0
            kept = np.sort(np.argsort(-stamps, axis=1, kind="stable")[:, :WAYS], axis=1)
            self.entries.heads[:] = np.take_along_axis(heads, kept, 1).reshape(self.entries.heads.shape)
            taken = np.take_along_axis(followers, kept[:, :, None], 1)
            self.entries.followers[:] = taken.reshape(self.entries.followers.shape)
            self.entries.evidence[:] = (self.entries.evidence + other.entries.evidence) / 2

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that is kept, as arrays by name, for a file."""
        heads, followers = self.entries.heads.reshape(-1), self.entries.followers.reshape(-1, self.top_k)
        used = np.flatnonzero(heads["tag"])
        return {
            "ngram_sizes": np.array([self.orders, self.capacity, self.top_k, self.clock], dtype=np.int64),
            "ngram_old_share": np.array(self.old_share),
            "ngram_slots": used.astype(np.int64),
            "ngram_tags": heads["tag"][used],
            "ngram_stamps": heads["stamp"][used],
            "ngram_ids": followers["token"][used],
            "ngram_logs": followers["log"][used],
            "ngram_floors": heads["floor"][used],
            "ngram_evidence": self.entries.evidence.copy(),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> DraftMemory:
        """The memory that `to_arrays` gave.

        Raises:
            _DamagedFileError: An array is missing, or they cannot be from there.
            Exception: There cannot be a memory of these sizes.
        """
        orders, capacity, top_k, clock = _expect(arrays, "ngram_sizes", np.int64, (4,)).tolist()
        memory = cls(orders, capacity, top_k, float(_expect(arrays, "ngram_old_share", np.float64, ())))
        heads, followers = memory.entries.heads.reshape(-1), memory.entries.followers.reshape(-1, top_k)
        slots = _expect(arrays, "ngram_slots", np.int64, (None,))
        count = len(slots)
        stamps = _expect(arrays, "ngram_stamps", np.uint32, (count,))
        if memory.capacity != capacity or stamps.max(initial=0) > clock or slots.min(initial=0) < 0:
            raise _DamagedFileError(f"{_NO_MEMORY}: its arrays do not belong together")
        memory.clock = clock
        heads["tag"][slots], heads["stamp"][slots] = _expect(arrays, "ngram_tags", np.int64, (count,)), stamps
        heads["floor"][slots] = _expect(arrays, "ngram_floors", np.float32, (count,))
        followers["token"][slots] = _expect(arrays, "ngram_ids", np.int32, (count, top_k))
        followers["log"][slots] = _expect(arrays, "ngram_logs", np.float32, (count, top_k))
        if "ngram_evidence" in arrays:  # older files have none
            evidence = _expect(arrays, "ngram_evidence", np.float64, memory.entries.evidence.shape)
            memory.entries.evidence[:] = np.maximum(evidence, EVIDENCE_PRIOR / 2)
        return memory

    def save(self, path: str | Path, model: str) -> int:
        """Write all of it to a file, as numpy arrays without pickled objects; it is on the disk on return.

        Args:
            path: The file; it is written over.
            model: Which model it was learned from: any string that says so.

        Returns:
            `clock` when it was written.

        Raises:
            OSError: The file cannot be written.
        """
        with self.lock:
            arrays, clock = self.to_arrays(), self.clock
        with open(path, "wb") as file:
            np.savez(  # compressing it takes far longer than writing it
                file,
                allow_pickle=False,
                format=np.array(_FORMAT, dtype=np.int64),
                model=np.array(model),
                **arrays,
            )
            file.flush()
            os.fsync(file.fileno())
        return clock

    @classmethod
    def load(cls, path: str | Path, model: str) -> DraftMemory:
        """Read a file that `save` wrote.

        Args:
            path: The file.
            model: The model that is to be drafted for.

        Raises:
            InvalidArgumentError: It is no such file, damaged, of another version, or of another model.
            OSError: The file cannot be read.
        """
        content = BytesIO(Path(path).read_bytes())
        try:
            with np.load(content, allow_pickle=False) as arrays:
                version, owner = int(_expect(arrays, "format", np.int64, ())), str(arrays["model"])
                if version != _FORMAT:
                    raise _DamagedFileError(
                        f"was written by another version of this library (format {version}, this one reads {_FORMAT})"
                    )
                if owner != model:
                    raise _DamagedFileError(
                        f"was filled from another model ({owner}) than {model}: each model needs a file of its own"
                    )
                return cls.from_arrays(arrays)
        except Exception as error:  # zipfile, zlib and numpy raise all kinds for damaged files
            what = f"{_NO_MEMORY}: it is cut short, or something else"
            if isinstance(error, _DamagedFileError):
                what = str(error)
            raise InvalidArgumentError(f"memory={str(path)!r} {what}; {_ADVICE}") from error


def _expect(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: DTypeLike, shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """The array called `name`.

    Args:
        arrays: Where it is.
        name: What it is called.
        dtype: Its type; numbers of a floating one must be finite.
        shape: Its shape; `None` stands for any size.

    Raises:
        _DamagedFileError: It is not there, or another one.
    """
    if name not in arrays:
        raise _DamagedFileError(f"{_NO_MEMORY}: it lacks the array {name!r}")
    array = arrays[name]
    sizes = tuple(size if want is None else want for size, want in zip(array.shape, shape, strict=False))
    if array.dtype != np.dtype(dtype) or array.ndim != len(shape) or array.shape != sizes:
        raise _DamagedFileError(f"{_NO_MEMORY}: its array {name!r} is a {array.dtype} of shape {list(array.shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _DamagedFileError(f"{_NO_MEMORY}: its array {name!r} holds numbers that are not finite")
    return array
