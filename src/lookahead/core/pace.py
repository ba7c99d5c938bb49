"""How many nodes a step sends, or whether it rests from drafting: what pays by the clock.

A node is sent where it promises about the tokens that its time brings in plain decoding: a little less, above all early
in a text, for what the model says after each node is what later steps are drafted from. Steps that have nothing likely
to send are plain but for the search. Whether drafting goes on at all is a running sum of what drafted steps saved.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.compiled import FIRST, compiled
from lookahead.core.protocols import Send
from lookahead.core.step_costs import PLAIN, StepCosts, seconds_at
from lookahead.core.step_time import StepTime

FIRST_NODES = 8
"""Nodes of a row in the first step. Steps grow to twice as many as were run: nobody pays for a large one before a
smaller one has shown what steps cost."""

USUAL_NODES = 32
"""Most nodes of a row; twice as many where these cost less than they teach, and are tried where the first do: 32 were
best on every curve of a CPU that was played; 64 gave 1.15 of 32 on a GPU, where they cost what 8 do."""

TAUGHT = 0.007
"""What a node is worth besides, in tokens, whatever becomes of it: what the model says after it fills the memory.
Played with AMX and on a GPU: 1.05 to 1.15 of the speed without it, by nodes that cost next to nothing; with AVX-512
0.95 to 1.05, and with 0.02 less."""

EARLY = 32
"""Drafted steps of a text in which a node teaches more, at first four times as much: all later steps draw from it.
Played with prices of CPUs, 24 to 32 texts each, over sending all that a step may after timed plain ones: stories 1.02
to 1.04, sampled ones 0.99 to 1.04, GSM8K 0.98 to 1.01, HumanEval 0.99 to 1.01."""

FIRST_CREDIT, TRIAL, MOST_CREDIT = 5.0, 2.0, 16.0
"""What drafts may lose at first, each time they are tried again, and after they have paid, in plain steps."""

REST, COVER = 16, 100
"""Plain steps of the first rest; each is twice as long as the one before, up to `COVER` for each plain step that was
lost. First rests of 64 steps cost texts of 128 tokens a fifth of their speed where early drafts were unlucky. After
as many steps of a rest a draft is looked for, and ends it if it promises to win more than `TRIAL`."""

PLAIN_STEPS = 2
"""Of so many plain steps in a row the last one is timed: the first after a draft took a third longer than
those of plain decoding (stories260k), and drafts that lost seemed to pay."""

TIMED = 4
"""Plain steps are run after as many drafted ones, and then after so many times more, until what they do not save is one
plain step in `COVER`: where drafts save little, that they do has to be known the better. Played with twice instead of
four times more: 2 to 3 % less on texts of 128 to 200 tokens."""

DOUBTED, MOST_DOUBT = 0.1, 4.0
"""How fast probabilities are doubted, and how far: after a step that promised many tokens and brought none they are
taken to the power of a tenth more. Played with 0.05 and 0.2: forced edits, agents 1 to 3 % less and 1 % more, stories
3 % less with 0.2. Without it forced texts, whose drafts kept 0.35 to 0.86 of what they promised, went at 0.85 of it.
It fades, a fifth as fast, in steps that promise nothing: where so much is doubted that nothing is sent, nothing shows
it wrong. By clocks with and without noise stories at 1 1.03, at 0.8 1.02, GSM8K, HumanEval at 0.8 0.99, 1.00."""


class Credit:
    """Whether drafting goes on: a running sum of what drafted steps saved, in plain steps.

    When what it may lose is spent, steps are plain for a rest, twice as long as the one before, until rests cover what
    the trials between them lose. What drafts save later makes rests shorter again. Now and then a resting text looks
    whether a draft promises much, for it may be another text than the one whose drafts failed; the next time later, if
    that is not kept.

    Args:
        first: What may be lost before the first rest.

    Attributes:
        rest: Plain steps that are left of a rest.
        unseen: Those of them until the next look.
        failures: Rests that drafts have not made up for.
    """

    def __init__(self, first: float) -> None:
        self._left = first
        self.failures = 0
        self.rest = 0
        self.unseen = 0
        self._woken, self._broken = False, 0  # by a promise; how many were not kept since drafts paid

    def book(self, saved: float) -> None:
        """Note what a drafted step saved."""
        self._left += saved
        if self._left > MOST_CREDIT:
            self._woken, self._broken = False, 0
            if self.failures and self._left > MOST_CREDIT + TRIAL:
                self.failures -= 1
                self._left -= TRIAL
            elif not self.failures:
                self._left = MOST_CREDIT
        elif self._left <= 0:
            self.rest = min(REST << self.failures, int(COVER * (TRIAL - self._left)))
            self.failures = min(self.failures + 1, 32)
            self._left = TRIAL
            self._broken = min(self._broken + self._woken, 32)
            self._woken, self.unseen = False, REST << self._broken

    def wait(self) -> None:
        """Note a plain step of a rest."""
        self.rest -= 1
        self.unseen -= 1

    @property
    def looks(self) -> bool:
        """Whether it is time to look whether a draft promises much, in a rest."""
        return self.rest > 0 >= self.unseen

    def look(self, promised: float) -> None:
        """End a rest if that is what a draft promises, in plain steps."""
        self.unseen = REST
        if promised > TRIAL:
            self.rest, self._woken = 0, True


class Pace:
    """Learns what steps cost and bring, and says what the coming one sends: one for a model, a number of rows, a way to
    run drafts, and a temperature. Threads may share it; what two of them book at once may count as one.

    Args:
        costs: What steps cost. It is told of them.
        rows: Rows that share each step.

    Attributes:
        costs, rows: Likewise.
        credit: Whether drafting goes on.
        searches: Whether a draft is looked for in the coming step, but for a look in a rest.
    """

    def __init__(self, costs: StepCosts, rows: int = 1) -> None:
        self.costs, self.rows = costs, rows
        self.credit = Credit(FIRST_CREDIT)
        self.searches = False
        self._tried = FIRST_NODES // 2 * rows
        self._plain = 0  # plain steps since the last drafted one
        self._since, self._interval = 0, PLAIN_STEPS  # drafted steps since the last one that was timed, and until then
        self._saved = 0.0  # by those steps, in plain ones
        self._doubt = 1.0  # power to which probabilities are taken; those of some texts promise more than they keep
        self._promised = 0.0  # tokens that the candidates of the coming step are expected to bring

    def similar(self, rows: int) -> Pace:
        """For another number of rows, beginning with what is known here of costs."""
        pace = Pace(self.costs.similar(), rows)
        pace._tried = max(pace._tried, self._tried)
        pace._doubt = self._doubt
        if self.credit.failures:
            pace.credit = Credit(TRIAL)
        return pace

    def begin(self, rows: int) -> None:
        """A step of so many rows begins."""
        self.rows, self._promised = rows, 0.0  # the one before may not have been booked

    @property
    def is_new(self) -> bool:
        """Whether nothing was booked yet."""
        return not self.costs.times.any()

    @property
    def in_rest(self) -> bool:
        """Whether drafts do not pay, so that steps are plain, or look for one at most."""
        return self.credit.rest > 0

    @property
    def rests(self) -> bool:
        """Whether the coming step is plain: because drafts do not pay, or to time it."""
        return (self.in_rest and not self.credit.looks) or self._since >= self._interval

    @property
    def room(self) -> int:
        """Nodes that a step has at most over all rows, before it is known what larger ones cost; of passes of fixed
        sizes those of the largest one."""
        nodes = self.costs.padded(2 * self._tried)
        return min(nodes, self.costs.captured[-1]) if self.costs.captured else nodes

    def most(self, taught: float = TAUGHT) -> int:
        """Nodes of the coming step for each row, the root included, at most, if each teaches so much."""
        costs, rows, nodes = self.costs, self.rows, USUAL_NODES
        plain = costs.plain(rows)
        while nodes < MOST_CHOSEN_NODES:
            fewer, more, least = 1, nodes, plain
            if costs.was_timed(2 * nodes * rows):
                fewer, more, least = nodes, 2 * nodes, costs.seconds(nodes * rows)
            if costs.seconds(more * rows) - least >= plain * taught * (more - fewer):
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
        """How many candidates are sent, the first ones.

        Args:
            likely: Probability that each is accepted, in the order of sending, `[candidates]`.
            pending: Nodes without them, of the row; of all rows if `shared`.
            resends: Whether these and the accepted tokens are sent again unless all candidates are accepted, as where
                states cannot be taken back.
            shared: Whether they are those of all rows. Else each row sends as many.
            taught: What a node is worth besides, in tokens: nothing where it resends, in a rest `TAUGHT` at most.
        """
        costs, rows = self.costs, 1 if shared else self.rows
        if not self.in_rest:  # a look is for a text that may keep what another did not
            likely = likely**self._doubt
        taught = 0.0 if resends else min(taught, TAUGHT) if self.in_rest else taught
        plain = costs.plain(self.rows) * rows / self.rows
        chosen, gain = _choose(likely, pending, rows, resends, taught, plain, costs.curve)
        if self.in_rest:
            self.credit.look(gain)
            chosen = 0 if self.in_rest else chosen
        if chosen:  # what fills a pass of fixed size costs nothing
            chosen = min(costs.padded((pending + chosen) * rows) // rows - pending, len(likely))
        self._promised += float(likely[:chosen].sum())
        return chosen

    def least(self, rows: int) -> float:
        """About the least probability at which a candidate is sent, where so many rows share the step."""
        costs = self.costs
        return max((costs.seconds(2 * rows) - costs.seconds(rows)) / costs.plain(rows), TAUGHT)

    def skip(self) -> bool:
        """Note a step of a long rest, before whose end nobody asks what steps take; whether it was one."""
        if self.searches or self.credit.rest <= REST:
            return False
        self._doubt **= 1 - DOUBTED / 5
        self.credit.wait()
        return True

    def book(self, step: StepTime) -> None:
        """Note a step."""
        promised, self._promised, self.searches = self._promised, 0.0, False
        if not step.tells:
            return
        kept = step.tokens - step.certain_tokens - step.rows
        faded = self._doubt if promised else self._doubt ** (1 - DOUBTED / 5)
        doubt = faded * math.exp(DOUBTED * (promised - kept) / (promised + step.rows))
        self._doubt = min(max(doubt, 1.0), MOST_DOUBT)
        if step.drafted:
            self._book_draft(step)
            return
        self._plain += 1
        if self._plain % PLAIN_STEPS == 0:
            nodes = step.nodes - step.certain_nodes  # those that are not certain take this part of the time:
            part = self.costs.seconds(nodes) / self.costs.seconds(step.nodes)
            self.costs.observe(nodes, step.context, step.seconds * part, plain=True)
        if self.credit.rest:
            self.credit.wait()
        elif self._since >= self._interval and self._plain >= PLAIN_STEPS:
            paid = min(self._saved / self._since, 1.0)
            longer = min(TIMED * self._interval, int(paid * PLAIN_STEPS * COVER))
            self._since, self._saved, self._interval = 0, 0.0, max(longer, TIMED * PLAIN_STEPS)

    def _book_draft(self, step: StepTime) -> None:
        costs, tokens = self.costs, (step.tokens - step.certain_tokens) / step.rows
        self._since, self._plain = self._since + 1, 0
        self._tried = max(self._tried, step.nodes)
        if costs.observe(step.nodes, step.context, step.seconds):
            self._interval = PLAIN_STEPS  # have plain steps changed as well?
        cost = costs.seconds(step.nodes - step.certain_nodes) / costs.plain(self.rows)
        if costs.times[PLAIN]:
            # What a step seems to save that brings no more than a plain one is noise, and would hide what drafts cost.
            saved = tokens - cost if tokens > 1 else min(tokens - cost, 0.0)
            self._saved += saved
            self.credit.book(saved)
        if self.credit.rest:  # what costs were, may be why
            self._since, self._saved, self._tried = 0, 0.0, FIRST_NODES // 2 * self.rows
            costs.forget()


class PacedRow:
    """The part of a `Pace` that one text takes (`StepBudget`): alone, or in rows that are padded.

    Args:
        pace: What decides.
        resends: Whether drafts are chains of which nothing is kept unless all is accepted.
        most: Nodes of a step at most, the root included.
    """

    least = 0.0

    def __init__(self, pace: Pace, resends: bool = False, most: int = MOST_CHOSEN_NODES) -> None:
        self._pace = pace
        self._resends, self._most = resends, most
        self.most = 0
        self.backs_off = pace.rests
        self._searched, self._taught = 0, 0.0
        self._looks = 0  # that found nothing: each took a third of a plain step of 5 ms
        pace.credit.unseen = min(pace.credit.unseen, REST << 1)  # this may be another text than the one before

    def begin(self, teaches: bool = True) -> None:
        """See `StepBudget`."""
        self.backs_off = self._pace.rests
        if not self.backs_off:
            self._pace.searches = True
            self._searched += 1
            # `choose` counts nothing for chains; but they may be long where nodes cost next to nothing.
            taught = TAUGHT if teaches or self._resends else 0.0
            self.most = min(self._pace.most(taught), self._most) - 1
            self._taught = taught * (1 + 3 * math.exp(-self._searched / EARLY))

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """See `StepBudget`."""
        most = min(self.most, max(self._pace.room - pending, 0)) if self._resends else self.most
        chosen = self._pace.choose(likely[:most], pending, self._resends, taught=self._taught)
        self.backs_off = self._pace.in_rest  # it was but a look
        if self.backs_off:
            self._looks = min(self._looks + 1, 2)
            self._pace.credit.unseen = REST << self._looks
        self._pace.searches &= not self.backs_off
        send(chosen)


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
    """How many candidates gain the most, and how much that is, in tokens; of others that come before them they need
    the more, the later.

    `rows` send as many each; `plain` is the seconds in which plain decoding brings a token.
    """
    chosen, gain, most, before = FIRST, 0.0, 0.0, 1.0
    last = seconds_at(curve, pending * rows)
    for sent in range(len(likely)):
        time = seconds_at(curve, (pending + sent + 1) * rows)
        # That the draft fails here has all before it sent again.
        probability = min(likely[sent], before)
        again = (before - probability) * (pending + sent) if resends else 0.0
        gain += probability + taught - (time - last) / plain * (1 + again)
        if gain > most:
            chosen, most = sent + 1, gain
        before, last = probability if resends else 1.0, time
    return chosen, most
