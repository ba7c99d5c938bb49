"""Parameters that `make test` runs of large tests; `make test-exact` runs all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest

REPRESENTATIVES = (
    *("deepseek_v3", "falcon_multi_query", "gemma3", "gemma4", "gpt2", "gpt_oss", "gptj", "llama", "llama4_chunked"),
    *("llama_dynamic_rope", "mistral_sliding", "nemotron", "opt", "phi3_long_rope", "qwen3_moe"),
)
"""Architectures of the zoo that cover every kind of attention, position, cache and mixture."""


def quickly(values: Iterable[Any], quick: Collection[Any] = REPRESENTATIVES) -> list[Any]:
    """Return the values as parameters; values outside `quick` run with `make test-exact`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.exact) for value in values]


def diagonal(*axes: Collection[Any]) -> list[Any]:
    """Return all combinations of the axes' values as parameters.

    `make test` runs as few of them as have every value of each axis, `make test-exact` all others. Values may be
    parameters of `quickly`.
    """
    quick = {tuple(number % len(axis) for axis in axes) for number in range(max(map(len, axes)))}
    parameters = []
    for place, values in zip(product(*map(range, map(len, axes))), product(*axes), strict=True):
        marked = [value for value in values if hasattr(value, "marks")]
        plain = [value.values[0] if hasattr(value, "marks") else value for value in values]
        is_quick = place in quick and not marked
        parameters.append(pytest.param(*plain, marks=() if is_quick else pytest.mark.exact))
    return parameters
