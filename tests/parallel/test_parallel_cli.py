"""`lookahead generate --parallel`: the text of one process, one error if a rank fails, no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import parallel_entries
from lookahead.cli import main
from lookahead.demo import demo_model_path
from parallel_signals import GENERATE, SIGNALS, complaints, reach, start

PROMPT = "def add(a, b):"
ARGUMENTS = ["generate", PROMPT, "--preset", "paper", "-n", "16", "--json"]
posix = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


@pytest.mark.exact  # three processes load a model
def test_the_text_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    expected = json.loads(capsys.readouterr().out)
    command = [sys.executable, "-m", "lookahead", *ARGUMENTS, "--parallel", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=6000, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)  # one object, as the other rank prints nothing
    assert got["text"] == expected["text"]
    assert len(done.stderr.splitlines()) <= 1


def run_on_ranks(entry: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a function of `parallel_entries` on two ranks."""
    command = [sys.executable, parallel_entries.__file__, entry, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    ("entry", "code", "reason"),
    [("rank_1_fails", 3, "failed: no room"), ("rank_1_is_killed", 137, "killed by SIGKILL")],
)
def test_a_rank_that_fails_stops_the_others(entry: str, code: int, reason: str) -> None:
    """The failure also stops ranks that would never end, and one line names the failed rank."""
    ran = run_on_ranks(entry)
    assert ran.returncode == code
    assert "rank 1" in ran.stderr
    assert reason in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_standard_input_reaches_every_rank() -> None:
    text = "text\n" * 50_000  # more than a pipe holds
    ran = run_on_ranks("expects", str(len(text)), given=text)
    assert ran.returncode == 0, ran.stderr


@posix
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_ranks_that_start(name: str) -> None:
    number, to_group, code = SIGNALS[name]
    processes = start([parallel_entries.__file__, "sleeps"])
    try:
        seconds = processes.send(number, to_group)
        print(f"{name}: all ended after {seconds:.2f} s")
        assert processes.parent.returncode == code
        assert processes.complaints() == ""
    finally:
        processes.close()


@posix
@pytest.mark.exact  # three processes load a model
def test_an_interrupt_keeps_the_text_so_far() -> None:
    """The signal goes to all processes, like Ctrl-C in a terminal."""
    processes = start(GENERATE)
    try:
        reach(processes, "generating")
        seconds = processes.send(*SIGNALS["Ctrl-C"][:2])
        print(f"all ended after {seconds:.2f} s")
        assert processes.parent.returncode == 130
        assert processes.printed() != ""
        assert complaints(processes) == []
    finally:
        processes.close()


@posix
@pytest.mark.exact  # three processes load a model
def test_ranks_that_wait_for_another_end_with_their_parent() -> None:
    """A killed parent cannot notify its ranks; `make test-parallel` tests the other signals and phases."""
    processes = start(GENERATE)
    try:
        reach(processes, "waiting")
        seconds = processes.send(signal.SIGKILL)
        print(f"all ended after {seconds:.2f} s")
        assert complaints(processes) == []
    finally:
        processes.close()


@posix
def test_a_rank_ends_with_the_pipe_of_its_parent() -> None:
    """For systems without a death signal of the kernel."""
    sentinel, held = os.pipe()
    code = (
        f"import time; from lookahead.parallel.launcher import end_after; print(1, flush=True); end_after({sentinel})"
    )
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[sentinel], stdout=subprocess.PIPE) as process:
        os.close(sentinel)
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        time.sleep(0.2)
        assert process.poll() is None
        os.close(held)
        assert process.wait(600) == 1


@posix
def test_a_rank_ends_if_its_parent_died_before_its_start() -> None:
    """The rank's parent process differs from the expected one."""
    sentinel, held = os.pipe()
    command = [sys.executable, "-m", "lookahead.parallel.launcher", "1", str(sentinel), "-1", "parallel_entries:sleeps"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        ran = subprocess.run(command, pass_fds=[sentinel], env=environment, timeout=600, check=False)
        assert ran.returncode == 1
    finally:
        os.close(sentinel)
        os.close(held)


def _folder_without_config(folder: Path) -> list[str]:
    (folder / "model").mkdir()
    return ["--model", str(folder / "model")]


def _broken_config(folder: Path) -> list[str]:
    model = folder / "model"
    model.mkdir()
    for file in demo_model_path().iterdir():
        (model / file.name).write_bytes(b"{" if file.name == "config.json" else b"")
    return ["--model", str(model)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda folder: ["--model", str(folder / "none")], "no such folder"),
        (_folder_without_config, "it has no config.json"),
        (_broken_config, "its config.json is not valid JSON"),
        (lambda folder: ["--memory", str(folder / "none" / "memory.npz")], "is not supported on 2 ranks"),
        (lambda folder: ["--memory", str(folder)], "is not supported on 2 ranks"),
        (lambda folder: ["--device", "abacus"], "--device abacus is not available here"),
        (lambda folder: ["--parallel", "0"], "at least 1"),
    ],
)
def test_impossible_options_are_refused_before_ranks_start(
    options: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(options)
    assert main(["generate", PROMPT, "--parallel", "2", *options(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1


def test_the_process_that_starts_ranks_needs_no_torch() -> None:
    code = (
        "import sys; from lookahead.cli import main; "
        "assert main(['generate', 'text', '--parallel', '2', '--model', 'nowhere']) == 2; "
        "import lookahead.parallel.launcher; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600, check=False).returncode == 0
