"""One request of vLLM: its text as far as it was seen, and the draft that vLLM was given for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting.chain import ChainDrafter
from lookahead.integrations.vllm.predictions import Predictions


class DraftedRequest:
    """Feeds a drafter with what vLLM shows of one request.

    Args:
        drafter: Drafts for it alone.
        text: Its tokens so far, `[tokens]`.

    Attributes:
        text: Its tokens so far, `[tokens]`.
        draft: What vLLM was given to verify in the step that follows.
        step: The step in which it was last seen.
    """

    def __init__(self, drafter: ChainDrafter, text: NDArray[np.integer]) -> None:
        self.drafter = drafter
        self.text = text.copy()
        self.draft: list[int] = []
        self.step = -1
        self._tree: TokenTree | None = None
        drafter.start(text.tolist())

    def is_at(self, text: NDArray[np.integer]) -> bool:
        """Whether `text` is what was seen."""
        return len(self.text) == len(text) and bool((self.text == text).all())

    def precedes(self, text: NDArray[np.integer]) -> bool:
        """Whether `text` goes on from what was seen."""
        return len(self.text) <= len(text) and self.is_at(text[: len(self.text)])

    def catch_up(self, text: NDArray[np.integer]) -> None:
        """The draft was not verified. Read tokens that came while the proposer was asked for others, or for none."""
        self.draft, self._tree = [], None
        if len(text) > len(self.text):
            last = int(self.text[-1])
            for token in text[len(self.text) :].tolist():
                self.drafter.observe(_unknown(TokenTree([last]), [], [token]))
                last = token
            self.text = text.copy()

    def observe(self, sampled: Sequence[int], told: Predictions | None, lists_tokens: bool) -> int:
        """Read what a step sampled.

        Args:
            sampled: The accepted part of the draft, and the token sampled after it.
            told: What the model predicted after the last token, and after each one of the draft; `None` if unknown.
            lists_tokens: Where that is unknown, let what was sampled stand for it.

        Returns:
            How many tokens of the draft were accepted.
        """
        accepted = len(sampled) - 1
        known = self._tree is not None and list(sampled[:-1]) == self.draft[:accepted]
        if not known and accepted:  # it was not this draft that was verified
            self.catch_up(np.concatenate([self.text, np.array(sampled, dtype=self.text.dtype)]))
            return 0
        tree = self._tree if known and self._tree is not None else TokenTree([int(self.text[-1])])
        if told is not None and len(told.best) != len(tree):
            told = None
        listed = _sampled(len(tree), sampled) if told is None and lists_tokens else told
        path = list(range(1, accepted + 1))
        if listed is None:
            result = _unknown(tree, path, list(sampled))
        else:
            result = StepResult(tree, listed.best, path, list(sampled), listed.ids, listed.probabilities)
        self.drafter.observe(result)
        return accepted

    def propose(self, text: NDArray[np.integer], room: int) -> TokenTree:
        """Have the drafter look for a draft of at most `room` tokens. The tree that is returned will hold it."""
        self.text = text.copy()
        self._tree = TokenTree([int(text[-1])], room)
        if room > 0:
            self.drafter.propose(self._tree)
        return self._tree

    def send(self) -> list[int]:
        """The draft, when it is settled how long it is."""
        self.draft = [] if self._tree is None else self._tree.tokens[1:]
        return self.draft


def _unknown(tree: TokenTree, path: list[int], tokens: list[int]) -> StepResult:
    """A step of which nothing is known but what was sampled."""
    nodes = len(tree)
    nothing = np.empty((nodes, 0), dtype=np.int64), np.empty((nodes, 0), dtype=np.float32)
    return StepResult(tree, np.full(nodes, -1, dtype=np.int64), path, tokens, *nothing)


def _sampled(nodes: int, sampled: Sequence[int]) -> Predictions:
    """What was sampled as what is likely to follow; nothing is known of the rest of the draft."""
    ids = np.full((nodes, 1), -1, dtype=np.int64)
    ids[: len(sampled), 0] = sampled
    return Predictions(ids[:, 0], ids, (ids >= 0).astype(np.float32))
