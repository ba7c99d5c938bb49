"""Prompts from arguments, files and pipes; output of text and figures on terminals, on pipes, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.spinner import Spinner
from rich.style import Style

from lookahead.errors import InvalidArgumentError
from lookahead.text import TextBuilder, Tokenizer
from lookahead.values import decoded, read_text


def read_prompt(prompt: str | None, file: Path | None, default: str = "") -> str:
    """Read the prompt from the argument, a file, or standard input (`-`).

    `default` applies if none is given and standard input is empty, as in a scheduled job.

    Raises:
        InvalidArgumentError: No prompt, an empty one, or two are given.
    """
    if prompt is not None and file is not None:
        raise InvalidArgumentError(
            f"two prompts: the argument {prompt[:30]!r} and --file {file}; give only one of them"
        )
    source = "standard input"
    if "-" in (prompt, str(file)):
        text = _read_stdin()
    elif file is not None:
        text, source = read_text(file, "the prompt from --file"), f"--file {file}"
    elif prompt is not None:
        text, source = checked(prompt, "the prompt argument"), "the argument"
    elif stdin_is(typed=False):
        text = _read_stdin() or default
    elif default:
        text = default
    else:
        raise InvalidArgumentError(
            "no prompt: give it as an argument, as in lookahead generate 'def add(a, b):', with --file PATH, or pipe "
            "it in"
        )
    if not text:
        raise InvalidArgumentError(f"the prompt from {source} is empty; give at least one character to continue from")
    return text


def stdin_is(*, typed: bool) -> bool:
    """Whether standard input is open, and is a terminal (`typed`) or not."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty() == typed


def checked(text: str, what: str) -> str:
    """Return `text`, or raise an error that names `what` if it has bytes that the locale could not decode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{what} is not valid UTF-8; write it in UTF-8") from error
    return text


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        return ""
    return decoded(sys.stdin.buffer.read(), "the prompt from standard input")


STEP_STYLES = (Style(color="cyan"), Style(color="magenta"))
"""Styles of alternate steps, readable on dark and light backgrounds."""

_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Visible replacements, so that a model cannot send escape sequences to the terminal."""


def visible(text: str) -> str:
    """Replace control characters by visible symbols."""
    return text.translate(_CONTROL_PICTURES)


class _Console(Console):
    """Console that raises `BrokenPipeError`, where rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the BrokenPipeError


class Consoles:
    """Consoles for results (`out`, standard output) and for notes about them (`notes`, standard error)."""

    def __init__(self, *, no_color: bool) -> None:
        self.out, self.notes = _console(no_color), _console(no_color, stderr=True)


def _console(no_color: bool, stderr: bool = False) -> Console:
    terminal = (sys.stderr if stderr else sys.stdout).isatty()  # rich would also read environment variables
    return _Console(
        stderr=stderr,
        force_terminal=terminal,
        color_system="auto" if terminal and not no_color else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


def measuring_progress(notes: Console, auto_refresh: bool = False) -> Progress:
    """Progress bar, on a terminal only.

    By default it is redrawn only on updates with `refresh=True`: a redrawing thread would add CPU time to measurements.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=notes, auto_refresh=auto_refresh, transient=True, disable=not notes.is_terminal)


def spinner(notes: Console, message: str) -> Live:
    """Spinner with a message, on a terminal only; shown at once, where `Console.status` waits for its thread."""
    return Live(Spinner("dots", text=message), console=notes, transient=True)


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of generated tokens, without special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def counts_line(tokens: int, steps: int, seconds: float) -> str:
    """Line with tokens, steps, step compression and tokens per second."""
    compression, speed = tokens / steps if steps else 0.0, tokens / seconds if seconds else 0.0
    return f"{tokens} tokens in {steps} steps, step compression {compression:.2f}, {speed:.1f} tokens/s"


class StepPrinter:
    """Printer of generated tokens as they arrive, with one colour per step."""

    def __init__(self, out: Console, tokenizer: Tokenizer) -> None:
        self._out, self._text = out, TextBuilder(tokenizer)
        self._steps = 0
        self._last = "\n"

    def step(self, tokens: Sequence[int]) -> None:
        """Print the text of one more step, up to the last complete character."""
        for token in tokens:
            self._text.add(token)
        self._show(self._text.take())

    def finish(self) -> None:
        """Print the rest, and end the line."""
        self._show(self._text.finish())
        if self._last != "\n":
            self._show("\n")

    def _show(self, text: str) -> None:
        if text and self._out.is_terminal:
            segment = Segment(visible(text), STEP_STYLES[self._steps % len(STEP_STYLES)])
            # A bare segment: rich would wrap words and expand tabs in text that begins mid-line.
            self._out.print(Segments([segment]), end="", soft_wrap=True)
        elif text:
            self._out.file.write(text)
            self._out.file.flush()
        self._last = text[-1:] or self._last
        self._steps += 1


def print_json(out: Console, result: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, in ASCII for any encoding of the terminal."""
    out.file.write(json.dumps(result) + "\n")
    out.file.flush()
