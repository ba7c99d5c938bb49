"""What the command line names, checked before torch is imported: the prompt, and the model's folder or GGUF file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from lookahead.cli.loading import LoadedModel
    from lookahead.cli.settings import PromptSource


_STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as the model's input.

    Attributes:
        text: The prompt, exactly as it was given.
        input_ids: Its tokens on the model's device. Shape [1, S].
        max_new_tokens: Most tokens to generate after it, within the model's context.
    """

    text: str
    input_ids: torch.Tensor
    max_new_tokens: int


def read_prompt(settings: PromptSource) -> str:
    """The prompt from its one source: the argument, a file, or standard input."""
    text, source = _given_prompt(settings)
    if text is None and stdin_is_piped():
        text, source = _read_stdin(), "standard input"
    if text is None:
        raise InvalidArgumentError(
            "no prompt: give it as an argument, as in lookahead generate 'def add(a, b):', with --file PATH, or pipe "
            "it in"
        )
    return _not_empty(text, source)


def read_prompt_or(settings: PromptSource, default: str) -> tuple[str, bool]:
    """The prompt, or `default` when there is none; and whether it is the default.

    Standard input that was not asked for and holds nothing, as in a scheduled job, counts as no prompt.
    """
    text, source = _given_prompt(settings)
    if text is not None:
        return _not_empty(text, source), False
    text = _read_stdin() if stdin_is_piped() else ""
    return text or default, not text


def stdin_is_piped() -> bool:
    """Whether standard input is there and is not a keyboard."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


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


def encode_prompt(loaded: LoadedModel, text: str, max_new_tokens: int, notes: Console) -> Prompt:
    """Tokenize the prompt and clip `max_new_tokens` to what the model's context has left."""
    encoded = loaded.tokenizer(text, return_tensors="pt", verbose=False)
    input_ids: torch.Tensor = encoded["input_ids"].to(loaded.model.device)  # [1, S]
    length = input_ids.shape[1]
    if length == 0:
        raise InvalidArgumentError("the prompt has no tokens for this model's tokenizer; give a longer one")
    room = None if loaded.context_length is None else loaded.context_length - length
    if room is None or room >= max_new_tokens:
        return Prompt(text, input_ids, max_new_tokens)
    if room < 1:
        raise InvalidArgumentError(
            f"the prompt has {length} tokens, but the model's context is {loaded.context_length}: "
            "shorten the prompt so that at least one more token fits"
        )
    notes.print(
        f"note: --max-new-tokens {max_new_tokens} clipped to {room}: the prompt has {length} tokens "
        f"and the model's context is {loaded.context_length}"
    )
    return Prompt(text, input_ids, room)


def _given_prompt(settings: PromptSource) -> tuple[str | None, str]:
    """The prompt from the argument or the file, `None` when neither was given; and where it is from."""
    prompt, file = settings.prompt, settings.file
    if prompt is not None and file is not None:
        raise InvalidArgumentError(
            f"two prompts: the argument {_shortened(prompt)} and --file {file}; give only one of them"
        )
    if _STDIN in (prompt, str(file)):
        return _read_stdin(), "standard input"
    if file is not None:
        return read_text(file, "the prompt", "--file"), f"--file {file}"
    return None if prompt is None else checked(prompt, "the prompt argument"), "the argument"


def _not_empty(text: str, source: str) -> str:
    if not text:
        raise InvalidArgumentError(f"the prompt from {source} is empty; give at least one character to continue from")
    return text


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        return ""
    return decoded(sys.stdin.buffer.read(), "the prompt from standard input")


def _shortened(text: str, most: int = 30) -> str:
    return repr(text if len(text) <= most else text[: most - 1] + "…")


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.*",
    "*.tiktoken",
    "spiece.model",
)


def model_folder(path: Path | None) -> Path:
    """The folder or the GGUF file that `--model` names, the folder of the demonstration model for `None`.

    Raises:
        InvalidArgumentError: There can be no model; the message says what is missing.
    """
    return demo_model_path() if path is None else check_model_path(path)


def check_model_path(path: Path) -> Path:
    """Refuse a path that cannot hold a model, and say what is missing."""
    if not path.exists():
        raise InvalidArgumentError(
            f"--model {path}: no such folder; give the path of a local model folder (nothing is downloaded)"
        )
    if is_gguf(path):
        return path
    if not path.is_dir():
        raise InvalidArgumentError(
            f"--model {path}: not a folder; give the folder that holds the model's config.json, or a file with the "
            "ending .gguf"
        )
    for kind, patterns in (
        ("config.json", ("config.json",)),
        ("weights (*.safetensors or pytorch_model*.bin)", _WEIGHTS),
        ("tokenizer files (tokenizer.json or tokenizer.model)", _TOKENIZERS),
    ):
        if not any(any(path.glob(pattern)) for pattern in patterns):
            raise InvalidArgumentError(f"--model {path}: not a model folder, it has no {kind}")
    _check_config(path)
    return path


def is_gguf(path: Path | None) -> bool:
    """Whether `--model` names a GGUF file."""
    return path is not None and path.suffix.lower() == ".gguf" and path.is_file()


def _check_config(path: Path) -> None:
    """Refuse a `config.json` that no model type could be read from."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"--model {path}: cannot read its config.json: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InvalidArgumentError(
            f"--model {path}: its config.json is not valid JSON ({error}); copy the model again"
        ) from error
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"--model {path}: its config.json holds no JSON object; copy the model again")
