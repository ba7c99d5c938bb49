"""The errors this library raises on purpose, and what it warns of.

Every message names the argument, the value it had, and what to do instead.
"""

from __future__ import annotations

import warnings


class LookaheadError(Exception):
    """Base class of all errors raised on purpose by this library."""


class InvalidArgumentError(LookaheadError, ValueError):
    """An argument has a value that cannot work; the message says which values do."""


class UnsupportedArgumentError(LookaheadError, NotImplementedError):
    """A legal `generate` argument that lookahead decoding does not support."""


class UnsupportedModelError(LookaheadError, TypeError):
    """A model that cannot be run on token trees; the message says what it lacks."""


class ParallelError(LookaheadError, RuntimeError):
    """A run on several ranks cannot go on or begin; the message names the rank that is to blame."""


class ModelChangedError(LookaheadError, RuntimeError):
    """The model changed while this text was decoded, so its rest would come from another model."""


class LookaheadWarning(UserWarning):
    """A request could not be met, although the text is right. The message says what is lost."""


def extra_hint(extra: str) -> str:
    """Instruction to install an extra, for the end of an error. The package is not on an index yet."""
    return f"install the extra: pip install '.[{extra}]' in a checkout, or 'WHEEL[{extra}]' with the path of a wheel"


def warn_of_plain(refusal: LookaheadError, stacklevel: int) -> None:
    """Warn that a text is decoded without drafts, and why; `stacklevel` is that of `warnings.warn` in the caller."""
    warnings.warn(f"decoded plainly, without drafts: {refusal}", LookaheadWarning, stacklevel=stacklevel + 1)
