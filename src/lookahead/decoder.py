"""The decoding loop: draft a tree, run it, walk it, keep what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lookahead.drafting import StepResult
from lookahead.engine import ForwardResult, ModelRunner
from lookahead.sequence import Sequence as TextSequence
from lookahead.statistics import Statistics, StepRecord
from lookahead.token_tree import TokenTree
from lookahead.verification import Walk, walk

Stop = Callable[[TextSequence], bool]
"""Says whether a sequence is complete; asked after every token."""

OnStep = Callable[[StepRecord], None]


def decode(
    runner: ModelRunner,
    sequences: Sequence[TextSequence],
    stop: Stop,
    statistics: Statistics,
    on_step: OnStep | None = None,
) -> None:
    """Decode `sequences` side by side until all are finished; the texts grow in place.

    Args:
        runner: The model, with an empty cache or one that holds the beginning of each text.
        sequences: One for each row of the batch.
        stop: Asked after every token.
        statistics: Counts and times are added to it.
        on_step: Called with each step of each sequence, after the cache has settled.
    """
    while not all(sequence.finished for sequence in sequences):
        for record in _step(runner, sequences, stop, statistics):
            statistics.record(record)
            if on_step is not None:
                on_step(record)


def _step(
    runner: ModelRunner, sequences: Sequence[TextSequence], stop: Stop, statistics: Statistics
) -> list[StepRecord]:
    """One forward pass for all sequences, and all that follows from it."""
    timing = statistics.seconds.timing
    with timing("draft"):
        trees = [_draft(runner, row, sequence) for row, sequence in enumerate(sequences)]
    with timing("forward"):
        results = runner.forward(trees)
    with timing("verify"):
        walks = [
            None if sequence.finished else _verify(sequence, tree, result, stop)
            for sequence, tree, result in zip(sequences, trees, results, strict=True)
        ]
    with timing("commit"):
        runner.commit([None if walked is None else walked.path for walked in walks], trees)
    statistics.steps += 1
    records = []
    with timing("draft"):
        for row, (sequence, tree, result, walked) in enumerate(zip(sequences, trees, results, walks, strict=True)):
            if walked is not None:
                sequence.steps += 1
                sequence.finished = walked.stopped
                sequence.drafter.observe(StepResult(tree, result.predictions, walked.path, walked.tokens))
                records.append(StepRecord(row, sequence.steps, walked.tokens, nodes=len(tree) - tree.root))
    return records


def _draft(runner: ModelRunner, row: int, sequence: TextSequence) -> TokenTree:
    if sequence.finished:
        # Its row of the batch must hold something; what comes of it is not kept.
        return TokenTree(sequence.tokens[-1:])
    tree = runner.begin_tree(row, sequence.tokens)
    if runner.wants_draft(tree):
        sequence.drafter.propose(tree)
    return tree


def _verify(sequence: TextSequence, tree: TokenTree, result: ForwardResult, stop: Stop) -> Walk:
    def choose(node: int) -> int:
        if sequence.target.is_argmax:
            return int(result.predictions[node])
        return sequence.target.choose(sequence.ids, result.logits_after(node).to(sequence.ids.device))

    def append(token: int) -> bool:
        sequence.append(token)
        return stop(sequence)

    return walk(tree, choose, append)
