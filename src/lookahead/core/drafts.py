"""Drafts of a step: calls of the drafters of all rows.

Drafters of a group, for example of texts with a common memory, have one call. If a drafter raises, its sequence
continues without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import Backend, Drafter, NoDrafter, RowsDrafter, StepBudget
from lookahead.core.results import StepResults
from lookahead.core.roots import Roots
from lookahead.core.sequence import SequenceState
from lookahead.core.token_tree import TokenTree
from lookahead.errors import not_of_signal

S = TypeVar("S")
T = TypeVar("T")


class Members(NamedTuple):
    """Rows of a group.

    Attributes:
        drafters: Their drafters, one for each row.
        rows: The rows, ascending.
    """

    drafters: list[Any]
    rows: list[int]


class Groups(NamedTuple):
    """Rows with a drafter.

    Attributes:
        shared: Members of each group and budget.
        single: Rows of drafters without a group, ascending.
    """

    shared: dict[tuple[RowsDrafter, StepBudget], Members]
    single: list[int]


def grouped(sequences: Sequence[SequenceState], rows: Iterable[int]) -> Groups:
    """Return the groups of some rows, by group and budget."""
    shared: dict[tuple[RowsDrafter, StepBudget], Members] = {}
    single: list[int] = []
    for row in rows:
        drafter: Any = sequences[row].drafter
        together = getattr(drafter, "together", None)
        if together is not None:
            members = shared.setdefault((together, drafter.budget), Members([], []))
            members.drafters.append(drafter)
            members.rows.append(row)
        elif type(drafter) is not NoDrafter:
            single.append(row)
    return Groups(shared, single)


def draft(backend: Backend, sequences: Sequence[SequenceState], roots: Roots) -> tuple[int, Groups]:
    """Add drafts to the trees of a step.

    Returns:
        The largest `top_k` of the drafters, and the rows with a drafter.
    """
    rows = []
    for row, sequence in enumerate(sequences):
        left = sequence.most_tokens - len(sequence.tokens)
        tree = roots.trees[row]
        if left < 2 or sequence.finished or type(sequence.drafter) is NoDrafter:
            continue
        if tree is None:
            roots.levels[row] = left - 1
        elif backend.wants_draft(tree):
            tree.limit(left - 1)
        else:
            continue
        rows.append(row)
        if sequence.sampler.samples:
            roots.foresee[row] = sequence.sampler.foresee
    groups = grouped(sequences, range(len(sequences)))
    if rows:
        propose(sequences, roots, groups if len(rows) == len(sequences) else grouped(sequences, rows))
        stopped = [row for row in rows if type(sequences[row].drafter) is NoDrafter]
        if stopped:
            roots.remove_drafts(stopped)
            groups = grouped(sequences, range(len(sequences)))
    top_k = 0
    for row in groups.single:
        top_k = max(top_k, sequences[row].ask_drafter(_top_k, 0))
    for (group, _), members in groups.shared.items():
        top_k = max(top_k, group.top_k_of(members.drafters))
    return top_k, groups


def propose(sequences: Sequence[SequenceState], roots: Roots, groups: Groups) -> None:
    """Add the drafts of some rows to their trees. If a drafter raises, its sequence continues without drafts."""
    for row in groups.single:
        sequences[row].ask_drafter(partial(_propose, roots.tree(row)), None)
    offers: dict[StepBudget, tuple[list[_Offer], list[int]]] = {}
    for (group, budget), members in groups.shared.items():
        for some, found in _call(sequences, members, group.find_rows, roots):
            if found is not None:
                of_budget, competing = offers.setdefault(budget, ([], []))
                of_budget.append(_Offer(group, some, *found))
                competing += some.rows
    for budget, (of_budget, competing) in offers.items():
        try:
            _send(roots, competing, budget, of_budget)
        except BaseException as error:  # of all its rows
            for row in competing:
                sequences[row].stop_drafting(not_of_signal(error))


class _Offer(NamedTuple):
    """Candidates of the drafters of a group.

    Attributes:
        group: The group.
        members: Its rows with candidates.
        likely: Probability that each candidate is accepted, row after row, `[candidates]`.
        counts: Candidates of each row, `[rows]`.
    """

    group: RowsDrafter
    members: Members
    likely: NDArray[np.float64]
    counts: NDArray[np.int64]


def _send(roots: Roots, rows: Sequence[int], budget: StepBudget, offers: Sequence[_Offer]) -> None:
    """Send the likeliest of the candidates that compete for a budget; it chooses their number."""
    _, _, likely, counts = offers[0]
    if len(offers) > 1:
        likely = np.concatenate([offer.likely for offer in offers])
        counts = np.concatenate([offer.counts for offer in offers])
    sent = budget.choose(likely, counts, roots, rows)
    end = 0
    for offer in offers:
        begin = end
        end = end + len(offer.counts)
        offer.group.send_rows(*offer.members, roots, sent[begin:end])


def observe(sequences: Sequence[SequenceState], results: StepResults, groups: Groups) -> None:
    """Pass the results of a step to the drafters of some rows, to learn from them."""
    for row in groups.single:
        sequences[row].ask_drafter(partial(_observe, results, row), None)
    for (group, _), members in groups.shared.items():
        _call(sequences, members, group.observe_rows, results)


def _call(
    sequences: Sequence[SequenceState],
    members: Members,
    call: Callable[[Sequence[Any], Sequence[int], S], T],
    of_step: S,
) -> list[tuple[Members, T]]:
    """Call once for all rows of a group; after an error once for each, so that it stops only the drafts of its row.

    Returns:
        The rows of each call that raised nothing, and its result.
    """
    try:
        return [(members, call(*members, of_step))]
    except BaseException as error:
        error = not_of_signal(error)
        if len(members.rows) == 1:
            sequences[members.rows[0]].stop_drafting(error)
            return []
        pairs = zip(*members, strict=True)
        return [done for drafter, row in pairs for done in _call(sequences, Members([drafter], [row]), call, of_step)]


def _top_k(drafter: Drafter) -> int:
    return drafter.top_k


def _propose(tree: TokenTree, drafter: Drafter) -> None:
    drafter.propose(tree)


def _observe(results: StepResults, row: int, drafter: Drafter) -> None:
    result = results.of(row)
    if result is not None:
        drafter.observe(result)
