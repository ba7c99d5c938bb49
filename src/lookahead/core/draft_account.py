"""Whether drafting pays: what drafted steps saved or lost, held against the clock."""

from __future__ import annotations

import math

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.calibration import Calibration
from lookahead.core.cost_model import TRUST, CostModel
from lookahead.core.step_time import StepTime

MOST_CREDIT = 32.0
"""What drafting may lose after it paid, in plain steps."""

FIRST_CREDIT = 10.0
"""What it may lose before anything is known."""

CAUTIOUS_CREDIT = 3.0
"""The same where drafts are not expected to bring much."""

RESUMED_CREDIT = 4.0
"""What it may lose each time that it is tried again."""

INCOME = 0.009
"""Credit that each plain step of a rest adds: the share of time that trying again may cost."""

INTERVALS = (8, 512)
"""Fewest and most drafted steps between plain ones, which keep the clock of plain steps right."""

INTERVAL = 400
"""Drafted steps between plain ones, for each plain step of time that a draft saves in the mean: the more it saves, the
more a plain step loses, and the less depends on the clock. What is lost is 0.25 % of the time."""

RESTING = 16
"""While drafting backs off, one of so many plain steps is timed: they are all the same, and for a small model learning
from one takes as long as a tenth of a step. A rest has some hundreds."""

MOST_SURPRISE = 10.0
"""A step counts no longer than so many times the median of its size: a single one says little."""

RATE = 0.03
"""Weight of the latest step in a mean."""

KEPT = 0.99
"""What a drafted step keeps of its weight in the usual rate from one to the next, so that some 100 steps count."""

FIRST_STEPS = 4.0
"""Plain steps that count in the usual rate before anything was drafted."""

FIRST_NODES = 8
"""Nodes that the first step with a draft has at most, or two for each row; each one that was run allows for twice as
many. So nobody pays for a large step before a smaller one has shown what steps cost."""

PROMPTS_KEPT = 0.9
"""What a step that carries prompts keeps of its weight when the next one comes."""

FIRST_PLAIN = 3
"""Plain steps that are run, if none was timed yet, before drafts are held against them."""


