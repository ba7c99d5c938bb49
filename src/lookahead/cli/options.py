"""Commands with options that a settings class declares as its fields."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from lookahead.config import LookaheadConfig
from lookahead.errors import LookaheadError

SOURCE = "Prompt and model"
CONVERSATION = "Conversation"
NETWORK = "Network"
LIMITS = "Limits"
DRAFT = "Drafting (changes the number of steps, never the text)"
SAMPLING = "Sampling"
RUN = "Running"
OUTPUT = "Output"
PANELS = (SOURCE, CONVERSATION, NETWORK, LIMITS, DRAFT, SAMPLING, RUN, OUTPUT)
"""Panels of the help texts, in order."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

_SettingsT = TypeVar("_SettingsT", bound="Settings")


def _number(kind: type[Any], allowed: str = "", fits: Callable[[Any], bool] = lambda number: True) -> Any:
    """Make a parser of numbers that refuses other texts, and numbers out of range."""

    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
        if not fits(number):
            raise typer.BadParameter(f"{text} is out of range; it must be {allowed}")
        return number

    return parse


whole_number = _number(int)
positive_whole_number = _number(int, "at least 1", lambda number: number >= 1)
count = _number(int, "at least 0", lambda number: number >= 0)
seed = _number(int, "from 0 to 2**64 - 1", lambda number: 0 <= number < 2**64)
layers = _number(int, "at least 0, or -1 for all", lambda number: number >= -1)
port = _number(int, "from 0 to 65535", lambda number: 0 <= number < 2**16)
positive = _number(float, "above 0", lambda number: 0 < number < math.inf)
probability = _number(float, "above 0 and at most 1", lambda number: 0 < number <= 1)


def not_empty(text: str) -> str:
    """Refuse an empty text: a stop text would match at once, and an empty path is the current folder."""
    if not text:
        raise typer.BadParameter("'' is empty; give a text, or leave the option out")
    return text


def output_file(text: str) -> Path:
    """Path of a file to write. Standard output is refused, as files are resumed or replaced as a whole."""
    if text == "-":
        raise typer.BadParameter("'-' is not a file; give the name of a file")
    return Path(not_empty(text))


def dtype(text: str) -> str:
    """Return `text`, or raise an error if it is not in `DTYPES`."""
    if text not in DTYPES:
        raise typer.BadParameter(f"{text!r} is not a type; choose one of {', '.join(DTYPES)}")
    return text


_METAVARS: dict[Any, str] = {
    **dict.fromkeys((whole_number, positive_whole_number, count, seed, layers, port), "INTEGER"),
    **dict.fromkeys((positive, probability), "NUMBER"),
    dtype: "|".join(DTYPES),
}


def option(usage: str, panel: str, help: str, parser: Any = None, default: Any = None, label: str | bool = True) -> Any:
    """Declare a field that is an option.

    Args:
        usage: Names on the command line and, unless the parser has one, a placeholder for the value.
        panel: Panel of the help text.
        help: Help text.
        parser: Function that converts the text or raises an error; by default typer's own for the field's type.
        default: Value without the option; `...` if the option is required.
        label: Default in the help text; `True` for the value, `False` for none.
    """
    names = [word for word in usage.split() if word.startswith("-")]
    metavar = " ".join(usage.split()[len(names) :]) or _METAVARS.get(parser)
    declared = typer.Option(
        *names,
        help=help,
        parser=parser,
        metavar=metavar,
        show_default=label,
        rich_help_panel=panel,
        autocompletion=_completing(DTYPES) if parser is dtype else None,
    )
    return _field(declared, default)


def _completing(choices: Sequence[str] | None) -> Callable[[str], list[str]] | None:
    """Shell completion of a value from `choices`; of file names if there are none."""

    def matches(incomplete: str) -> list[str]:
        return [choice for choice in choices or () if choice.startswith(incomplete)]

    return None if choices is None else matches


def argument(name: str, help: str, default: Any = ...) -> Any:
    """Declare a field that is an argument, required unless it has a default."""
    return _field(typer.Argument(metavar=name, help=help), default)


