"""Start of the command line: no early imports, and Ctrl-C during start-up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lookahead
from lookahead.core.compiled import loops_folder
from lookahead.core.files import OWN_FOLDER
from lookahead.demo import DEMO_PROMPT
from preloaded import Command

HEAVY = ["torch", "transformers", "numba", "numpy"]

EACH = f"""
import contextlib, io, json, sys
from lookahead.cli import main
for line in sys.stdin:
    sys.argv = ["lookahead", *json.loads(line)]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main()
    loaded = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([code, out.getvalue(), err.getvalue(), loaded]))
"""

INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent that ignores SIGINT passes that on
moment = sys.argv.pop()

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "lookahead.cli.app":
            print("ready", flush=True)
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from lookahead.cli import main
sys.exit(main())
"""


def start(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_commands_without_a_model_import_no_heavy_packages() -> None:
    helps = [
        [],
        ["--help"],
        ["--version"],
        ["-V"],
        ["help"],
        ["help", "generate"],
        ["bench"],
        ["cache"],
        ["cache", "show"],
    ]
    helps += [[command, "--help"] for command in ("generate", "compare", "chat", "tune")]
    helps += [["bench", command, "--help"] for command in ("run", "law")]
    nowhere = ["--model", "/no/such/folder"]
    refused = [
        ["unknown"],
        ["generate"],
        ["generate", "--unknown"],
        ["generate", "a prompt", "--step-budget", "0"],
        ["generate", "a prompt", "-W", "x"],
        *([command, "a prompt", *nowhere] for command in ("generate", "compare")),
        *([command, *nowhere] for command in ("chat", "tune")),
        ["bench", "run", "/no/such/suite.toml", "-o", "results.jsonl"],
    ]
    command_lines = "".join(json.dumps(arguments) + "\n" for arguments in helps + refused)
    result = subprocess.run(
        [sys.executable, "-c", EACH], input=command_lines, capture_output=True, text=True, timeout=600
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == len(helps) + len(refused), result.stderr
    for arguments, (code, out, err, loaded) in zip(helps + refused, rows, strict=True):
        assert loaded == [], arguments
        if arguments in helps:
            assert (code, err) == (0, ""), arguments
            assert out, arguments
        else:
            assert (code, out) == (2, ""), arguments
            assert len(err.splitlines()) == 1, arguments
            assert err.startswith("error: "), arguments
            assert len(err) > len("error: \n"), arguments


def test_the_package_imports_heavy_packages_late() -> None:
    code = (
        "import sys, lookahead\n"
        f"assert not [name for name in {HEAVY} if name in sys.modules]\n"
        "lookahead.LookaheadConfig(); lookahead.InvalidArgumentError; assert lookahead.__version__\n"
        f"assert not [name for name in {HEAVY} if name in sys.modules]\n"
        "assert lookahead.errors.LookaheadError is lookahead.LookaheadError\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_every_public_name_can_be_imported() -> None:
    names: dict[str, Any] = {}
    exec("from lookahead import *", names)
    assert names["generate"] is lookahead.generate
    assert lookahead.parallel.join
    assert set(lookahead.__all__) <= set(dir(lookahead))
    assert all(getattr(lookahead, name) is not None for name in lookahead.__all__)
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = lookahead.nothing


COMPLETED = """
eval "$(lookahead --show-completion)"
complete_it() {
    COMP_WORDS=(lookahead "$@")
    COMP_CWORD=$#
    _lookahead_completion lookahead
    echo "${COMPREPLY[@]}"
}
complete_it gen
complete_it bench r
complete_it generate --window
complete_it generate --preset t
complete_it serve --dtype fl
complete_it generate --file some
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_names(tmp_path: Path) -> None:
    program = tmp_path / "lookahead"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lookahead "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "--norc", "-c", COMPLETED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.stderr == ""
    offered = ["generate", "run", "--window-size", "token_recycling", "float32 float16", ""]
    assert [sorted(line.split()) for line in result.stdout.splitlines()] == [sorted(line.split()) for line in offered]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGPIPE semantics")
@pytest.mark.parametrize("arguments", [["generate", "--help"], ["--version"]])
def test_help_into_a_closed_pipe_is_quiet(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as gone:
        command = [sys.executable, "-m", "lookahead", *arguments]
        result = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, timeout=600)
    assert result.stderr == b""
    assert result.returncode == 141


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize(
    "moment",
    [
        "lookahead.config",
        "typer",
        "torch",
        pytest.param("transformers.models.llama.modeling_llama", marks=pytest.mark.exact),
    ],
)
def test_interrupted_while_something_is_imported(moment: str) -> None:
    with start(INTERRUPTED, "generate", DEMO_PROMPT, moment) as process:
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (130, b"ready\n", b"")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("seconds", [0.05, 1.0])
def test_interrupted_after_a_while(seconds: float) -> None:
    with start(INTERRUPTED, "generate", DEMO_PROMPT, "-n", "700", "never") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert err == b"" or err.startswith(b"interrupted: "), err


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals of a Unix")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command", ["trace", "chat"])
def test_a_signal_writes_the_trace_so_far(tmp_path: Path, command: str, number: int) -> None:
    page = tmp_path / "page.html"
    options = ["--raw", "--trace", str(page)] if command == "chat" else [DEMO_PROMPT, "-n", "700", "-o", str(page)]
    arguments = [command, *options, "--device", "cpu"]
    (stdin, typed), (shown, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
    process = Command(arguments, {0: stdin, 1: stdout, 2: stderr})
    for theirs in (stdin, stdout, stderr):
        os.close(theirs)
    with open(typed, "wb", buffering=0) as to_it, open(shown, "rb") as out, open(errors, "rb") as err_of:
        if command == "chat":
            to_it.write(b"def add(a, b):\n")
        assert out.read(1)
        process.send_signal(number)
        to_it.close()
        out.read()
        err = err_of.read()
    assert process.wait(600) == 128 + number, err
    assert b"page.html: " in err
    assert b"Traceback" not in err
    assert 'id="data"' in page.read_text(encoding="utf-8")


CLOSED = """
import os, sys
from lookahead.cli import main
sys.argv = ["lookahead", "--version"]
code = main()
os._exit(code or min(os.pipe()) < 3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of a Unix")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_trouble(closed: str) -> None:
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", CLOSED], capture_output=True, timeout=600
    )
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_output_beyond_the_limit_of_files_is_one_line(tmp_path: Path) -> None:
    command = f"ulimit -f 0; exec {sys.executable} -m lookahead --version > out"
    result = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=600)
    assert result.returncode == 2
    assert result.stderr.startswith("error: cannot write to standard output: File too large; make room")
    assert result.stderr.count("\n") == 1


PROGRAM = """
import atexit, sys, threading

class Last:
    def __del__(self):
        print("taken apart", flush=True)

class Starter:
    def find_spec(self, name, path=None, target=None):
        if name == "lookahead.cli.app":  # by now the program runs
            threading.Thread(target=late).start()

def late():
    atexit.register(print, "registered")
    threading.main_thread().join()
    print("thread")

from lookahead.cli import program
sys.modules["kept"] = Last()
sys.meta_path.insert(0, Starter())
program()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["generate", "--nonsense"], 2)])
def test_a_program_ends_once_everything_is_flushed_and_done(arguments: list[str], code: int) -> None:
    with start(PROGRAM, *arguments) as process:
        out, err = process.communicate(timeout=120)
    lines = out.decode().split("\n")
    assert process.returncode == code
    assert lines[-3:] == ["thread", "registered", ""]
    assert len(lines) == (3 if code else 4)
    assert err.decode().count("\n") == (1 if code else 0)


def test_main_returns_to_whoever_called_it() -> None:
    code = PROGRAM.replace("program()", "from lookahead.cli import main; print(main(['--version']))")
    with start(code) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.decode().split("\n")[1:] == ["0", "thread", "registered", "taken apart", ""]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("--nonsense", 2)])
def test_notes_that_cannot_be_written_cost_nothing_else(argument: str, code: int) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "lookahead", argument]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=120)
    assert result.returncode == code
    assert result.stdout.startswith("lookahead ") == (code == 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "lookahead", "--version"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("error: cannot write to standard output: No space left on device; make room")
    assert result.stderr.count("\n") == 1


TERMINAL = """
import os, sys
moment = sys.argv.pop()

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            print("MOMENT", file=sys.stderr, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watcher())
from lookahead.cli import program
program()
"""


def on_a_terminal(code: str, *arguments: str) -> str:
    """Return the standard error of a process, with a terminal as its standard error."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    ) as process:
        os.close(theirs)
        output = bytearray()
        try:
            while part := os.read(ours, 4096):
                output += part
        except OSError:  # Linux reports the closed other end as an error
            pass
        os.close(ours)
    assert process.returncode == 0, output
    return output.decode()


def test_loading_is_said_before_torch_is_imported() -> None:
    output = on_a_terminal(TERMINAL, "generate", "def add(a, b):", "-n", "8", "--device", "cpu", "--no-color", "torch")
    before, moment, _ = output.partition("MOMENT")
    assert moment
    assert "loading the model" in before


COMPILE = """
from lookahead.drafting import compile_loops
from lookahead.core.compiled import on_first_compilation
with on_first_compilation(lambda: print("compiling")):
    compile_loops()
"""


@pytest.fixture
def one_loop_is_not_compiled(tmp_path: Path, compiled_loops: None) -> dict[str, str]:
    """Environment of a process with compiled loops, except for one module."""
    folder = loops_folder()
    assert folder is not None
    missing = shutil.ignore_patterns("pace.*")
    half_written = shutil.ignore_patterns("*.tmp.*")  # other tests may be compiling
    copied = tmp_path / OWN_FOLDER / folder.name
    shutil.copytree(folder, copied, ignore=lambda *names: missing(*names) | half_written(*names))
    assert missing(str(folder), os.listdir(folder)), "no loop of that module is kept"
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}


def test_compiling_is_announced_once(one_loop_is_not_compiled: dict[str, str]) -> None:
    for message in (b"compiling\n", b""):
        with start(COMPILE, env=one_loop_is_not_compiled) as process:
            assert process.communicate(timeout=600) == (message, b"")


AFTER_COMPILING = """
import sys
from lookahead.cli import main
from lookahead.cli import loading
from lookahead.core.compiled import on_first_compilation

compile_drafting = loading.compile_drafting
later = on_first_compilation(lambda: print("late", file=sys.stderr))

def and_no_later(notes):
    compile_drafting(notes)
    later.__enter__()

loading.compile_drafting = and_no_later
sys.exit(main())
"""


@pytest.mark.exact
def test_nothing_is_compiled_while_figures_are_taken(one_loop_is_not_compiled: dict[str, str]) -> None:
    arguments = ["generate", "def add(a, b):", "-n", "24", "--json", "--device", "cpu", "--no-compile-in-background"]
    with start(AFTER_COMPILING, *arguments, env=one_loop_is_not_compiled) as process:
        out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, b"compiling the drafting loops (once)\n")
    assert json.loads(out)["seconds"]["draft"] > 0
