"""mypy on a user's script."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lookahead

SCRIPT = Path(__file__).parents[1] / "support" / "typed_script.py"

SETTINGS = """
[mypy]
strict = true
[mypy-lookahead.*]
# as for what is installed
follow_imports = silent
"""

STUBS = {
    "torch": "class Tensor: ...\n",
    "transformers": "class GenerationConfig:\n    def __init__(self, **kwargs: Any) -> None: ...\n",
}
"""Stubs in place of two large libraries, which take mypy a minute."""

WRONG = """
import lookahead
import torch

def wrong(model: torch.nn.Module) -> None:
    lookahead.LookaheadConfig(preset="papr")
    lookahead.LookaheadConfig(fallback="plainly")
    lookahead.generate(model).statistics
    lookahead.generate(model, return_dict_in_generate=True).statistics.step_compresion
"""


def strict_mypy(script: Path, folder: Path, *options: str, more: str = "") -> str:
    """Return the output of `mypy --strict` for a script."""
    (folder / "mypy.ini").write_text(SETTINGS + more)
    command = [sys.executable, "-m", "mypy", "--config-file", folder / "mypy.ini", "--cache-dir", folder / "cache"]
    paths = [str(Path(lookahead.__file__).parents[1]), str(folder / "stubs")]
    environment = {"MYPYPATH": ":".join(paths), "PATH": ""}
    ended = subprocess.run([*command, *options, script], capture_output=True, text=True, env=environment, check=False)
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the stubs and of mypy's cache."""
    folder = tmp_path_factory.mktemp("types")
    for name, text in STUBS.items():
        (folder / "stubs" / name).mkdir(parents=True)
        rest = "def __getattr__(name: str) -> Any: ...\n"
        (folder / "stubs" / name / "__init__.pyi").write_text(f"from typing import Any\n{text}{rest}")
    return folder


ALONE = ("--no-site-packages",)
UNKNOWN = "[mypy-numba.*,llvmlite.*,numpy.*,torch.*,transformers.*]\nignore_missing_imports = true\n"


def test_a_users_script_passes_strict_mypy(folder: Path) -> None:
    assert strict_mypy(SCRIPT, folder, *ALONE, more=UNKNOWN).startswith("Success")


def test_mistakes_are_found(folder: Path) -> None:
    script = folder / "wrong.py"
    script.write_text(WRONG)
    output = strict_mypy(script, folder, *ALONE, more=UNKNOWN)
    lines = [int(line) for line in re.findall(r"wrong\.py:(\d+): error", output)]
    assert lines == [6, 7, 8, 9], output


@pytest.mark.exact
def test_a_users_script_passes_strict_mypy_with_all_of_transformers(tmp_path: Path) -> None:
    """mypy reads torch and transformers, which takes a minute of CPU time."""
    assert strict_mypy(SCRIPT, tmp_path).startswith("Success")