def _field(declared: Any, default: Any) -> Any:
    metadata = {"option": declared}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Parsed options of a command. The field `config` has no option of its own; `of` makes it from several."""

    argv: Sequence[str] = ()  # arguments of the command line
    no_color: bool = option("--no-color", OUTPUT, "Print without colours.", default=False)

    @classmethod
    def of(cls: type[_SettingsT], options: Mapping[str, Any]) -> _SettingsT:
        """Make settings from option values; other fields have their default."""
        return cls(**{spec.name: options[spec.name] for spec in fields(cls) if spec.name in options})

    @classmethod
    def in_options(cls, message: str) -> str:
        """Replace argument names in a message of the library by option names."""
        options = {parameter.name: parameter for parameter in _parameters(cls) if _panel(parameter) >= 0}
        options.pop("model", None)  # the library's `model` is an object, not a name

        def option_name(match: re.Match[str]) -> str:
            name, value = match.groups()
            flag = "--" + name.replace("_", "-")
            if value is None:
                return flag if "_" in name else name  # names like `memory` also occur as plain words
            if value == "False":
                return f"no {flag}" if options[name].default is False else flag.replace("--", "--no-")
            return flag if value == "True" else f"{flag} {quote(value.strip(_QUOTES))}"

        return re.sub(rf"(?<![\w./-])({'|'.join(options)})(?:={_VALUE})?(?![\w./-])", option_name, message)


_QUOTES = "'\""
_VALUE = r"""('[^']*'|"[^"]*"|[\w.-]+)"""


class _WithoutTypes:
    """Mixin that removes `<bool>` after switches in help texts."""

    def get_params(self, context: Any) -> list[Any]:
        """Return all parameters, without placeholders for switches."""
        parameters: list[Any] = cast(Any, super()).get_params(context)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_WithoutTypes, TyperCommand):
    """A command."""


class Group(_WithoutTypes, TyperGroup):
    """A group of commands."""


def command(
    app: typer.Typer, settings: type[_SettingsT], name: str | None = None
) -> Callable[[Callable[[_SettingsT], int]], Callable[[_SettingsT], int]]:
    """Register a function that takes settings and returns an exit code as a command of `app`."""

    def register(function: Callable[[_SettingsT], int]) -> Callable[[_SettingsT], int]:
        def run(_context: typer.Context, **options: Any) -> int:
            try:
                return function(settings.of(options | {"argv": _context.obj}))
            except LookaheadError as error:
                error.args = (settings.in_options(str(error)),)
                raise

        context = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = sorted(_parameters(settings), key=_panel)
        # Declared for the help only: the error handler reads it from `argv`, as parsing may fail.
        debug = typer.Option("--debug", help="Print the traceback of an error.", rich_help_panel=OUTPUT)
        parameters.append(_parameter("debug", bool, debug, False))
        cast(Any, run).__signature__ = inspect.Signature([context, *parameters])
        run.__doc__ = function.__doc__
        app.command(name or function.__name__, cls=Command)(run)
        return function

    return register


def _panel(parameter: inspect.Parameter) -> int:
    """Index of a parameter's panel in `PANELS`; -1 for arguments."""
    panel = parameter.annotation.__metadata__[0].rich_help_panel
    return PANELS.index(panel) if panel else -1


def _parameters(settings: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield a typer parameter for each field; in place of `config` one for each field of `LookaheadConfig`."""
    types = get_type_hints(settings)
    for spec in fields(settings):
        if "option" in spec.metadata:
            default = inspect.Parameter.empty if spec.default is MISSING else spec.default
            yield _parameter(spec.name, types[spec.name], spec.metadata["option"], default)
        elif types[spec.name] is LookaheadConfig:
            yield from _config_parameters()


def _config_parameters() -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field of `LookaheadConfig` with a help text; the class checks their values."""
    types = get_type_hints(LookaheadConfig)
    for spec in fields(LookaheadConfig):
        about = spec.metadata
        if "help" not in about:
            continue
        kind = next((kind for kind in (bool, int) if kind in (types[spec.name], *get_args(types[spec.name]))), str)
        switch = spec.default is False
        flag = "--" + spec.name.replace("_", "-")
        if kind is bool and not switch:
            flag += flag.replace("--", "/--no-")
        declared = typer.Option(
            *(name for name in (flag, about.get("short")) if name),
            help=about["help"],
            metavar="INTEGER" if kind is int else about.get("metavar"),
            parser=whole_number if kind is int else None,
            show_default=switch or about.get("label") or str(about.get("chosen", spec.default)),
            rich_help_panel=RUN if about.get("runs") else DRAFT,
            autocompletion=_completing(about.get("choices")),
        )
        yield _parameter(spec.name, kind if switch else kind | None, declared, False if switch else None)


def _parameter(name: str, kind: Any, declared: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )
