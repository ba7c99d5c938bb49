"""Pace of a step for many rows: the choice of candidates, and the bound of the loss."""

import random
from collections.abc import Iterator
from itertools import chain, repeat

import numpy as np
import pytest

from lookahead.core.pace import MOST_CREDIT, Pace
from lookahead.core.roots import Roots
from lookahead.core.shared_pace import SharedPace
from lookahead.core.step_costs import GRID, StepCosts
from lookahead.core.step_time import StepTime

FIXED_LOSS = 40.0
"""Plain steps that drafts may lose until rests are long enough to cover them."""


def shared_of(slope: float = 0.01, nodes: int | None = None) -> SharedPace:
    """Return a pace with an initial guess of `slope` plain steps per node."""
    return SharedPace(lambda load, temperature: Pace(StepCosts(1 + slope * (GRID - 1)), load), nodes)


def send(shared: SharedPace, offers: list[list[float]], teaching: int | None = None) -> list[int]:
    """Return the number of candidates sent for each row."""
    for place in range(len(offers)):
        shared.begin(teaching is None or place < teaching)
    likely = np.array([probability for offer in offers for probability in offer])
    return shared.choose(likely, np.array([*map(len, offers)]), Roots([None] * len(offers)), ()).tolist()


@pytest.mark.parametrize("seed", range(10))
def test_the_likeliest_candidates_of_all_rows_are_sent(seed: int) -> None:
    generator = random.Random(seed)
    offers = [sorted((generator.random() for _ in range(generator.randint(0, 6))), reverse=True) for _ in range(4)]
    shared = shared_of(nodes=9)
    shared.begin_step(4)
    sent = send(shared, offers)
    everything = sorted((likely for offered in offers for likely in offered), reverse=True)
    chosen = [likely for offered, count in zip(offers, sent, strict=True) for likely in offered[:count]]
    assert sorted(chosen, reverse=True) == everything[:5]


def test_a_step_that_has_room_for_its_roots_alone_drafts_nothing() -> None:
    shared = shared_of(nodes=3)
    shared.begin_step(3)
    assert shared.backs_off
    shared.begin_step(2)
    assert not shared.backs_off


def test_the_dearer_nodes_are_the_fewer_are_sent() -> None:
    counts = []
    for slope in (0.001, 0.05, 0.5):
        shared = shared_of(slope)
        for _ in range(5):  # the first steps are timed for any probabilities
            shared.begin_step(4)
            sent = sum(send(shared, [[0.9, 0.5, 0.1]] * 4)) if not shared.backs_off else 0
            shared.book(StepTime(4 + sent, 100, 1 + slope * (3 + sent), 4 + sent // 2, 4, not shared.backs_off))
        shared.begin_step(4)
        counts.append(sum(send(shared, [[0.9, 0.5, 0.1]] * 4)))
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize(("teaching", "sent"), [(4, True), (3, True), (2, False), (0, False)])
def test_nodes_have_a_bonus_for_learning_in_the_mean_row(teaching: int, sent: bool) -> None:
    shared = shared_of(slope=0.002)  # a node costs 0.008 tokens of a step with four rows; it promises and teaches
    shared.begin_step(4)
    assert any(send(shared, [[0.0035]] * 4, teaching)) == sent


def test_a_new_load_begins_with_its_neighbours_costs() -> None:
    shared = shared_of()
    for _ in range(8):
        shared.begin_step(4)
        shared.book(StepTime(4, 100, 3.0, 4, 4, drafted=False))
    shared.begin_step(8)
    (pace,) = [pace for (load, _), pace in shared._paces.items() if load == 8]
    assert pace.costs.seconds(4) == pytest.approx(3.0, rel=0.05)


def test_steps_that_carry_prompts_say_nothing() -> None:
    pace = Pace(StepCosts(), 2)
    shared = SharedPace(lambda load, temperature: pace)
    shared.begin_step(2)
    shared.book(StepTime(500, 100, 99.0, 2, 2, drafted=True, tells=False))
    assert pace.is_new


class Load:
    """Requests in shared steps, with a simulated clock."""

    def __init__(self, rows: int, slope: float) -> None:
        self.shared, self._rows, self._slope = shared_of(), rows, slope
        self._plain = 1 + slope * (rows - 1)
        self.seconds = self.tokens = 0.0  # in plain steps; per row

    def decode(self, drafts: Iterator[tuple[float, float]], tokens: int) -> None:
        """Decode `tokens` more per row; `drafts` yields the accepted share of a step's candidates, and the step's time
        relative to its expected time."""
        end = self.tokens + tokens
        while self.tokens < end:
            self.shared.begin_step(self._rows)
            sent = 0 if self.shared.backs_off else sum(send(self.shared, [[0.4] * 8] * self._rows))
            rests = self.shared.backs_off  # or the search was only a probe
            share, longer = (0.0, 1.0) if rests else next(drafts)
            accepted = round(share * sent)
            took = (1 + self._slope * (self._rows + sent - 1)) * longer
            tokens = self._rows + accepted
            self.shared.book(StepTime(self._rows + sent, 100, took, tokens, self._rows, not rests))
            self.seconds += took / self._plain
            self.tokens += tokens / self._rows

    @property
    def lost(self) -> float:
        """Plain steps lost beyond the allowed share of the time."""
        return self.seconds - 1.01 * self.tokens


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("slope", [0.001, 0.02, 0.5])
def test_drafts_that_are_always_wrong_cost_one_percent_and_a_fixed_number_of_steps(rows: int, slope: float) -> None:
    load = Load(rows, slope)
    load.decode(repeat((0.0, 1.0)), 6000)
    assert load.lost <= FIXED_LOSS + MOST_CREDIT


@pytest.mark.parametrize("rows", [2, 16])
def test_drafts_that_were_right_and_never_are_again_lose_what_they_may_and_no_more(rows: int) -> None:
    load = Load(rows, 0.01)
    load.decode(chain(repeat((0.4, 1.0), 200), repeat((0.0, 1.0))), 500)
    before = load.lost
    load.decode(repeat((0.0, 1.0)), 10000)
    assert load.lost - before <= FIXED_LOSS + MOST_CREDIT


@pytest.mark.parametrize("rows", [2, 16])
def test_costs_that_jump_are_noticed(rows: int) -> None:
    load = Load(rows, 0.01)
    load.decode(repeat((0.4, 1.0)), 1000)
    before = load.lost
    load.decode(repeat((0.4, 8.0)), 10000)
    assert load.lost - before <= FIXED_LOSS + MOST_CREDIT + 8 * 8.0
    load.decode(repeat((0.4, 1.0)), 4000)
    seconds, tokens = load.seconds, load.tokens
    load.decode(repeat((0.4, 1.0)), 1000)
    assert load.seconds - seconds < 0.8 * (load.tokens - tokens), "drafts that pay again are not taken up again"
