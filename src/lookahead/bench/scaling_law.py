"""Scaling law of lookahead decoding (section 4 of the paper): S from an acceptance rate, W, G and N.

A step verifies b guesses of gamma tokens each, and a token of a guess passes with probability alpha, independently of
the tokens before it. In the paper's method b = W = G and gamma = N-1. One step in f has good guesses; the others add
one token.

The law ignores guesses with a common prefix (they do not pass independently), a pool that is still filling, and rates
that depend on W, N or the position in the text. It describes a trend; alpha and f of one model and one kind of text do
not carry over to another.

Source: Fu, Bailis, Stoica, Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024,
section 4, Eq. 4 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lookahead.bench.rows import Row
from lookahead.bench.summary import RunSet
from lookahead.errors import InvalidArgumentError


def expected_tokens(alpha: Any, length: int, guesses: int = 1) -> Any:
    """Expected number of tokens that a step adds when it verifies several guesses: Eq. 5.

    `(gamma + 1) - sum over i = 1..gamma of (1 - alpha^i)^b`, with gamma = `length` and b = `guesses`. The step adds
    the longest accepted prefix of a guess, and the token that the model selects after it.

    Args:
        alpha: Probability that a token of a guess passes after its predecessors passed; from 0 to 1, or an array.
        length: gamma, number of tokens in a guess; at least 0.
        guesses: b, number of guesses; at least 0.

    Returns:
        Tokens, from 1 to `length` + 1.
    """
    return length + 1 - sum((1 - alpha**i) ** guesses for i in range(1, length + 1))


class ScalingLaw(NamedTuple):
    """Scaling law with fixed alpha and f: Eq. 7.

    Attributes:
        alpha: Probability that a token of a good guess passes, from 0 to 1.
        f: One step in f has good guesses; at least 1.
    """

    alpha: float
    f: float

    def step_compression(self, window_size: int, ngram_size: int) -> float:
        """S for W = G = `window_size` and N = `ngram_size`: `(f - 1 + E(tokens)) / f`, E(tokens) from Eq. 5."""
        return float(self.f - 1 + expected_tokens(self.alpha, ngram_size - 1, window_size)) / self.f


class Measured(NamedTuple):
    """Measured S, generated tokens over steps (Eq. 6), for W = G = `window_size` and N = `ngram_size`."""

    window_size: int
    ngram_size: int
    step_compression: float


def fit(points: Sequence[Measured]) -> tuple[ScalingLaw, float]:
    """Fit alpha and f to measured S by least squares.

    For a given alpha Eq. 7 is linear in 1/f, `S - 1 = (E(tokens) - 1) / f`, so that the best f has a closed form;
    alpha is searched on a grid of 1e-4.

    Args:
        points: Measurements with W = G, of at least two sizes: a single size fits any alpha.

    Returns:
        The law, and the root mean square deviation of S.

    Raises:
        InvalidArgumentError: No point has S above 1.
    """
    gains = np.array([point.step_compression - 1 for point in points])
    alphas = np.linspace(0, 1, 10_001)[1:]
    max_gains = np.stack([expected_tokens(alphas, point.ngram_size - 1, point.window_size) - 1 for point in points])
    rates = np.clip(gains @ max_gains / (max_gains**2).sum(axis=0), 0, 1)  # 1/f for each alpha
    costs = ((gains[:, None] - rates * max_gains) ** 2).sum(axis=0)
    best = int(np.argmin(costs))
    if rates[best] <= 0:
        raise InvalidArgumentError("no measured S is above 1, so alpha and f cannot be fitted")
    law = ScalingLaw(float(alphas[best]), 1 / float(rates[best]))
    return law, float(np.sqrt(costs[best] / len(points)))


PAPER_LAW = ScalingLaw(alpha=0.425, f=3.106)
"""Law in the paper for LLaMA-2-Chat-7B on MT-Bench (Fig. 4(b))."""

LARGE_NGRAM = 5
LARGE_WINDOW = 2
"""Minimum N and W = G for the law, as the paper assumes a large enough N."""


def law_points(rows: Sequence[Row], before_cycles: bool = False) -> list[Measured]:
    """Measured S of all sizes with W = G, and n-grams from the window only."""
    points = []
    for method in RunSet(rows).methods:
        config = method.settings.get("lookahead", {})
        value = method.before_cycles if before_cycles else method.step_compression
        of_law = config.get("preset") == "paper" and not config["pool_from_prompt"]
        if of_law and value is not None and config["window_size"] == config["guess_set_size"]:
            points.append(Measured(config["window_size"], config["ngram_size"], value))
    return points


def law_fit(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and lines of a table with alpha and f of the paper, and fitted to rows."""
    every_point = law_points(rows)
    large = [point for point in every_point if point.ngram_size >= LARGE_NGRAM and point.window_size >= LARGE_WINDOW]
    fits = {
        "here, whole outputs": every_point,
        "here, before the first cycle": law_points(rows, before_cycles=True),
        f"here, whole outputs, without N < {LARGE_NGRAM} and W < {LARGE_WINDOW}": large,
    }
    lines = [["paper: LLaMA-2-Chat-7B, MT-Bench (Fig. 4(b))", f"{PAPER_LAW.alpha}", f"{PAPER_LAW.f}", "not printed"]]
    for name, points in fits.items():
        if len({(point.window_size, point.ngram_size) for point in points}) < 2:
            continue
        law, deviation = fit(points)
        lines.append([f"{name}, {len(points)} sizes", *(f"{figure:.3f}" for figure in (*law, deviation))])
    return ["fit of Eq. 7", "α", "f", "root mean square deviation of S"], lines
