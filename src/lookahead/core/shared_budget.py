"""Which nodes a step sends whose rows are those of many requests: the likeliest of all rows, as many as pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf, log2

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.budget import WORTHWHILE, Send
from lookahead.core.calibration import Calibration
from lookahead.core.choosing import choose_for_all, line_up
from lookahead.core.draft_account import DraftAccount
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

NO_LESS = 0.5
"""A row is searched for candidates that are at least so likely, in relation to the likeliest one that was not sent in
the last step."""

LEAST_LIKELY, SURELY_LIKELY = 0.01, 0.1
"""A candidate less likely than the one is never searched for, and the first steps begin with it; one that is likelier
than the other always is: where rows are few, the next step may have none of those that the last one had."""

EXPLORED, EXPLORING = 64, 4
"""Each of the first so many trees of an engine sends at least so many candidates, however unlikely: what the model says
after them is all that its n-gram memory has to go by at first, and serves all rows from then on. Not where rows are
sampled, to which drafts bring less."""

LEAST_WEIGHT, MOST_WEIGHT = 0.5, 2.0
"""How much less or more than another row's a row's token may count, where no request waits."""


class SharedBudget:
    """Has the candidates of all rows compete for the nodes of a step.

    The candidates are put in one order, the likeliest first, whichever row they are of. n of them, of probabilities
    p1 >= p2 >= ..., make a step of r rows add r + p1 + ... + pn tokens; the n with the most tokens per second is taken.
    So sure drafts of one row take the room of another's guesses, and where steps are full nothing is sent.

    Whether a step drafts at all is held against the clock, with an account for each load and temperature: what pays for
    two rows may not for fifty, and what pays for greedy rows may not for sampled ones.

    Where no request waits, the row that has the most to write keeps the engine busy when all others have ended: a token
    counts the more, the more tokens its row may still write.

    Args:
        account: Gives the account of a load, in rows: 1, 2, 4, 8, ..., and of a temperature: 0, 0.5, 1, ...
        nodes: A fixed number of nodes of a step over all its rows, roots included, instead of what pays.
        explored: Each of the first so many trees sends `EXPLORING` candidates at least, if its step is greedy.

    Attributes:
        backs_off: Whether the coming step goes without a draft.
        rows: How many rows it has.

    Raises:
        InvalidArgumentError: `nodes` is out of range.
    """

    def __init__(
        self, account: Callable[[int, float], DraftAccount], nodes: int | None = None, explored: int = 0
    ) -> None:
        if nodes is not None and nodes < 1:
            raise InvalidArgumentError(f"nodes={nodes} is out of range; a step has at least a root")
        self.backs_off = False
        self._account_of = account
        self._nodes = nodes
        self._accounts: dict[tuple[int, float], DraftAccount] = {}
        self._account: DraftAccount | None = None
        self._offers: list[tuple[RowBudget, Send]] = []
        self._outcomes: dict[Calibration, list[tuple[NDArray[np.float64], Sequence[int]]]] = {}  # of the last step
        self._context = 1
        self.rows = 0
        self._least = LEAST_LIKELY  # likely enough to be looked for
        self._unexplored = explored  # trees
        self._waits = False  # any request
        self._samples = False  # any row

    def row(self, temperature: float = 0.0, longest: int | None = None) -> RowBudget:
        """The part of one row.

        How far drafts are to be believed is of the model, not of a load: what a single row has learned is gone by.

        Args:
            temperature: What its tokens are sampled with, 0 for the likeliest ones.
            longest: How many tokens its text has at most; if not given, tokens of all rows count alike.
        """
        return RowBudget(self, self._account_of(1, round(temperature, 1)).calibration, longest)

    def begin(self, rows: int, temperature: float = 0.0, timed: bool = True, waits: bool = False) -> None:
        """Begin a step.

        Args:
            rows: How many rows it has.
            temperature: What their tokens are sampled with, in the mean.
            timed: Whether it will be booked, as a step that carries prompts is not.
            waits: Whether a request waits to take the place of a row that ends.
        """
        self._offers.clear()
        self._waits, self._samples = waits, temperature > 0
        self._context, self.rows = 1, rows
        for calibration, drafts in self._outcomes.items():  # of all rows at once, which takes as long as of one
            calibration.learn_all(drafts)
        self._outcomes.clear()
        if self._nodes is not None:
            self.backs_off = self._nodes <= rows
            return
        self._account = self._account_for(rows, 1 << max(rows - 1, 0).bit_length(), round(2 * temperature) / 2)
        # What a draft beside prompts brings is not booked, so that drafts which are not known to pay would cost unseen.
        self.backs_off = self._account.backs_off if timed else not self._account.reads_prompts

    def _account_for(self, rows: int, load: int, temperature: float) -> DraftAccount:
        """The account of a load. It begins with what is known of the nearest one: requests come and go, and a load that
        had to find out everything by itself would be over before it has."""
        if (load, temperature) not in self._accounts:
            self._accounts[load, temperature] = self._account_of(load, temperature)
        account = self._accounts[load, temperature]
        account.rows = rows
        if account.is_new:
            known = [
                (abs(log2(other / load)), other)
                for (other, like), one in self._accounts.items()
                if like == temperature and not one.is_new
            ]
            if known:
                account.take_after(self._accounts[min(known)[1], temperature])
        return account

    def offer(self, row: RowBudget, context: int, send: Send) -> None:
        """Note that a row has candidates; `send` sends the first of them."""
        self._offers.append((row, send))
        self._context = max(self._context, context)

    def learn(self, row: RowBudget, accepted: Sequence[int]) -> None:
        """Note which of the candidates that a row sent were accepted."""
        self._outcomes.setdefault(row.calibration, []).append((row.offered[: row.chosen], accepted))

    @property
    def least(self) -> float:
        """How likely a candidate must turn out to be for it to be looked for."""
        return self._least if self._nodes is None and not self.explores else 0.0

    @property
    def explores(self) -> bool:
        """Whether candidates are sent that are not likely enough, for what they teach."""
        return self._nodes is None and self._unexplored > 0 and not self._samples

    @property
    def most(self) -> int:
        """Most candidates of a row that may be sent."""
        return (MOST_CHOSEN_NODES if self._nodes is None else self._nodes) - 1

    def share_out(self, trees: Sequence[TokenTree]) -> None:
        """Choose among all that was offered, and have it sent.

        Args:
            trees: Those of the step, with roots and pending tokens alone.
        """
        if not self._offers:
            return
        owners, promised = self._line_up()
        sent = self._affordable(promised, trees)
        counts = np.bincount(owners[:sent], minlength=len(self._offers)).tolist()
        fewest = EXPLORING if self.explores else 0
        if not fewest:
            # Where all that was found is sent, less likely ones might have been, too.
            least = NO_LESS * (self._least if sent == len(promised) else float(promised[sent]))
            self._least = min(max(least, LEAST_LIKELY), SURELY_LIKELY)
        self._unexplored -= len(self._offers)
        for (row, send), count in zip(self._offers, counts, strict=True):
            row.chosen = max(count, min(fewest, len(row.offered)))
            send(row.chosen)
        self._offers.clear()

    def _line_up(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The candidates of all rows, those that promise most first: whose each is, by the place of the row, and how
        many tokens it promises, which is how likely it has turned out to be, times the weight of its row."""
        groups: dict[Calibration, list[tuple[RowBudget, Send]]] = {}
        for offer in self._offers:
            groups.setdefault(offer[0].calibration, []).append(offer)
        self._offers = [offer for group in groups.values() for offer in group]
        likely = np.concatenate(
            [calibration.correct_all([row.offered for row, _ in group]) for calibration, group in groups.items()]
        )
        ends = list(accumulate(len(row.offered) for row, _ in self._offers))
        owners, promised = np.empty(len(likely), dtype=np.int64), np.empty(len(likely))
        line_up(likely, np.array(ends), np.array(self._weights()), np.array([0, *ends[:-1]]), owners, promised)
        return owners, promised

    def _weights(self) -> list[float]:
        """What a token of each row counts, `[offers]`."""
        left = [max(row.longest - row.context, 1) for row, _ in self._offers if row.longest is not None]
        if self._waits or len(left) < len(self._offers):
            return [1.0] * len(self._offers)
        mean = sum(left) / len(left)
        return [min(max(tokens / mean, LEAST_WEIGHT), MOST_WEIGHT) for tokens in left]

    def _affordable(self, promised: NDArray[np.float64], trees: Sequence[TokenTree]) -> int:
        """How many candidates are sent, the first ones."""
        base, rows = sum(map(len, trees)), sum(tree.needs_logits[tree.root] for tree in trees)
        if self._nodes is not None:
            return min(max(self._nodes - base, 0), len(promised))
        account = self._account
        assert account is not None
        costs = account.costs
        promised = promised[: max(account.most_nodes - rows, rows)]
        # Certain tokens leave room in the products that prompts fill.
        beside = account.prompt_node_seconds / costs.pace if any(tree.root for tree in trees) else inf
        seconds = account.looking / costs.pace, beside
        table = costs.table(base + len(promised))
        return choose_for_all(promised, table, self._context, base, rows, account.idle_cost / WORTHWHILE, *seconds)

    @property
    def is_timed(self) -> bool:
        """Whether the seconds of the coming step are wanted, should it have no draft; see `DraftAccount.is_timed`.

        Which account it will be told to is known when the step has begun.
        """
        return True

    def book(self, step: StepTime) -> None:
        """Note what a step took and brought; see `DraftAccount.book`."""
        if self._account is not None:
            self._account.book(step)


