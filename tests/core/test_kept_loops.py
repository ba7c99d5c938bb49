"""Compiled loops are kept between processes, and compiled anew when anything that they are made of has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

MODULES = {
    "called.py": "from lookahead.core.compiled import inner\n\n@inner\ndef step(x):\n    return x + {step}\n",
    "loop.py": (
        "from called import step\nfrom lookahead.core.compiled import compiled\n\n"
        "@compiled\ndef run(x):\n    return step(x)\n"
    ),
    "main.py": (
        "from pathlib import Path\nfrom lookahead.core import kept_loops\n\n"
        "kept_loops._PACKAGE = Path(__file__).parent\nfor kept in (kept_loops._stamp, kept_loops.loops_folder):\n"
        "    kept.cache_clear()\nkept_loops._cache_class.cache_clear()\nfrom loop import run\n\n"
        "print(run(1), len(run.stats.cache_hits), kept_loops.loops_folder())\n"
    ),
}


def run_in(folder: Path, step: int) -> tuple[int, bool, Path]:
    """What the loop gives with such a step, whether it was read rather than compiled, and where it is kept."""
    for name, text in MODULES.items():
        (folder / name).write_text(text.format(step=step))
    command = [sys.executable, str(folder / "main.py")]
    result, hits, kept = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(result), int(hits) > 0, Path(kept)


def test_a_loop_follows_what_it_calls_in_other_files(tmp_path: Path) -> None:
    result, was_kept, first = run_in(tmp_path, step=1)
    assert (result, was_kept) == (2, False)
    assert run_in(tmp_path, step=1) == (2, True, first)
    result, was_kept, second = run_in(tmp_path, step=10)
    assert (result, was_kept) == (11, False)
    assert second.parent == first.parent == tmp_path / "__pycache__"
    assert not first.exists(), "loops of earlier sources are removed"
