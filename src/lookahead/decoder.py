"""The decoding loop: draft a tree, run it, walk it, keep what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from lookahead.drafting import StepResult
from lookahead.engine import ForwardResult
from lookahead.sequence import Sequence as TextSequence
from lookahead.statistics import Statistics, StepRecord
from lookahead.token_tree import TokenTree
from lookahead.verification import Walk, walk

Stop = Callable[[TextSequence], bool]
"""Says whether a sequence is complete; asked after every token."""


class TreeRunner(Protocol):
    """Runs the trees of a batch; `lookahead.engine.ModelRunner` says what each method does."""

    def idle_tree(self) -> TokenTree: ...

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree: ...

    def wants_draft(self, tree: TokenTree) -> bool: ...

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> list[ForwardResult]: ...

    def commit(self, kept: Sequence[Sequence[int]]) -> None: ...


class Verify(Protocol):
    """Walks the trees of a step; `verify` does."""

    def __call__(
        self,
        sequences: Sequence[TextSequence],
        trees: Sequence[TokenTree],
        results: Sequence[ForwardResult],
        stop: Stop,
        tie_margin: float,
    ) -> list[Walk | None]: ...


class StepTimes(Protocol):
    """Learns what steps cost; `lookahead.cost_model.CostModel` does."""

    def observe(self, nodes: int, context: int, seconds: float) -> None:
        """Note a step: its nodes over all sequences, the longest text before it, and how long it took."""


OnStep = Callable[[StepRecord], None]


def verify(
    sequences: Sequence[TextSequence],
    trees: Sequence[TokenTree],
    results: Sequence[ForwardResult],
    stop: Stop,
    tie_margin: float,
) -> list[Walk | None]:
    """Walk the tree of each sequence, which grows by the tokens named; `None` for one that is finished."""
    return [
        None if sequence.finished else _verify(sequence, tree, result, stop, tie_margin)
        for sequence, tree, result in zip(sequences, trees, results, strict=True)
    ]


def decode(
    runner: TreeRunner,
    sequences: Sequence[TextSequence],
    stop: Stop,
    statistics: Statistics,
    on_step: OnStep | None = None,
    tie_margin: float = 0.0,
    times: StepTimes | None = None,
    verify: Verify = verify,
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
        times: Told of each step that carried no prompt.
        verify: Walks the trees of a step.
    """
    while not all(sequence.finished for sequence in sequences):
        context = max(len(sequence.tokens) for sequence in sequences)
        start = perf_counter()
        records, nodes = _step(runner, sequences, stop, statistics, tie_margin, verify)
        # Plain steps are all alike: a part of them says as much, and costs them less.
        if times is not None and nodes is not None and (nodes > 1 or statistics.steps % 4 == 0):
            times.observe(nodes * len(sequences), context, perf_counter() - start)
        for record in records:
            statistics.record(record)
            if on_step is not None:
                on_step(record)


def _step(
    runner: TreeRunner,
    sequences: Sequence[TextSequence],
    stop: Stop,
    statistics: Statistics,
    tie_margin: float,
    verify: Verify,
) -> tuple[list[StepRecord], int | None]:
    """One forward pass for all sequences, and all that follows from it.

    Returns:
        What it did to each sequence, and how many nodes each of them sent; `None` if there were prompt tokens too.
    """
    timing = statistics.seconds.timing
    with timing("draft"):
        trees = [_draft(runner, row, sequence, tie_margin) for row, sequence in enumerate(sequences)]
    with timing("forward"):
        results = runner.forward(trees, max(sequence.drafter.top_k for sequence in sequences))
    with timing("verify"):
        walks = verify(sequences, trees, results, stop, tie_margin)
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
    prompts = any(tree.root for tree in trees)
    return records, None if prompts else max(len(tree) for tree in trees)


def _draft(runner: TreeRunner, row: int, sequence: TextSequence, tie_margin: float) -> TokenTree:
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


def name_token(
    sequence: TextSequence, tree: TokenTree, result: ForwardResult, node: int, tie_margin: float
) -> int | None:
    """The token that the target names after `node`; `None` where it is too close a choice, see `decode`."""
    wary = tie_margin > 0 and not tree.is_chain and not sequence.target.samples
    if wary and result.margin(node) < tie_margin:
        return None
    if sequence.target.is_argmax:
        return int(result.predictions[node])
    return sequence.target.choose(sequence.ids, result.logits_after(node).to(sequence.ids.device))


def _verify(sequence: TextSequence, tree: TokenTree, result: ForwardResult, stop: Stop, tie_margin: float) -> Walk:
    def choose(node: int) -> int | None:
        return name_token(sequence, tree, result, node, tie_margin)

    def append(token: int) -> bool:
        sequence.append(token)
        return stop(sequence)

    return walk(tree, choose, append)