class DraftAccount:
    """Books the time and result of each step, and says whether the coming one drafts.

    A step that added k tokens to each row in the time of c plain steps saved the time of k - c plain steps, or lost
    it. That is booked against a credit. When the credit is spent, drafting backs off: steps are plain, and each of
    them earns a little. When there is enough for another attempt, drafting resumes.

    So decoding is never much slower than plain decoding, whatever drafts cost and bring. It takes at most `INCOME`
    (0.9 %) of its time longer; besides, `FIRST_CREDIT` (10) plain steps once, or `CAUTIOUS_CREDIT` (3), or
    `MOST_CREDIT` (32) after drafting had paid, and what the drafts cost that were under way when it turned out that
    they lose. Where drafting saves time in the mean, the credit stays away from zero: with outcomes independent of each
    other, the mean loss against always drafting is below 1 % of the time from the 6,000th token on.

    Threads may share an account; a booking that two of them make at once may count as one.

    Args:
        costs: What steps cost. It is told of them.
        rows: Sequences that share each step.
        adaptive: Go by the clock. Else go by `costs`, which then stays as it is, so that the same calls take the same
            steps.
        cautious: Risk little, and time plain steps before the first draft: for sampling, by which drafts gain less.
        chains: Whether drafts are chains.

    Attributes:
        adaptive: Whether it goes by the clock.
        calibration: How far the probabilities of drafts are to be believed.
    """

    def __init__(
        self, costs: CostModel, rows: int = 1, adaptive: bool = True, cautious: bool = False, chains: bool = False
    ) -> None:
        self.costs = costs
        self.rows = rows
        self.calibration = Calibration(leans=chains)
        self._plain_surprise, self._draft_surprise, self._idle = _Surprise(), _Surprise(), _Surprise(1.05)
        self.adaptive = adaptive
        self._cautious = adaptive and cautious
        self._credit = CAUTIOUS_CREDIT if self._cautious else FIRST_CREDIT
        self._backs_off = False
        self._drafted = 0  # steps since the last plain one
        self._interval = 1  # drafted steps after which a plain one is run
        self._plain = 0
        self._tokens = self._time = FIRST_STEPS  # of a row, in plain steps; what is older counts less
        self._saved = 0.0  # by a draft in the mean, in plain steps
        self._times_plain = self._cautious
        self._booked = False
        self._looking: float | None = None  # seconds for each row
        self._looked = 0  # times
        self._with_prompts = 0.0, 0.0  # seconds and nodes of the last steps that carried prompts
        # Nodes of the largest step so far.
        self._tried = max(FIRST_NODES // 2, rows) if adaptive and not costs.in_seconds else MOST_CHOSEN_NODES * rows

    @property
    def backs_off(self) -> bool:
        """Whether the coming step goes without a draft."""
        if self.rests or not self.adaptive:
            return self.rests
        unknown = self._times_plain and max(self._plain, self.costs.evidence(self.rows)) < FIRST_PLAIN
        return unknown or self._drafted >= self._interval

    @property
    def rests(self) -> bool:
        """Whether it does so because drafts do not pay, and not to time a plain step."""
        return self._backs_off

    @property
    def is_new(self) -> bool:
        """Whether no step was booked yet."""
        return not self._booked

    @property
    def reads_prompts(self) -> bool:
        """Whether reading prompts for drafting is worth its time; where it is not known, if not cautious."""
        return self._saved > 0 if self._cautious else not self._backs_off

    @property
    def most_nodes(self) -> int:
        """Nodes that a step has at most over all rows, before it is known what larger ones cost."""
        return 2 * self._tried

    def take_after(self, other: DraftAccount) -> None:
        """Begin with what is known of another load: what nodes cost beside the roots, how large steps may be, and how
        often a plain one is run.

        Drafts of sampled tokens that do not pay for fewer rows do not begin here either: more rows leave less room.
        """
        if not self.adaptive:
            return
        self.costs.take_after(other.costs)
        self._looking = other._looking
        self._tried = max(self._tried, other._tried)
        self._interval, self._saved = other._interval, other._saved
        if not self._cautious:
            self._plain = other._plain
        elif other.rows < self.rows and other._backs_off:
            self._backs_off, self._credit = True, other._credit

    @property
    def is_timed(self) -> bool:
        """Whether the seconds of the coming step are wanted, should it have no draft."""
        return not self._backs_off or (self.adaptive and self._plain % RESTING == 0)

    def book(self, step: StepTime) -> None:
        """Note a step. One that carried prompts says what a node costs beside these, and nothing else."""
        if step.prompts:
            if self.adaptive and not math.isnan(step.seconds):
                self._book_prompts(step)
            return
        self._times_plain = self._booked = True
        if step.drafted:
            self._book_draft(step)
        else:
            self._book_plain(step)

    def _book_prompts(self, step: StepTime) -> None:
        """Rows pay for their roots, for the pass itself and for looking in any case; the rest is what nodes took."""
        plain = self.costs.step_time(self.rows, step.context) if self.costs.in_seconds else 0.0
        took, nodes = self._with_prompts
        seconds = max(step.seconds - step.looking - plain, 0.0)
        self._with_prompts = (
            PROMPTS_KEPT * took + seconds,
            PROMPTS_KEPT * nodes + max(step.nodes - self.rows, 0),
        )

    def _book_plain(self, step: StepTime) -> None:
        is_booked = not self._backs_off or self._plain % RESTING == 0
        if self.adaptive and is_booked and not math.isnan(step.seconds):
            self.costs.observe(step.nodes, step.context, step.seconds)
            usual = self.costs.step_time(step.nodes, step.context)
            self._plain_surprise.add(step.seconds / usual)
        self._plain += 1
        if self._backs_off:
            self._credit += INCOME
            self._backs_off = self._credit < RESUMED_CREDIT
        elif self._drafted >= self._interval:
            least, most = INTERVALS
            self._interval = min(2 * self._interval, max(least, min(most, int(INTERVAL * self._saved))))
        self._drafted = 0

    def _book_draft(self, step: StepTime) -> None:
        self._drafted += 1
        if self.adaptive and step.looking:
            latest = step.looking / step.rows
            self._looked += 1
            weight = max(1 / max(self._looked - 1, 1), RATE)  # a mean without the first one, which takes long
            self._looking = latest if self._looking is None else self._looking + weight * (latest - self._looking)
        if step.nodes - step.certain_nodes > self.rows:
            cost = self._draft_cost(step)
        else:
            plain = self.costs.step_time(self.rows, step.context)
            if self.adaptive:
                self._idle.add((step.seconds - step.looking) / self._undrafted(step))
            cost = self.idle_cost + self.looking / plain
        tokens = (step.tokens - step.certain_tokens) / step.rows
        self._tokens, self._time = KEPT * self._tokens + tokens, KEPT * self._time + cost
        saved = tokens - cost
        self._saved += RATE * (saved - self._saved)
        self._credit = min(self._credit + saved, MOST_CREDIT)
        self._backs_off = self._credit <= 0

    def _draft_cost(self, step: StepTime) -> float:
        """What a step that was drafted took, in plain steps."""
        seconds = step.seconds - step.looking
        if self.adaptive:
            self._tried = max(self._tried, step.nodes)
            self.costs.observe(step.nodes, step.context, seconds)
        # Asked now: before the first observation costs are not in seconds.
        usual, plain = (self.costs.step_time(nodes, step.context) for nodes in (step.nodes, self.rows))
        certain = self._undrafted(step) - plain  # what the certain nodes took
        if not self.adaptive:
            return (usual - certain) / plain
        self._draft_surprise.add(seconds / usual)
        cost = usual * self._draft_surprise.mean
        if self.costs.evidence(step.nodes) < TRUST:  # what is usual leans on other sizes, or on a guess
            cost = max(cost, min(seconds, MOST_SURPRISE * plain))
        cost += self.looking - certain
        return cost / (plain * self._plain_surprise.mean)

    def _undrafted(self, step: StepTime) -> float:
        """What the step would have taken with its certain nodes alone."""
        return self.costs.step_time(self.rows + step.certain_nodes, step.context)

    @property
    def prompt_node_seconds(self) -> float:
        """Seconds that a node adds to a step that carries prompts, at most.

        The products of such a step are full: a node takes no longer than its tokens do in the mean.
        """
        took, nodes = self._with_prompts
        return took / nodes if nodes else math.inf

    @property
    def looking(self) -> float:
        """Seconds that looking for drafts takes in a step, where they are told apart; else `costs` holds them."""
        return (self._looking or 0.0) * self.rows

    @property
    def usual_rate(self) -> float:
        """Tokens that drafted steps add to a row lately, in the time of a plain step."""
        return self._tokens / self._time

    @property
    def idle_cost(self) -> float:
        """What a step takes for which a draft was looked for and none was sent, in plain steps."""
        return max(self._idle.mean / self._plain_surprise.mean, 1.0)


class _Surprise:
    """How long steps take over what is usual, in the mean; the median is what is usual.

    Costs are medians, which what disturbs a single step does not move. But time is lost by sums, not by medians.
    """

    def __init__(self, mean: float = 1.0) -> None:
        self.mean = mean
        self._rate = 0.5

    def add(self, ratio: float) -> None:
        """Note the time of a step over the usual one."""
        self._rate = max(self._rate * 0.8, RATE)
        self.mean += self._rate * (min(ratio, MOST_SURPRISE) - self.mean)
