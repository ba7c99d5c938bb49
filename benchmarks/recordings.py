"""Recorded prompts and answers, as token ids of a real tokenizer."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lookahead.errors import InvalidArgumentError

Encode = Callable[[str], list[int]]

_FILE = "tekken_240911.json"
_HOW = "install the extra `bench` (mistral-common and tiktoken), or name a tokenizer with --tokenizer"


@dataclass(frozen=True)
class Recording:
    """A prompt, what a model answered, and what could be expected beforehand, in tokens."""

    id: str
    prompt: list[int]
    answer: list[int]
    expected: list[int]


def tokenizer_of(path: Path | None) -> tuple[str, Encode]:
    """A tokenizer's name, and what makes tokens of a text, without special ones.

    Args:
        path: A tekken file, or the folder of a tokenizer of transformers; the tekken file that mistral-common ships if
            not given.

    Raises:
        InvalidArgumentError: There is none.
    """
    if path is not None and path.is_dir():
        from transformers import AutoTokenizer  # late: it takes seconds

        tokenizer = AutoTokenizer.from_pretrained(path)
        return path.name, lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)
    path = _shipped() if path is None else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return path.name, _tekken(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{path} is no tekken file ({error}), nor the folder of a tokenizer") from error


def _shipped() -> Path:
    package = find_spec("mistral_common")
    if package is None or package.origin is None:
        raise InvalidArgumentError(f"mistral-common is not installed, which ships the tokenizer; {_HOW}")
    return Path(package.origin).parent / "data" / _FILE


def _tekken(content: dict[str, Any]) -> Encode:
    try:
        tiktoken = import_module("tiktoken")
    except ImportError as error:
        raise InvalidArgumentError(f"tiktoken is not installed; {_HOW}") from error
    config = content["config"]
    special = int(config["default_num_special_tokens"])
    count = int(config["default_vocab_size"]) - special
    ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in content["vocab"][:count]}
    encoding = tiktoken.Encoding("tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    return lambda text: [token + special for token in encoding.encode_ordinary(text)]


def read_recordings(path: Path, encode: Encode, limit: int | None = None) -> list[Recording]:
    """The recordings of a file of JSON lines; of an edit, which has `instruction` and `input`, the input is expected.

    Raises:
        InvalidArgumentError: The file cannot be read, or a line holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the recordings {path}: {error}") from error
    return [_recording(path, number, line, encode) for number, line in enumerate(lines[:limit], start=1)]


def _recording(path: Path, number: int, line: str, encode: Encode) -> Recording:
    try:
        row = json.loads(line)
        edit = "input" in row
        prompt = f"{row['instruction']}\n\n{row['input']}\n\n" if edit else row["prompt"]
        texts: Sequence[str] = (prompt, row["output"], row["input"] if edit else "")
        prompt_ids, answer, expected = map(encode, texts)
        name = str(row["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path}, line {number}: a recording is an object with `id`, `output`, and `prompt` or `instruction` and "
            f"`input` ({type(error).__name__}: {error})"
        ) from error
    if not prompt_ids or not answer:
        raise InvalidArgumentError(f"{path}, line {number}: prompt and output need at least a token each")
    return Recording(name, prompt_ids, answer, expected)
