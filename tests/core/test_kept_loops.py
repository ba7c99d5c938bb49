"""Compiled loops are stored for later processes, and compiled again after any change of their sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from quick import quickly

pytest.importorskip("numba")

HERE = (
    "from pathlib import Path\nfrom lookahead.core import compiled as kept_loops\n\n"
    "kept_loops._PACKAGE = Path(__file__).parent\nfor kept in (kept_loops._stamp, kept_loops.loops_folder):\n"
    "    kept.cache_clear()\nkept_loops._cache_class.cache_clear()\n"
)
"""Start of a program that identifies its loops by its own sources."""

MODULES = {
    "called.py": "from lookahead.core.compiled import inner\n\n@inner\ndef step(x):\n    return x + {step}\n",
    "loop.py": (
        "from called import step\nfrom lookahead.core.compiled import compiled\n\n"
        "@compiled\ndef run(x):\n    return step(x)\n"
    ),
    "main.py": (HERE + "from loop import run\n\nprint(run(1), len(run.stats.cache_hits), kept_loops.loops_folder())\n"),
}


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables for a user cache in a folder."""
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}


def output(folder: Path) -> str:
    """Return the output of a folder's `main.py`."""
    return subprocess.check_output([sys.executable, str(folder / "main.py")], env=environment(folder), text=True)


def run_in(folder: Path, step: int) -> tuple[int, bool, Path]:
    """Return the result of the loop with `step`, whether it was loaded instead of compiled, and its folder."""
    for name, text in MODULES.items():
        (folder / name).write_text(text.format(step=step))
    result, hits, loops = output(folder).split()
    return int(result), int(hits) > 0, Path(loops)


@pytest.mark.slow_by_nature("compiles in processes of their own")
def test_a_loop_follows_changes_of_functions_in_other_files(tmp_path: Path) -> None:
    result, was_kept, first = run_in(tmp_path, step=1)
    assert (result, was_kept) == (2, False)
    assert run_in(tmp_path, step=1) == (2, True, first)
    result, was_kept, second = run_in(tmp_path, step=10)
    assert (result, was_kept) == (11, False)
    assert run_in(tmp_path, step=1) == (2, True, first), "loops of other sources stay"
    assert second.parent == first.parent == tmp_path / "cache" / "lookahead-decoding"
    assert not list(tmp_path.glob("__pycache__/*.nb*")), "nothing lies beside the sources"


def test_loops_that_were_not_used_for_long_make_room(tmp_path: Path) -> None:
    own = tmp_path / "cache" / "lookahead-decoding"
    for age in range(1, 21):
        (own / f"loops-{age:02}").mkdir(parents=True)
        os.utime(own / f"loops-{age:02}", (1e9 - age, 1e9 - age))
    (own / "findings").mkdir()
    _, _, used = run_in(tmp_path, step=1)
    assert {folder.name for folder in own.iterdir()} == {
        "findings",
        used.name,
        *(f"loops-{age:02}" for age in range(1, 16)),
    }


def test_without_a_folder_loops_run_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text.format(step=1))
    assert output(tmp_path) == "2 0 None\n"
    assert not list(tmp_path.glob("**/*.nb*"))


AT_ONCE = (
    HERE + "import os\nimport sys\nimport time\n\nimport numpy as np\n\nfrom loop import total\n\n"
    "wholes, waits = np.arange(8), [float(wait) for wait in sys.argv[2:]]\n"
    "numbers = {'whole': wholes, 'half': wholes[::2], 'short': wholes.astype(np.int32)}[sys.argv[1]]\n\n\n"
    "def replace(source, target, at_once=os.replace):\n"
    "    time.sleep(waits.pop(0) if waits else 0)\n    at_once(source, target)\n\n\n"
    "os.replace = replace\nprint('ready', flush=True)\ninput()\n"
    "print(total(numbers) == numbers.sum(), len(total.stats.cache_hits))\n"
)
"""Add numbers of some type, with a delay before each file is moved to its name."""

ADDED = (
    "from lookahead.core.compiled import compiled\n\n@compiled\ndef total(numbers):\n    sum = 0\n"
    "    for number in numbers:\n        sum += number\n    return sum\n"
)


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the program, and wait until it is ready for its input."""
    command = [sys.executable, str(folder / "main.py"), *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(folder), **pipes)
    assert opened(process.stdout).readline() == "ready\n"
    return process


def opened(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.mark.parametrize("other", quickly(["half", "short"], ["short"]))
def test_processes_that_compile_for_two_types_at_once_do_not_mix_them_up(tmp_path: Path, other: str) -> None:
    (tmp_path / "loop.py").write_text(ADDED)
    (tmp_path / "main.py").write_text(AT_ONCE)
    # With numbered files and an index, the delays would pair the second program's index with the first one's code.
    processes = [begin(tmp_path, "whole", "0.5", "1.5"), begin(tmp_path, other, "1", "0.5")]
    for process in processes:
        opened(process.stdin).write("\n")
        opened(process.stdin).flush()
    assert [process.communicate()[0] for process in processes] == ["True 0\n"] * 2
    for numbers in ("whole", other):
        assert begin(tmp_path, numbers).communicate("\n")[0] == "True 1\n"


def test_damaged_files_are_compiled_anew(tmp_path: Path) -> None:
    _, _, folder = run_in(tmp_path, step=1)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    assert run_in(tmp_path, step=1) == (2, False, folder)
    assert run_in(tmp_path, step=1) == (2, True, folder)


def test_a_loop_that_cannot_be_kept_runs_all_the_same(tmp_path: Path) -> None:
    """numba does not store loops with a large array in their code."""
    (tmp_path / "loop.py").write_text(
        "import numpy as np\n\nfrom lookahead.core.compiled import compiled\n\nMANY = np.ones(1 << 20)\n\n"
        "@compiled\ndef run(x):\n    return x + int(MANY[x])\n"
    )
    (tmp_path / "main.py").write_text(HERE + "from loop import run\n\nprint(run(1))\n")
    assert output(tmp_path) == "2\n"


def test_loops_run_as_plain_python_if_numba_is_disabled() -> None:
    code = "from lookahead.drafting.background import compile_loops; compile_loops()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "NUMBA_DISABLE_JIT": "1"})
