"""From tokens to text as they come, up to a stop string; conversations as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

_CONTEXT = 6
"""Tokens of the prompt that are decoded beside the first new ones: some tokenizers drop a leading space."""

_INCOMPLETE = "\ufffd"

_MOST_INCOMPLETE = 32
"""Tokens without a complete character that are kept back; after so many the bytes are no text."""


class Tokenizer(Protocol):
    """What decoding needs of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of these tokens."""


class TextBuilder:
    """The text of an answer, token by token.

    Characters whose bytes have not all come are kept back, and so is what may be the beginning of a stop string.

    Args:
        prompt: The token ids before the answer.
        stops: Texts that end the answer; they are no part of it.
        dropped: Special tokens that are no part of the text; all of them if `None`.

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
        self._window = list(prompt[-_CONTEXT:])  # tokens around what is not decoded yet
        self._decoded = len(self._window)
        self._text = ""
        self._taken = 0
        self.stopped = False
        self.stop: str | None = None

    def add(self, token: int) -> bool:
        """Add a token; whether the answer has ended with it."""
        self._window.append(token)
        self._read(last=len(self._window) - self._decoded >= _MOST_INCOMPLETE)
        return self.stopped

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text

    def take(self) -> str:
        """The text that is certain and was not taken yet."""
        held = 0 if self.stopped else held_back(self._text, self._stops)
        end = max(len(self._text) - held, self._taken)
        new, self._taken = self._text[self._taken : end], end
        return new

    def finish(self) -> str:
        """All that is left, when no token follows."""
        if not self.stopped:
            self._read(last=True)
        new, self._taken = self._text[self._taken :], len(self._text)
        return new

    def _read(self, last: bool) -> None:
        """Decode what came since, unless a character is not complete, and is not the `last` either."""
        before, after = self._decode(self._window[: self._decoded]), self._decode(self._window)
        if len(after) > len(before) and (last or not after.endswith(_INCOMPLETE)):
            self._window = self._window[self._decoded :]
            self._decoded = len(self._window)
            self._extend(after[len(before) :])

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
        kept = [token for token in tokens if token not in (self._dropped or ())]
        skips = self._dropped is None
        return self._tokenizer.decode(kept, skip_special_tokens=skips, clean_up_tokenization_spaces=False)


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    held = 0
    for mark in marks:
        start = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
        while start >= 0 and not mark.startswith(text[start:]):
            start = text.find(mark[0], start + 1)
        held = max(held, len(text) - start if start >= 0 else 0)
    return held


def conversation_text(turns: Iterable[tuple[str, str]]) -> str:
    """A conversation where there is no chat template: every turn, a role and its text, begins on a new line, and the
    assistant goes on right where the text before it ends."""
    text = ""
    for role, said in turns:
        if text and role != "assistant" and not text.endswith("\n"):
            text += "\n"
        text += said
    return text
