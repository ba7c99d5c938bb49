"""Budgets of a fixed number of nodes."""

import numpy as np
import pytest

from lookahead.core.protocols import FixedBudget
from lookahead.core.roots import Roots
from lookahead.errors import InvalidArgumentError


def sent(budget: FixedBudget, likely: list[float]) -> int:
    return int(budget.choose(np.array(likely), np.array([len(likely)]), Roots([None]), [0])[0])


def test_all_candidates_are_sent_up_to_a_number_of_nodes() -> None:
    assert sent(FixedBudget(4), [0.9, 0.5]) == 2
    assert sent(FixedBudget(4), [0.9, 0.5, 0.4, 0.3]) == FixedBudget(4).max_candidates == 3


def test_nothing_is_searched_or_learned_where_nothing_can_be_sent() -> None:
    assert FixedBudget(1).backs_off
    assert not FixedBudget(2).backs_off


def test_a_step_has_at_least_its_root() -> None:
    with pytest.raises(InvalidArgumentError, match="nodes=0"):
        FixedBudget(0)
