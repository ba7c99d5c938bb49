"""Prompt, model, adapters and API keys of the command line, checked before torch is imported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.backends.mlx.folder import is_mlx_folder
from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from lookahead.cli.settings import ModelSettings, PromptSource


def read_prompt(settings: PromptSource, default: str = "") -> str:
    """Read the prompt from the argument, a file, or standard input.

    Args:
        settings: Settings with the argument and the file.
        default: Prompt if none is given and standard input is empty, as in a scheduled job.

    Raises:
        InvalidArgumentError: No prompt, an empty one, or two are given.
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
    """Whether standard input is open, and is a terminal (`typed`) or not."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty() == typed


def read_text(path: Path, what: str, option: str) -> str:
    """Read a UTF-8 file; errors name its purpose `what` and its `option`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {what} from {option} {path}: {error.strerror}") from error
    return decoded(content, f"{what} from {option} {path}")


def decoded(content: bytes, what: str) -> str:
    """Decode UTF-8 bytes; errors name their source `what`."""
    try:
        return content.decode("utf-8-sig")  # without the byte order mark, which is not part of the text
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{what} is not valid UTF-8 (byte {error.start}); convert it to UTF-8 first"
        ) from error


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


SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""File names of weights, or of the index of their parts, in the order of transformers."""

_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(:[^:]+)?")


@dataclass(frozen=True)
class FoundModel:
    """Local files of the model that `--model` names.

    Attributes:
        path: Model folder, or GGUF file.
        origin: `NAME@COMMIT` of a model of the Hub.
    """

    path: Path
    origin: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.path.suffix.lower() == ".gguf" and self.path.is_file()

    @property
    def is_mlx(self) -> bool:
        """Whether it is a folder that mlx-lm runs."""
        return is_mlx_folder(self.path)


def find_model(settings: ModelSettings, notes: Console) -> FoundModel:
    """Find the model that the settings name.

    A name is a local folder, else a local GGUF file, else a model of the Hub, which is downloaded. Without a name, the
    demonstration model is used.

    Raises:
        InvalidArgumentError: The model does not exist, or a file is missing.
    """
    name = settings.model
    path = demo_model_path() if name is None else Path(name)
    is_here = path.exists()
    if name is not None and not is_here and _HUB_NAME.fullmatch(name) and not _is_file_name(name):
        from lookahead.cli.hub import find_on_hub  # late, as the Hub's library is slow to import

        return find_on_hub(name, settings.revision, settings.trust_remote_code, settings.allow_pickle, notes)
    if not is_here:
        what = ("file", "GGUF file") if path.suffix.lower() == ".gguf" else ("folder", "model folder")
        raise InvalidArgumentError(
            f"--model {path}: no such {what[0]}; give the path of a local {what[1]}, or a name of the Hub, such as "
            "Qwen/Qwen3-0.6B"
        )
    if settings.revision is not None:
        raise InvalidArgumentError(
            f"--revision {settings.revision} applies to models of the Hub only, but --model {path} is a local path"
        )
    found = FoundModel(path)
    if not found.is_gguf:
        _check_folder(path, settings.allow_pickle)
    return found


def _is_file_name(name: str) -> bool:
    """Whether a name is a path of a GGUF file rather than a repository."""
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
    """File name of the weights, or of the index of their parts; `None` if there are none.

    Raises:
        InvalidArgumentError: The only weights are pickles, and `pickles` is not set.
    """
    found = next((name for name in (*SAFE, *PICKLED) if name in names), None)
    if found in PICKLED and not pickles:
        raise InvalidArgumentError(
            f"--model {model}: its weights are pickles ({found}), a format that can run code when it is read; use a "
            "model with safetensors, or allow it with --allow-pickle"
        )
    return found


def adapter_folders(options: Sequence[str] | None) -> dict[str, Path]:
    """Folders of LoRA adapters by name, from texts `NAME=PATH`.

    Raises:
        InvalidArgumentError: A text is malformed, a name occurs twice, or a folder has no adapter.
    """
    folders: dict[str, Path] = {}
    for text in options or ():
        name, separator, path = text.partition("=")
        if not (name and separator and path):
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
    lines = [line.strip() for line in read_text(path, "the keys", "--api-key-file").splitlines()]
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
