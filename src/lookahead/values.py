"""Checks of argument values, and of files named by them. Errors name the argument, its value and the requirement."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from operator import index
from pathlib import Path
from typing import Any, cast

from lookahead.errors import InvalidArgumentError, not_of_signal

_LONGEST = 100
"""Most characters of a value in a message; a longer value is replaced by its type."""


def display(value: object) -> str:
    """Format a value on one short line, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a user's own object may raise anything
        not_of_signal(error)
        text = ""
    return text if 0 < len(text) <= _LONGEST else f"<{type(value).__name__}>"


def require(holds: bool, name: str, value: object, requirement: str) -> None:
    """Refuse a value unless a condition holds.

    Args:
        holds: The condition.
        name: Name of the argument.
        value: Its value.
        requirement: Rest of the message, `"must be ..."` for example.

    Raises:
        InvalidArgumentError: `holds` is false.
    """
    if not holds:
        raise InvalidArgumentError(f"{name}={display(value)} {requirement}")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def whole_number(
    name: str, value: Any, minimum: int | None = None, maximum: int | None = None, meaning: str = ""
) -> int:
    """Convert a whole number of Python, numpy or torch to `int`; a bool is refused.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum, maximum: Bounds, both included; `None` for none.
        meaning: Description of the argument, for messages.

    Raises:
        InvalidArgumentError: `value` is no whole number, below `minimum`, or above `maximum`.
    """
    meaning = f" ({meaning})" if meaning else ""
    try:
        number = None if _is_bool(value) else index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise InvalidArgumentError(f"{name}={display(value)} must be a whole number{meaning}")
    lower = None if minimum is None else f"at least {minimum}"
    upper = None if maximum is None else f"at most {maximum}"
    too_large = maximum is not None and number > maximum
    if too_large or (minimum is not None and number < minimum):
        allowed = " and ".join(bound for bound in (lower, upper) if bound is not None)
        advice = ": choose a smaller one" if too_large else ""
        raise InvalidArgumentError(f"{name}={number} is out of range; it must be {allowed}{meaning}{advice}")
    return number


def finite_number(name: str, value: Any, requirement: str) -> float:
    """Convert a finite number to `float`; a bool is refused.

    Raises:
        InvalidArgumentError: `value` is no number, infinite, or nan.
    """
    try:
        number = float("nan") if _is_bool(value) or isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = float("nan")
    require(number - number == 0, name, value, requirement)
    return number


def yes_or_no(name: str, value: object) -> bool:
    """Return `value`, which must be `True` or `False`.

    Raises:
        InvalidArgumentError: `value` is no bool.
    """
    require(isinstance(value, bool), name, value, "must be True or False")
    return bool(value)


def check_callable(name: str, value: object, arguments: int, requirement: str) -> None:
    """Refuse a value that cannot be called with `arguments` positional arguments.

    Raises:
        InvalidArgumentError: `value` is not callable, or has another signature.
    """
    require(callable(value), name, value, requirement)
    try:
        inspect.signature(cast(Callable[..., Any], value)).bind(*[None] * arguments)
    except ValueError:  # a callable without a signature, as in some extensions
        return
    except TypeError as error:
        raise InvalidArgumentError(f"{name}={display(value)} {requirement}: {error}") from error


def check_key(name: str, value: object) -> None:
    """Refuse a value that cannot be the key of a dict.

    Raises:
        InvalidArgumentError: `value` cannot be hashed, or compared.
    """
    try:
        hash(value)
        bool(value == value)
    except Exception as error:  # a user's own object may raise anything
        raise InvalidArgumentError(
            f"{name}={display(value)} must be hashable, such as a text or a number"
        ) from not_of_signal(error)


def check_path(name: str, value: object, requirement: str) -> None:
    """Refuse a value that is no path of a file.

    Raises:
        InvalidArgumentError: `value` is neither a nonempty string nor a path object of text.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    require(isinstance(path, str) and path != "", name, value, requirement)


def read_text(path: Path, what: str) -> str:
    """Read a text file; errors name its purpose `what` and its path.

    Raises:
        InvalidArgumentError: The file cannot be read, or is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read {what} {path}: {error.strerror}; give the path of a readable file"
        ) from error
    return decoded(content, f"{what} {path}")


def decoded(content: bytes, what: str) -> str:
    """Decode UTF-8 bytes, without a byte order mark; errors name their source `what`.

    Raises:
        InvalidArgumentError: They are not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{what} is not valid UTF-8 (byte {error.start}); convert it to UTF-8 first"
        ) from error
