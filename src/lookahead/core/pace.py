"""How many nodes a step sends, or whether it rests from drafting: what pays by the clock.

What a step sends is not only for that step: what the model says after each node is what later steps are drafted from.
So steps send about as many nodes each, likely or not, and how many is a matter of what sizes cost and bring on the
average. Where nodes are dear, fewer are sent: those that bring more than their time brings elsewhere. Whether drafting
goes on at all is a running sum of what drafted steps saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.compiled import compiled, inner
from lookahead.core.step_costs import GRID, PLAIN, StepCosts, bucket, seconds_at
from lookahead.core.step_time import StepTime

FIRST_NODES = 8
"""Nodes of the first steps. Steps grow to twice as many as were run: nobody pays for a large one before a smaller one
has shown what steps cost."""

FIRST_GAIN, LESS = 0.5, 1.4
"""What two nodes are expected to add to the one token of a step; n nodes, in proportion to log(n / LESS). So it grew in
recorded runs of 4 to 64 nodes: 1.5 to 1.8 times from 4 to 8, 1.2 to 1.4 times from 32 to 64."""

EXPECTED_STEPS, LATEST = 25.0, 0.01
"""How many steps that expectation counts, and the weight of the latest step in a mean."""

FEWER = 0.75
"""The power of the share that the first nodes of larger steps bring which steps of so few nodes bring: their texts stop
more often at easy places (recorded runs of 4 to 64 nodes, within 6 %)."""

FEWEST, CHEAP = 16, 1.3
"""Fewer nodes are too few to learn from: they are sent only where so many take `CHEAP` plain steps."""

TAUGHT = 0.1
"""What a node is worth whatever becomes of it, in tokens: what the model says after it fills the memory. So where nodes
are cheap all are sent; where they are dear, likely ones (simulated, 16 nodes at 2.9 plain steps: 1.2 of the speed)."""

EVEN, TRIES = 4, 24
"""Steps for which the number of nodes stays as it is, so that each size is timed more than once; and after how many the
size beside the best one is run, in full, for its times to be known."""

FIRST_CREDIT, TRIAL, MOST_CREDIT = 5.0, 2.0, 16.0
"""What drafts may lose at first, each time they are tried again, and after they have paid, in plain steps."""

REST, LONGEST_REST, COVER = 64, 1024, 100
"""Plain steps of the first rest and of the longest; and how many of them cover the loss of one."""

MOST_SURPRISE = 3.0
"""A step counts no longer than so many times what is usual for its size: others use the machine, too."""

TIMED, FIRST_INTERVAL, INTERVAL = 8, 2, 256
"""One of so many steps of a rest is timed; drafted steps before the first plain one, and the most between two."""


class Credit:
    """Whether drafting goes on: a running sum of what drafted steps saved, in plain steps.

    When what it may lose is spent, steps are plain for a rest, twice as long as the one before; what was lost beyond
    that makes it longer. So all but a fixed loss is covered by `COVER` plain steps for each one lost. What drafts save
    later makes rests shorter again.

    Attributes:
        rest: Plain steps that are left of a rest.
    """

    def __init__(self, first: float) -> None:
        self._left = first
        self._failures = 0
        self.rest = 0

    def book(self, saved: float) -> None:
        """Note what a drafted step saved."""
        self._left += saved
        if self._left > MOST_CREDIT:
            if self._failures and self._left > MOST_CREDIT + TRIAL:
                self._failures -= 1
                self._left -= TRIAL
            elif not self._failures:
                self._left = MOST_CREDIT
        elif self._left <= 0:
            self.rest = min(REST << self._failures, LONGEST_REST) - int(COVER * self._left)
            self._failures += 1
            self._left = TRIAL

    def wait(self) -> None:
        """Note a plain step of a rest."""
        self.rest -= 1


class Pace:
    """Learns what steps cost and bring, and says what the coming one sends: one for a model, a number of rows, a way to
    run drafts, and a temperature. Threads may share it; what two of them book at once may count as one.

    Args:
        costs: What steps cost. It is told of them.
        rows: Rows that share each step, padded to the same number of nodes.
        clocked: Go by the clock. Else go by `costs`, which then stays as it is: the same calls take the same steps.

    Attributes:
        costs, clocked: Likewise.
        nodes: Nodes of the coming step for each row, the root included, at most.
        credit: Whether drafting goes on.
    """

    def __init__(self, costs: StepCosts, rows: int = 1, clocked: bool = True) -> None:
        self.costs = costs
        self.clocked = clocked
        self.credit = Credit(FIRST_CREDIT)
        self._rows = rows
        self.nodes = self._tried = max(costs.padded(FIRST_NODES * rows) // rows, 2)
        self._brought = np.zeros((2, PLAIN))  # accepted candidates of late, and steps, for each size of `GRID`
        self._steps = 0  # with drafts
        self._since = self._interval = FIRST_INTERVAL  # drafted steps since the last plain one, and until the next
        self._tokens = self._time = 1.0  # of a row in drafted steps lately, in plain steps

    @property
    def rests(self) -> bool:
        """Whether the coming step is plain: because drafts do not pay, or to time it."""
        return self.credit.rest > 0 or (self.clocked and self._since >= self._interval)

    @property
    def is_timed(self) -> bool:
        """Whether the seconds of the coming step are wanted, should it have no draft: in a rest, of some."""
        return self.clocked and self.credit.rest % TIMED == 0

    @property
    def most_nodes(self) -> int:
        """Nodes that a step has at most for each row, before it is known what larger ones cost."""
        return 2 * self._tried

    def choose(self, likely: NDArray[np.float64], nodes: int = 1, resends: bool = False) -> int:
        """How many of a row's candidates are sent: the first ones, as far as they bring more than their time elsewhere.

        Args:
            likely: Probability that each is accepted, descending, `[candidates]`.
            nodes: Nodes of the row without them.
            resends: Whether these and the accepted tokens are sent again unless all candidates are accepted, as where
                states cannot be taken back.
        """
        taught = 0.0 if resends else TAUGHT
        if taught and self._steps % TRIES < EVEN:
            return len(likely)
        rate = self._tokens / (self._time * self.costs.seconds(self._rows, plain=True))
        return _choose(likely, nodes, self._rows, resends, rate, taught, self.costs.curve)

    def learn(self, nodes: int, accepted: Sequence[int]) -> None:
        """Note which candidates of a row were accepted, by their places, in a step that could have so many nodes."""
        _count(nodes, np.array(accepted, dtype=np.int64), 1 - LATEST / self._rows, self._brought)

    def book(self, step: StepTime) -> None:
        """Note a step."""
        if step.drafted:
            self._book_draft(step)
            return
        if self.clocked:
            seconds = step.seconds * self._without_certain(step)
            self.costs.observe(step.nodes - step.certain_nodes, step.context, seconds, plain=True)
        if self.credit.rest:
            self.credit.wait()
        elif self._since:
            self._since, self._interval = 0, min(2 * self._interval, INTERVAL)

    def _book_draft(self, step: StepTime) -> None:
        costs, tokens = self.costs, (step.tokens - step.certain_tokens) / step.rows
        self._since += 1
        self._steps += 1
        self._tried = max(self._tried, step.nodes // self._rows)
        seconds = costs.seconds(step.nodes)
        if self.clocked:
            seconds = min(step.seconds, MOST_SURPRISE * seconds)
            costs.observe(step.nodes, step.context, step.seconds)
        cost = seconds * self._without_certain(step) / costs.seconds(self._rows, plain=True)
        self._tokens += LATEST * (tokens - self._tokens)
        self._time += LATEST * (cost - self._time)
        if self._steps % EVEN == 0:
            turn = self._steps // TRIES % 2 * 2 - 1 if self._steps % TRIES == 0 else 0
            self.nodes = self._best_size(turn)
        if costs.times[PLAIN] or not self.clocked:
            self.credit.book(tokens - cost)

    def _without_certain(self, step: StepTime) -> float:
        """Which part of its time the step would have taken without its certain nodes."""
        if not step.certain_nodes:
            return 1.0
        return self.costs.seconds(step.nodes - step.certain_nodes) / self.costs.seconds(step.nodes)

    def _best_size(self, turn: int) -> int:
        limit = min(self.most_nodes, MOST_CHOSEN_NODES)
        plain = self.costs.seconds(self._rows, plain=True)
        place = _best_place(self.costs.curve, plain, self._rows, self.nodes, limit, self._brought, turn)
        return min(self.costs.padded(min(int(GRID[place]), limit) * self._rows) // self._rows, MOST_CHOSEN_NODES)


@compiled
def _count(nodes: int, accepted: NDArray[np.int64], kept: float, brought: NDArray[np.float64]) -> None:
    """Note what steps of each size up to this one would have brought."""
    for place in range(1, bucket(nodes) + 1):
        brought[0, place] *= kept
        brought[1, place] *= kept
        brought[1, place] += 1
        for index in accepted:
            brought[0, place] += index < GRID[place] - 1


@inner
def _gain(place: int, brought: NDArray[np.float64]) -> float:
    """What drafts of a size add to the one token of a step; where few were sent, rather what smaller ones promise."""
    gain = FIRST_GAIN
    for smaller in range(1, place + 1):
        if smaller > 1:
            gain *= np.log(GRID[smaller] / LESS) / np.log(GRID[smaller - 1] / LESS)
        gain = (brought[0, smaller] + EXPECTED_STEPS * gain) / (brought[1, smaller] + EXPECTED_STEPS)
    return gain


@compiled
def _best_place(
    curve: NDArray[np.float64],
    plain: float,
    rows: int,
    nodes: int,
    limit: int,
    brought: NDArray[np.float64],
    turn: int,
) -> int:
    """The size of `GRID`, in nodes of each row, that goes best with what it costs; or by `turn` the one beside it."""
    first = 1
    if seconds_at(curve, FEWEST * rows) <= CHEAP * plain:
        while GRID[first] < FEWEST:
            first += 1
    now = bucket(nodes)
    level = _gain(now, brought)
    best, chosen, place = 0.0, first, first
    while place < PLAIN and GRID[place] <= limit:
        gain = _gain(place, brought)
        if place < now:
            gain = level * (gain / level) ** FEWER
        rate = (1 + gain) / seconds_at(curve, GRID[place] * rows)
        if rate > best:
            best, chosen = rate, place
        place += 1
    return min(max(chosen + turn, first), PLAIN - 1)


@compiled
def _choose(
    likely: NDArray[np.float64],
    nodes: int,
    rows: int,
    resends: bool,
    rate: float,
    taught: float,
    curve: NDArray[np.float64],
) -> int:
    """How many candidates gain the most, in tokens; of others that come before them they need the more, the later."""
    chosen, gain, most, before = 0, 0.0, 0.0, 1.0
    last = seconds_at(curve, nodes * rows)
    for sent in range(len(likely)):
        time = seconds_at(curve, (nodes + sent + 1) * rows)
        # That the draft fails here has all before it sent again.
        again = (before - likely[sent]) * (nodes + sent) if resends else 0.0
        gain += likely[sent] + taught - rate * (time - last) * (1 + again)
        if gain > most:
            chosen, most = sent + 1, gain
        before, last = likely[sent], time
    return chosen


def compile_pace() -> None:
    """Run each loop once, so that no step has to wait for it."""
    pace = Pace(StepCosts())
    for step in range(EVEN):
        pace.choose(np.ones(1), resends=step > 0)
        pace.learn(2, [0])
        pace.book(StepTime(2, 1, 1.0, 2, 1, True))
