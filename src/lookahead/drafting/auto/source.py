"""A source of `preset="auto"`: before each step it lists tokens that may follow the text, with probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from lookahead.core.outputs import StepResult
from lookahead.errors import InvalidArgumentError

MEMBERS = ("name", "start", "propose", "observe")


@dataclass(frozen=True)
class TokenPaths:
    """Tokens that may follow the text, as a tree.

    Attributes:
        tokens: Token ids, `[tokens]`, the likeliest first among those with the same parent, which differ.
        parents: For each token the place in `tokens` of the one that it follows, which comes before it; -1 where it
            follows the text.
        probabilities: How likely each token is after its parent, `[tokens]`, above 0 and at most 1. What they are
            worth is seen from what comes true, so an estimate will do.
    """

    tokens: ArrayLike
    parents: ArrayLike
    probabilities: ArrayLike

    @classmethod
    def chain(cls, tokens: Sequence[int], probability: float = 0.9) -> TokenPaths:
        """One path, each token of which is as likely as the others."""
        return cls(tokens, range(-1, len(tokens) - 1), [probability] * len(tokens))


NO_PATHS = TokenPaths(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0))
"""Nothing is known of what may follow."""


class Source(Protocol):
    """Proposes tokens that may follow one text. It cannot change the text, and counts as far as it comes true.

    A source may also have a method `permits(tokens, parents)`, which says for each node of a draft whether it can come
    true, as a grammar would know; see `Permits`. And it may have two methods for what is sent whether or not drafting
    pays: `certain()` gives the tokens that will be selected next whatever the model says, and `alternatives()` paths of
    which one will be selected after these. `certain` is called first in each step; `propose` and `permits` are about
    what follows its tokens.
    """

    @property
    def name(self) -> str:
        """What traces call it: one word or a few, different from those of other sources."""

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence that follows `prompt`, the token ids of the text so far."""

    def propose(self) -> TokenPaths:
        """What may follow the text now. Called before each step that has a draft."""

    def observe(self, result: StepResult) -> None:
        """The text goes on with `result.tokens`. Called after every step."""


class CheckedSource:
    """A user-defined source, whose paths are checked before the search uses them.

    Args:
        source: What a factory in `LookaheadConfig(sources=...)` made.
        vocabulary: Tokens that the model knows; any are, if not given.

    Raises:
        InvalidArgumentError: `source` lacks a member of `Source`, or its name is no text.
    """

    def __init__(self, source: Any, vocabulary: int | None = None) -> None:
        missing = [member for member in MEMBERS if not hasattr(source, member)]
        if missing:
            raise InvalidArgumentError(
                f"sources made {source!r}, which lacks {', '.join(missing)}; a source has {', '.join(MEMBERS)}"
            )
        if not isinstance(source.name, str) or not source.name:
            raise InvalidArgumentError(f"sources made {source!r}, whose name={source.name!r} must be a text")
        self._source: Source = source
        self._vocabulary = np.iinfo(np.int32).max if vocabulary is None else vocabulary
        self.name = source.name
        self.start = source.start
        self.observe = source.observe
        self.permits = getattr(source, "permits", None)
        self.certain = self.alternatives = None
        if getattr(source, "certain", None) is not None:
            self.certain = lambda: self._known(source.certain())
            self.alternatives = lambda: [self._known(path) for path in source.alternatives()]

    def propose(self) -> TokenPaths:
        """See `Source`.

        Raises:
            InvalidArgumentError: The paths are none.
        """
        paths = self._source.propose()
        try:
            tokens, parents = (np.array(each, dtype=np.int64) for each in (paths.tokens, paths.parents))
            probabilities = np.array(paths.probabilities, dtype=np.float64)
        except (AttributeError, TypeError, ValueError) as error:
            raise self._refusal(f"{paths!r}, which is no TokenPaths of numbers") from error
        if tokens.ndim != 1 or not tokens.shape == parents.shape == probabilities.shape:
            raise self._refusal(f"arrays of shapes {tokens.shape}, {parents.shape}, {probabilities.shape}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            raise self._refusal(f"tokens outside of 0 to {self._vocabulary - 1}")
        if (parents < -1).any() or (parents >= np.arange(len(parents))).any():
            raise self._refusal("a parent that does not come before its token")
        if not ((probabilities > 0) & (probabilities <= 1)).all():
            raise self._refusal("a probability that is not above 0 and at most 1")
        return TokenPaths(tokens, parents, probabilities)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        if not all(0 <= token < self._vocabulary for token in tokens):
            raise self._refusal(f"tokens outside of 0 to {self._vocabulary - 1}")
        return list(tokens)

    def _refusal(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"source {self.name!r} proposed {what}; see lookahead.drafting.TokenPaths")
