"""Models of the Hugging Face Hub: choice of their files, and download into the Hub's cache."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePosixPath

from rich.console import Console
from rich.prompt import IntPrompt

from lookahead.cli.hub_repository import Repository, quiet_hub
from lookahead.cli.inputs import PICKLED, SAFE, FoundModel, stdin_is, weights_among
from lookahead.cli.rendering import spinner
from lookahead.errors import InvalidArgumentError

_BESIDE_WEIGHTS = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Suffixes of configurations, tokenizers and chat templates."""

_PART = re.compile(r"-(\d{5})(-of-\d{5})(?=\.gguf$)", re.IGNORECASE)
"""Part number in the file name of a split GGUF model."""

_LISTED = 12
"""Maximum number of file names in an error."""


def find_on_hub(name: str, revision: str | None, code: bool, pickles: bool, notes: Console) -> FoundModel:
    """Find a model in the Hub's cache, and download missing files.

    Args:
        name: `OWNER/REPOSITORY` or, for one of its GGUF files, `OWNER/REPOSITORY:FILE`.
        revision: Branch, tag or commit; the main branch if not given.
        code: Whether to download the model's Python modules.
        pickles: Whether weights may be pickles.
        notes: Console for progress, and for a choice among GGUF files.

    Raises:
        InvalidArgumentError: The model does not exist, or cannot be downloaded.
    """
    repo, _, file = name.partition(":")
    with quiet_hub():
        with spinner(notes, f"looking for {name}"):
            repository = Repository(repo, revision)
            names = [] if file or _only_gguf(repository.names) else _model_files(repository, code, pickles)
        if names:
            path = repository.get(names)
        else:
            chosen = _chosen_gguf(repository, file, notes)
            parts = [other for other in repository.names if _whole(other) == _whole(chosen)]
            path = repository.get(parts) / chosen
    return FoundModel(path, f"{name}@{repository.commit}")


def _only_gguf(names: Sequence[str]) -> bool:
    """Whether a repository has GGUF files, and no weights for transformers."""
    return not {*SAFE, *PICKLED}.intersection(names) and bool(_gguf_models(names))


def _model_files(repository: Repository, code: bool, pickles: bool) -> list[str]:
    """Names of the files that transformers loads."""
    names = repository.names
    weights = weights_among(names, pickles, repository.repo)
    if weights is None or "config.json" not in names:
        lacking = "config.json" if weights else "weights that transformers loads (model.safetensors)"
        raise repository.lacks(lacking)
    beside = [name for name in names if "/" not in name and PurePosixPath(name).suffix in _BESIDE_WEIGHTS]
    templates = [name for name in names if name.startswith("additional_chat_templates/")]
    modules = [name for name in names if name.endswith(".py")] if code else []
    parts = {weights}
    if weights.endswith(".json"):
        parts |= set(json.loads(repository.read(weights))["weight_map"].values())
    return sorted({*beside, *templates, *modules, *parts})


def _gguf_models(names: Sequence[str]) -> list[str]:
    """GGUF files with a model, not image projectors or importance matrices; of split models the first part."""
    models = [name for name in names if name.lower().endswith(".gguf")]
    models = [name for name in models if not PurePosixPath(name).name.lower().startswith(("mmproj", "imatrix"))]
    return sorted(name for name in models if (part := _PART.search(name)) is None or int(part[1]) == 1)


def _whole(name: str) -> str:
    """Name of a GGUF model without its part number."""
    return _PART.sub(r"\2", name)


def _chosen_gguf(repository: Repository, pattern: str, notes: Console) -> str:
    """GGUF file that matches `asked`: its whole name, else the end of its name, else a part of it.

    Several matches are listed for a choice on a terminal. An empty `asked` matches all files.

    Raises:
        InvalidArgumentError: No file matches, or several and nobody can choose.
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
