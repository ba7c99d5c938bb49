"""How many candidates a step sends: compiled loops over what they promise and what steps cost.

Each step asks once, and what it asks about fits a few cache lines. Written as operations on whole arrays it would take
longer: after a forward pass none of their code is in the processor's cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled, inner

Costs = NDArray[np.float64]
"""What `CostModel.table` gives: seconds of a step of n nodes, a fixed part and one for each token of text, `[2, n]`."""


@inner
def _seconds(costs: Costs, nodes: int, context: int) -> float:
    return float(costs[0, nodes] + context * costs[1, nodes])


@compiled
def choose_for_one(
    likely: NDArray[np.float64],
    costs: Costs,
    context: int,
    rows: int,
    most: int,
    idle: float,
    worthwhile: float,
    usual: float,
    leaning: float,
) -> tuple[int, bool]:
    """Choose among the candidates of one row; see `ThroughputBudget`.

    Args:
        likely: How likely each is, descending, `[candidates]`.
        costs: What steps cost, up to `rows * (most + 1)` nodes.
        context: Tokens of the text.
        rows: Rows that send as many each.
        most: Most candidates that are sent.
        idle: What a step takes that sends none, over one of roots alone.
        worthwhile: What a token counts that comes without any.
        usual: Tokens of a row that steps bring, in the time of a plain one.
        leaning: How far a rate below the usual one is taken to be nearer to it.

    Returns:
        How many are sent, and whether any number of others would pay if all were as likely as the last one.
    """
    plain = _seconds(costs, rows, context)
    rate, tokens = worthwhile / (plain * idle), 1.0
    for sent in range(len(likely)):
        tokens += likely[sent]
        rate = max(rate, tokens / _seconds(costs, rows * (sent + 2), context))
    rate += leaning * max(usual / plain - rate, 0.0)
    chosen, gain, tokens = 0, worthwhile - rate * plain * idle, 1.0
    for sent in range(len(likely)):
        tokens += likely[sent]
        gained = tokens - rate * _seconds(costs, rows * (sent + 2), context)
        if gained > gain:
            chosen, gain = sent + 1, gained
    more = False
    if len(likely) > 0:
        for sent in range(len(likely), most):
            tokens += likely[-1]
            more |= tokens - rate * _seconds(costs, rows * (sent + 2), context) > gain
    return chosen, more


@compiled
def line_up(
    likely: NDArray[np.float64],
    ends: NDArray[np.int64],
    weights: NDArray[np.float64],
    heads: NDArray[np.int64],
    owners: NDArray[np.int64],
    promised: NDArray[np.float64],
) -> None:
    """Put the candidates of several rows in one order, those that promise most first.

    Args:
        likely: How likely each is, row by row, descending within each, `[candidates]`.
        ends: Where those of each row end, `[rows]`.
        weights: What a token of each row counts, `[rows]`.
        heads: Where those of each row begin; changed, `[rows]`.
        owners: Gets whose each is, `[candidates]`.
        promised: Gets what each promises, in tokens, likewise.
    """
    for place in range(len(likely)):
        owner, best = 0, -1.0
        for row in range(len(ends)):
            if heads[row] < ends[row] and likely[heads[row]] * weights[row] > best:
                owner, best = row, likely[heads[row]] * weights[row]
        owners[place], promised[place] = owner, best
        heads[owner] += 1


@compiled
def choose_for_all(
    promised: NDArray[np.float64],
    costs: Costs,
    context: int,
    base: int,
    rows: int,
    idle: float,
    looking: float,
    beside: float,
) -> int:
    """Choose how many candidates of all rows are sent, the first ones; see `SharedBudget`.

    Args:
        promised: Tokens that each promises, descending, `[candidates]`.
        costs: What steps cost, up to `base + candidates` nodes.
        context: Tokens of the longest text.
        base: Nodes of the step without candidates: roots and parts of prompts.
        rows: How many of them are roots.
        idle: What a step takes that sends none, over one of roots alone.
        looking: Seconds that looking for candidates takes, whatever is sent.
        beside: Seconds that a node adds to a step that carries prompts, at most.
    """
    tokens = float(rows)
    chosen, rate = 0, tokens / (_seconds(costs, rows, context) * idle + looking)
    for sent in range(len(promised)):
        tokens += promised[sent]
        reached = tokens / (_seconds(costs, rows + sent + 1, context) + looking)
        if reached > rate:
            chosen, rate = sent + 1, reached
    if base == rows:
        return chosen
    # The prompts are read anyway: what drafts take beside them must bring what that time brings in other steps.
    chosen, gain, tokens = 0, 0.0, 0.0
    for sent in range(len(promised)):
        tokens += promised[sent]
        added = _seconds(costs, base + sent + 1, context) - _seconds(costs, base, context)
        gained = tokens - rate * min(added, beside * (sent + 1))
        if gained > gain:
            chosen, gain = sent + 1, gained
    return chosen
