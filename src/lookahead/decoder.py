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
    tie_margin: float = 0.0,
) -> None:
    """Decode `sequences` side by side until all are finished; the texts grow in place.

    Args:
        runner: The model, with an empty cache or one that holds the beginning of each text.
        sequences: One for each row of the batch.
        stop: Asked after every token.
        statistics: Counts and times are added to it.
        on_step: Called with each step of each sequence, after the cache has settled.
        tie_margin: Greedy decoding names no token from a step with a draft whose logit is less than this above
            the second; the next step decides, without a draft. See `LookaheadConfig.tie_margin`.
    """
    while not all(sequence.finished for sequence in sequences):
        for record in _step(runner, sequences, stop, statistics, tie_margin):
            statistics.record(record)
            if on_step is not None:
                on_step(record)


def _step(
    runner: ModelRunner,
    sequences: Sequence[TextSequence],
    stop: Stop,
    statistics: Statistics,
    tie_margin: float,
) -> list[StepRecord]:
    """One forward pass for all sequences, and all that follows from it."""
    timing = statistics.seconds.timing
    with timing("draft"):
        trees = [_draft(runner, row, sequence, tie_margin) for row, sequence in enumerate(sequences)]
    with timing("forward"):
        results = runner.forward(trees, max(sequence.drafter.top_k for sequence in sequences))
    with timing("verify"):
        walks = [
            None if sequence.finished else _verify(sequence, tree, result, stop, tie_margin)
            for sequence, tree, result in zip(sequences, trees, results, strict=True)
        ]
    with timing("commit"):
        runner.commit([_kept(tree, walked) for tree, walked in zip(trees, walks, strict=True)])
    statistics.steps += 1
    records = []
    with timing("draft"):
        for row, (sequence, tree, result, walked) in enumerate(zip(sequences, trees, results, walks, strict=True)):
            if walked is not None:
                sequence.steps += 1
                sequence.finished, sequence.undecided = walked.stopped, walked.declined
                sequence.drafter.observe(_step_result(tree, result, walked))
                records.append(StepRecord(row, sequence.steps, walked.tokens, len(tree) - tree.root, sequence.finished))
    return records


def _draft(runner: ModelRunner, row: int, sequence: TextSequence, tie_margin: float) -> TokenTree:
    if sequence.finished:
        return runner.idle_tree()
    tree = runner.begin_tree(row, sequence.tokens)
    # Who is wary of rounding wants the prompt's keys and values, and the first token, as plain decoding has them.
    plainly = sequence.undecided or (tie_margin > 0 and tree.root > 0)
    if runner.wants_draft(tree) and not plainly:
        sequence.drafter.propose(tree)
    return tree


def _kept(tree: TokenTree, walked: Walk | None) -> list[int]:
    """The nodes whose keys and values stay: pending tokens and accepted path, up to the last token that was named
    after them, which the next step sends as its root."""
    if walked is None:
        return []
    kept = [*range(tree.root + 1), *walked.path]
    return kept[:-1] if walked.declined else kept


def _step_result(tree: TokenTree, result: ForwardResult, walked: Walk) -> StepResult:
    return StepResult(tree, result.predictions, walked.path, walked.tokens, result.top_ids, result.top_probabilities)


def _verify(sequence: TextSequence, tree: TokenTree, result: ForwardResult, stop: Stop, tie_margin: float) -> Walk:
    wary = tie_margin > 0 and not tree.is_chain and not sequence.target.samples

    def choose(node: int) -> int | None:
        if wary and result.margin(node) < tie_margin:
            return None
        if sequence.target.is_argmax:
            return int(result.predictions[node])
        return sequence.target.choose(sequence.ids, result.logits_after(node).to(sequence.ids.device))

    def append(token: int) -> bool:
        sequence.append(token)
        return stop(sequence)

    return walk(tree, choose, append)
