"""The Makefile: output paths of targets, and the prompts of the server's benchmark."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITERS = (
    *("bench", "bench-server", "lm-eval", "models", "pictures", "plots", "ray-serve", "ray-serve-llm"),
    *("standard", "tables", "test-mlx", "test-page", "test-versions", "trl"),
)
INSTALLED = (".venv/installed", "build/mlx/installed", "build/playwright", "build/ray", "build/tox", "build/vllm")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands(*arguments: str, **environment: str) -> str:
    """Return the commands of a dry run, as if all packages were installed."""
    installed = [word for target in INSTALLED for word in ("-o", target)]
    clean = {name: value for name, value in os.environ.items() if name not in ("SHARED", "RECORD", "MAKEFLAGS")}
    call = ["make", "--dry-run", "--always-make", "--no-print-directory", *installed, *arguments]
    result = subprocess.run(call, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=True)
    return result.stdout.replace("\\\n", " ")


def written(lines: str) -> list[str]:
    """Return the output paths of commands, by the options and programs of this Makefile."""
    places = re.findall(r"--(?:output|plots) (\S+)", lines)
    places += re.findall(r"(?:_plot|method_pictures)\.py (\S+)", lines)
    places += [place for line in re.findall(r"mkdir -p (.*)", lines) for place in line.split()]
    return places + re.findall(r"cp .* (\S+)$", lines, re.MULTILINE)


@pytest.mark.parametrize("target", WRITERS)
def test_no_target_changes_a_file_of_the_repository_by_default(target: str) -> None:
    tracked = re.compile(r"(\./)?(docs|benchmarks|README)")
    lines = commands(target)
    if target == "tables":
        assert "--check" in lines
    else:
        assert written(lines)
        assert not [place for place in written(lines) if tracked.match(place)]
    recorded = commands(target, "RECORD=1")
    assert "--check" not in recorded
    if target != "tables":
        assert [place for place in written(recorded) if tracked.match(place)]


def test_every_target_that_names_a_folder_of_results_is_tried() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z-]+):[^\n]*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert {name for name, recipe in rules if "$(OUT)" in recipe or "$(RECORD)" in recipe} == set(WRITERS)


def test_the_server_is_measured_with_prompts_that_are_there(tmp_path: Path) -> None:
    option = f"--prompts {tmp_path}/data/humaneval.jsonl"
    assert option in commands("bench-server", f"SHARED={tmp_path}")
    assert option in commands("bench-server", SHARED=str(tmp_path))
    assert ("--prompts" in commands("bench-server")) == (ROOT / "../shared/data/humaneval.jsonl").exists()


def test_the_library_has_prompts_enough_for_the_server() -> None:
    specification = importlib.util.spec_from_file_location("load_probe", ROOT / "benchmarks/load.py")
    assert specification is not None
    assert specification.loader is not None
    load = importlib.util.module_from_spec(specification)
    sys.modules["load_probe"] = load  # another module may be named `load`
    specification.loader.exec_module(load)
    assert len(set(load.own_prompts())) > sum(load.Options().requests)


def test_installing_the_load_generator_is_announced_first() -> None:
    lines = commands("bench-server").splitlines()
    notice = next(number for number, line in enumerate(lines) if "about four minutes" in line)
    assert notice < min(number for number, line in enumerate(lines) if "pip install" in line)
