"""Bounds of `Pace`, by simulated clocks: the loss against plain decoding, for any cost and success of drafts."""

import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, cycle, repeat

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lookahead.core.pace import MOST_CREDIT, PLAIN_STEPS, REST, Pace, PacedRow
from lookahead.core.roots import Roots
from lookahead.core.step_costs import GRID, StepCosts
from lookahead.core.step_time import StepTime

LOSS = 0.01
"""Share of the time that drafts may lose, in addition to a fixed number of plain steps."""

FIXED_LOSS = 30.0
"""Plain steps that may be lost at first, and in trials until rests are long enough to cover them."""

Draft = tuple[int, float]
"""Largest number of accepted candidates, and the time of a step relative to `curve`."""

Curve = list[tuple[int, float]]
CURVES: dict[str, Curve] = {
    "AMX": [(1, 1.0), (16, 1.14), (64, 1.75), (128, 2.9)],
    "AVX-512": [(1, 1.0), (16, 1.7), (64, 4.0), (128, 7.2)],
    "GPU": [(1, 1.0), (128, 1.1)],
    "rows": [(1, 1.0), (128, 112.0)],
}


def chosen(row: PacedRow, likely: NDArray[np.float64]) -> int:
    """Return the number of candidates that are sent for the row."""
    return int(row.choose(likely, np.array([len(likely)]), Roots([None]), [0])[0])


def seconds_of(curve: str | Curve, nodes: int) -> float:
    return _seconds_of(tuple(CURVES[curve] if isinstance(curve, str) else curve), nodes)


@cache
def _seconds_of(points: tuple[tuple[int, float], ...], nodes: int) -> float:
    return float(np.interp(nodes, *zip(*points, strict=True)))


class Text:
    """A text decoded with a `Pace` and a simulated clock. Noise of the clock confuses the pace, but is not counted as
    a loss."""

    def __init__(self, pace: Pace, curve: str | Curve = "AMX", jitter: Callable[[], float] = lambda: 1.0) -> None:
        self.pace = pace
        self._curve, self._jitter = curve, jitter
        self.seconds, self.tokens, self.sent = 0.0, 0, list[int]()

    def decode(self, drafts: Iterator[Draft], tokens: int, likely: float = 0.2) -> None:
        """Decode at least `tokens` more tokens."""
        end, row = self.tokens + tokens, PacedRow(self.pace)
        while self.tokens < end:
            sent, accepted, longer = [0], 0, 1.0
            row.begin()
            if not row.backs_off:
                sent.append(chosen(row, np.full(row.max_candidates, likely)))
            rests = row.backs_off
            if not rests:
                accepted, longer = next(drafts)
                accepted = min(accepted, sent[-1])
            nodes = 1 + sent[-1]
            seconds = seconds_of(self._curve, nodes) * longer
            if not self.pace.skip():
                self.pace.book(StepTime(nodes, 100, seconds * self._jitter(), 1 + accepted, 1, not rests))
            self.seconds += seconds
            self.tokens += 1 + accepted
            self.sent.append(0 if rests else nodes)

    @property
    def lost(self) -> float:
        """Plain steps lost against plain decoding, beyond the allowed share of the time."""
        return self.seconds - self.tokens * (1 + LOSS)


def uneven(seed: int, noise: float) -> Callable[[], float]:
    generator = random.Random(seed)
    return lambda: math.exp(noise * generator.gauss(0, 1)) * (3.0 if generator.random() < 0.003 else 1.0)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("tokens", [1000, 20000])
def test_drafts_that_are_always_wrong_cost_one_percent_and_a_fixed_number_of_steps(curve: str, tokens: int) -> None:
    text = Text(Pace(StepCosts()), curve)
    text.decode(repeat((0, 1.0)), tokens)
    assert text.lost <= FIXED_LOSS + 2 * seconds_of(curve, 8)
    assert len([nodes for nodes in text.sent[-1000:] if nodes]) > 0, "it never tried again"


@pytest.mark.parametrize("curve", ["AMX", "AVX-512", "GPU"])
@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_noise_does_not_make_wrong_drafts_seem_to_save(curve: str, noise: float) -> None:
    for seed in range(5):
        text = Text(Pace(StepCosts()), curve, uneven(seed, noise))
        text.decode(repeat((0, 1.0)), 3000)
        assert text.lost <= FIXED_LOSS


