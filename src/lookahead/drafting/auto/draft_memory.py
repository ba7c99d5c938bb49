"""What drafting learns about a model: its predictions after short contexts, in one file."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.ngrams import NO_STATISTICS, NGramMemory
from lookahead.drafting.auto.weights import MODEL_WEIGHTS, TEXT_WEIGHTS, build_weights
from lookahead.drafting.stored_arrays import MOST_BYTES, DamagedFileError, StoredArrays, expect
from lookahead.errors import InvalidArgumentError

_FORMAT = 2
_ADVICE = "delete the file or choose another"


class DraftMemory:
    """The n-gram memory of one model, the weights that go with it, and its file.

    Args:
        ngrams: The n-gram memory; a new one if not given.
        weights: Weigh what it says (`build_weights`); those for a model's predictions, or for texts, if not given.

    Attributes:
        lock: Held by whoever reads or changes the arrays, if several threads may. A drafter holds it for one proposal
            or one observation at a time, the methods here as long as they need it.
        batches: The `DraftBatch` of those who draft from it, by their settings.
    """

    def __init__(self, ngrams: NGramMemory | None = None, weights: NDArray[np.float64] | None = None) -> None:
        # Made when they are first needed: many calls end before they draft.
        self._ngrams, self._weights = ngrams, weights
        self.lock = RLock()
        self.batches: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

    @property
    def ngrams(self) -> NGramMemory:
        """The n-gram memory."""
        if self._ngrams is None:
            with self.lock:
                self._ngrams = self._ngrams or NGramMemory()
        return self._ngrams

    @property
    def weights(self) -> NDArray[np.float64]:
        """What weighs proposals."""
        if self._weights is None:
            table = TEXT_WEIGHTS if self.ngrams.observed else MODEL_WEIGHTS
            self._weights = build_weights(self.ngrams.orders, table)
        return self._weights

    @property
    def is_used(self) -> bool:
        """Whether there are arrays."""
        return self._ngrams is not None

    def statistics(self) -> dict[str, Any]:
        """Of the n-gram memory; see `MemoryStatistics`. Where there is none yet, none is made."""
        with self.lock:
            return asdict(NO_STATISTICS if self._ngrams is None else self._ngrams.statistics())

    def copy(self) -> DraftMemory:
        """The same content in arrays of its own, as it is at one moment."""
        with self.lock:
            arrays = self.ngrams.to_arrays()
        return DraftMemory(NGramMemory.from_arrays(arrays), self._weights)

    def merge(self, other: DraftMemory, clock: int) -> None:
        """Take in what another memory of the same model learned beside this one.

        Args:
            other: The other one; it stays as it is.
            clock: `ngrams.clock` when both were one memory; 0 if they never were.

        Raises:
            InvalidArgumentError: They are of different sizes.
        """
        with self.lock:
            self.ngrams.merge(other.ngrams, clock)

    def save(self, path: str | Path, model: str) -> None:
        """Write all of it to a file, as numpy arrays without pickled objects; it is on the disk on return.

        Args:
            path: The file; it is written over.
            model: Which model it was learned from: any string that says so.

        Raises:
            OSError: The file cannot be written.
        """
        with self.lock:
            arrays = self.ngrams.to_arrays()
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
        name = f"memory={str(path)!r}"
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        try:
            if len(content) > MOST_BYTES:
                raise DamagedFileError("it is too large for one")
            arrays = StoredArrays(content)
            version = int(expect(arrays, "format", np.int64, ()))
            if version != _FORMAT:
                raise InvalidArgumentError(
                    f"{name} was written by another version of this library (format {version}, this one reads "
                    f"{_FORMAT}); {_ADVICE}"
                )
            owner = str(expect(arrays, "model", arrays["model"].dtype, ()))
            if owner != model:
                raise InvalidArgumentError(
                    f"{name} was filled from another model ({owner}) than {model}: each model needs a file of its "
                    f"own; {_ADVICE}"
                )
            return cls(NGramMemory.from_arrays(arrays))
        except DamagedFileError as error:
            raise InvalidArgumentError(f"{name} is no saved memory: {error}; {_ADVICE}") from error
