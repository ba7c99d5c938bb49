"""Prompt, model, adapters and keys that the command line names, checked before torch is imported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from lookahead.cli.settings import ModelSettings, PromptSource


def read_prompt(settings: PromptSource, default: str = "") -> str:
    """The prompt from its one source: the argument, a file, or standard input.

    Args:
        default: The prompt where none is named, and standard input holds nothing, as in a scheduled job.

    Raises:
        InvalidArgumentError: There is none, or it is empty.
    """
    prompt, file, source = settings.prompt, settings.file, "standard input"
    if prompt is not None and file is not None:
        raise InvalidArgumentError(
            f"two prompts: the argument {prompt[:30]!r} and --file {file}; give only one of them"
        )
    if "-" in (prompt, str(file)):
        text = _read_stdin()
    elif file is not None:
        text, source = read_text(file, "the prompt", "--file"), f"--file {file}"
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
    """Whether standard input is there, and is a keyboard or not."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty() == typed


def read_text(path: Path, what: str, option: str) -> str:
    """The text of the file that `option` names; `what` says in errors what it was to be."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {what} from {option} {path}: {error.strerror}") from error
    return decoded(content, f"{what} from {option} {path}")


def decoded(content: bytes, what: str) -> str:
    """UTF-8 bytes as text; `what` says in errors what they were to be."""
    try:
        return content.decode("utf-8-sig")  # a byte order mark says how to read the file; it is no part of the text
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{what} is not valid UTF-8 (byte {error.start}); convert it to UTF-8 first"
        ) from error


def checked(text: str, what: str) -> str:
    """Refuse text that holds bytes which the locale could not decode, as a command line or a keyboard may."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{what} is not valid UTF-8; write it in UTF-8") from error
    return text


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        return ""
    return decoded(sys.stdin.buffer.read(), "the prompt from standard input")


SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of weights, or of the list of their parts, as transformers looks for them."""

_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(:[^:]+)?")


@dataclass(frozen=True)
class FoundModel:
    """The model that `--model` names, on this machine.

    Attributes:
        path: Its folder, or the GGUF file.
        origin: `NAME@COMMIT` of a model of the Hub.
    """

    path: Path
    origin: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.path.suffix.lower() == ".gguf" and self.path.is_file()


def find_model(settings: ModelSettings, notes: Console) -> FoundModel:
    """Find the model that the settings name: a folder or a GGUF file or, if there is none, a model of the Hub, which is
    downloaded; the demonstration model if they name none.

    Raises:
        InvalidArgumentError: There can be no model; the message says what is missing.
    """
    name = settings.model
    path = demo_model_path() if name is None else Path(name)
    is_here = path.exists()
    if name is not None and not is_here and _HUB_NAME.fullmatch(name) and not _is_file_name(name):
        from lookahead.cli.hub import find_on_hub  # late, as the Hub's library takes its time to import

        return find_on_hub(name, settings.revision, settings.trust_remote_code, settings.allow_pickle, notes)
    if not is_here:
        what = ("file", "GGUF file") if path.suffix.lower() == ".gguf" else ("folder", "model folder")
        raise InvalidArgumentError(
            f"--model {path}: no such {what[0]}; give the path of a local {what[1]}, or a name of the Hub, such as "
            "Qwen/Qwen3-0.6B"
        )
    if settings.revision is not None:
        raise InvalidArgumentError(
            f"--revision {settings.revision} is about models of the Hub, but --model {path} is on this machine"
        )
    found = FoundModel(path)
    if not found.is_gguf:
        _check_folder(path, settings.allow_pickle)
    return found


def _is_file_name(name: str) -> bool:
    """Whether a name is that of a GGUF file rather than of a repository with such files."""
    return ":" not in name and name.lower().endswith(".gguf")


def _check_folder(path: Path, pickles: bool) -> None:
    if not path.is_dir():
        raise InvalidArgumentError(
            f"--model {path}: not a folder; give the folder that holds the model's config.json, or a file with the "
            "ending .gguf"
        )
    if not (path / "config.json").is_file():
        raise InvalidArgumentError(f"--model {path}: not a model folder, it has no config.json")
    try:
        json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--model {path}: its config.json is not valid JSON: {error}") from error
    weights_among([name for name in (*SAFE, *PICKLED) if (path / name).is_file()], pickles, str(path))


def weights_among(names: Collection[str], pickles: bool, model: str) -> str | None:
    """The name of the weights, or of the list of their parts; `None` if there are none.

    Raises:
        InvalidArgumentError: They are pickles, and these are not allowed.
    """
    found = next((name for name in (*SAFE, *PICKLED) if name in names), None)
    if found in PICKLED and not pickles:
        raise InvalidArgumentError(
            f"--model {model}: its weights are pickles ({found}), a format that can run code as it is read; take a "
            "model with safetensors, or load them all the same with --allow-pickle"
        )
    return found


def adapter_folders(given: Sequence[str] | None) -> dict[str, Path]:
    """The folders of LoRA adapters, by the names that `NAME=PATH` gives them.

    Raises:
        InvalidArgumentError: There is no adapter in one, or two have one name.
    """
    found: dict[str, Path] = {}
    for text in given or ():
        name, separator, path = text.partition("=")
        if not (name and separator and path):
            raise InvalidArgumentError(f"--lora {text}: give NAME=PATH, the name that clients ask for and the folder")
        if name in found:
            raise InvalidArgumentError(f"--lora {text}: there is another adapter of this name; choose another one")
        if not (Path(path) / "adapter_config.json").is_file():
            raise InvalidArgumentError(
                f"--lora {text}: {path} is no folder with an adapter_config.json, as peft saves it"
            )
        found[name] = Path(path)
    return found


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """The keys in a file, one a line, beside comments that begin with `#`; none if there is no file.

    Raises:
        InvalidArgumentError: It cannot be read, holds no key, or one that no header can carry.
    """
    if path is None:
        return ()
    lines = [line.strip() for line in read_text(path, "the keys", "--api-key-file").splitlines()]
    for number, line in enumerate(lines, 1):
        if line[:1] != "#" and not (line.isascii() and line.isprintable()):
            raise InvalidArgumentError(
                f"--api-key-file {path}: line {number} has characters that cannot be sent in a header; use letters, "
                "digits and marks of ASCII"
            )
    keys = tuple(line for line in lines if line and line[0] != "#")
    if not keys:
        raise InvalidArgumentError(f"--api-key-file {path}: holds no key; write one a line")
    return keys
