"""State of one sequence during decoding."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from traceback import extract_tb
from typing import Any, TypeVar

from lookahead.core.protocols import Drafter, NoDrafter, Sampler
from lookahead.core.statistics import OnStep
from lookahead.core.watching import StepWatcher
from lookahead.errors import LookaheadWarning, not_of_signal

T = TypeVar("T")

Stop = Callable[[Any], bool]
"""Return whether a sequence, a `SequenceState`, is complete; called after every token."""


class SequenceState:
    """Text of one sequence, with its drafter, sampler, stop rule and listeners.

    It is independent of any batch: between two steps it may join one or leave it.

    Args:
        tokens: The token ids of the prompt that the model reads. At least one.
        drafter: Drafter of this sequence only. If it raises, the text continues without drafts.
        sampler: Selects the tokens.
        stop: Stop rule, called after every token.
        listeners: Called with each step, after the backend has committed it.
        index: Index of the sequence in its call, for listeners.
        most_tokens: Maximum length of `tokens`, if known; no draft reaches beyond it.

    Raises:
        LookaheadWarning: The drafter failed, and warnings are errors.

    Attributes:
        tokens: Token ids of the text so far.
        end_tokens: Token ids that complete the text, if `stop` depends on nothing but these and `most_tokens`; else
            `None`, and `stop` is called.
        finished: Whether the text is complete or has failed.
        error: Error raised by the sampler, the stop rule or a listener, if any.
        steps: Steps this sequence has taken.
        watcher: Called with each step and its outputs, before the listeners, if set.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        drafter: Drafter,
        sampler: Sampler,
        stop: Stop,
        listeners: Sequence[OnStep] = (),
        index: int = 0,
        most_tokens: int | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self.drafter = drafter
        self.sampler = sampler
        self.stop = stop
        self.listeners = listeners
        self.index = index
        self.most_tokens = sys.maxsize if most_tokens is None else most_tokens
        self.end_tokens: tuple[int, ...] | None = None
        self.finished = False
        self.error: BaseException | None = None
        self.steps = 0
        self.watcher: StepWatcher | None = None
        self.ask_drafter(lambda drafter: drafter.start(self.tokens), None)
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """End the text because of `error`."""
        self.error = error
        self.finished = True

    def ask_drafter(self, ask: Callable[[Drafter], T], otherwise: T) -> T:
        """Return `ask(drafter)`; if it raises, stop drafting and return `otherwise`."""
        try:
            return ask(self.drafter)
        except BaseException as error:
            self.stop_drafting(not_of_signal(error))
            return otherwise

    def stop_drafting(self, error: BaseException) -> None:
        """Continue without drafts, which changes no text, and warn. If warnings are errors, this text ends."""
        self.drafter = NoDrafter()
        place = extract_tb(error.__traceback__)[-1]
        try:
            warnings.warn(
                f"drafting stopped, and the text goes on without drafts: {type(error).__name__}: {error} "
                f"({place.filename}:{place.lineno})",
                LookaheadWarning,
                stacklevel=2,
            )
        except LookaheadWarning as warning:  # ends only this text, not the others of its step
            self.fail(warning)

    def append(self, token: int) -> bool:
        """Add a token to the text; return whether the text is complete."""
        self.tokens.append(token)
        return self.stop(self)


_CHUNK = 256
"""Number of tokens of two texts that are compared at once."""


def common_start(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts, lists both."""
    size = min(len(first), len(second))
    for begin in range(0, size, _CHUNK):
        end = min(begin + _CHUNK, size)
        if first[begin:end] != second[begin:end]:
            pairs = zip(first[begin:end], second[begin:end], strict=True)
            return begin + next(place for place, (one, other) in enumerate(pairs) if one != other)
    return size


def may_share_more(first: Sequence[int], second: Sequence[int], tokens: int) -> bool:
    """Return whether the common prefix of two texts may be longer than `tokens`."""
    return len(first) > tokens < len(second) and first[tokens] == second[tokens]
