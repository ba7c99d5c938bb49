"""Starting the command line: what is imported before it is needed, and Ctrl-C before anything has happened."""

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
from lookahead.demo import DEMO_PROMPT

HEAVY = ["torch", "transformers", "numba", "numpy"]

MAIN = """
import json, sys
from lookahead.cli import main
code = main()
loaded = [name for name in {heavy} if name in sys.modules]
print(json.dumps([code, loaded]), file=sys.stderr)
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 0),
        (["generate", "--help"], 0),
        (["compare", "--help"], 0),
        (["chat", "--help"], 0),
        (["tune", "--help"], 0),
        (["bench"], 0),
        (["bench", "run", "--help"], 0),
        (["bench", "report", "--help"], 0),
        (["bench", "tables", "--help"], 0),
        (["unknown"], 2),
        (["generate", "--unknown"], 2),
        (["generate", "a prompt", "--step-budget", "0"], 2),
        (["generate", "a prompt", "-W", "x"], 2),
        (["generate", "a prompt", "--model", "/no/such/folder"], 2),
        (["compare", "a prompt", "--model", "/no/such/folder"], 2),
        (["chat", "--model", "/no/such/folder"], 2),
        (["tune", "--model", "/no/such/folder"], 2),
        (["generate"], 2),
        (["bench", "run", "/no/such/suite.toml", "-o", "results.jsonl"], 2),
    ],
)
def test_what_needs_no_model_imports_none_of_the_heavy_packages(arguments: list[str], expected: int) -> None:
    with start(MAIN.format(heavy=HEAVY), *arguments) as process:
        out, err = process.communicate(timeout=120)
    lines = err.decode().splitlines()
    assert json.loads(lines[-1]) == [expected, []]
    if expected:
        assert out == b""
        assert len(lines) == 2
        assert lines[0].startswith("error: ")
        assert len(lines[0]) > len("error: ")
    else:
        assert out
        assert len(lines) == 1


def test_the_package_imports_what_is_asked_for() -> None:
    code = (
        "import sys, lookahead\n"
        f"assert not [name for name in {HEAVY} if name in sys.modules]\n"
        "lookahead.LookaheadConfig(); lookahead.InvalidArgumentError; assert lookahead.__version__\n"
        f"assert not [name for name in {HEAVY} if name in sys.modules]\n"
        "assert lookahead.parallel.join and lookahead.errors.LookaheadError is lookahead.LookaheadError\n"
        "from lookahead import *\n"
        "assert generate is lookahead.generate and 'transformers' in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_names_of_the_package() -> None:
    assert set(lookahead.__all__) <= set(dir(lookahead))
    assert all(getattr(lookahead, name) is not None for name in lookahead.__all__)
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = lookahead.nothing


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGPIPE semantics")
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["bench"], ["--version"]])
def test_help_to_a_reader_that_has_gone(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as gone:
        command = [sys.executable, "-m", "lookahead", *arguments]
        result = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, timeout=120)
    assert result.stderr == b""
    assert result.returncode == 141


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("moment", ["typer", "torch", "transformers", "transformers.models.llama.modeling_llama"])
def test_interrupted_while_something_is_imported(moment: str) -> None:
    with start(INTERRUPTED, "generate", DEMO_PROMPT, moment) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, b"ready\n", b"")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("seconds", [0.05, 1.0])
def test_interrupted_after_a_while(seconds: float) -> None:
    with start(INTERRUPTED, "generate", DEMO_PROMPT, "-n", "700", "never") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b"" or err.startswith(b"interrupted: "), err


def copy_compiled(target: Path, but: str) -> None:
    """Give a cache folder what numba keeps beside the sources, so that loops of the module `but` alone are compiled."""
    caching = pytest.importorskip("numba.core.caching")
    for kept in Path(lookahead.__file__).parent.rglob("*.nb?"):
        folder = target / caching._CacheLocator.get_suitable_cache_subpath(str(kept.parents[1] / "module.py"))
        folder.mkdir(exist_ok=True)
        if not kept.name.startswith(f"{but}."):
            shutil.copy2(kept, folder)


def test_compiling_is_announced_and_kept_out_of_the_figures(tmp_path: Path, compiled_loops: None) -> None:
    copy_compiled(tmp_path, but="search")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    arguments = ["generate", "def add(a, b):", "-n", "24", "--json", "--device", "cpu"]
    with start(MAIN.format(heavy=[]), *arguments, env=environment) as process:
        out, err = process.communicate(timeout=300)
    assert err == b"compiling the drafting loops (once)\n[0, []]\n"
    seconds = json.loads(out)["seconds"]
    # Drafting for a few steps takes milliseconds; compiling what drafts takes many times a forward pass.
    assert seconds["draft"] < seconds["forward"]
    again = "from lookahead.drafting import compile_loops\n" + (
        "from lookahead.drafting.compiled import on_first_compilation\n"
        "with on_first_compilation(lambda: print('compiling')): compile_loops()"
    )
    with start(again, env=environment) as process:
        assert process.communicate(timeout=300) == (b"", b"")
