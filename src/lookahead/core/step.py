"""The decoding step: draft a tree for each text, run all trees in one pass, walk them, keep the accepted tokens, learn.

The step knows neither clock nor price. Drafters decide the number of nodes (`lookahead.core.pace`). The owner of the
batch times the steps by the calls of `mark`, and passes the times to the pace. An exception in the code of one
sequence, such as a processor or a listener, ends only that sequence (`SequenceState.error`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from lookahead.core.drafts import draft, grouped, observe
from lookahead.core.forest import Forest
from lookahead.core.protocols import Backend, Sampler
from lookahead.core.results import EarlyTokens, ForestOutputs, StepResults, Walks
from lookahead.core.sequence import SequenceState
from lookahead.core.statistics import Seconds, Statistics, StepRecord
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import walk_trees
from lookahead.core.watching import Explanation, explain
from lookahead.errors import not_of_signal

Phase = Literal["draft", "forward", "verify", "commit", "watch", "learn"]
"""The parts of a step, in order."""


@dataclass
class Batch:
    """Sequences that are decoded side by side.

    Attributes:
        sequences: One for each row of the backend. Between two steps others may take their place, or they may become
            more or fewer, as the backend's rows do.
        statistics: Counts are added to it.
        mark: Called with each part of a step when it is over.
        launched: Called after the launch of a pass, while a device computes.
        notify: Called with the results of a step before the listeners of the sequences.
    """

    sequences: Sequence[SequenceState]
    statistics: Statistics = field(default_factory=Statistics)
    mark: Callable[[Phase], None] = lambda phase: None
    launched: Callable[[], None] | None = None
    notify: Callable[[StepResults], None] | None = None

    @property
    def finished(self) -> bool:
        """Whether all texts are complete."""
        return all(sequence.finished for sequence in self.sequences)


def step(backend: Backend, batch: Batch) -> StepResults:
    """Run one forward pass for all sequences, and process its results."""
    sequences = batch.sequences
    mark = batch.mark
    watched: list[int] = []
    texts: list[Sequence[int] | None] = []
    for row, sequence in enumerate(sequences):
        texts.append(None if sequence.finished else sequence.tokens)
        if sequence.watcher is not None:
            watched.append(row)
    before = replace(batch.statistics.seconds) if watched else batch.statistics.seconds
    roots = backend.begin_step(texts)
    top_k, groups = draft(backend, sequences, roots)
    forest = roots.forest()
    mark("draft")

    outputs = backend.forward(forest, top_k)
    early = _look_ahead(sequences, forest, outputs)
    if batch.launched is not None:
        batch.launched()
    mark("forward")
    # A device still computes here, so drafters could learn some results meanwhile.
    walk: Callable[..., Walks] = getattr(backend, "walk", walk_trees)
    results = StepResults(forest, outputs, walk(sequences, forest, outputs, early))
    mark("verify")

    backend.commit(results.walks.committed(sequences))
    batch.statistics.steps += 1
    mark("commit")

    # before any drafter learns
    explanations = {row: _explain(sequences[row], forest[row]) for row in watched} if watched else {}
    mark("watch")

    walks = results.walks
    going = walks.counts.nonzero()[0]
    rows = going.tolist()
    for row in rows:
        sequences[row].steps += 1
    for row in walks.stopped.nonzero()[0].tolist():
        sequences[row].finished = True
    observe(sequences, results, groups if len(rows) == len(sequences) else grouped(sequences, rows))
    mark("learn")

    batch.statistics.record(results.nodes[going].tolist(), walks.counts[going].tolist())
    if batch.notify is not None:
        batch.notify(results)
    seconds = batch.statistics.seconds.since(before) if watched else before
    for row in rows:
        if sequences[row].listeners or row in explanations:
            _notify(sequences[row], results, row, explanations.get(row), seconds)
    return results


def _look_ahead(sequences: Sequence[SequenceState], forest: Forest, outputs: ForestOutputs) -> list[EarlyTokens]:
    """Sample at nodes that walks may reach, in one call for each kind of sampler."""
    kinds: dict[type[Sampler], list[tuple[SequenceState, int]]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.finished or not sequence.sampler.needs_logits:
            continue
        if forest.reads[forest.firsts[row] + forest.roots[row]]:
            kinds.setdefault(type(sequence.sampler), []).append((sequence, row))
    if not kinds:
        return []
    return [tokens for kind, rows in kinds.items() for tokens in kind.look_ahead_rows(rows, forest, outputs)]


def _explain(sequence: SequenceState, tree: TokenTree) -> Explanation:
    return sequence.ask_drafter(partial(explain, tree=tree), explain(None, tree))


def _notify(
    sequence: SequenceState, results: StepResults, row: int, explanation: Explanation | None, seconds: Seconds
) -> None:
    """Call the watcher and the listeners of a sequence. `seconds` is the time of each part of the step."""
    try:
        if sequence.watcher is not None and explanation is not None:
            result = results.of(row)
            if result is not None:
                sequence.watcher(result, explanation, seconds, sequence.finished)
        for listener in sequence.listeners:
            tokens = results.walks.tokens_of(row)
            nodes = int(results.nodes[row])
            listener(StepRecord(sequence.index, sequence.steps, tokens, nodes, sequence.finished))
    except BaseException as error:
        sequence.fail(not_of_signal(error))