def test_drafts_that_were_right_and_never_are_again_lose_what_they_may_and_no_more() -> None:
    text = Text(Pace(StepCosts()))
    text.decode(chain(repeat((4, 1.0), 200), repeat((0, 1.0))), 1000)
    before = text.seconds - text.tokens
    text.decode(repeat((0, 1.0)), 20000)
    assert text.seconds - text.tokens - before <= LOSS * 20000 + MOST_CREDIT + FIXED_LOSS


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 6)), min_size=1, max_size=8),
    cost=st.floats(1.0, 4.0),
    curve=st.sampled_from(sorted(CURVES)),
    noise=st.floats(0.0, 0.1),
    seed=st.integers(0, 1000),
)
# Each node costs a plain step, so none is sent; the search for drafts takes 7 % of a step.
@example(blocks=[(278, 3), (276, 3), (6, 3), (174, 1), (133, 3)], cost=1.07, curve="rows", noise=0.098, seed=19)
# Noise made plain steps seem too long, so steps with wrong drafts seemed to save time.
@example(blocks=[(1, 0)], cost=1.0, curve="AMX", noise=0.078125, seed=0)
@example(blocks=[(1, 1)], cost=1.0, curve="AVX-512", noise=0.0859375, seed=0)
def test_the_loss_against_plain_decoding_is_small_for_any_drafts(
    blocks: list[tuple[int, int]], cost: float, curve: str, noise: float, seed: int
) -> None:
    drafts = ((accepted, cost) for steps, accepted in cycle(blocks) for _ in range(steps))
    text = Text(Pace(StepCosts()), curve, uneven(seed, noise))
    text.decode(drafts, 6000)
    assert text.lost <= FIXED_LOSS + MOST_CREDIT + 8 * cost * seconds_of(curve, 16)


def test_a_promising_draft_ends_a_rest_until_promises_are_broken() -> None:
    pace = Pace(StepCosts())
    text = Text(pace)
    text.decode(repeat((0, 1.0)), 1000)
    while pace.credit.cooldown < 8 * REST:  # until the rest has many steps left
        text.decode(repeat((0, 1.0)), 1, likely=0.01)
    begin = text.seconds
    text.decode(repeat((8, 1.0)), 200, likely=0.9)
    assert text.seconds - begin < 100, "a text that is likely to be drafted for waits for the end of a rest"
    text.decode(repeat((0, 1.0)), 20000, likely=0.9)
    assert text.lost <= FIXED_LOSS + MOST_CREDIT, "promises are believed that were broken each time"


def test_candidates_that_break_their_promises_are_sent_now_and_then_until_they_keep_them() -> None:
    pace = Pace(StepCosts())
    likely = np.full(12, 0.25)
    for seconds in (1.0, 1.0):
        pace.book(StepTime(1, 100, seconds, 1, 1, False))

    def send(accepted: int) -> int:
        sent = pace.choose(likely)
        pace.book(StepTime(1 + sent, 100, seconds_of("AVX-512", 1 + sent), 1 + min(accepted, sent), 1, True))
        return sent

    assert send(0) == len(likely)
    while send(2) == len(likely) and pace.costs.times[: len(GRID)].sum() < 12:
        pass
    assert send(2) == len(likely)
    counts = [send(0) for _ in range(60)]
    sends = np.flatnonzero(counts[30:])
    assert len(sends) <= 12, "what is promised and not kept is sent all the same"
    assert len(sends), "what is never sent can never be kept"


def test_costs_that_jump_are_noticed() -> None:
    text = Text(Pace(StepCosts()))
    text.decode(repeat((3, 1.0)), 2000)
    before = text.seconds - text.tokens
    text.decode(repeat((3, 6.0)), 20000)
    assert text.seconds - text.tokens - before <= LOSS * 20000 + MOST_CREDIT + 2 * FIXED_LOSS
    text.decode(repeat((3, 1.0)), 4000)
    seconds, tokens = text.seconds, text.tokens
    text.decode(repeat((3, 1.0)), 4000)
    assert text.seconds - seconds < 0.5 * (text.tokens - tokens), "drafts that pay again are not taken up again"


