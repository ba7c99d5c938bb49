"""One request of vLLM: its text as far as it was seen, and the draft that vLLM was given for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.auto.path_drafter import PathDrafter
from lookahead.integrations.vllm.chain_lengths import ChainLengths
from lookahead.integrations.vllm.predictions import Predictions

SURE = 0.97
"""How likely a whole draft has to be for its step not to be read: it teaches nothing that is not known."""

RUN = 32
"""How many drafted tokens were accepted, without one that was not, before such a step goes unread. Where several
requests teach one memory, less is enough."""

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
        is_sure: Whether all of the draft is so likely that what the model says about it need not be read.
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

    def observe(self, sampled: Sequence[int], told: Predictions | None, reads: bool, judges: bool = True) -> int:
        """Read what a step sampled.

        Args:
            sampled: The accepted part of the draft, and the token sampled after it.
            told: What the model predicted after the last token, and after each one of the draft; `None` if unknown.
            reads: Whether that is told as a rule. Else what was sampled stands for it.
            judges: See `PathDrafter.learn`.

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
            self._drafter.learn(sampled, told.ids, told.probabilities, judges)
        elif self.is_sure:
            self._drafter.recall(sampled)
        self._drafter.extend(sampled)
        self._run = self._run + accepted if accepted == len(self.draft) else 0
        return accepted

    def propose(self, text: NDArray[np.integer], room: int, lengths: ChainLengths | None, run: int = RUN) -> None:
        """Draft after `text` at most `room` tokens, of which `lengths` sends as many as pay. For `run` see `RUN`."""
        self.text = text.copy()
        self.draft, self.expected, self.is_sure = [], 0.0, False
        if lengths is not None and lengths.rests:
            return
        tokens, likely = self._drafter.propose(room)
        count = len(tokens) if lengths is None else lengths.choose(likely)
        if count:
            self.draft = tokens[:count].tolist()
            self.expected = float(likely[:count].sum())
            self.is_sure = self._run >= run and bool(likely[count - 1] >= SURE)


def _sampled(sampled: Sequence[int], probability: float) -> Predictions:
    """What was sampled as what is likely to follow."""
    ids = np.array(sampled, dtype=np.int64)[:, None]
    return Predictions(ids, np.full(ids.shape, probability, dtype=np.float32))
