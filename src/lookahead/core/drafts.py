"""Drafts of a step: calls of the drafters of all rows.

Drafters of a group, for example of texts with a common memory, have one call. If a drafter raises, its sequence goes
on without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import Backend, Drafter, NoDrafter, RowsDrafter, StepPace
from lookahead.core.results import StepResults
from lookahead.core.roots import Roots
from lookahead.core.sequence import SequenceState
from lookahead.core.token_tree import TokenTree


def draft(backend: Backend, sequences: Sequence[SequenceState], roots: Roots, pace: StepPace | None) -> int:
    """Add drafts to the trees of a step, and return the largest `top_k` of the drafters."""
    if all(type(sequence.drafter) is NoDrafter for sequence in sequences):
        return 0
    left = [sequence.most_tokens - len(sequence.tokens) for sequence in sequences]
    rows = [
        row
        for row, (sequence, tree) in enumerate(zip(sequences, roots.trees, strict=True))
        if left[row] > 1
        and type(sequence.drafter) is not NoDrafter
        and not sequence.finished
        and (tree is None or backend.wants_draft(tree))
    ]
    roots.limit(rows, [left[row] - 1 for row in rows])
    for row in rows:
        if sequences[row].sampler.samples:
            roots.foresee[row] = sequences[row].sampler.foresee
    propose(sequences, roots, rows, pace)
    stopped = [row for row in rows if isinstance(sequences[row].drafter, NoDrafter)]
    if stopped:
        roots.remove_drafts(stopped)
    groups, single = _grouped(sequences, range(len(sequences)))
    singly = [sequences[row].ask_drafter(_top_k, 0) for row in single]
    listed = [group.top_k_of([sequences[row].drafter for row in members]) for group, members in groups.items()]
    return max([*singly, *listed], default=0)


def propose(
    sequences: Sequence[SequenceState], roots: Roots, rows: Sequence[int], pace: StepPace | None = None
) -> None:
    """Add the drafts of some rows to their trees. If a drafter raises, its sequence goes on without drafts."""
    sharing = set[int]()
    if pace is not None and pace.is_shared:
        sharing = {row for row in rows if getattr(sequences[row].drafter, "shares", False)}
    for row in rows:
        if row not in sharing:
            sequences[row].ask_drafter(partial(_propose, roots.tree(row)), None)
    if pace is None or not pace.is_shared:
        return
    offers = _find(sequences, roots, sorted(sharing))
    try:
        likely = np.concatenate([_NO_CANDIDATES, *(offer.likely for offer in offers)])
        counts = np.concatenate([_NO_ROWS, *(offer.counts for offer in offers)])
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
    groups, single = _grouped(sequences, rows)
    offers = _find_each(sequences, roots, single)
    for group, members in groups.items():
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


def observe(sequences: Sequence[SequenceState], results: StepResults, rows: Sequence[int]) -> None:
    """Pass the results of a step to the drafters of some rows, to learn from them."""
    groups, single = _grouped(sequences, rows)
    for row in single:
        sequences[row].ask_drafter(partial(_observe, results, row), None)
    for group, members in groups.items():
        try:
            group.observe_rows([sequences[row].drafter for row in members], members, results)
        except Exception:
            for row in members:
                sequences[row].ask_drafter(partial(_observe, results, row), None)


def _grouped(sequences: Sequence[SequenceState], rows: Sequence[int]) -> tuple[dict[RowsDrafter, list[int]], list[int]]:
    """Return the rows of each group of several drafters, and the other rows with a drafter."""
    groups = dict[RowsDrafter, list[int]]()
    single = list[int]()
    for row in rows:
        drafter = sequences[row].drafter
        if type(drafter) is NoDrafter:
            continue
        together = getattr(drafter, "together", None)
        if together is None:
            single.append(row)
        else:
            groups.setdefault(together, []).append(row)
    alone = [group for group, members in groups.items() if len(members) == 1]
    single += [groups.pop(group)[0] for group in alone]
    return groups, sorted(single)


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
