"""Rows of many requests that share a step: whose candidates are sent, and what drafting may lose."""

import random

import numpy as np
import pytest

from lookahead.core.pace import MOST_CREDIT, Pace
from lookahead.core.shared_pace import SharedPace, SharedRow
from lookahead.core.step_costs import GRID, StepCosts
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

FIXED_LOSS = 40.0
"""Plain steps that drafts may lose before rests are long enough to cover them."""


def shared_of(slope: float = 0.01, nodes: int | None = None) -> SharedPace:
    """Steps that are guessed to take `slope` longer for each node."""
    return SharedPace(lambda load, temperature: Pace(StepCosts(1 + slope * (GRID - 1)), load), nodes)


def send(shared: SharedPace, offers: list[list[float]], rejects: bool = False) -> list[int]:
    """How many candidates of each row are sent; `rejects` says that none is accepted."""
    sent = [0] * len(offers)
    rows = [SharedRow(shared) for _ in offers]
    for place, (row, likely) in enumerate(zip(rows, offers, strict=True)):
        row.offer(np.array(likely), lambda count, place=place: sent.__setitem__(place, count))
    shared.share_out([TokenTree([0]) for _ in offers])
    for row in rows if rejects else []:
        row.learn([])
    return sent


@pytest.mark.parametrize("seed", range(10))
def test_the_likeliest_candidates_of_all_rows_are_sent(seed: int) -> None:
    generator = random.Random(seed)
    offers = [sorted((generator.random() for _ in range(generator.randint(0, 6))), reverse=True) for _ in range(4)]
    shared = shared_of(nodes=9)
    shared.begin(4)
    sent = send(shared, offers)
    everything = sorted((likely for offered in offers for likely in offered), reverse=True)
    chosen = [likely for offered, count in zip(offers, sent, strict=True) for likely in offered[:count]]
    assert sorted(chosen, reverse=True) == everything[:5]


def test_a_step_that_has_room_for_its_roots_alone_drafts_nothing() -> None:
    shared = shared_of(nodes=3)
    shared.begin(3)
    assert shared.backs_off
    shared.begin(2)
    assert not shared.backs_off


def test_a_step_has_at_least_a_root() -> None:
    with pytest.raises(InvalidArgumentError, match="nodes=0"):
        shared_of(nodes=0)


def test_the_dearer_nodes_are_the_fewer_are_sent() -> None:
    counts = []
    for slope in (0.001, 0.05, 0.5):
        shared = shared_of(slope)
        for _ in range(5):  # the first ones are timed, whatever they promise
            shared.begin(4)
            sent = sum(send(shared, [[0.9, 0.5, 0.1]] * 4)) if not shared.backs_off else 0
            shared.book(StepTime(4 + sent, 100, 1 + slope * (3 + sent), 4 + sent // 2, 4, not shared.backs_off))
        shared.begin(4)
        counts.append(sum(send(shared, [[0.9, 0.5, 0.1]] * 4)))
    assert counts[0] > counts[1] > counts[2]


def test_a_new_load_begins_with_what_its_neighbour_knows() -> None:
    shared = shared_of()
    for _ in range(8):
        shared.begin(4)
        shared.book(StepTime(4, 100, 3.0, 4, 4, drafted=False))
    shared.begin(8)
    (pace,) = [pace for (load, _), pace in shared._paces.items() if load == 8]
    assert pace.costs.seconds(4) == pytest.approx(3.0, rel=0.05)


def test_steps_that_carry_prompts_say_nothing() -> None:
    shared = shared_of()
    shared.begin(2)
    shared.book(StepTime(500, 100, 99.0, 2, 2, drafted=True, prompts=True))
    assert all(pace.is_new for pace in shared._paces.values())


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("slope", [0.001, 0.02, 0.5])
def test_drafts_that_are_always_wrong_cost_one_percent_and_a_fixed_number_of_steps(rows: int, slope: float) -> None:
    shared, seconds, plain = shared_of(), 0.0, 1 + slope * (rows - 1)
    steps = 6000
    for _ in range(steps):
        shared.begin(rows)
        sent = 0 if shared.backs_off else sum(send(shared, [[0.4] * 8] * rows, rejects=True))
        took = 1 + slope * (rows + sent - 1)
        shared.book(StepTime(rows + sent, 100, took, rows, rows, not shared.backs_off))
        seconds += took
    assert seconds / plain <= steps * 1.01 + FIXED_LOSS + MOST_CREDIT
