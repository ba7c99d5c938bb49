"""How much of a text repeats itself in cycles.

Greedy text of small models often ends in a cycle: the same line again and again. Inside a cycle every method
that drafts from n-grams looks excellent, so a measured step compression means little without the share of the
text that was repeated. The functions here measure that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

MAX_PERIOD = 256
"""Longest cycle that is looked for by default: every cycle that fits twice into 512 tokens."""

MIN_REPEATED = 8
"""Fewest tokens that must repeat the token one period before them, so that chance does not count."""


def repeated_cycle_share(tokens: Sequence[int], *, max_period: int = MAX_PERIOD) -> float:
    """Share of the tokens that lie inside a repeated cycle, from 0 to 1.

    A *run* of period p is a longest possible stretch of tokens in which each token, but for the first p,
    equals the one p places before it; that is, a block of p tokens said over and over, where the last copy
    may be cut short. A run is a repeated cycle when it holds the block at least twice (length >= 2p) and at
    least `MIN_REPEATED` of its tokens repeat an earlier one (length >= p + 8): so three equal tokens, the
    spaces of an indentation or a doubled word are no cycle, and a doubled sentence is one. The share is that
    of the tokens covered by one cycle or several.

    The first copy of the block counts as well. It was new when it was written, but the question is which text
    is to be kept apart from the rest, and there the strict reading is the safe one: what is left is free of
    cycles altogether, and a text called "little repeated" is so on any reading.

    Periods up to `max_period` are tried; the time taken is O(len(tokens) * max_period), in numpy.

    Args:
        tokens: Token ids, of the generated text alone.
        max_period: Longest block that is looked for. Nothing longer than half of the text can repeat anyway,
            so this matters only for texts of more than twice this length, where it keeps the time linear.
    """
    covered = np.zeros(len(tokens), dtype=bool)
    for start, end, _ in repeated_cycles(tokens, max_period):
        covered[start:end] = True
    return float(covered.mean()) if len(tokens) else 0.0


def final_cycle_share(tokens: Sequence[int], *, max_period: int = MAX_PERIOD) -> float:
    """Share of the tokens that lie in a repeated cycle which lasts to the end of the text, from 0 to 1.

    This is the trap that greedy decoding does not leave again. Cycles are those of `repeated_cycle_share`; of
    all that reach the last token, the longest counts.
    """
    lengths = [end - start for start, end, _ in repeated_cycles(tokens, max_period) if end == len(tokens)]
    return max(lengths) / len(tokens) if lengths else 0.0


def tokens_before_cycles(tokens: Sequence[int], *, max_period: int = MAX_PERIOD) -> int:
    """How many tokens come before the first repeated cycle, its first copy counted as part of it.

    Cycles are those of `repeated_cycle_share`; in a text without any, all tokens count.
    """
    return min((start for start, _, _ in repeated_cycles(tokens, max_period)), default=len(tokens))


def repeated_cycles(tokens: Sequence[int], max_period: int) -> Iterator[tuple[int, int, int]]:
    """All repeated cycles as (start, end, period), end excluded, from the shortest period to the longest."""
    ids = np.asarray(tokens, dtype=np.int64)
    for period in range(1, min(max_period, len(ids) // 2) + 1):
        starts, ends = _stretches(ids[period:] == ids[:-period])
        # A stretch of m equal pairs is a run of m + period tokens: 2p and p + 8 ask for m >= p and m >= 8.
        long_enough = ends - starts >= max(period, MIN_REPEATED)
        for start, end in zip(starts[long_enough].tolist(), ends[long_enough].tolist(), strict=True):
            yield start, end + period, period


def _stretches(flags: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Starts and ends (excluded) of the longest stretches of true values."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return edges[::2], edges[1::2]