def test_a_slow_first_step_ends_nothing() -> None:
    text = Text(Pace(StepCosts()))
    text.pace.book(StepTime(1, 100, 5000.0, 1, 1, drafted=False))
    text.decode(repeat((3, 1.0)), 1000)
    assert text.seconds < 0.5 * text.tokens
    text = Text(Pace(StepCosts()))
    text.decode(chain([(3, 50.0)], repeat((3, 1.0))), 3000)
    assert text.seconds < 0.5 * text.tokens


def test_a_disturbed_step_ends_nothing() -> None:
    text = Text(Pace(StepCosts()))
    text.decode(repeat((3, 1.0)), 1000)
    text.decode(chain([(3, 1000.0)], repeat((3, 1.0))), 1)
    assert not text.pace.credit.cooldown


@pytest.mark.parametrize("curve", CURVES)
def test_chains_of_honest_probabilities_go_about_as_fast_as_with_the_best_fixed_number(curve: str) -> None:
    def decode(nodes: int | None) -> float:
        """Return tokens per plain step; each candidate is right with the probability of the current passage."""
        generator, pace = np.random.default_rng(0), Pace(StepCosts())
        row, seconds, tokens = PacedRow(pace), 0.0, 0.0
        for _ in range(3000):
            ease, sent = generator.choice([0.1, 0.6, 0.97]), [0 if nodes is None else nodes - 1]
            row.begin()
            if nodes is None and not row.backs_off:
                sent.append(chosen(row, ease ** np.arange(1, row.max_candidates + 1)))
            is_plain = nodes is None and row.backs_off
            accepted = 0
            while accepted < sent[-1] and generator.random() < ease:
                accepted += 1
            took = seconds_of(curve, 1 + sent[-1])
            pace.book(StepTime(1 + sent[-1], 100, took, 1 + accepted, 1, not is_plain))
            seconds, tokens = seconds + took, tokens + 1 + accepted
        return tokens / seconds

    assert decode(None) > 0.95 * max(decode(nodes) for nodes in (1, 2, 4, 8, 16, 32, 64))


def test_certain_tokens_say_nothing_of_whether_drafting_pays() -> None:
    pace = Pace(StepCosts())
    for _ in range(400):  # four certain tokens each; other candidates are always wrong
        rests = pace.rests
        nodes = 5 if rests else 4 + pace.max_nodes()
        pace.book(
            StepTime(nodes, 100, seconds_of("AVX-512", nodes), 5, 1, not rests, certain_nodes=4, certain_tokens=4)
        )
    assert pace.credit.cooldown


def test_steps_fill_passes_of_fixed_sizes() -> None:
    sizes = (8, 32, 128)
    text = Text(Pace(StepCosts(captured=sizes)), "GPU")
    text.decode(repeat((3, 1.0)), 2000)
    assert set(text.sent) <= {0, *sizes}
    pace = Pace(StepCosts(captured=sizes), rows=64)
    assert pace.room == sizes[-1] < Pace(StepCosts(), rows=64).room


def test_rows_pay_for_their_nodes_together() -> None:
    likely, chosen = 0.9 ** np.arange(1, 32), list[int]()
    for rows in (1, 8):
        pace = Pace(StepCosts(1 + 0.05 * (GRID - 1)), rows)
        pace._since = 1
        chosen.append(pace.choose(likely))
    assert chosen[0] > chosen[1] > 0


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_as_long_as_gains_the_most_where_a_rejection_has_it_sent_again(seed: int) -> None:
    generator = random.Random(seed)
    slope, pending = generator.choice([0.0, 0.01, 0.05, 0.2]), generator.randint(1, 10)
    chances = [generator.random() for _ in range(generator.randint(1, 12))]
    pace = Pace(StepCosts(1 + slope * (GRID - 1)))

    def gain(nodes: int) -> float:
        """Return the expected tokens of a draft minus its time in plain steps, over all outcomes."""
        total = 0.0
        for accepted in range(nodes + 1):
            fails = 1 - chances[accepted] if accepted < nodes else 1.0
            again = 0 if accepted == nodes else pending + accepted
            total += float(np.prod(chances[:accepted])) * fails * (accepted - slope * (nodes + again))
        return total

    chosen = pace.choose(np.cumprod(chances), pending, resends=True)
    assert gain(chosen) == pytest.approx(max(gain(nodes) for nodes in range(len(chances) + 1)))


