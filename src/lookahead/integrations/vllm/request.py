"""One request of vLLM: its text as far as it was seen, and the draft that vLLM was given for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.path_drafter import PathDrafter
from lookahead.integrations.vllm.predictions import Predictions

SURE, RUN = 0.97, 32
"""How likely the tokens of a draft have to be in the mean for its step not to be read, and how many drafted tokens
have to be accepted before, without one that was not: such a step teaches little."""

SURE_OF_MANY, RUN_OF_MANY = 0.8, 0
"""The same where many requests teach one memory."""

_REJECTED = 3
"""Of so many tokens that were rejected, what the model says after them is learned. What comes after more of them is
hardly ever asked for, and takes the place of what is."""

_MISSED = 0.7
"""What a token counts that was selected where another one was sure, and of which nothing else is known."""


class DraftedRequest:
    """Feeds a drafter with what vLLM shows of one request.

    Args:
        drafter: Drafts for it alone.
        text: Its tokens so far, `[tokens]`.

    Attributes:
        text: Its tokens so far, `[tokens]`.
        draft: What vLLM was given to verify in the step that follows.
        expected: How many tokens of it are to be accepted.
        step: The step in which it was last seen.
        is_sure: Whether the draft is so likely that what the model says about it need not be read.
    """

    def __init__(self, drafter: PathDrafter, text: NDArray[np.integer]) -> None:
        self._drafter = drafter
        self.text = text.copy()
        self.draft: list[int] = []
        self.expected = 0.0
        self.step = -1
        self._run = 0  # how many drafted tokens were accepted since one was not
        self.is_sure = False
        drafter.start(text)

    def is_at(self, text: NDArray[np.integer]) -> bool:
        """Whether `text` is what was seen."""
        return len(self.text) == len(text) and bool((self.text == text).all())

    def precedes(self, text: NDArray[np.integer]) -> bool:
        """Whether `text` goes on from what was seen."""
        return len(self.text) <= len(text) and self.is_at(text[: len(self.text)])

    def catch_up(self, text: NDArray[np.integer]) -> None:
        """The draft was not verified. Read tokens that came while the proposer was asked for others, or for none."""
        self.draft = []
        self._drafter.extend(text[len(self.text) :].tolist())
        self.text = text.copy()

    def observe(self, sampled: Sequence[int], told: Predictions | None, reads: bool) -> int:
        """Read what a step sampled.

        Args:
            sampled: The accepted part of the draft, and the token sampled after it.
            told: What the model predicted after the last token, and after each one of the draft; `None` if unknown.
            reads: Whether that is told as a rule. Else what was sampled stands for it.

        Returns:
            How many tokens of the draft were accepted.
        """
        accepted = len(sampled) - 1
        if list(sampled[:-1]) != self.draft[:accepted]:  # it was not this draft that was verified
            self.catch_up(np.concatenate([self.text, np.array(sampled, dtype=self.text.dtype)]))
            return 0
        if told is None and (not reads or (self.is_sure and accepted < len(self.draft))):
            told = _sampled(sampled, _MISSED if reads else 1.0)
        if told is not None:
            rows = slice(len(sampled) + _REJECTED)
            self._drafter.learn(sampled, told.ids[rows], told.probabilities[rows])
        elif self.is_sure:
            self._drafter.recall(sampled)
        self._drafter.extend(sampled)
        self._run = self._run + accepted if accepted == len(self.draft) else 0
        return accepted

    def propose(self, text: NDArray[np.integer], room: int, least: float, of_many: bool) -> None:
        """Draft after `text`.

        Args:
            text: All tokens so far, `[tokens]`.
            room: Most tokens of the draft.
            least: How likely each has to be to be accepted.
            of_many: Whether many requests share the memory.
        """
        self.rest(text)
        tokens, likely = self._drafter.propose(room, least)
        if len(tokens):
            self.draft = tokens.tolist()
            self.expected = float(likely.sum())
            sure, run = (SURE_OF_MANY, RUN_OF_MANY) if of_many else (SURE, RUN)
            self.is_sure = self._run >= run and self.expected >= sure * len(tokens)

    def rest(self, text: NDArray[np.integer]) -> None:
        """Draft nothing after `text`."""
        self.text = text.copy()
        self.draft, self.expected, self.is_sure = [], 0.0, False


def _sampled(sampled: Sequence[int], probability: float) -> Predictions:
    """What was sampled as what is likely to follow."""
    ids = np.array(sampled, dtype=np.int64)[:, None]
    return Predictions(ids, np.full(ids.shape, probability, dtype=np.float32))
