"""Choose the number of nodes of each step from measured step times, and pause drafting where it is slower.

Send a node if its expected tokens per second are at least plain decoding's. The bar is a little lower early in a text,
because later drafts are built from the model's predictions after each node. A step without likely candidates sends
only its root. A running sum of the time that drafted steps saved decides whether drafting continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.compiled import FIRST, compiled
from lookahead.core.ranking import UNRANKED
from lookahead.core.roots import Roots
from lookahead.core.step_costs import PLAIN, StepCosts, seconds_at
from lookahead.core.step_time import StepTime

FIRST_NODES = 8
"""Nodes of a row in the first step; later steps have at most twice the largest number timed so far."""

USUAL_NODES = 32
"""Usual limit of nodes per row; it doubles while the second half costs less than `TAUGHT` per node."""

TAUGHT = 0.007
"""Value of the prediction after a node for later drafts, accepted or not, in tokens."""

EARLY = 32
"""Decay of the extra value of early nodes, in drafted steps of a text: it starts at three times `TAUGHT`."""

FIRST_CREDIT = 5.0
TRIAL = 2.0
MOST_CREDIT = 16.0
"""Starting credit, credit after each rest, and cap, in plain steps."""

REST = 16
"""Length of the first rest and of the first probe interval, in plain steps; each rest doubles it."""

COVER = 100
"""Maximum length of a rest in plain steps, for each plain step of time lost."""

PLAIN_STEPS = 2
"""Length of a run of plain steps, in steps; only the last is timed, because the first after a draft is slower."""

TIMED = 4
"""Growth of the number of drafted steps between two runs of plain ones, until these runs cost 1 % (1 / `COVER`)."""

DOUBTED = 0.1
"""Step of the exponent ("doubt") that corrects predicted probabilities; a fifth of it in steps that send nothing."""

MOST_DOUBT = 4.0
"""Maximum doubt."""


class Credit:
    """Running sum of the time saved by drafted steps, in plain steps; when it is spent, drafting rests.

    Each rest is twice as long as the previous one, until rests outweigh the losses of the trials between them. Later
    savings make rests shorter again. During a rest a probe searches for one draft, because a new text may suit drafts
    better. A probe that ends a rest in vain doubles the time to the next one.

    Args:
        first: Credit before the first rest, in plain steps.

    Attributes:
        cooldown: Plain steps left of a rest.
        until_probe: Plain steps until the next probe.
        failures: Rests that savings have not made up for.
    """

    def __init__(self, first: float) -> None:
        self._left = first
        self.failures = 0
        self.cooldown = 0
        self.until_probe = 0
        self._probed = False  # whether a probe ended the latest rest
        self._failed_probes = 0  # probes that ended a rest in vain since drafts last saved time

    def book(self, saved: float) -> None:
        """Add the time that a drafted step saved, in plain steps; negative if it lost time."""
        self._left += saved
        if self._left > MOST_CREDIT:
            self._probed = False
            self._failed_probes = 0
            if self.failures and self._left > MOST_CREDIT + TRIAL:
                self.failures -= 1
                self._left -= TRIAL
            elif not self.failures:
                self._left = MOST_CREDIT
        elif self._left <= 0:
            self.cooldown = min(REST << self.failures, int(COVER * (TRIAL - self._left)))
            self.failures = min(self.failures + 1, 32)
            self._left = TRIAL
            self._failed_probes = min(self._failed_probes + self._probed, 32)
            self._probed = False
            self.until_probe = REST << self._failed_probes

    def wait(self) -> None:
        """Count a plain step of a rest."""
        self.cooldown -= 1
        self.until_probe -= 1

    @property
    def probing(self) -> bool:
        """Whether the coming step of a rest searches for a draft."""
        return self.cooldown > 0 >= self.until_probe

    def probe(self, gain: float) -> None:
        """End a rest if the draft of a probe is expected to save more than `TRIAL`; `gain` is in plain steps."""
        self.until_probe = REST
        if gain > TRIAL:
            self.cooldown = 0
            self._probed = True


class Pace:
    """Learn the time and the accepted tokens of steps, and choose the number of nodes of the coming one.

    A pace belongs to one model, number of rows, way to run drafts and temperature. Threads may share it; two steps
    booked at the same moment may count as one.

    Args:
        costs: Step times; updated with each timed step.
        rows: Rows that share each step.

    Attributes:
        costs: Step times.
        rows: Rows that share each step.
        credit: Decision whether drafting continues.
        searches: Whether the coming step searches for a draft, probes of a rest excluded.
    """

    def __init__(self, costs: StepCosts, rows: int = 1) -> None:
        self.costs = costs
        self.rows = rows
        self.credit = Credit(FIRST_CREDIT)
        self.searches = False
        self._largest = FIRST_NODES // 2 * rows  # most nodes of a timed step
        self._plain = 0  # plain steps since the last drafted one
        self._since, self._interval = 0, PLAIN_STEPS  # drafted steps since the last timed plain one, and the limit
        self._saved = 0.0  # time saved by these drafted steps, in plain steps
        self._doubt = 1.0  # exponent of predicted probabilities
        self._promised = 0.0  # expected number of accepted candidates of the coming step

    def similar(self, rows: int) -> Pace:
        """Return a pace for another number of rows that starts from the costs and the doubt learned here."""
        pace = Pace(self.costs.similar(), rows)
        pace._largest = max(pace._largest, self._largest)
        pace._doubt = self._doubt
        if self.credit.failures:
            pace.credit = Credit(TRIAL)
        return pace

    is_shared = False

    def begin_step(self, rows: int, temperature: float = 0.0) -> None:
        """Begin a step of `rows` rows (`StepPace.begin_step`)."""
        self.rows, self._promised = rows, 0.0  # the previous step may not have been booked

    def budget_of_text(self, resends: bool, max_nodes: int) -> PacedRow:
        """Return the budget of one text; arguments as for `PacedRow`."""
        return PacedRow(self, resends, max_nodes)

    @property
    def is_new(self) -> bool:
        """Whether no step was timed yet."""
        return not self.costs.times.any()

    @property
    def in_rest(self) -> bool:
        """Whether drafting rests: steps are plain or probe for a draft."""
        return self.credit.cooldown > 0

    @property
    def rests(self) -> bool:
        """Whether the coming step is plain, in a rest or to time a plain step."""
        return (self.in_rest and not self.credit.probing) or self._since >= self._interval

    @property
    def room(self) -> int:
        """Capacity of a step in nodes over all rows: twice the largest timed step, at most the largest fixed size."""
        nodes = self.costs.padded(2 * self._largest)
        return min(nodes, self.costs.captured[-1]) if self.costs.captured else nodes

    def max_nodes(self, taught: float = TAUGHT) -> int:
        """Return the maximum number of nodes per row in the coming step, the root included.

        Args:
            taught: Value of each node for later drafts, in tokens.
        """
        costs = self.costs
        rows = self.rows
        nodes = USUAL_NODES
        plain = costs.plain(rows)
        while nodes < MOST_CHOSEN_NODES:
            fewer = 1
            more = nodes
            base = plain
            if costs.was_timed(2 * nodes * rows):
                fewer = nodes
                more = 2 * nodes
                base = costs.seconds(nodes * rows)
            if costs.seconds(more * rows) - base >= plain * taught * (more - fewer):
                break
            nodes *= 2
        return max(min(costs.padded(nodes * rows), self.room) // rows, 1)

    def choose(
        self,
        likely: NDArray[np.float64],
        pending: int = 1,
        resends: bool = False,
        shared: bool = False,
        taught: float = TAUGHT,
    ) -> int:
        """Return the number of candidates to send; they are the first ones.

        Args:
            likely: Probability that each candidate is accepted, in the order of sending, `[candidates]`.
            pending: Nodes besides the candidates, of one row; of all rows if `shared`.
            resends: Whether a rejected candidate makes the next step send the pending and accepted tokens again, as
                for models that cannot rewind their states.
            shared: Whether `likely` covers all rows; otherwise each row sends this number.
            taught: Value of each node for later drafts, in tokens; 0 if `resends`, at most `TAUGHT` in a rest.
        """
        costs = self.costs
        rows = 1 if shared else self.rows
        if not self.in_rest:  # doubt was learned from another text than the one that probes
            likely = likely**self._doubt
        taught = 0.0 if resends else min(taught, TAUGHT) if self.in_rest else taught
        plain = costs.plain(self.rows) * rows / self.rows
        chosen, gain = _choose(likely, pending, rows, resends, taught, plain, costs.curve)
        if self.in_rest:
            self.credit.probe(gain)
            chosen = 0 if self.in_rest else chosen
        if chosen:  # candidates that fill a pass of fixed size are free
            chosen = min(costs.padded((pending + chosen) * rows) // rows - pending, len(likely))
        self._promised += float(likely[:chosen].sum())
        return chosen

    def min_probability(self, rows: int) -> float:
        """Return the approximate minimum probability of a sent candidate if `rows` rows share the step."""
        costs = self.costs
        return max((costs.seconds(2 * rows) - costs.seconds(rows)) / costs.plain(rows), TAUGHT)

    def skip(self) -> bool:
        """Count a step of a long rest without timing it; return whether the step was part of one."""
        if self.searches or self.credit.cooldown <= REST:
            return False
        self._doubt **= 1 - DOUBTED / 5
        self.credit.wait()
        return True

    def book(self, step: StepTime) -> None:
        """Learn from a finished step: its time, its accepted tokens, and the time it saved."""
        promised = self._promised
        self._promised = 0.0
        self.searches = False
        if not step.tells:
            return
        accepted = step.tokens - step.certain_tokens - step.rows
        faded = self._doubt if promised else self._doubt ** (1 - DOUBTED / 5)
        doubt = faded * math.exp(DOUBTED * (promised - accepted) / (promised + step.rows))
        self._doubt = min(max(doubt, 1.0), MOST_DOUBT)
        if step.drafted:
            self._book_draft(step)
            return
        self._plain += 1
        if self._plain % PLAIN_STEPS == 0:
            nodes = step.nodes - step.certain_nodes
            part = self.costs.seconds(nodes) / self.costs.seconds(step.nodes)  # of the time, without certain nodes
            self.costs.observe(nodes, step.context, step.seconds * part, plain=True)
        if self.credit.cooldown:
            self.credit.wait()
        elif self._since >= self._interval and self._plain >= PLAIN_STEPS:
            paid = min(self._saved / self._since, 1.0)
            longer = min(TIMED * self._interval, int(paid * PLAIN_STEPS * COVER))
            self._since = 0
            self._saved = 0.0
            self._interval = max(longer, TIMED * PLAIN_STEPS)

    def _book_draft(self, step: StepTime) -> None:
        costs = self.costs
        tokens = (step.tokens - step.certain_tokens) / step.rows
        self._since = self._since + 1
        self._plain = 0
        self._largest = max(self._largest, step.nodes)
        if costs.observe(step.nodes, step.context, step.seconds):
            self._interval = PLAIN_STEPS  # plain steps may have changed as well: time one soon
        cost = costs.seconds(step.nodes - step.certain_nodes) / costs.plain(self.rows)
        if costs.times[PLAIN]:
            # A step without accepted candidates saves nothing: a positive value is noise that would hide its cost.
            saved = tokens - cost if tokens > 1 else min(tokens - cost, 0.0)
            self._saved += saved
            self.credit.book(saved)
        if self.credit.cooldown:  # the cost estimates may be the reason
            self._since = 0
            self._saved = 0.0
            self._largest = FIRST_NODES // 2 * self.rows
            costs.forget()


class PacedRow:
    """Budget of one text (`StepBudget`): for a single sequence, or for one row of a padded batch.

    Args:
        pace: Pace that chooses the number of nodes.
        resends: Whether drafts are chains that must be sent again unless all of their tokens are accepted.
        max_nodes: Maximum number of nodes of a step, the root included.
    """

    min_probability = 0.0
    ranking = UNRANKED

    def __init__(self, pace: Pace, resends: bool = False, max_nodes: int = MOST_CHOSEN_NODES) -> None:
        self._pace = pace
        self._resends = resends
        self._max_nodes = max_nodes
        self.max_candidates = 0
        self.backs_off = pace.rests
        self._searched = 0
        self._taught = 0.0
        self._empty_probes = 0  # probes without a good draft; each takes time, so later ones are rarer
        pace.credit.until_probe = min(pace.credit.until_probe, REST << 1)  # a new text may suit drafts better

    @property
    def rests(self) -> bool:
        """Whether the coming step is plain; see `Pace.rests`."""
        return self._pace.rests and not self._pace.searches

    def begin(self, teaches: int = True) -> None:
        """Begin a step (`StepBudget.begin`)."""
        self.backs_off = self._pace.rests
        if not self.backs_off:
            self._pace.searches = True
            self._searched += 1
            # `choose` gives the nodes of chains no such value, but chains may be long where nodes are almost free.
            taught = TAUGHT if teaches or self._resends else 0.0
            self.max_candidates = min(self._pace.max_nodes(taught), self._max_nodes) - 1
            self._taught = taught * (1 + 3 * math.exp(-self._searched / EARLY))

    def choose(
        self, likely: NDArray[np.float64], counts: NDArray[np.int64], roots: Roots, rows: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the number of candidates of the only row to send (`StepBudget.choose`)."""
        count = self.max_candidates
        pending = 1  # of trees, whose steps are timed without the tokens of a prompt
        if self._resends:
            pending = roots.pending_of(rows[0])
            count = min(count, max(self._pace.room - pending, 0))
        chosen = self._pace.choose(likely[:count], pending, self._resends, taught=self._taught)
        self.backs_off = self._pace.in_rest  # the search was only a probe
        if self.backs_off:
            self._empty_probes = min(self._empty_probes + 1, 2)
            self._pace.credit.until_probe = REST << self._empty_probes
        self._pace.searches &= not self.backs_off
        return np.array([chosen])


