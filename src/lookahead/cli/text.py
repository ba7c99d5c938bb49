"""Text that grows with its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that turns tokens back into text."""

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of generated tokens, without special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class IncrementalText:
    """Hands out the text of a growing list of tokens piece by piece.

    All tokens so far are decoded together every time: one token alone may hold half a character, and some
    tokenizers drop the space before the first token of whatever they are given.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is new and cannot change any more."""
        self._tokens.extend(tokens)
        # A replacement character at the end may be the first bytes of a character that is still to come.
        certain = decode(self._tokenizer, self._tokens).rstrip(_REPLACEMENT)
        if not certain.startswith(self._given):
            return ""
        return self._give(certain)

    def finish(self) -> str:
        """Return the rest, whatever it looks like."""
        return self._give(decode(self._tokenizer, self._tokens))

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._given = text
        return new
