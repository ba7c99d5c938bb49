"""Prompts, adapters and API keys of the command line, checked before torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lookahead.errors import InvalidArgumentError
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


def adapter_folders(options: Sequence[str] | None) -> dict[str, Path]:
    """Folders of LoRA adapters by name, from texts `NAME=PATH`.

    Raises:
        InvalidArgumentError: A text is malformed, a name occurs twice, or a folder has no adapter.
    """
    folders: dict[str, Path] = {}
    for text in options or ():
        name, _, path = text.partition("=")
        if not (name and path):
            raise InvalidArgumentError(f"--lora {text}: give NAME=PATH, the name for clients and the folder")
        if name in folders:
            raise InvalidArgumentError(f"--lora {text}: another adapter has this name; choose another name")
        if not (Path(path) / "adapter_config.json").is_file():
            raise InvalidArgumentError(
                f"--lora {text}: {path} is not a folder with an adapter_config.json, as peft saves it"
            )
        folders[name] = Path(path)
    return folders


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """Read API keys from a file, one per line; lines that begin with `#` are comments. No keys without a file.

    Raises:
        InvalidArgumentError: The file cannot be read, has no key, or has a key that is not valid in an HTTP header.
    """
    if path is None:
        return ()
    lines = [line.strip() for line in read_text(path, "the keys from --api-key-file").splitlines()]
    for number, line in enumerate(lines, 1):
        if line[:1] != "#" and not (line.isascii() and line.isprintable()):
            raise InvalidArgumentError(
                f"--api-key-file {path}: line {number} has characters that cannot be sent in a header; use printable "
                "ASCII characters"
            )
    keys = tuple(line for line in lines if line and line[0] != "#")
    if not keys:
        raise InvalidArgumentError(f"--api-key-file {path}: contains no key; write one per line")
    return keys