class RowBudget:
    """What one row takes of a `SharedBudget`; a `StepBudget`.

    Args:
        shared: The whole.
        calibration: How far predictions are to be believed for rows like this one.
        longest: How many tokens the text has at most, if that is known.

    Attributes:
        calibration: Likewise.
        longest: Likewise.
        context: How many it has.
        offered: The predictions for this step's candidates.
        chosen: See `StepBudget`.
    """

    left = 0

    def __init__(self, shared: SharedBudget, calibration: Calibration, longest: int | None = None) -> None:
        self._shared = shared
        self.calibration = calibration
        self.longest = longest
        self.offered: NDArray[np.float64] = np.empty(0)
        self.context = 1
        self.chosen = 0

    @property
    def backs_off(self) -> bool:
        """See `StepBudget`."""
        return self._shared.backs_off

    @property
    def least(self) -> float:
        """See `StepBudget`."""
        return self.calibration.predicted(self._shared.least)

    @property
    def reads_prompts(self) -> bool:
        """See `StepBudget`: rows that share steps fill the memory for each other, which is as good."""
        return self._shared.rows == 1

    def begin(self) -> None:
        """See `StepBudget`."""
        self.chosen = 0

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """See `StepBudget`."""
        most = self._shared.most
        if self.longest is not None:  # near the end of a text, nodes are of more use to other rows
            most = min(most, max(self.longest - context - 1, 0))
        self.offered = probabilities[:most]
        self.context = context
        if self._shared.explores:
            return len(self.offered) < min(EXPLORING, most)
        return len(self.offered) < most  # none of less than `least` is among them

    def when_chosen(self, send: Send) -> None:
        """See `StepBudget`: when all rows have offered theirs."""
        self._shared.offer(self, self.context, send)

    def learn(self, accepted: Sequence[int]) -> None:
        """See `StepBudget`."""
        if self.chosen:
            self._shared.learn(self, accepted)
