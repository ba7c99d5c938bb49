"""What tokens are called on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_PROMPT = 20_000
"""Characters of a prompt that are shown: its last ones."""

_CONTEXT = 6
"""Tokens that are decoded again before new ones: one alone may hold half a character, or lose its space."""

_REPLACEMENT = "\ufffd"


class Vocabulary:
    """The tokens of a page, numbered as they come.

    Args:
        tokenizer: Names them; they are shown by their ids without one.

    Attributes:
        names: The text of each.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.names: list[str] = []
        self._tokenizer = tokenizer
        self._numbers: dict[int, int] = {}

    def number(self, token: int) -> int:
        """The number of a token; -1 for none."""
        if token < 0:
            return -1
        if token not in self._numbers:
            self._numbers[token] = len(self.names)
            self.names.append(decode([token], self._tokenizer))
        return self._numbers[token]


def decode(tokens: Sequence[int], tokenizer: Any) -> str:
    """Their text, special tokens included; their ids without a tokenizer."""
    if tokenizer is None:
        return " ".join(f"#{token}" for token in tokens)
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def shown_prompt(prompt: Sequence[int], tokenizer: Any) -> str:
    """The end of a prompt's text."""
    text = decode(prompt[-MOST_PROMPT:], tokenizer)
    return text if len(text) <= MOST_PROMPT else "…" + text[-MOST_PROMPT:]


def pieces(steps: Sequence[Sequence[int]], tokenizer: Any, prompt: Sequence[int]) -> list[str]:
    """The text that each step added. A character that two steps share belongs to the later one."""
    if tokenizer is None:
        return [decode(step, None) + " " for step in steps]
    tokens = list(prompt[-_CONTEXT:])
    begin, given, parts = 0, decode(tokens, tokenizer), []
    for number, step in enumerate(steps):
        tokens += step
        text = decode(tokens[begin:], tokenizer)
        certain = text if number + 1 == len(steps) else text.rstrip(_REPLACEMENT)
        known = len(given) if certain.startswith(given) else _shared(certain, given)
        parts.append(certain[known:])
        given = certain
        if len(tokens) - begin > 8 * _CONTEXT and certain == text:
            begin = len(tokens) - _CONTEXT
            given = decode(tokens[begin:], tokenizer)
    return parts


def _shared(one: str, other: str) -> int:
    """Characters that two texts begin with."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
