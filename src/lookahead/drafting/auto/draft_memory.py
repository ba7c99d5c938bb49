"""What drafting learns about a model: its predictions after short contexts, in one file."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.ngrams import NO_MEMORY, DamagedFileError, NGramMemory, expect
from lookahead.drafting.auto.weights import MODEL_WEIGHTS, TEXT_WEIGHTS, build_weights
from lookahead.errors import InvalidArgumentError

_FORMAT = 2
_ADVICE = "delete the file or choose another"


class DraftMemory:
    """The n-gram memory of one model, the weights that go with it, and its file.

    Args:
        ngrams: The n-gram memory; a new one if not given.

    Attributes:
        ngrams: See above.
        lock: Held by whoever reads or changes the arrays, if several threads may. A drafter holds it for one proposal
            or one observation at a time, the methods here as long as they need it.
        batches: The `DraftBatch` of those who draft from it, by their settings.
    """

    def __init__(self, ngrams: NGramMemory | None = None) -> None:
        self.ngrams = NGramMemory() if ngrams is None else ngrams
        self.lock = RLock()
        self.batches: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

    @property
    def weights(self) -> NDArray[np.float64]:
        """What weighs proposals: those for a model's predictions, or for texts."""
        return build_weights(self.ngrams.orders, TEXT_WEIGHTS if self.ngrams.observed else MODEL_WEIGHTS)

    def statistics(self) -> dict[str, Any]:
        """Of the n-gram memory; see `NGramMemory.statistics`."""
        with self.lock:
            return self.ngrams.statistics()

    def merge(self, other: DraftMemory) -> None:
        """Take in what another memory of the same model learned beside this one, which stays as it is.

        Raises:
            InvalidArgumentError: They are of different sizes.
        """
        with self.lock:
            self.ngrams.merge(other.ngrams)

    def save(self, path: str | Path, model: str) -> int:
        """Write all of it to a file, as numpy arrays without pickled objects; it is on the disk on return.

        Args:
            path: The file; it is written over.
            model: Which model it was learned from: any string that says so.

        Returns:
            `ngrams.clock` when it was written.

        Raises:
            OSError: The file cannot be written.
        """
        with self.lock:
            arrays, clock = self.ngrams.to_arrays(), self.ngrams.clock
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
                version, owner = int(expect(arrays, "format", np.int64, ())), str(arrays["model"])
                if version != _FORMAT:
                    raise DamagedFileError(
                        f"was written by another version of this library (format {version}, this one reads {_FORMAT})"
                    )
                if owner != model:
                    raise DamagedFileError(
                        f"was filled from another model ({owner}) than {model}: each model needs a file of its own"
                    )
                return cls(NGramMemory.from_arrays(arrays))
        except Exception as error:  # zipfile, zlib and numpy raise all kinds for damaged files
            what = error if isinstance(error, DamagedFileError) else f"{NO_MEMORY}: it is cut short, or something else"
            raise InvalidArgumentError(f"memory={str(path)!r} {what}; {_ADVICE}") from error
