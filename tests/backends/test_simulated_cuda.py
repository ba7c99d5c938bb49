"""The library on a simulated CUDA device, in a separate process, as the simulation patches torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow_by_nature("the simulation runs Python for each operation")
@pytest.mark.parametrize("marked", ["not exact", pytest.param("exact", marks=pytest.mark.exact)])
def test_cases_pass_on_the_simulated_device(marked: str) -> None:
    apart = Path(__file__).parent / "apart"
    paths = [str(apart / f"simulated_{what}_cases.py") for what in ("cuda", "engine")]
    command = [sys.executable, "-m", "pytest", *paths, "-p", "no:cacheprovider", "-m", marked]
    result = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
