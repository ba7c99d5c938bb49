"""The decoding step: draft a tree for each text, run all trees in one pass, walk them, keep the accepted tokens, learn.

The step knows neither clock nor price. Drafters decide the number of nodes (`lookahead.core.pace`). The owner of the
batch times the steps by the calls of `mark`, and passes the times to the pace. An exception in the code of one
sequence, such as a processor or a listener, ends only that sequence (`SequenceState.error`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from lookahead.core.forest import Forest
from lookahead.core.protocols import (
    Backend,
    Drafter,
    ForestOutputs,
    NodeOutputs,
    NoDrafter,
    RowsDrafter,
    Sampler,
    StepResults,
    Walk,
)
from lookahead.core.sequence import SequenceState
from lookahead.core.statistics import Seconds, Statistics, StepRecord
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import walk_trees
from lookahead.core.watching import Explanation, explain

Phase = Literal["draft", "forward", "verify", "commit", "watch", "learn"]
"""The parts of a step, in order."""


@dataclass
class Batch:
    """Sequences that are decoded side by side.

    Attributes:
        sequences: One for each row of the backend. Between two steps others may take their place, or they may become
            more or fewer, as the backend's rows do.
        statistics: Counts are added to it.
        verify: Walks the trees of a step; `walk_trees` does where each sequence has the outputs of all its nodes.
        share_out: Called with the trees after all drafters have proposed, to choose among the candidates of all rows.
        mark: Called with each part of a step when it is over.
    """

    sequences: Sequence[SequenceState]
    statistics: Statistics = field(default_factory=Statistics)
    verify: Callable[[Sequence[Any], Sequence[TokenTree], Any], list[Walk | None]] = walk_trees
    share_out: Callable[[Sequence[TokenTree]], None] | None = None
    mark: Callable[[Phase], None] = lambda phase: None

    @property
    def finished(self) -> bool:
        """Whether all texts are complete."""
        return all(sequence.finished for sequence in self.sequences)


def step(backend: Backend, batch: Batch) -> StepResults:
    """One forward pass for all sequences, and all that follows from it."""
    sequences, mark = batch.sequences, batch.mark
    watched = [row for row, sequence in enumerate(sequences) if sequence.watcher is not None]
    before = replace(batch.statistics.seconds) if watched else batch.statistics.seconds
    forest = Forest(_draft(backend, batch))
    mark("draft")

    top_k = max([sequence.ask_drafter(_top_k, 0) for sequence in sequences])
    outputs = backend.forward(forest, top_k)
    _look_ahead(sequences, forest, outputs)
    mark("forward")
    # A device still computes here. What drafters need not know before they draft again could be learned meanwhile.
    results = StepResults(forest, outputs, batch.verify(sequences, forest, outputs))
    mark("verify")

    backend.commit([_kept(*row) for row in zip(sequences, forest, results.walks, strict=True)])
    batch.statistics.steps += 1
    mark("commit")

    explanations = {row: _explain(sequences[row], forest[row]) for row in watched}  # before any drafter learns
    mark("watch")

    for sequence, walk in zip(sequences, results.walks, strict=True):
        if walk is not None:
            sequence.steps += 1
            sequence.finished = walk.stopped
    observe(sequences, results)
    mark("learn")

    seconds = batch.statistics.seconds.since(before) if watched else before
    for row, walk in enumerate(results.walks):
        if walk is not None:
            record = _record(sequences[row], walk)
            batch.statistics.record(record)
            _notify(sequences[row], record, results, row, explanations.get(row), seconds)
    return results


def _draft(backend: Backend, batch: Batch) -> list[TokenTree]:
    """The tree of each row, with the drafts that are sent."""
    trees, rows = [], []
    for row, sequence in enumerate(batch.sequences):
        if sequence.finished:
            trees.append(backend.idle_tree())
            continue
        tree = backend.begin_tree(row, sequence.tokens)
        trees.append(tree)
        drafts = type(sequence.drafter) is not NoDrafter and not sequence.is_last_token
        if drafts and backend.wants_draft(tree):
            tree.foresee = sequence.sampler.foresee if sequence.sampler.samples else None
            tree.limit(sequence.remaining - 1)
            rows.append(row)
    propose(batch.sequences, trees, rows)
    if batch.share_out is not None:
        try:
            batch.share_out(trees)
        except Exception as error:  # it is no matter of one row
            for sequence in batch.sequences:
                sequence.stop_drafting(error)
    for row in rows:
        if not trees[row].is_chain and isinstance(batch.sequences[row].drafter, NoDrafter):  # drafting has stopped
            trees[row].keep_path(())
    return trees


def propose(sequences: Sequence[SequenceState], trees: Sequence[TokenTree], rows: Sequence[int]) -> None:
    """Have the drafters of some rows add to their trees, drafters of one group in one call. If a drafter raises, its
    sequence goes on without drafts."""
    groups, single = _grouped(sequences, rows)
    for row in single:
        sequences[row].ask_drafter(partial(_propose, trees[row]), None)
    for drafter, members in groups.items():
        try:
            drafter.propose_rows([sequences[row].drafter for row in members], [trees[row] for row in members])
        except Exception:  # one by one, so that an error stops only its own sequence's drafts
            for row in members:
                trees[row].keep_path(())
                sequences[row].ask_drafter(partial(_propose, trees[row]), None)


def observe(sequences: Sequence[SequenceState], results: StepResults) -> None:
    """Have drafters learn from a step, as `propose`."""
    groups, single = _grouped(sequences, [row for row, walk in enumerate(results.walks) if walk is not None])
    for row in single:
        sequences[row].ask_drafter(partial(_observe, results, row), None)
    for drafter, members in groups.items():
        try:
            drafter.observe_rows([sequences[row].drafter for row in members], members, results)
        except Exception:
            for row in members:
                sequences[row].ask_drafter(partial(_observe, results, row), None)


def _grouped(sequences: Sequence[SequenceState], rows: Sequence[int]) -> tuple[dict[RowsDrafter, list[int]], list[int]]:
    """The rows of each drafter that serves several, and the other rows that have a drafter."""
    groups, single = dict[RowsDrafter, list[int]](), list[int]()
    for row in rows:
        drafter = sequences[row].drafter
        together = getattr(drafter, "together", None)
        if together is not None:
            groups.setdefault(together, []).append(row)
        elif type(drafter) is not NoDrafter:
            single.append(row)
    return groups, single


def _top_k(drafter: Drafter) -> int:
    return drafter.top_k


def _propose(tree: TokenTree, drafter: Drafter) -> None:
    drafter.propose(tree)


def _observe(results: StepResults, row: int, drafter: Drafter) -> None:
    result = results.of(row)
    if result is not None:
        drafter.observe(result)


def _look_ahead(sequences: Sequence[SequenceState], forest: Forest, outputs: ForestOutputs) -> None:
    """Begin to sample at nodes that walks may reach, in one call for each kind of sampler."""
    kinds: dict[type[Sampler], list[tuple[SequenceState, TokenTree, NodeOutputs]]] = {}
    for row, (sequence, tree) in enumerate(zip(sequences, forest, strict=True)):
        if sequence.sampler.samples and tree.reads_root and not sequence.finished:
            kinds.setdefault(type(sequence.sampler), []).append((sequence, tree, outputs[row]))
    for kind, rows in kinds.items():
        kind.look_ahead_rows(rows)


def _kept(sequence: SequenceState, tree: TokenTree, walk: Walk | None) -> Sequence[int]:
    """The nodes to keep in the cache: pending tokens and accepted path. The next step sends the last selected token as
    its root."""
    if walk is None:
        return () if sequence.finished else range(len(tree))
    return [*range(tree.root + 1), *walk.path] if walk.path else range(tree.root + 1)


def _explain(sequence: SequenceState, tree: TokenTree) -> Explanation:
    return sequence.ask_drafter(partial(explain, tree=tree), explain(None, tree))


def _record(sequence: SequenceState, walk: Walk) -> StepRecord:
    nodes = len(walk.tree) - walk.tree.root
    return StepRecord(sequence.index, sequence.steps, walk.tokens, nodes, sequence.finished)


def _notify(
    sequence: SequenceState,
    record: StepRecord,
    results: StepResults,
    row: int,
    explanation: Explanation | None,
    seconds: Seconds,
) -> None:
    """Call the watcher and the listeners of a sequence. `seconds` is the time of each part of the step."""
    try:
        if sequence.watcher is not None and explanation is not None:
            result = results.of(row)
            if result is not None:
                sequence.watcher(result, explanation, seconds, sequence.finished)
        for listener in sequence.listeners:
            listener(record)
    except Exception as error:
        sequence.fail(error)
