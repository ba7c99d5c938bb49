"""One sequence that is being decoded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from traceback import extract_tb
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import Drafter, NoDrafter, Sampler
from lookahead.core.statistics import OnStep
from lookahead.core.watching import StepWatcher
from lookahead.errors import LookaheadWarning

T = TypeVar("T")

Tokens = Sequence[int] | NDArray[np.int64]

Stop = Callable[[Any], bool]
"""Says whether a sequence, a `SequenceState`, is complete; called after every token."""


class SequenceState:
    """The text of one sequence, with its drafter, its sampler, its stop rule and its listeners.

    It belongs to no batch: between two steps it may join one or leave it.

    Args:
        tokens: The token ids of the prompt that the model reads. At least one.
        drafter: Proposes tokens for this sequence alone. If it raises, the text goes on without drafts.
        sampler: Selects the tokens.
        stop: Ends the text.
        listeners: Called with each step, after the backend has settled.
        index: Which sequence of its call it is, for listeners.
        most_tokens: Length of `tokens` at which the text is complete at the latest, if that is known; no draft reaches
            further.

    Raises:
        LookaheadWarning: Its drafter did, and warnings are errors.

    Attributes:
        tokens: Token ids of the text so far.
        end_tokens: Token ids that complete the text, if `stop` looks at nothing but these and `most_tokens`; `None` to
            ask `stop`.
        finished: Whether the text is complete, or nothing is added to it any more.
        error: What its sampler, its stop rule or a listener raised, if anything.
        steps: Steps this sequence has taken.
        watcher: Called with each step and all that it showed, before the listeners, if anybody watches.
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

    @property
    def is_last_token(self) -> bool:
        """Whether the coming token certainly completes the text, so that there is nothing to draft."""
        return len(self.tokens) + 1 >= self.most_tokens

    @property
    def remaining(self) -> int:
        """Number of tokens with which the text is complete at the latest."""
        return self.most_tokens - len(self.tokens)

    def fail(self, error: BaseException) -> None:
        """Add nothing to the text any more, because of `error`."""
        self.error, self.finished = error, True

    def ask_drafter(self, ask: Callable[[Drafter], T], otherwise: T) -> T:
        """What `ask` returns for the drafter; `otherwise` if it raises, and then drafting stops."""
        try:
            return ask(self.drafter)
        except Exception as error:
            self.stop_drafting(error)
            return otherwise

    def stop_drafting(self, error: Exception) -> None:
        """Go on without drafts, which change no text, and warn of it. Where the warning is an error, this text ends."""
        self.drafter = NoDrafter()
        place = extract_tb(error.__traceback__)[-1]
        try:
            warnings.warn(
                f"drafting stopped, and the text goes on without drafts: {type(error).__name__}: {error} "
                f"({place.filename}:{place.lineno})",
                LookaheadWarning,
                stacklevel=2,
            )
        except LookaheadWarning as warning:  # of this text, and no other one in its step
            self.fail(warning)

    def append(self, token: int) -> bool:
        """Add a token to the text; whether the text is complete with it."""
        self.tokens.append(token)
        return self.stop(self)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, after the stop rule was checked for them."""
        self.tokens += tokens


def common_start(first: Tokens, second: Tokens) -> int:
    """How many tokens two texts begin with in common."""
    size = 0
    for most in (16, None):  # most texts differ at once, and long ones take long to make arrays of
        size = min(len(first[:most]), len(second[:most]))
        differ = np.flatnonzero(np.asarray(first[:size]) != np.asarray(second[:size]))
        if len(differ):
            return int(differ[0])
    return size