@pytest.mark.parametrize("deviation", [0.05, 0.16])
@pytest.mark.parametrize("curve", CURVES)
def test_costs_are_learned_from_noisy_steps_and_never_fall(curve: str, deviation: float) -> None:
    noise, costs = uneven(0, deviation), StepCosts()
    sizes = [2, 8, 16, 32, 64]
    for step in range(300):
        nodes = sizes[step % 5] if step % 6 else 1
        costs.observe(nodes, 100, 0.01 * seconds_of(curve, nodes) * noise(), plain=nodes == 1)
    assert costs.plain(1) == pytest.approx(0.01, rel=0.1)
    for nodes in sizes:
        expected = 0.01 * seconds_of(curve, nodes)
        assert costs.seconds(nodes) == pytest.approx(expected, rel=0.08 if deviation < 0.1 else 0.12)
    assert (np.diff(costs.curve) >= 0).all()


def learned(sizes: tuple[int, ...] = (1, 8, 32)) -> StepCosts:
    """Return costs learned from steps of 10 ms plus 0.2 ms per node."""
    costs, noise = StepCosts(), uneven(1, 0.03)
    for _ in range(20):
        for nodes in sizes:
            costs.observe(nodes, 100, 0.01 * (1 + 0.02 * (nodes - 1)) * noise(), plain=nodes == 1)
    return costs


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.6])
@pytest.mark.parametrize("steps", [1, 40])
def test_a_machine_that_slows_down_slows_plain_steps_that_nobody_timed(factor: float, steps: int) -> None:
    costs, noise = learned(), uneven(2, 0.03)
    for step in range(60):
        slower = factor ** min((step + 1) / steps, 1)
        costs.observe(32, 100, 0.01 * 1.62 * slower * noise())
    assert costs.plain(1) == pytest.approx(0.01 * factor, rel=0.1)
    assert costs.seconds(8) == pytest.approx(0.01 * 1.14 * factor, rel=0.1)


@pytest.mark.parametrize("factor", [0.6, 2.0])
def test_the_next_plain_step_shows_whether_only_one_size_changed(factor: float) -> None:
    costs = learned()
    changes = [costs.observe(32, 100, 0.01 * 1.62 * factor) for _ in range(3)]
    assert changes == ([True, False, False] if factor < 1 else [False, False, True])
    for _ in range(3):
        costs.observe(1, 100, 0.01, plain=True)
        costs.observe(32, 100, 0.01 * 1.62 * factor)
    assert costs.plain(1) == pytest.approx(0.01, rel=0.05)
    assert costs.seconds(32) == pytest.approx(max(0.01 * 1.62 * factor, 0.01), rel=0.08)


def test_a_disturbed_step_changes_nothing() -> None:
    costs = learned()
    assert not costs.observe(32, 100, 1.0)
    assert costs.plain(1) == pytest.approx(0.01, rel=0.1)
    assert costs.seconds(32) == pytest.approx(0.0162, rel=0.1)


def test_old_times_of_one_node_do_not_raise_the_price_of_thirty_two() -> None:
    costs = StepCosts()
    for _ in range(8):
        costs.observe(1, 100, 1.0, plain=True)
        costs.observe(1, 100, 6.0)
        costs.observe(32, 100, 12.0)
    costs.forget()
    for _ in range(2):
        costs.observe(1, 100, 1.0, plain=True)
        costs.observe(32, 100, 1.4)
    assert costs.seconds(32) == pytest.approx(1.4, rel=0.1)


def test_a_trial_begins_with_the_nodes_of_a_first_step() -> None:
    text = Text(Pace(StepCosts()))
    first = text.pace.max_nodes()
    text.decode(repeat((3, 1.0)), 500)
    text.decode(repeat((0, 1.0)), 1000)
    assert text.pace.in_rest
    assert text.pace.max_nodes() == first


def test_old_times_of_one_node_do_not_lower_the_price_of_sixty_four() -> None:
    pace = Pace(StepCosts())
    for step in range(400):
        slow = 1.5 if step < 40 else 1.0
        size = 1 if step < 20 else (16, 32)[step % 2]
        drafted = step % 8 > 1
        nodes = size if drafted else 1
        seconds = slow * (1.3 + 0.02 * (nodes - 1) if drafted else 1.0)
        pace.book(StepTime(nodes, 100, seconds, 3 if nodes > 1 else 1, 1, drafted))
    assert pace.max_nodes() == 32


