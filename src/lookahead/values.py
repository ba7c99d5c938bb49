"""Checks of what callers give. A value that cannot work is refused with its name, and with what to give instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from operator import index
from typing import Any, cast

from lookahead.errors import InvalidArgumentError

_LONGEST = 100
"""Characters of a value in a message; of a longer one its type is told."""


def shown(value: object) -> str:
    """A value on one short line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever an object of the user's own raises
        text = ""
    return text if 0 < len(text) <= _LONGEST else f"<{type(value).__name__}>"


def require(holds: bool, name: str, value: object, requirement: str) -> None:
    """Refuse a value unless something holds of it.

    Raises:
        InvalidArgumentError: It does not.
    """
    if not holds:
        raise InvalidArgumentError(f"{name}={shown(value)} {requirement}")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None, meaning: str = "") -> int:
    """A whole number of any type but bool: of Python, numpy or a tensor.

    Raises:
        InvalidArgumentError: It is none, below `least`, or above `most`; `meaning` says what it stands for.
    """
    meaning = f" ({meaning})" if meaning else ""
    try:
        number = None if _is_bool(value) else index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise InvalidArgumentError(f"{name}={shown(value)} must be a whole number{meaning}")
    lower = None if least is None else f"at least {least}"
    upper = None if most is None else f"at most {most}"
    too_large = most is not None and number > most
    if too_large or (least is not None and number < least):
        allowed = " and ".join(bound for bound in (lower, upper) if bound is not None)
        advice = ": choose a smaller one" if too_large else ""
        raise InvalidArgumentError(f"{name}={number} is out of range; it must be {allowed}{meaning}{advice}")
    return number


def finite_number(name: str, value: Any, requirement: str) -> float:
    """A number that is no bool, and neither infinite nor nan.

    Raises:
        InvalidArgumentError: It is none.
    """
    try:
        number = float("nan") if _is_bool(value) or isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = float("nan")
    require(number - number == 0, name, value, requirement)
    return number


def yes_or_no(name: str, value: object) -> bool:
    """`True` or `False`.

    Raises:
        InvalidArgumentError: It is something else.
    """
    require(isinstance(value, bool), name, value, "must be True or False")
    return bool(value)


def check_callable(name: str, value: object, arguments: int, requirement: str) -> None:
    """Refuse what cannot be called with so many arguments, as far as it says what it takes.

    Raises:
        InvalidArgumentError: It is something else.
    """
    require(callable(value), name, value, requirement)
    try:
        inspect.signature(cast(Callable[..., Any], value)).bind(*[None] * arguments)
    except ValueError:  # it does not say
        return
    except TypeError as error:
        raise InvalidArgumentError(f"{name}={shown(value)} {requirement}: {error}") from error


def check_path(name: str, value: object, requirement: str) -> None:
    """Refuse what is no path of text.

    Raises:
        InvalidArgumentError: It is something else.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    require(isinstance(path, str) and path != "", name, value, requirement)
