"""The decoding step: draft a tree for each text, run them in one pass, walk them, keep what was accepted, learn.

Nothing here knows a clock or a price. How many nodes are sent, drafters decide (`lookahead.core.pace`). Who owns the
batch may time its steps by what `step` marks, and tells the pace what they did. What the code of one sequence raises, a
processor or a listener of its own, ends that sequence alone (`SequenceState.error`).

Verification is a walk down the tree along the tokens that the sampler selects. Drafts are deterministic, so accepting a
drafted token exactly when the sampler selects it gives the distribution of the paper's Algorithms 3 and 4. Tokens are
selected one after another, each once and in order, as plain decoding does: the same random state gives the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from lookahead.core.protocols import Backend, NodeOutputs, NoDrafter, RowsDrafter, StepResult
from lookahead.core.sequence import SequenceState
from lookahead.core.statistics import Seconds, Statistics, StepRecord
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, explain

Phase = Literal["draft", "forward", "verify", "commit", "watch", "learn"]
"""The parts of a step, in order."""


class Walk(NamedTuple):
    """A walk from the root of a tree along drafted tokens that were selected.

    Attributes:
        tree: The tree that was sent.
        path: Accepted candidate nodes, from below the root downwards.
        tokens: The tokens selected: those of `path`, and one more, the root of the next step.
        stopped: Whether the text is complete.
    """

    tree: TokenTree
    path: list[int]
    tokens: list[int]
    stopped: bool


def follow(tree: TokenTree, take: Callable[[int], tuple[int, bool]]) -> Walk:
    """Walk `tree` to the end.

    Args:
        tree: The tree that was sent.
        take: Selects the token after a node and adds it to the text; returns it, and whether the text is complete with
            it. Called once for each token of the output, in order.
    """
    node, path, tokens = tree.root, list[int](), list[int]()
    while True:
        token, stopped = take(node)
        tokens.append(token)
        child = None if stopped else tree.child(node, token)
        if child is None:
            return Walk(tree, path, tokens, stopped)
        path.append(child)
        node = child


def take_token(sequence: SequenceState, outputs: NodeOutputs, node: int) -> tuple[int, bool]:
    """Select the token after `node` and add it to the text; returns it, and whether the text is complete with it."""
    sampler = sequence.sampler
    token = sampler.select(sequence, outputs, node) if sampler.needs_logits else int(outputs.predictions[node])
    return token, sequence.append(token)


def verify(
    sequences: Sequence[SequenceState], trees: Sequence[TokenTree], outputs: Sequence[NodeOutputs]
) -> list[Walk | None]:
    """Walk the tree of each sequence, whose text grows by the tokens selected; `None` for one that is finished, of
    whose prompt the step carried a part alone, or that failed."""
    walks: list[Walk | None] = []
    for sequence, tree, output in zip(sequences, trees, outputs, strict=True):
        walk = None
        if not sequence.finished and tree.needs_logits[tree.root]:
            try:
                walk = follow(tree, partial(take_token, sequence, output))
            except Exception as error:
                sequence.fail(error)
        walks.append(walk)
    return walks


@dataclass
class Batch:
    """Sequences that are decoded side by side.

    Attributes:
        sequences: One for each row of the backend. Between two steps others may take their place, or they may become
            more or fewer, as the backend's rows do.
        statistics: Counts are added to it.
        verify: Walks the trees of a step; `verify` does where each sequence has the outputs of all its nodes.
        share_out: Called with the trees when each drafter has proposed, to send what waits for the proposals of others.
        mark: Called with each part of a step when it is over.
    """

    sequences: Sequence[SequenceState]
    statistics: Statistics = field(default_factory=Statistics)
    verify: Callable[[Sequence[Any], Sequence[TokenTree], Sequence[Any]], list[Walk | None]] = verify
    share_out: Callable[[Sequence[TokenTree]], None] | None = None
    mark: Callable[[Phase], None] = lambda phase: None

    @property
    def finished(self) -> bool:
        """Whether all texts are complete."""
        return all(sequence.finished for sequence in self.sequences)


DoneStep = tuple[Sequence[TokenTree], Sequence[StepResult | None]]
"""For each sequence what a step sent, and what it showed about it; `None` where no text went on."""


def step(backend: Backend, batch: Batch) -> DoneStep:
    """One forward pass for all sequences, and all that follows from it."""
    sequences, mark = batch.sequences, batch.mark
    watched = any(sequence.watcher is not None for sequence in sequences)
    before = replace(batch.statistics.seconds) if watched else batch.statistics.seconds
    trees = _draft(backend, batch)
    mark("draft")

    top_k = max(sequence.ask_drafter(lambda drafter: drafter.top_k, 0) for sequence in sequences)
    outputs = backend.forward(trees, top_k)
    for sequence, tree, output in zip(sequences, trees, outputs, strict=True):
        if tree.needs_logits[tree.root] and not sequence.finished:
            sequence.sampler.look_ahead(sequence, tree, output)
    mark("forward")
    # A device still computes here. What drafters need not know before they draft again could be learned meanwhile.
    walks = batch.verify(sequences, trees, outputs)
    mark("verify")

    backend.commit([_kept(*row) for row in zip(sequences, trees, walks, strict=True)])
    batch.statistics.steps += 1
    mark("commit")

    explanations = [  # before any drafter learns
        None if sequence.watcher is None else sequence.ask_drafter(partial(explain, tree=tree), explain(None, tree))
        for sequence, tree in zip(sequences, trees, strict=True)
    ]
    mark("watch")

    results = [_settle(*row) for row in zip(sequences, outputs, walks, strict=True)]
    ask_drafters([row for row in zip(sequences, results, strict=True) if row[1] is not None], "observe")
    mark("learn")

    for row, result in enumerate(results):
        if result is not None:
            _tell(batch, row, result, explanations[row], before)
    return trees, results


def _draft(backend: Backend, batch: Batch) -> list[TokenTree]:
    """The tree of each row, with what is sent of what its drafter proposes."""
    trees, asked = [], []
    for row, sequence in enumerate(batch.sequences):
        tree = backend.idle_tree() if sequence.finished else backend.begin_tree(row, sequence.tokens)
        trees.append(tree)
        if not sequence.finished and not sequence.is_last_token and backend.wants_draft(tree):
            tree.foresee = sequence.sampler.foresee if sequence.sampler.samples else None
            tree.limit(sequence.most_tokens - len(sequence.tokens) - 1)
            asked.append((sequence, tree))
    ask_drafters(asked, "propose")
    if batch.share_out is not None:
        try:
            batch.share_out(trees)
        except Exception as error:  # it is no matter of one row
            for sequence in batch.sequences:
                sequence.stop_drafting(error)
    for sequence, tree in asked:
        if not tree.is_chain and isinstance(sequence.drafter, NoDrafter):  # drafting stopped, whatever was added then
            tree.keep_path(())
    return trees


def ask_drafters(asked: Sequence[tuple[SequenceState, Any]], what: Literal["propose", "observe"]) -> None:
    """Have the drafters of some sequences propose to a tree each, or observe a result; those that draft together in one
    call. Drafting stops for sequences whose drafter raises."""
    together: dict[RowsDrafter, list[tuple[SequenceState, Any]]] = {}
    for sequence, argument in asked:
        rows = getattr(sequence.drafter, "together", None) if len(asked) > 1 else None
        if rows is not None:
            together.setdefault(rows, []).append((sequence, argument))
        else:
            try:
                getattr(sequence.drafter, what)(argument)
            except Exception as error:
                sequence.stop_drafting(error)
    for rows, group in together.items():
        try:
            drafters, arguments = [sequence.drafter for sequence, _ in group], [argument for _, argument in group]
            getattr(rows, f"{what}_rows")(drafters, arguments)
        except Exception:  # one after another, so that it costs those alone whose matter it is
            for sequence, argument in group:
                if what == "propose":
                    argument.keep_path(())
                ask_drafters([(sequence, argument)], what)


def _kept(sequence: SequenceState, tree: TokenTree, walk: Walk | None) -> list[int]:
    """The nodes whose keys and values stay: pending tokens and accepted path, up to the last token that was selected
    after them, which the next step sends as its root."""
    if walk is None:
        return [] if sequence.finished else list(range(len(tree)))
    return [*range(tree.root + 1), *walk.path]


def _settle(sequence: SequenceState, outputs: NodeOutputs, walk: Walk | None) -> StepResult | None:
    """What the step showed about a sequence whose text went on."""
    if walk is None:
        return None
    sequence.steps += 1
    sequence.finished = walk.stopped
    listed = outputs.top_ids, outputs.top_probabilities
    return StepResult(walk.tree, lambda: outputs.predictions, walk.path, walk.tokens, *listed)


def _tell(batch: Batch, row: int, result: StepResult, explanation: Explanation | None, before: Seconds) -> None:
    """Count the step of one sequence, and tell those who watch or listen. `before` are the times before the step."""
    sequence, nodes = batch.sequences[row], len(result.tree) - result.tree.root
    record = StepRecord(sequence.index, sequence.steps, result.tokens, nodes, sequence.finished)
    batch.statistics.record(record)
    try:
        if sequence.watcher is not None and explanation is not None:
            sequence.watcher(result, explanation, batch.statistics.seconds.since(before), sequence.finished)
        for listener in sequence.listeners:
            listener(record)
    except Exception as error:
        sequence.fail(error)
