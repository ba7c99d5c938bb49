"""The scaling law, against full enumeration, simulation and the paper's figures."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lookahead.bench.scaling_law import PAPER_LAW, Measured, ScalingLaw, expected_tokens, fit
from lookahead.cli import main
from lookahead.errors import InvalidArgumentError
from preloaded import run_program

ALPHAS = (0.0, 0.1, 0.425, 0.9, 1.0)


def accepted(guess: tuple[bool, ...]) -> int:
    """Return the number of right tokens before the first wrong one."""
    return guess.index(False) if False in guess else len(guess)


@pytest.mark.parametrize(("length", "guesses"), [(0, 3), (1, 1), (3, 1), (1, 4), (2, 3), (4, 2), (3, 3), (5, 0)])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_eq_5_is_the_mean_over_all_outcomes(alpha: float, length: int, guesses: int) -> None:
    mean = 0.0
    for outcome in product(product((True, False), repeat=length), repeat=guesses):
        passed = [token for guess in outcome for token in guess]
        probability = float(np.prod([alpha if token else 1 - alpha for token in passed]))
        mean += probability * (1 + max((accepted(guess) for guess in outcome), default=0))
    assert expected_tokens(alpha, length, guesses) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("length", [0, 1, 4, 30])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_eq_5_with_one_guess_is_eq_4(alpha: float, length: int) -> None:
    one = length + 1 if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)
    assert expected_tokens(alpha, length, 1) == pytest.approx(one, abs=1e-12)


def test_eq_7_is_the_mean_of_simulated_steps() -> None:
    law, guesses, length, steps = ScalingLaw(0.6, 2.5), 7, 4, 40_000
    rng = np.random.default_rng(0)
    passes = rng.random((steps, guesses, length)) < law.alpha
    longest = passes.cumprod(axis=2).sum(axis=2).max(axis=1)
    tokens = 1 + np.where(rng.random(steps) < 1 / law.f, longest, 0)
    # Five standard errors of the simulated mean: one run in a million would fall outside by chance; the seed is fixed.
    error = 5 * tokens.std() / np.sqrt(steps)
    assert law.step_compression(guesses, length + 1) == pytest.approx(tokens.mean(), abs=error)


def test_the_papers_figures_follow_from_the_law() -> None:
    # Table 3, row 8: S = 1.96 for N = 5, W = G = 15; the law "aligns well to some extent".
    assert PAPER_LAW.step_compression(15, 5) == pytest.approx(1.96, abs=0.03)


def test_s_grows_by_equal_steps_as_the_guesses_double() -> None:
    """Section 4.2: given a large enough N, S is linear in log(b)."""
    values = [PAPER_LAW.step_compression(2**power, 30) for power in range(6, 13)]
    slopes = np.diff(values)
    assert slopes == pytest.approx(slopes.mean(), rel=0.01)
    # Each doubling of b adds log(2) / log(1 / alpha) tokens to one step of f.
    assert slopes.mean() == pytest.approx(np.log(2) / np.log(1 / PAPER_LAW.alpha) / PAPER_LAW.f, rel=0.01)


@pytest.mark.parametrize("law", [PAPER_LAW, ScalingLaw(0.05, 1.0), ScalingLaw(0.93, 12.0)])
def test_fit_finds_the_law_that_made_the_points(law: ScalingLaw) -> None:
    sizes = [(w, n) for n in (3, 5, 7) for w in (1, 4, 15, 30)]
    fitted, off = fit([Measured(w, n, law.step_compression(w, n)) for w, n in sizes])
    assert fitted.alpha == pytest.approx(law.alpha, abs=1e-6)
    assert fitted.f == pytest.approx(law.f, rel=1e-5)
    assert off < 1e-7


def test_fit_is_a_minimum_when_the_points_scatter() -> None:
    rng = np.random.default_rng(0)
    sizes = [(w, n) for n in (3, 5) for w in (1, 4, 15)]
    points = [Measured(w, n, PAPER_LAW.step_compression(w, n) + rng.normal(0, 0.05)) for w, n in sizes]
    fitted, off = fit(points)

    def deviation(alpha: float, f: float) -> float:
        law = ScalingLaw(alpha, f)
        squares = [(law.step_compression(p.window_size, p.ngram_size) - p.step_compression) ** 2 for p in points]
        return float(np.sqrt(np.mean(squares)))

    alpha, f = fitted.alpha, fitted.f
    assert off == pytest.approx(deviation(alpha, f), abs=1e-12)
    for other_alpha, other_f in product((alpha - 1e-4, alpha, alpha + 1e-4), (f - 1e-3, f, f + 1e-3)):
        assert off <= deviation(other_alpha, other_f) + 1e-12


def test_points_without_gain_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no measured S is above 1"):
        fit([Measured(1, 5, 1.0), Measured(15, 5, 1.0)])


def test_the_command_prints_the_fit_of_a_results_file(capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "bench"
    ran = run_program("-m", "lookahead", "bench", "law", str(results / "paper-grid.jsonl"), COLUMNS="160")
    assert ran.returncode == 0
    line = next(line for line in ran.stdout.splitlines() if "here, whole outputs, 21 sizes" in line)
    assert [cell.strip() for cell in line.split("│")[2:5]] == ["0.317", "1.856", "0.096"], "as docs/paper.md has it"
    assert main(["bench", "law", str(results / "demo.jsonl")]) == 2
    assert "no runs of the paper's method" in capsys.readouterr().err