@compiled
def _choose(
    likely: NDArray[np.float64],
    pending: int,
    rows: int,
    resends: bool,
    taught: float,
    plain: float,
    curve: NDArray[np.float64],
) -> tuple[int, float]:
    """Return the number of candidates with the largest expected gain, and this gain in tokens.

    The gain of a candidate is `probability + taught - added seconds / plain`. If `resends`, a rejection repeats the
    nodes before it, and each candidate needs all earlier ones.

    Args:
        likely: Probability that each candidate is accepted, `[candidates]`.
        pending: Nodes of a row besides its candidates.
        rows: Rows that send this number of candidates each.
        resends: Whether a rejection makes the next step send earlier nodes again.
        taught: Value of each node for later drafts, in tokens.
        plain: Seconds per token of plain decoding.
        curve: Seconds of a step of each size, `[sizes]`.
    """
    chosen = FIRST
    gain = 0.0
    best = 0.0
    before = 1.0
    last = seconds_at(curve, pending * rows)
    for sent in range(len(likely)):
        time = seconds_at(curve, (pending + sent + 1) * rows)
        # A draft that is first rejected here has all its earlier nodes sent again.
        probability = min(likely[sent], before)
        again = (before - probability) * (pending + sent) if resends else 0.0
        gain += probability + taught - (time - last) / plain * (1 + again)
        if gain > best:
            chosen = sent + 1
            best = gain
        before = probability if resends else 1.0
        last = time
    return chosen, best
