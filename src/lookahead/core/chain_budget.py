"""How long a chain is sent, where what is not accepted has to be paid for again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.budget import ThroughputBudget
from lookahead.core.draft_account import DraftAccount


class ChainBudget(ThroughputBudget):
    """Sends as much of a chain as makes for the most tokens per second, on models with running states.

    Where the draft is accepted as a whole, the next step has one pending token. Where it is not, the states are put
    back, and the tokens of this step and the pending ones before them are sent again: a step is charged with what
    these will cost. No step is more than twice as large as one that was run, before it is known what large ones cost.

    Args:
        account: What steps cost and drafts bring.
        most: Nodes of a step at most, the pending tokens included.
    """

    def __init__(self, account: DraftAccount, most: int = MOST_CHOSEN_NODES) -> None:
        super().__init__(account, most)

    def offer_chain(self, probabilities: NDArray[np.float64], pending: int, context: int) -> None:
        """Choose how many nodes of a chain are sent.

        Args:
            probabilities: Probability that each of them is accepted, from the root downwards, `[nodes]`.
            pending: Pending tokens before them, the root included.
            context: Tokens of text before the step.
        """
        room = max(min(self._most + 1, self._account.most_nodes) - pending, 0)
        self._offered = probabilities[:room]
        if not len(self._offered):  # a prompt, to which nothing is added, or more pending tokens than were ever sent
            self.chosen = 0
            return
        probabilities = self._account.calibration.correct(self._offered)
        accepted = np.concatenate([[0.0], np.cumsum(probabilities)])
        whole = np.concatenate([[1.0], probabilities])
        seconds = self._account.costs.step_time(np.arange(1, self._most + 2), context)
        own = seconds[pending - 1 :][: len(accepted)]
        # Expected number of tokens that are sent again, at the price of a token in this step.
        again = (1 - whole) * pending + accepted - np.arange(len(accepted)) * whole
        price = np.maximum(own - seconds[0], 0) / np.maximum(np.arange(len(accepted)) + pending - 1, 1)
        table = np.zeros((2, len(own) + 1))
        table[0, 1:] = own + price * again
        self._choose(probabilities, table, context, 1, len(probabilities))
