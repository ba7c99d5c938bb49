"""The decoding step, and the loop over it: draft a tree, run it, walk it, keep what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from lookahead.core.backend import Backend
from lookahead.core.outputs import NodeOutputs, StepResult
from lookahead.core.sequence import SequenceState
from lookahead.core.statistics import Statistics, StepRecord
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import Walk, follow

Stop = Callable[[Any], bool]
"""Says whether a sequence, a `SequenceState`, is complete; asked after every token."""

OnStep = Callable[[StepRecord], None]


class StepTimes(Protocol):
    """Learns what steps cost; `lookahead.core.cost_model.CostModel` does."""

    def observe(self, nodes: int, context: int, seconds: float) -> None:
        """Note a step: its nodes over all sequences, the longest text before it, and how long it took."""


class Verify(Protocol):
    """Walks the trees of a step; `verify` does."""

    def __call__(self, batch: Batch, trees: Sequence[TokenTree], outputs: Sequence[Any]) -> list[Walk | None]: ...


def verify(batch: Batch, trees: Sequence[TokenTree], outputs: Sequence[NodeOutputs]) -> list[Walk | None]:
    """Walk the tree of each sequence, which grows by the tokens selected; `None` for one that is finished."""
    rows = zip(batch.sequences, trees, outputs, strict=True)
    return [None if sequence.finished else _walk(batch, sequence, tree, output) for sequence, tree, output in rows]


@dataclass
class Batch:
    """Sequences that are decoded side by side.

    Attributes:
        sequences: One for each row.
        stop: Asked after every token.
        statistics: Counts and times are added to it.
        on_step: Called with each step of each sequence, after the backend has settled.
        tie_margin: Greedy decoding selects no token from a step with a draft whose logit is less than this above the
            second; the next step decides, without a draft. See `LookaheadConfig.tie_margin`.
        times: Told of each step that carried no prompt.
        verify: Walks the trees of a step.
    """

    sequences: Sequence[SequenceState]
    stop: Stop
    statistics: Statistics = field(default_factory=Statistics)
    on_step: OnStep | None = None
    tie_margin: float = 0.0
    times: StepTimes | None = None
    verify: Verify = verify

    @property
    def finished(self) -> bool:
        """Whether all texts are complete."""
        return all(sequence.finished for sequence in self.sequences)


def decode(backend: Backend, batch: Batch) -> None:
    """Decode until all sequences are finished; their texts grow in place."""
    while not batch.finished:
        step(backend, batch)


def step(backend: Backend, batch: Batch) -> None:
    """One forward pass for all sequences, and all that follows from it."""
    start = perf_counter()
    context = max(len(sequence.tokens) for sequence in batch.sequences)
    timing = batch.statistics.seconds.timing
    with timing("draft"):
        trees = [_draft(backend, batch, row) for row in range(len(batch.sequences))]
    with timing("forward"):
        outputs = backend.forward(trees, max(sequence.drafter.top_k for sequence in batch.sequences))
    with timing("verify"):
        walks = batch.verify(batch, trees, outputs)
    with timing("commit"):
        backend.commit([_kept(tree, walk) for tree, walk in zip(trees, walks, strict=True)])
    batch.statistics.steps += 1
    with timing("draft"):
        records = [
            _settle(row, sequence, output, walk)
            for row, (sequence, output, walk) in enumerate(zip(batch.sequences, outputs, walks, strict=True))
            if walk is not None
        ]
    _note_time(batch, trees, context, start)
    for record in records:
        batch.statistics.record(record)
        if batch.on_step is not None:
            batch.on_step(record)


def _note_time(batch: Batch, trees: Sequence[TokenTree], context: int, start: float) -> None:
    nodes = max(len(tree) for tree in trees)
    if batch.times is None or any(tree.root for tree in trees):  # prompt tokens are no draft
        return
    # Plain steps are all alike: a part of them says as much, and costs them less.
    if nodes > 1 or batch.statistics.steps % 4 == 0:
        batch.times.observe(nodes * len(trees), context, perf_counter() - start)


def _draft(backend: Backend, batch: Batch, row: int) -> TokenTree:
    sequence = batch.sequences[row]
    if sequence.finished:
        return backend.idle_tree()
    tree = backend.begin_tree(row, sequence.tokens)
    # Who is wary of rounding wants the prompt's keys and values, and the first token, as plain decoding has them.
    plainly = sequence.undecided or (batch.tie_margin > 0 and tree.root > 0)
    if backend.wants_draft(tree) and not plainly:
        sequence.drafter.propose(tree)
    return tree


def _walk(batch: Batch, sequence: SequenceState, tree: TokenTree, outputs: NodeOutputs) -> Walk:
    def select(node: int) -> int | None:
        return select_token(sequence, tree, outputs, node, batch.tie_margin)

    def append(token: int) -> bool:
        sequence.append(token)
        return batch.stop(sequence)

    return follow(tree, select, append)


def select_token(
    sequence: SequenceState, tree: TokenTree, outputs: NodeOutputs, node: int, tie_margin: float
) -> int | None:
    """The token selected after `node`; `None` where it is too close a choice, see `Batch.tie_margin`."""
    wary = tie_margin > 0 and not tree.is_chain and not sequence.sampler.samples
    if wary and outputs.margin(node) < tie_margin:
        return None
    if not sequence.sampler.needs_logits:
        return int(outputs.predictions[node])
    return sequence.sampler.select(sequence, outputs, node)


def _kept(tree: TokenTree, walk: Walk | None) -> list[int]:
    """The nodes whose keys and values stay: pending tokens and accepted path, up to the last token that was selected
    after them, which the next step sends as its root."""
    if walk is None:
        return []
    kept = [*range(tree.root + 1), *walk.path]
    return kept[:-1] if walk.declined else kept


def _settle(row: int, sequence: SequenceState, outputs: NodeOutputs, walk: Walk) -> StepRecord:
    """Let the sequence and its drafter know what the step came to."""
    tree = walk.tree
    sequence.steps += 1
    sequence.finished, sequence.undecided = walk.stopped, walk.declined
    sequence.drafter.observe(
        StepResult(tree, outputs.predictions, walk.path, walk.tokens, outputs.top_ids, outputs.top_probabilities)
    )
    return StepRecord(row, sequence.steps, walk.tokens, len(tree) - tree.root, sequence.finished)
