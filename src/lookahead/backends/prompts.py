"""What the rows of a call begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Prompts:
    """What the rows of a call begin with.

    Attributes:
        input_ids: As the caller gave them, `[batch, tokens]`.
        mask: Which tokens of the whole text count, `[batch, columns]` bool: of what is cached and left out of
            `input_ids`, too.
        tokens: The tokens of each row of `input_ids` that count.
        before: How many tokens that count come before them, per row.
        cache: What the caller passed to go on from, if anything.
        inputs: What transformers would hand to the model, if that is more than tokens: images, say, or positions that
            follow an image. Then the prompt is read by the model's own prefill.
        source: What an encoder has read before, for all rows, as arguments of each pass of its decoder.
        source_tokens: The token ids that it read, for each row; empty where these were none.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor
    tokens: list[list[int]]
    before: list[int]
    cache: Cache | None
    inputs: dict[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    source_tokens: Sequence[Sequence[int]] = ()

    @cached_property
    def all_count(self) -> bool:
        """Whether no token is hidden, neither of the prompts nor of what is cached."""
        return bool(self.mask.all())

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Tokens of each row of `input_ids`, padding included."""
        return self.input_ids.shape[1]

    @property
    def padding(self) -> list[int]:
        """Hidden tokens of each row of `input_ids`."""
        return [self.width - len(row) for row in self.tokens]

    @property
    def longest(self) -> int:
        """Tokens that count of the longest row, those before `input_ids` included."""
        return max(earlier + len(row) for earlier, row in zip(self.before, self.tokens, strict=True))
