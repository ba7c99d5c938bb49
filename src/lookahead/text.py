"""Incremental decoding of tokens to text, up to a stop string; conversations as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

_CONTEXT = 6
"""Prompt tokens that are decoded together with the first new ones: some tokenizers drop a leading space."""

_INCOMPLETE = "\ufffd"

_LONGEST_CONTEXT = 24
"""Tokens of the context, so that it is decoded once for several tokens."""

_MOST_INCOMPLETE = 32
"""Most tokens that are held back until a character is complete; more are no valid text."""


class Tokenizer(Protocol):
    """Part of a tokenizer's interface that decoding needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of `token_ids`."""


class FastDecoder:
    """Decodes as a fast tokenizer of transformers without clean-up does, past the checks of its arguments.

    Args:
        backend: Its `backend_tokenizer`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """See `Tokenizer`."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))


class TextBuilder:
    """Build the text of an answer, token by token.

    Incomplete characters and possible beginnings of a stop string are held back.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: Token ids before the answer.
        stops: Stop strings, which end the answer and are not part of it.
        dropped: Special tokens to leave out of the text; `None` leaves out all of them.

    Attributes:
        stopped: Whether a stop string was found.
        stop: Which one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        dropped: Collection[int] | None = None,
    ) -> None:
        self._tokenizer, self._dropped = tokenizer, dropped
        self._stops = list(stops)
        self._window = list(prompt[-_CONTEXT:])  # tokens not decoded yet, after some context
        self._decoded = len(self._window)
        self._before: str | None = None  # text of the context, once decoded
        self._text = ""
        self._taken = 0
        self.stopped = False
        self.stop: str | None = None

    def add(self, token: int) -> bool:
        """Add a token; return whether the answer has ended."""
        self._window.append(token)
        self._read(last=len(self._window) - self._decoded >= _MOST_INCOMPLETE)
        return self.stopped

    def extend(self, tokens: Sequence[int]) -> bool:
        """Add tokens up to a stop string; return whether the answer has ended."""
        if len(tokens) > 1 and not self._stops:
            count = len(self._window)
            self._window += tokens
            if self._read(last=False):
                return False
            del self._window[count:]
        return any(self.add(token) for token in tokens)

    @property
    def text(self) -> str:
        """Text of the answer until now."""
        return self._text

    def take(self) -> str:
        """Return the new text since the last call, without held-back characters."""
        held = 0 if self.stopped else held_back(self._text, self._stops)
        end = max(len(self._text) - held, self._taken)
        new, self._taken = self._text[self._taken : end], end
        return new

    def finish(self) -> str:
        """Return the rest of the text, including held-back characters; no token follows."""
        if not self.stopped:
            self._read(last=True)
        new, self._taken = self._text[self._taken :], len(self._text)
        return new

    def _read(self, last: bool) -> bool:
        """Decode the new tokens, unless they end in an incomplete character and are not the `last` ones.

        Returns:
            Whether they gave new text.
        """
        if self._before is None:
            self._before = self._decode(self._window[: self._decoded])
        before, after = self._before, self._decode(self._window)
        is_incomplete = after.endswith(_INCOMPLETE)
        if len(after) <= len(before) or (is_incomplete and not last):
            return False
        self._before = after
        if is_incomplete or len(self._window) > _LONGEST_CONTEXT:
            self._window = self._window[self._decoded :]
            self._before = None
        self._decoded = len(self._window)
        self._extend(after[len(before) :])
        return True

    def _extend(self, piece: str) -> None:
        longest = max((len(stop) for stop in self._stops), default=1)
        start = max(len(self._text) - longest + 1, 0)
        self._text += piece
        places = [(place, stop) for stop in self._stops if (place := self._text.find(stop, start)) >= 0]
        if places:
            place, self.stop = min(places)
            self._text = self._text[:place]
            self.stopped = True

    def _decode(self, tokens: list[int]) -> str:
        visible = [token for token in tokens if token not in (self._dropped or ())]
        skips = self._dropped is None
        return self._tokenizer.decode(visible, skip_special_tokens=skips, clean_up_tokenization_spaces=False)


def held_back(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may begin one of `marks`."""
    held = 0
    for mark in marks:
        start = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
        while start >= 0 and not mark.startswith(text[start:]):
            start = text.find(mark[0], start + 1)
        held = max(held, len(text) - start if start >= 0 else 0)
    return held


def conversation_text(turns: Iterable[tuple[str, str]]) -> str:
    """Format a conversation for a model without a chat template.

    Args:
        turns: Pairs of a role and a text. Each turn begins on a new line, except an assistant's, which continues the
            text before it.
    """
    text = ""
    for role, content in turns:
        if text and role != "assistant" and not text.endswith("\n"):
            text += "\n"
        text += content
    return text
