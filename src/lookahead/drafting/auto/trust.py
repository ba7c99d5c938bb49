"""How far the model's own predictions are what is selected: not where processors or a grammar decide otherwise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import compiled
from lookahead.core.outputs import StepResult

UNTRUSTED = 0.35
"""Share below which predictions that are not on the path teach nothing."""

KEPT = 0.9
"""What is left of the weight of a token with each that follows; of sampled ones, by which little is told, more."""
_KEPT_SAMPLED = 0.98

_SURE = 0.5
"""Share from which predictions are believed in full when sampling: that it is not 1 may be chance."""

_FIRST = 1.0
"""Weight of what is believed beforehand: that the model's predictions are right."""


class Trust:
    """The share of selected tokens that the model's predictions account for, the latest tokens first of all.

    Where the likeliest token is selected, these are the tokens that are it. Where tokens are sampled, they are as
    probable in the mean as the distribution says; where another one is sampled from, less.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin a text."""
        self._agreed = self._expected = _FIRST
        self.share = 1.0

    @property
    def is_lost(self) -> bool:
        """Whether predictions have nothing to say."""
        return self.share < UNTRUSTED

    def note(self, result: StepResult) -> None:
        """Compare the tokens that a step selected with what the model said before them."""
        listed = result.top_ids.shape[1] > 0
        for node, token in zip(result.selected_after, result.tokens, strict=True):
            agreed, expected, kept = float(result.predictions[node] == token), 1.0, KEPT
            if result.samples and listed:
                probabilities = result.top_probabilities[node]
                agreed = float(probabilities[result.top_ids[node] == token].sum())
                expected, kept = float(np.square(probabilities).sum()), _KEPT_SAMPLED
            self._agreed = kept * self._agreed + agreed
            self._expected = kept * self._expected + expected
        share = min(self._agreed / self._expected, 1.0)
        self.share = 1.0 if result.samples and share > _SURE else share


def believed(result: StepResult, share: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What a step shows to follow each node, if the model's predictions account for so much of what is selected.

    Where they account for all of it, that is what they say. Else it is, by that share, the predicted and the selected
    token; and where they are not believed at all, nothing is known about nodes that are not on the path.

    Returns:
        The likeliest tokens after each node, likeliest first, and their probabilities, `[nodes, listed]`; -1 and 0
        where nothing is known.
    """
    ids, probabilities = result.top_ids, result.top_probabilities
    if share >= 1 and ids.shape[1]:
        return ids, probabilities
    if share < UNTRUSTED or not ids.shape[1]:
        shape = len(result.tree), 1
        ids, probabilities = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        ids[result.selected_after, 0], probabilities[result.selected_after, 0] = result.tokens, 1
        return ids, probabilities
    ids, probabilities = ids.copy(), probabilities.copy()
    for node, token in zip(result.selected_after, result.tokens, strict=True):
        if ids[node, 0] < 0:
            continue
        mix_in(token, ids[node], probabilities[node], share)
    return ids, probabilities


@compiled
def mix_in(token: int, ids: NDArray[np.int64], probabilities: NDArray[np.float32], share: float) -> None:
    """Let the listed tokens of one node, likeliest first, count by `share`, and the selected one for what is left.

    Args:
        token: The one that was selected.
        ids, probabilities: The listed ones, `[listed]` each; they are changed in place.
        share: See `Trust.share`.
    """
    place = len(ids) - 1
    for rank in range(len(ids)):
        probabilities[rank] *= np.float32(share)
    for rank in range(len(ids)):
        if ids[rank] == token:
            place = rank
            break
    own = probabilities[place] if ids[place] == token else 0.0
    ids[place], probabilities[place] = token, own + 1 - share
    while place > 0 and probabilities[place - 1] < probabilities[place]:
        ids[place - 1], ids[place] = ids[place], ids[place - 1]
        less = probabilities[place - 1]
        probabilities[place - 1], probabilities[place] = probabilities[place], less
        place -= 1
