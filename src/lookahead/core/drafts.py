"""Drafts of a step: calls of the drafters of all rows.

Drafters of a group, for example of texts with a common memory, have one call. If a drafter raises, its sequence goes
on without drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import Backend, Drafter, NoDrafter, RowsDrafter, StepPace
from lookahead.core.results import StepResults
from lookahead.core.roots import Roots
from lookahead.core.sequence import SequenceState
from lookahead.core.token_tree import TokenTree


class Groups(NamedTuple):
    """Rows with a drafter.

    Attributes:
        shared: Rows of each group of several drafters, ascending.
        single: Other rows, ascending.
    """

    shared: dict[RowsDrafter, list[int]]
    single: list[int]

    def among(self, going: NDArray[np.bool_]) -> Groups:
        """Return the groups with only the rows of a mask `[rows]`."""
        if not (self.shared or self.single) or going.all():
            return self
        shared = {group: [row for row in rows if going[row]] for group, rows in self.shared.items()}
        return Groups({group: rows for group, rows in shared.items() if rows}, [r for r in self.single if going[r]])


def draft(
    backend: Backend, sequences: Sequence[SequenceState], roots: Roots, pace: StepPace | None
) -> tuple[int, Groups]:
    """Add drafts to the trees of a step.

    Returns:
        The largest `top_k` of the drafters, and the rows with a drafter.
    """
    rows = []
    levels = []
    for row, sequence in enumerate(sequences):
        left = sequence.most_tokens - len(sequence.tokens)
        tree = roots.trees[row]
        if left < 2 or sequence.finished or type(sequence.drafter) is NoDrafter:
            continue
        if tree is None or backend.wants_draft(tree):
            rows.append(row)
            levels.append(left - 1)
            if sequence.sampler.samples:
                roots.foresee[row] = sequence.sampler.foresee
    if rows:
        roots.limit(rows, levels)
        propose(sequences, roots, rows, pace)
        stopped = [row for row in rows if type(sequences[row].drafter) is NoDrafter]
        if stopped:
            roots.remove_drafts(stopped)
    groups = _grouped(sequences, range(len(sequences)))
    top_k = 0
    for row in groups.single:
        top_k = max(top_k, sequences[row].ask_drafter(_top_k, 0))
    for group, members in groups.shared.items():
        top_k = max(top_k, group.top_k_of([sequences[row].drafter for row in members]))
    return top_k, groups


def propose(
    sequences: Sequence[SequenceState], roots: Roots, rows: Sequence[int], pace: StepPace | None = None
) -> None:
    """Add the drafts of some rows to their trees. If a drafter raises, its sequence goes on without drafts."""
    shares = pace is not None and pace.is_shared
    sharing = []
    for row in rows:
        if shares and getattr(sequences[row].drafter, "shares", False):
            sharing.append(row)
        else:
            sequences[row].ask_drafter(partial(_propose, roots.tree(row)), None)
    if pace is None or not shares:
        return
    offers = _find(sequences, roots, sharing)
    try:
        likely = np.concatenate([_NO_CANDIDATES, *[offer.likely for offer in offers]])
        counts = np.concatenate([_NO_ROWS, *[offer.counts for offer in offers]])
        sent = pace.share(likely, counts, roots.pending)
    except Exception as error:  # of all rows
        for sequence in sequences:
            sequence.stop_drafting(error)
        return
    end = 0
    for group, members, _, offered in offers:
        begin = end
        end = end + len(offered)
        if group is None:
            row = members[0]
            sequences[row].ask_drafter(partial(_send, roots.tree(row), int(sent[begin])), None)
        else:
            group.send_rows([sequences[row].drafter for row in members], roots, members, sent[begin:end])


class _Offer(NamedTuple):
    """Candidates of drafters that share the nodes of a step.

    Attributes:
        group: Group of the drafters; `None` for a single drafter.
        rows: Their rows.
        likely: Probability that each candidate is accepted, row after row, `[candidates]`.
        counts: Candidates of each row, `[rows]`.
    """

    group: RowsDrafter | None
    rows: Sequence[int]
    likely: NDArray[np.float64]
    counts: NDArray[np.int64]


_NO_CANDIDATES = np.zeros(0)
_NO_ROWS = np.zeros(0, dtype=np.int64)


def _find(sequences: Sequence[SequenceState], roots: Roots, rows: Sequence[int]) -> list[_Offer]:
    """Return the candidates of some rows, with one call for each group."""
    groups = _grouped(sequences, rows)
    offers = _find_each(sequences, roots, groups.single)
    for group, members in groups.shared.items():
        try:
            offer = group.find_rows([sequences[row].drafter for row in members], roots, members)
            if offer is not None:
                offers.append(_Offer(group, members, *offer))
        except Exception:  # one by one, so that an error stops only its own sequence's drafts
            offers += _find_each(sequences, roots, members)
    return offers


def _find_each(sequences: Sequence[SequenceState], roots: Roots, rows: Sequence[int]) -> list[_Offer]:
    """Return the candidates of some rows, with one call for each row."""
    offers = []
    for row in rows:
        likely = sequences[row].ask_drafter(partial(_find_one, roots.tree(row)), None)
        if likely is not None:
            offers.append(_Offer(None, [row], likely, np.array([len(likely)])))
    return offers


def observe(sequences: Sequence[SequenceState], results: StepResults, groups: Groups) -> None:
    """Pass the results of a step to the drafters of some rows, to learn from them."""
    for row in groups.single:
        sequences[row].ask_drafter(partial(_observe, results, row), None)
    for group, members in groups.shared.items():
        try:
            group.observe_rows([sequences[row].drafter for row in members], members, results)
        except Exception:
            for row in members:
                sequences[row].ask_drafter(partial(_observe, results, row), None)


def _grouped(sequences: Sequence[SequenceState], rows: Iterable[int]) -> Groups:
    """Return the groups of some rows; a drafter that is the only one of its group counts as single."""
    shared = dict[RowsDrafter, list[int]]()
    single = list[int]()
    for row in rows:
        drafter = sequences[row].drafter
        if type(drafter) is NoDrafter:
            continue
        together = getattr(drafter, "together", None)
        if together is None:
            single.append(row)
        elif together in shared:
            shared[together].append(row)
        else:
            shared[together] = [row]
    for group in [group for group, members in shared.items() if len(members) == 1]:
        single += shared.pop(group)  # a call for one row takes less time
    single.sort()
    return Groups(shared, single)


def _top_k(drafter: Drafter) -> int:
    return drafter.top_k


def _propose(tree: TokenTree, drafter: Drafter) -> None:
    drafter.propose(tree)


def _find_one(tree: TokenTree, drafter: Any) -> NDArray[np.float64] | None:
    likely: NDArray[np.float64] | None = drafter.find(tree)
    return likely


def _send(tree: TokenTree, count: int, drafter: Any) -> None:
    drafter.send(tree, count)


def _observe(results: StepResults, row: int, drafter: Drafter) -> None:
    result = results.of(row)
    if result is not None:
        drafter.observe(result)
