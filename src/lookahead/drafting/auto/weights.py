"""How likely each proposal is, from the evidence of the sources: a conditional logit with constant weights.

Token t scores s(t) = w · x(t), "none of those proposed" scores a constant b, and the probabilities are their softmax.
The features x(t) are the log-probability that the memory gives t after the last 1, 2, ... tokens, and the class of the
longest context match that t follows (one of eight is 1, the others 0). There is one set of w and b for each length of
the longest context that the memory knows, so the lengths are blended, not just backed off from.

Both tables were fitted by `tools/fit_weights.py`; its module docstring has the commands. The weights 10.00 are not
fitted: texts of the fit hardly copy prompts. A long match must outvote a certain prediction after a few tokens, as
`docs/decisions.md` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.texts import MATCH_CLASSES

NOTHING = "nothing"
"""Feature of all tokens that no source proposed; its weight b is in column 0."""

MATCHES = tuple(f"match of {length} tokens" for length in MATCH_CLASSES)
MODEL_WEIGHTS: dict[str, tuple[float, ...]] = {
    "nothing": (0.99, -0.47, -2.31, -3.17, -3.89),
    "after 1 token": (0.00, 0.71, 0.42, 0.34, 0.31),
    "after 2 tokens": (0.00, 0.00, 0.47, 0.21, 0.13),
    "after 3 tokens": (0.00, 0.00, 0.00, 0.46, 0.12),
    "after 4 tokens": (0.00, 0.00, 0.00, 0.00, 0.56),
    "match of 2 tokens": (3.11, 2.50, 1.12, 1.02, 1.24),
    "match of 3 tokens": (3.01, 2.79, 2.53, 1.36, 1.30),
    "match of 4 tokens": (3.96, 3.40, 3.30, 2.56, 1.21),
    "match of 6 tokens": (4.25, 3.23, 3.33, 3.47, 1.65),
    "match of 9 tokens": (3.47, 4.94, 4.69, 4.51, 2.20),
    "match of 16 tokens": (3.05, 10.00, 10.00, 10.00, 3.46),
    "match of 24 tokens": (1.43, 10.00, 10.00, 10.00, 4.14),
    "match of 32 tokens": (6.59, 10.00, 10.00, 10.00, 10.00),
}
"""Weights for a memory of model predictions: by feature, for each length of the longest known context, 0 to 4."""

TEXT_WEIGHTS: dict[str, tuple[float, ...]] = {
    "nothing": (2.49, 0.42, -0.47, -1.34, -1.57, -1.98, -2.44),
    "after 1 token": (0.00, 0.51, 0.29, 0.32, 0.20, 0.11, -0.05),
    "after 2 tokens": (0.00, 0.00, 0.18, 0.13, 0.14, 0.12, -0.03),
    "after 3 tokens": (0.00, 0.00, 0.00, 0.14, 0.11, 0.19, 0.15),
    "after 4 tokens": (0.00, 0.00, 0.00, 0.00, 0.04, -0.08, 0.03),
    "after 5 tokens": (0.00, 0.00, 0.00, 0.00, 0.00, 0.16, 0.03),
    "after 6 tokens": (0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.35),
    "match of 2 tokens": (3.75, 2.49, 0.35, 0.67, 0.65, 0.98, 1.24),
    "match of 3 tokens": (3.47, 2.78, 2.53, 0.25, 1.33, 0.57, 1.61),
    "match of 4 tokens": (4.54, 3.38, 3.28, 2.53, 0.37, 0.22, 1.66),
    "match of 6 tokens": (4.85, 3.23, 3.33, 3.47, 2.48, 2.48, 0.02),
    "match of 9 tokens": (5.58, 4.94, 4.69, 4.51, 3.42, 3.42, 0.93),
    "match of 16 tokens": (5.77, 5.78, 5.62, 5.73, 4.88, 4.88, 3.14),
    "match of 24 tokens": (4.91, 4.85, 4.88, 4.81, 4.90, 4.90, 3.52),
    "match of 32 tokens": (6.59, 6.59, 6.59, 6.59, 6.66, 6.66, 3.71),
}
"""Weights for a memory of observed texts without predictions: by feature, for lengths 0 to 6."""


def feature_names(orders: int) -> list[str]:
    """Return the feature of each column, for a memory of contexts of up to `orders` tokens."""
    contexts = [f"after {length} token{'s' if length > 1 else ''}" for length in range(1, orders + 1)]
    return [NOTHING, *contexts, *MATCHES]


def build_weights(orders: int, table: Mapping[str, Sequence[float]] = MODEL_WEIGHTS) -> NDArray[np.float64]:
    """Return the weights of a table for a memory of contexts of up to `orders` tokens.

    Contexts longer than the table's get the weights of its longest one.

    Returns:
        b in column 0, then w for contexts of 1, 2, ... tokens, and the classes of matches, for each length of the
        longest known context, 0 included, `[orders + 1, columns]`.
    """
    names = feature_names(orders)
    longest = len(table[NOTHING]) - 1
    rows = np.minimum(np.arange(orders + 1), longest)
    unknown = (0.0,) * (longest + 1)
    values = np.stack([np.array(table.get(name, unknown))[rows] for name in names], axis=1)
    for order in range(longest + 1, orders + 1):
        values[order, order], values[order, longest] = values[order, longest], 0.0
    return values


@cache
def all_weights(orders: int) -> NDArray[np.float64]:
    """Return the weights of both tables, model and text, `[2, orders + 1, columns]`; cached."""
    return np.stack([build_weights(orders, table) for table in (MODEL_WEIGHTS, TEXT_WEIGHTS)])
