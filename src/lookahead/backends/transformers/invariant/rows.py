"""How many rows a product needs so that each row has the same bits whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Product = Callable[[torch.Tensor], torch.Tensor]
"""`[rows, in_features]` to `[rows, out_features]`."""

MOST = 128
"""Rows of one product at most; more are multiplied in several."""

_LEAST = (1, 2, 4, 8, 16)
_FIXED = 16
_OUTCOMES = 1 << 17
"""Results that are compared for each number of rows, as few as one in ten thousand may differ; but of no fewer and no
more rows than `_FEWEST` and `_ROWS`."""
_FEWEST, _ROWS = 8, 8192
_TRIED = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, MOST)


class RowRule(NamedTuple):
    """Between how many rows a product may have; fewer are padded, and more are cut.

    Libraries choose an order of summation by the shape of a product. Where all numbers of rows from `least` on have
    one order in common, that is enough; on processors where they have not, `least` and `most` are the same.
    """

    least: int
    most: int


RULES = (*(RowRule(least, MOST) for least in _LEAST), RowRule(_FIXED, _FIXED))
"""From the cheapest one to the dearest."""


def find_rule(product: Product, inputs: int, dtype: torch.dtype) -> RowRule | None:
    """The cheapest rule under which products of random rows have the same bits in every company; `None` if there is
    none.

    Found by trying, always in the same order: a time would make bits depend on the load of the machine.

    Args:
        product: The product.
        inputs: Elements of a row.
        dtype: Their type.
    """
    sample, compared = _sample(product, inputs, dtype)
    expected = torch.cat([product(part) for part in torch.split(sample, MOST)])
    sizes = [rows for rows in _TRIED if _alike(product, sample, expected, rows, compared)]
    for rule in RULES[:-1]:
        if all(rows in sizes for rows in _TRIED if rows >= rule.least):
            return rule
    return RULES[-1] if are_alike(product, inputs, dtype, _FIXED) else None


def are_alike(product: Product, inputs: int, dtype: torch.dtype, size: int) -> bool:
    """Whether the rows of a product of `size` random ones, a divisor of `MOST`, have the same bits in each place.

    Args:
        product, inputs, dtype: As for `find_rule`.
        size: Rows of every product.
    """
    sample, _ = _sample(product, inputs, dtype)
    expected = torch.cat([product(part) for part in torch.split(sample, size)])
    turned = sample.roll(5, 0)
    again = torch.cat([product(part) for part in torch.split(turned, size)]).roll(-5, 0)
    return torch.equal(again, expected)


def _sample(product: Product, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Random rows, a multiple of `MOST`, and how many of them are compared."""
    outputs = product(torch.zeros(MOST, inputs, dtype=dtype)).shape[1]
    compared = min(max(_OUTCOMES // outputs, _FEWEST), _ROWS)
    random = torch.Generator().manual_seed(0)
    return torch.randn(-(-compared // MOST) * MOST, inputs, generator=random).to(dtype), compared


def _alike(product: Product, sample: torch.Tensor, expected: torch.Tensor, rows: int, compared: int) -> bool:
    """Whether so many rows at once give what `MOST` of them give; for the first `compared` of the sample or so."""
    count = max(compared, rows) // rows * rows
    return all(torch.equal(product(sample[at : at + rows]), expected[at : at + rows]) for at in range(0, count, rows))


def by_rule(product: Product, rows: torch.Tensor, rule: RowRule) -> torch.Tensor:
    """The product of `rows` `[count, in_features]` in as many parts, each padded, as the rule wants."""
    count = rows.shape[0]
    parts = -(-count // rule.most)
    size = max(-(-count // parts), rule.least)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, parts * size - count))
    return torch.cat([product(part) for part in torch.split(padded, size)])[:count]