@pytest.mark.parametrize(("curve", "most"), [([(1, 1.0), (32, 1.1), (64, 3.0)], 32), ([(1, 1.0), (128, 1.2)], 128)])
def test_more_nodes_stay_where_they_cost_less_than_they_teach(curve: list[tuple[int, float]], most: int) -> None:
    text = Text(Pace(StepCosts()), curve)
    text.decode(repeat((4, 1.0)), 4000)
    assert max(text.sent) >= 64, "they were never tried"
    assert max(text.sent[-400:]) == most


def test_nodes_are_worth_more_early_in_a_text_but_for_chains_and_where_they_teach_nothing() -> None:
    costs, likely = StepCosts(), np.full(31, 0.005)
    for nodes in (1, 8, 32, 1, 8, 32):
        costs.observe(
            nodes, 100, 1 + 0.02 * (nodes - 1), plain=nodes == 1
        )  # a node costs more than its probability, even with a bonus of 0.007

    def sent(row: PacedRow, teaches: bool = True) -> list[int]:
        counts = []
        for _ in range(100):
            row.begin(teaches)
            counts.append(chosen(row, likely))
        return counts

    first, second = sent(PacedRow(Pace(costs))), sent(PacedRow(Pace(costs)))
    assert first == second, "each text begins anew"
    assert first[0] > 0 == first[-1]
    assert first == sorted(first, reverse=True)
    assert not any(sent(PacedRow(Pace(costs), resends=True)))
    assert not any(sent(PacedRow(Pace(costs)), teaches=False))


def test_three_plain_steps_show_that_they_take_longer_now() -> None:
    costs = StepCosts()
    for step in range(100):
        costs.observe(1 if step % 2 else 16, 100, 0.01, plain=step % 2 > 0)
    for _ in range(3):
        costs.observe(1, 2000, 0.015, plain=True)
    assert costs.plain(1) == pytest.approx(0.015, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_no_step_can_have_teaches_nothing(seconds: float) -> None:
    costs = StepCosts()
    costs.observe(4, 1, seconds)
    assert not costs.times.any()


def test_a_text_that_rests_is_looked_at_less_often_than_the_next_one() -> None:
    pace = Pace(StepCosts())
    pace.credit.cooldown = 1000

    def looks(row: PacedRow, steps: int) -> list[int]:
        steps_with_search = []
        for step in range(steps):
            row.begin()
            if not row.backs_off:
                steps_with_search.append(step)
                chosen(row, np.zeros(0))
            pace.book(StepTime(1, 100, 1.0, 1, 1, False))
        return steps_with_search

    assert looks(PacedRow(pace), 250) == [0, 2 * REST, 6 * REST, 10 * REST, 14 * REST]
    assert looks(PacedRow(pace), 250)[0] <= 2 * REST


def test_plain_steps_are_only_timed_at_the_end_of_a_long_rest() -> None:
    text = Text(Pace(StepCosts()))
    while text.pace.credit.cooldown <= 3 * REST:
        text.decode(repeat((0, 1.0)), 1)
    timed, left = int(text.pace.costs.times[-1]), text.pace.credit.cooldown
    text.decode(repeat((0, 1.0)), left - REST)
    assert (text.pace.credit.cooldown, text.pace.costs.times[-1]) == (REST, timed)
    text.decode(repeat((0, 1.0)), REST)
    assert (text.pace.credit.cooldown, text.pace.costs.times[-1]) == (0, timed + REST // PLAIN_STEPS)


def test_searches_without_drafts_stay_within_the_allowed_loss() -> None:
    pace = Pace(StepCosts())
    row, searched = PacedRow(pace), 0
    for _ in range(2000):
        row.begin()
        if not row.backs_off:
            chosen(row, np.zeros(0))
        searched += pace.searches
        pace.book(StepTime(1, 100, 1.05 if pace.searches else 1.0, 1, 1, pace.searches))
    assert 0 < searched * 0.05 <= LOSS * 2000 + FIXED_LOSS
