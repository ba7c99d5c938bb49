"""The library on a simulated CUDA device, in a separate process, as the simulation patches torch."""

from pathlib import Path

import pytest

from preloaded import run_program


@pytest.mark.slow_by_nature("the simulation runs Python for each operation")
@pytest.mark.parametrize("marked", ["not exact", pytest.param("exact", marks=pytest.mark.exact)])
def test_cases_pass_on_the_simulated_device(marked: str) -> None:
    apart = Path(__file__).parent / "apart"
    paths = [str(apart / f"simulated_{what}_cases.py") for what in ("cuda", "engine")]
    result = run_program("-m", "pytest", *paths, "-p", "no:cacheprovider", "-m", marked, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr
