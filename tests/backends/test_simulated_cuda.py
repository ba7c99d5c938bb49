"""The library on a simulated CUDA device, in a process of its own: the simulation patches torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("cases", ["simulated_cuda_cases", "simulated_engine_cases"])
@pytest.mark.parametrize("marked", ["not exact", pytest.param("exact", marks=pytest.mark.exact)])
def test_cases_pass_on_the_simulated_device(marked: str, cases: str) -> None:
    path = Path(__file__).parents[1] / "support" / f"{cases}.py"
    command = [sys.executable, "-m", "pytest", str(path), "-p", "no:cacheprovider", "-m", marked]
    result = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
