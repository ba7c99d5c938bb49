"""Errors and warnings of this library.

Every message names the argument, its value, and a remedy.
"""

from __future__ import annotations

import signal
import warnings
from threading import current_thread, main_thread
from traceback import walk_tb
from typing import TypeVar

Raised = TypeVar("Raised", bound=BaseException)


class LookaheadError(Exception):
    """Base class of all errors raised on purpose by this library."""


class InvalidArgumentError(LookaheadError, ValueError):
    """An argument has an invalid value; the message lists the valid ones."""


class UnsupportedArgumentError(LookaheadError, NotImplementedError):
    """A valid `generate` argument that lookahead decoding does not support."""


class UnsupportedModelError(LookaheadError, TypeError):
    """A model that cannot be run on token trees; the message gives the reason."""


class ParallelError(LookaheadError, RuntimeError):
    """A run on several ranks cannot begin or continue; the message names the rank at fault."""


class ModelChangedError(LookaheadError, RuntimeError):
    """The model changed during decoding, so the rest of the text would come from another model."""


class LookaheadWarning(UserWarning):
    """A setting has no effect here; the text is still correct. The message names the loss."""


def extra_hint(extra: str) -> str:
    """Instruction to install an extra, for the end of an error message. The package is not on PyPI yet."""
    return f"install the extra: pip install '.[{extra}]' in a checkout, or 'WHEEL[{extra}]' with the path of a wheel"


def not_of_signal(error: Raised) -> Raised:
    """Return an error that belongs to the code that raised it; raise one of a signal, which may interrupt any code.

    Those are Ctrl-C, `sys.exit` in the main thread, and errors of a signal's handler, such as a time limit.
    """
    handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
    is_handled = any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))
    exits = isinstance(error, SystemExit) and current_thread() is main_thread()
    if is_handled or exits or isinstance(error, KeyboardInterrupt):
        raise error
    return error


def warn_of_plain(refusal: LookaheadError, stacklevel: int) -> None:
    """Warn that a text is decoded without drafts, with the reason.

    Args:
        refusal: Error with the reason.
        stacklevel: Stack level for a call of `warnings.warn` in the caller.
    """
    warnings.warn(f"decoded plainly, without drafts: {refusal}", LookaheadWarning, stacklevel=stacklevel + 1)
