"""What a model folder must hold, checked by its files alone: no torch, no transformers. Or it is a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError

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
