"""What drafting learns about a model: its predictions after short contexts, and when they are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lookahead.drafting.acceptance import Acceptance
from lookahead.drafting.ngram_memory import NGramMemory
from lookahead.errors import InvalidArgumentError

_FORMAT = 2


class DraftMemory:
    """The n-gram memory and the learned acceptance of one model, together in one file.

    Args:
        ngrams: The n-gram memory; a new one if not given.
        acceptance: What was learned about acceptance; nothing yet if not given.
    """

    def __init__(self, ngrams: NGramMemory | None = None, acceptance: Acceptance | None = None) -> None:
        self.ngrams = NGramMemory() if ngrams is None else ngrams
        self.acceptance = Acceptance(self.ngrams.orders) if acceptance is None else acceptance

    def save(self, path: str | Path, model: str) -> None:
        """Write all of it to a file, as numpy arrays without pickled objects.

        Args:
            path: The file; it is written over.
            model: Which model it was learned from: any string that says so.

        Raises:
            OSError: The file cannot be written.
        """
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                allow_pickle=False,
                format=np.array(_FORMAT),
                model=np.array(model),
                **self.ngrams.to_arrays(),
                **self.acceptance.to_arrays(),
            )

    @classmethod
    def load(cls, path: str | Path, model: str) -> DraftMemory:
        """Read a file that `save` wrote.

        Args:
            path: The file.
            model: The model that is to be drafted for.

        Raises:
            InvalidArgumentError: It is no such file, of another version, or of another model.
            OSError: The file cannot be read.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            version, owner = int(arrays["format"]), str(arrays["model"])
            if version != _FORMAT:
                raise InvalidArgumentError(
                    f"memory={str(path)!r} is of another version of this library; begin a new one"
                )
            if owner != model:
                raise InvalidArgumentError(
                    f"memory={str(path)!r} was filled from another model ({owner}) than {model}; use one file for each"
                )
            return cls(NGramMemory.from_arrays(arrays), Acceptance.from_arrays(arrays))
        except InvalidArgumentError:
            raise
        except OSError:
            raise
        except Exception as error:  # numpy raises all kinds for damaged files
            raise InvalidArgumentError(f"memory={str(path)!r} is no saved memory ({error})") from error
