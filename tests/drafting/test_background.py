"""Missing loops are compiled by another process, while texts are decoded without drafts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead.core.compiled import loops_folder
from lookahead.core.files import OWN_FOLDER

CALLS = """
import json, sys, time
import torch
import lookahead
from lookahead.core.compiled import loops_folder
from model_zoo import build

model, prompt = build("llama"), torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
arguments = dict(max_new_tokens=100, do_sample=False, eos_token_id=None)
expected = model.generate(prompt, **arguments)

def on_step(step):
    while step.step == 5 and not any(loops_folder().glob("all-*")):
        time.sleep(0.01)

for options in json.loads(sys.argv[1]):
    config = lookahead.LookaheadConfig(**options)
    output = lookahead.generate(
        model, prompt, lookahead_config=config, on_step=on_step, return_dict_in_generate=True, **arguments
    )
    assert output.sequences.equal(expected)
    print(json.dumps(output.statistics.nodes_per_step))
"""
"""Decode a text once per option, wait for the loops within it, and print the nodes of each step."""

STEPS = """
import json, sys, time
from lookahead import LookaheadConfig
from lookahead.core.compiled import loops_folder
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import build_drafter
from lookahead.drafting.background import BACKGROUND

waits = not sys.argv[2:]
if not waits:
    sys.executable = sys.argv[2]
BACKGROUND.begin(LookaheadConfig(compile_in_background=sys.argv[1] == "background"))
drafter = build_drafter(LookaheadConfig(step_budget=8))
drafter.start([3, 4, 5, 3, 4, 5, 3])
drafted = []
while not any(drafted):
    time.sleep(0.001)  # a step takes longer
    while waits and len(drafted) == 5 and not any(loops_folder().glob("all-*")):
        time.sleep(0.01)
    BACKGROUND.are_there()
    tree = TokenTree([4])
    drafter.propose(tree)
    drafted.append(len(tree) > 1)
print(json.dumps(drafted))
"""
"""Begin steps until one has a draft, with an optional program as the compiler; print whether each step had one."""


DIRECTLY = """
import sys
import numpy as np
from lookahead import LookaheadConfig
from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory, compile_loops
from lookahead.drafting.background import BACKGROUND

BACKGROUND.begin(LookaheadConfig())
if sys.argv[1] == "compile":
    compile_loops()
drafter = AutoDrafter(DraftMemory.of_texts(), 8)
drafter.start([3, 4, 5, 3, 4, 5, 3])
drafter.propose(tree := TokenTree([4]))
drafter.observe(StepResult(tree, np.full(len(tree), 5), [], [0]))
print("[1]")
"""
"""Compile the loops, or use a drafter at once, while another process compiles."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of compiled loops without one module, the fastest to compile."""
    loops = loops_folder()
    assert loops is not None
    missing = shutil.ignore_patterns("forest.*", "all-*", "*.tmp.*", "*.lock")
    return Path(shutil.copytree(loops, tmp_path / OWN_FOLDER / loops.name, ignore=missing))


def begin(folder: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(part for part in sys.path if part)
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(folder.parents[1]), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen[str]) -> list[list[int]]:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


def is_complete(folder: Path) -> bool:
    return any(folder.glob("all-*")) and any(folder.glob("forest._write_order*"))


@pytest.mark.slow_by_nature("processes of their own import torch, and compile")
def test_a_text_is_drafted_for_once_the_loops_are_there(folder: Path) -> None:
    first, second = lines(begin(folder, CALLS, json.dumps([{}, {"step_budget": 8}])))
    assert first[:5] == [1] * 5
    assert max(first) > 1
    assert max(second[:5]) > 1
    assert is_complete(folder)


def test_a_call_can_wait_for_them(folder: Path) -> None:
    assert lines(begin(folder, STEPS, "at once")) == [[True]]
    assert is_complete(folder)


@pytest.mark.slow_by_nature("processes of their own compile")
def test_processes_that_begin_at_once_share_them(folder: Path) -> None:
    for process in [begin(folder, STEPS, "background") for _ in range(2)]:
        (drafted,) = lines(process)
        assert drafted == [False] * 5 + [True]
    assert is_complete(folder)


@pytest.mark.slow_by_nature("processes of their own compile")
@pytest.mark.parametrize("way", ["compile", "draft"])
def test_loops_can_be_used_while_another_process_compiles(folder: Path, way: str) -> None:
    assert lines(begin(folder, DIRECTLY, way)) == [[1]]


@pytest.mark.parametrize("program", ["python", "no python", "another program"])
def test_without_another_process_this_one_compiles_after_a_while(folder: Path, tmp_path: Path, program: str) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    (drafted,) = lines(begin(folder, STEPS, "background", str(tmp_path / program)))
    assert drafted[:255] == [False] * 255
    assert drafted[-1]
    assert is_complete(folder)


def test_a_complete_folder_is_only_read(folder: Path) -> None:
    there = loops_folder()
    assert there is not None
    shutil.copytree(there, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.tmp.*", "*.lock"))
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert lines(begin(folder, STEPS, "background")) == [[True]]
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
