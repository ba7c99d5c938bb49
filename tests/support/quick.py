"""What `make test` runs of a test that has many parameters; `make test-exact` runs all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

REPRESENTATIVES = (
    *("deepseek_v3", "falcon_multi_query", "gemma3", "gemma4", "gpt2", "gpt_oss", "gptj", "llama", "llama4_chunked"),
    *("llama_dynamic_rope", "mistral_sliding", "nemotron", "opt", "phi3_long_rope", "qwen3_moe"),
)
"""Architectures of the zoo that have between them every kind of attention, position, cache and mixture."""


def quickly(values: Iterable[Any], quick: Collection[Any] = REPRESENTATIVES) -> list[Any]:
    """The values as parameters; those that are not among `quick` are for `make test-exact`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.exact) for value in values]
