"""Local files of the model that `--model` names: a folder, a GGUF file, or files of the Hub in its cache."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rich.console import Console
from rich.prompt import IntPrompt

from lookahead.backends.mlx import is_mlx_folder
from lookahead.cli.terminal import spinner, stdin_is
from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError

if TYPE_CHECKING:
    from lookahead.cli.hub_repository import Repository

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""File names of weights, or of the index of their parts, in the order of transformers."""

_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(:[^:]+)?")

_BESIDE_WEIGHTS = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Suffixes of configurations, tokenizers and chat templates."""

_PART = re.compile(r"-(\d{5})(-of-\d{5})(?=\.gguf$)", re.IGNORECASE)
"""Part number in the file name of a split GGUF model."""

_LISTED = 12
"""Maximum number of file names in an error."""


@dataclass(frozen=True)
class FoundModel:
    """Local files of a model.

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


def find_model(name: str | None, revision: str | None, code: bool, pickles: bool, notes: Console) -> FoundModel:
    """Find a local folder, else a local GGUF file, else a model of the Hub, whose missing files are downloaded.

    Args:
        name: Path, `OWNER/REPOSITORY`, or `OWNER/REPOSITORY:FILE`; by default the demonstration model.
        revision: Branch, tag or commit on the Hub; the main branch if not given.
        code: Whether to download the model's Python modules.
        pickles: Whether weights may be pickles.
        notes: Console for progress, and for a choice among GGUF files.

    Raises:
        InvalidArgumentError: The model does not exist or cannot be downloaded, or a file is missing.
    """
    path = demo_model_path() if name is None else Path(name)
    named_gguf = path.suffix.lower() == ".gguf"
    if not path.exists():
        if name is not None and _HUB_NAME.fullmatch(name) and (":" in name or not named_gguf):
            return _find_on_hub(name, revision, code, pickles, notes)
        what = ("file", "GGUF file") if named_gguf else ("folder", "model folder")
        raise InvalidArgumentError(
            f"--model {path}: no such {what[0]}; give the path of a local {what[1]}, or a name of the Hub, such as "
            "Qwen/Qwen3-0.6B"
        )
    if revision is not None:
        raise InvalidArgumentError(
            f"--revision {revision} applies to models of the Hub only, but --model {path} is a local path; leave it out"
        )
    model = FoundModel(path)
    if not model.is_gguf:
        _check_folder(path, pickles)
    return model


def _check_folder(path: Path, pickles: bool) -> None:
    if not path.is_dir():
        raise InvalidArgumentError(
            f"--model {path}: not a folder; give the folder that holds the model's config.json, or a file with the "
            "ending .gguf"
        )
    if not (path / "config.json").is_file():
        raise InvalidArgumentError(f"--model {path}: it has no config.json; give the folder that holds the model's")
    try:
        json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--model {path}: its config.json is not valid JSON: {error}") from error
    _weights_among([file.name for file in path.iterdir() if file.is_file()], pickles, str(path))


def _weights_among(names: Collection[str], pickles: bool, model: str) -> str | None:
    """File name of the weights, or of the index of their parts, if there are any. Pickles may be refused."""
    weights = next((name for name in (*SAFE, *PICKLED) if name in names), None)
    if weights in PICKLED and not pickles:
        raise InvalidArgumentError(
            f"--model {model}: its weights are pickles ({weights}), a format that can run code when it is read; use a "
            "model with safetensors, or allow it with --allow-pickle"
        )
    return weights


def _find_on_hub(name: str, revision: str | None, code: bool, pickles: bool, notes: Console) -> FoundModel:
    from lookahead.cli.hub_repository import Repository, quiet_hub  # late, as the Hub's library is slow to import

    repo, _, file = name.partition(":")
    with quiet_hub():
        with spinner(notes, f"looking for {name}"):
            repository = Repository(repo, revision)
            only_gguf = not {*SAFE, *PICKLED}.intersection(repository.names) and _gguf_models(repository.names)
            names = [] if file or only_gguf else _transformers_files(repository, code, pickles)
        if names:
            path = repository.get(names)
        else:
            file_name = _chosen_gguf(repository, file, notes)
            parts = [other for other in repository.names if _PART.sub(r"\2", other) == _PART.sub(r"\2", file_name)]
            path = repository.get(parts) / file_name
    return FoundModel(path, f"{name}@{repository.commit}")


def _transformers_files(repository: Repository, code: bool, pickles: bool) -> list[str]:
    names = repository.names
    weights = _weights_among(names, pickles, repository.repo)
    if weights is None or "config.json" not in names:
        raise repository.lacks("config.json" if weights else "weights that transformers loads (model.safetensors)")
    beside = [name for name in names if "/" not in name and PurePosixPath(name).suffix in _BESIDE_WEIGHTS]
    templates = [name for name in names if name.startswith("additional_chat_templates/")]
    modules = [name for name in names if name.endswith(".py")] if code else []
    parts = json.loads(repository.read(weights))["weight_map"].values() if weights.endswith(".json") else ()
    return sorted({weights, *beside, *templates, *modules, *parts})


def _gguf_models(names: Sequence[str]) -> list[str]:
    """GGUF files with a model, not image projectors or importance matrices; of split models the first part."""
    models = [name for name in names if name.lower().endswith(".gguf")]
    models = [name for name in models if not PurePosixPath(name).name.lower().startswith(("mmproj", "imatrix"))]
    return sorted(name for name in models if (part := _PART.search(name)) is None or int(part[1]) == 1)


def _chosen_gguf(repository: Repository, pattern: str, notes: Console) -> str:
    """GGUF file that matches `pattern`: its whole name, else the end of its name, else a part of it.

    Several matches are listed for a choice on a terminal. An empty `pattern` matches all files.
    """
    if pattern in repository.names and pattern.lower().endswith(".gguf"):
        return pattern
    models = _gguf_models(repository.names)
    ending = [name for name in models if _PART.sub("", name)[: -len(".gguf")].lower().endswith(pattern.lower())]
    matches = ending if pattern and ending else [name for name in models if pattern.lower() in name.lower()]
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1 and notes.is_terminal and stdin_is(typed=True):
        for number, name in enumerate(matches, 1):
            notes.print(f"{number:>3}  {name}")
        numbers = [str(number) for number in range(1, len(matches) + 1)]
        with suppress(EOFError):  # Ctrl-D
            return matches[IntPrompt.ask("number of the file", console=notes, choices=numbers, show_choices=False) - 1]
    if not models:
        raise repository.lacks("GGUF file")
    listed = ", ".join((matches or models)[:_LISTED]) + (", …" if len(matches or models) > _LISTED else "")
    problem = f"several files match '{pattern}'" if matches else f"no GGUF file matches '{pattern}'"
    if not pattern:
        problem = "several GGUF files"
    raise InvalidArgumentError(f"--model {repository.repo}: {problem}; name one as {repository.repo}:FILE ({listed})")
