"""Published rules that look a continuation up in the text, written from their documentation; each drafts one chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting.best_first import grow


class TextRule:
    """What rules that know the text alone have in common (`Drafter`)."""

    top_k = 0

    def __init__(self) -> None:
        self._text = np.zeros(0, dtype=np.int64)
        self.length = 0

    @property
    def text(self) -> NDArray[np.int64]:
        """Prompt and output so far."""
        return self._text[: self.length]

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self.length = 0
        self.extend(prompt)

    def propose(self, tree: TokenTree) -> None:
        """See `Drafter`: the tokens that `look_up` gives, one after another."""
        tree.add_candidates(self.look_up())

    def look_up(self) -> list[int]:
        """The tokens that may come next."""
        raise NotImplementedError

    def observe(self, result: StepResult) -> None:
        """See `Drafter`."""
        self.extend(result.tokens)

    def statistics(self) -> dict[str, Any]:
        """See `Drafter`."""
        return {}

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        end = self.length + len(tokens)
        if end > len(self._text):
            longer = np.zeros(max(2 * end, 1024), dtype=np.int64)
            longer[: self.length] = self.text
            self._text = longer
        self._text[self.length : end] = tokens
        self.length = end


def first_occurrence(text: NDArray[np.int64], size: int) -> int | None:
    """Where the first run begins that equals the last `size` tokens of a text and that something follows."""
    starts = len(text) - size
    if starts <= 0:
        return None
    same = np.ones(starts, dtype=bool)
    for place in range(size):
        same &= text[place : place + starts] == text[starts + place]
    found = np.flatnonzero(same)
    return int(found[0]) if len(found) else None


class FirstOccurrence(TextRule):
    """Drafts what followed the first occurrence of the longest of the last n-grams that has occurred before.

    transformers' prompt lookup is this rule for 2 tokens, else 1; vLLM's n-gram rule for 4 tokens, else 3, else 2.

    Args:
        most: Tokens drafted at most.
        shortest: Shortest n-gram that is looked up.
        longest: The longest one.
    """

    def __init__(self, most: int, shortest: int, longest: int) -> None:
        super().__init__()
        self._most, self._sizes = most, range(longest, shortest - 1, -1)

    def look_up(self) -> list[int]:
        """See `TextRule`."""
        text = self.text
        for size in self._sizes:
            place = first_occurrence(text, size)
            if place is not None:
                drafted: list[int] = text[place + size : place + size + self._most].tolist()
                return drafted
        return []


class RecycledText(TextRule):
    """Token recycling (arXiv 2408.08696) where no predictions are shown: after each token, the tokens that followed it.

    Each token keeps the last eight that followed it in prompt and output, the latest first; the tree is grown through
    them as if each were half as likely as the one before it.

    Args:
        most: Tokens drafted at most.
        kept: Followers of a token that are kept.
    """

    def __init__(self, most: int, kept: int = 8) -> None:
        super().__init__()
        self._most, self._kept = most, kept
        self._followers: dict[int, list[int]] = {}

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self._followers = {}
        super().start(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """See `TextRule`."""
        before = self.text[-1:].tolist()
        super().extend(tokens)
        for token, follower in zip([*before, *tokens], [*before, *tokens][1:], strict=False):
            own = self._followers.setdefault(token, [])
            if follower in own:
                own.remove(follower)
            own.insert(0, follower)
            del own[self._kept :]

    def propose(self, tree: TokenTree) -> None:
        """See `Drafter`."""

        def followers(token: int) -> Iterator[tuple[int, float]]:
            return ((each, 0.5 ** (rank + 1)) for rank, each in enumerate(self._followers.get(token, ())))

        grow(tree, self._most, followers)


class BestCopy(TextRule):
    """What no method can have: knows the answer, and drafts the longest run of a text that it goes on with.

    It bounds what can be gained by copying from that text.

    Args:
        most: Tokens drafted at most.
        source: The text that is copied from.
        answer: The answer.
    """

    def __init__(self, most: int, source: Sequence[int], answer: Sequence[int]) -> None:
        super().__init__()
        self._most, self._source, self._answer = most, source, answer
        self._prompt = 0

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        super().start(prompt)
        self._prompt = len(prompt)

    def look_up(self) -> list[int]:
        """See `TextRule`."""
        ahead = self._answer[self.length - self._prompt :][: self._most]
        runs = (_agreeing(self._source[place:], ahead) for place in range(len(self._source)))
        return list(ahead[: max(runs, default=0)])


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (first, second) in pairs if first != second), min(len(one), len(other)))
