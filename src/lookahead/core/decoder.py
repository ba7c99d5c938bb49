"""The decoding step, and the loop over it: draft a tree, run it, walk it, keep what was accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, TypeVar

from lookahead.core.protocols import Backend, Drafter, NodeOutputs, RowsDrafter, StepResult
from lookahead.core.sequence import SequenceState
from lookahead.core.statistics import Statistics, StepRecord
from lookahead.core.step_time import StepTime
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import Walk, follow
from lookahead.core.watching import Watch

T = TypeVar("T")


class StepTimes(Protocol):
    """Learns what steps cost and bring; `lookahead.core.pace.Pace` does."""

    @property
    def is_timed(self) -> bool:
        """Whether the seconds of the coming step are wanted, should it have no draft."""

    def book(self, step: StepTime) -> None:
        """Note a step."""


class Verify(Protocol):
    """Walks the trees of a step; `verify` does."""

    def __call__(self, batch: Batch, trees: Sequence[TokenTree], outputs: Sequence[Any]) -> list[Walk | None]:
        """Walk the tree of each sequence; `None` where there is nothing to walk."""


def verify(batch: Batch, trees: Sequence[TokenTree], outputs: Sequence[NodeOutputs]) -> list[Walk | None]:
    """Walk the tree of each sequence, which grows by the tokens selected; `None` for one that is finished, or of which
    the step carried a part of the text alone."""
    return [verify_row(*row) for row in zip(batch.sequences, trees, outputs, strict=True)]


def verify_row(sequence: SequenceState, tree: TokenTree, outputs: NodeOutputs) -> Walk | None:
    """Walk the tree of one sequence; see `verify`."""
    if sequence.finished or not tree.needs_logits[tree.root]:
        return None
    return follow(tree, lambda node: select_token(sequence, outputs, node), sequence.append)


@dataclass
class Batch:
    """Sequences that are decoded side by side.

    Attributes:
        sequences: One for each row of the backend. Between two steps others may take their place, or they may become
            more or fewer, as the backend's rows do.
        statistics: Counts and times are added to it.
        times: Told of each step; of those that carried prompts only if these are packed.
        clock: Says by what seconds `times` goes.
        verify: Walks the trees of a step.
        share_out: Called with the trees when each drafter has proposed, to send what waits for the proposals of others.
        packed: Whether the backend sends the trees one after another, instead of padding them to the same size.
    """

    sequences: Sequence[SequenceState]
    statistics: Statistics = field(default_factory=Statistics)
    times: StepTimes | None = None
    clock: Callable[[], float] = perf_counter
    verify: Verify = verify
    share_out: Callable[[Sequence[TokenTree]], None] | None = None
    packed: bool = False

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
    is_timed = batch.times is None or batch.times.is_timed  # asking the clock takes a tiny model's time
    start = batch.clock() if is_timed else 0.0
    context = max(len(sequence.tokens) for sequence in batch.sequences)
    seconds, now = batch.statistics.seconds, perf_counter()
    watch = Watch.of(batch.sequences, seconds)
    completes = all(sequence.finished or sequence.is_last_token for sequence in batch.sequences)
    trees = _draft(backend, batch)
    looking = 0.0
    if batch.share_out is not None:
        trees = _share_out(batch, batch.share_out, trees)
        looking = batch.clock() - start
    now = seconds.add("draft", now)
    top_k = max(sequence.ask_drafter(lambda drafter: drafter.top_k, 0) for sequence in batch.sequences)
    outputs = backend.forward(trees, top_k)
    now = seconds.add("forward", now)
    walks = batch.verify(batch, trees, outputs)
    now = seconds.add("verify", now)
    backend.commit([_kept(*row) for row in zip(batch.sequences, trees, walks, strict=True)])
    now = seconds.add("commit", now)
    batch.statistics.steps += 1
    if watch is not None:
        paused = batch.clock()
        watch.ask(batch.sequences, trees)
        start, now = start + batch.clock() - paused, perf_counter()  # what it took is no part of the step
    learning = 0.0 if batch.share_out is None else batch.clock()
    settled = [
        (row, *_settle(batch.sequences[row], outputs[row], walk)) for row, walk in enumerate(walks) if walk is not None
    ]
    ask_drafters(
        [(batch.sequences[row], result) for row, result, _ in settled],
        lambda drafter, result: drafter.observe(result),
        lambda kind, drafters, results: kind.observe_rows(drafters, results),
    )
    seconds.add("draft", now)
    # A step that completes the text has no draft; padded prompts say nothing of nodes.
    prompts = _carries_prompts(batch, trees)
    if batch.times is not None and settled and not completes and (batch.packed or not prompts):
        nodes = sum(map(len, trees)) if batch.packed else max(map(len, trees)) * len(trees)
        tokens = sum(len(record.tokens) for _, _, record in settled)
        # A drafter that has lost its trust in predictions wants none listed.
        drafted = top_k > 0 or any(len(tree) > tree.root + 1 + tree.certain for tree in trees)
        if is_timed or not drafted:
            end = batch.clock() if is_timed else math.nan
            apart = looking + end - learning if drafted and batch.share_out is not None else 0.0
            certain = sum(tree.certain for tree in trees), sum(result.certain_tokens for _, result, _ in settled)
            batch.times.book(
                StepTime(nodes, context, end - start, tokens, len(settled), drafted, prompts, apart, *certain)
            )
    for row, result, record in settled:
        sequence = batch.sequences[row]
        batch.statistics.record(record)
        if watch is not None and sequence.watcher is not None:
            sequence.watcher(watch.step(row, result, record, seconds))
        if sequence.on_step is not None:
            sequence.on_step(record)


def _carries_prompts(batch: Batch, trees: Sequence[TokenTree]) -> bool:
    """Whether some tree has tokens of a prompt, or of a text whose keys and values were dropped; these are no draft."""
    rows = zip(batch.sequences, trees, strict=True)
    return any(tree.root > 0 and (batch.packed or sequence.steps <= 1) for sequence, tree in rows)


def _draft(backend: Backend, batch: Batch) -> list[TokenTree]:
    """The tree of each row, with what its drafter proposes."""
    trees, asked = [], []
    for row, sequence in enumerate(batch.sequences):
        tree = backend.idle_tree() if sequence.finished else backend.begin_tree(row, sequence.tokens)
        trees.append(tree)
        if not sequence.finished and not sequence.is_last_token and backend.wants_draft(tree):
            tree.limit(sequence.most_tokens - len(sequence.tokens) - 1)
            asked.append((row, sequence, tree))
    stopped = ask_drafters(
        [(sequence, tree) for _, sequence, tree in asked],
        lambda drafter, tree: drafter.propose(tree),
        lambda kind, drafters, group: kind.propose_rows(drafters, group),
    )
    for (row, _, tree), has_stopped in zip(asked, stopped, strict=True):
        if has_stopped:
            trees[row] = _without_draft(tree)
    return trees


def ask_drafters(
    asked: Sequence[tuple[SequenceState, T]],
    ask: Callable[[Drafter, T], None],
    ask_rows: Callable[[type[RowsDrafter], Sequence[Any], Sequence[T]], None],
) -> list[bool]:
    """Ask the drafters of some sequences about something each, those that draft together in one call.

    Returns:
        Of each whether its drafter raised, and drafting stopped.
    """
    stopped = [False] * len(asked)
    together: dict[type[Any], list[int]] = {}
    for place, (sequence, argument) in enumerate(asked):
        drafter = sequence.drafter
        if len(asked) > 1 and getattr(drafter, "drafts_together", False):
            together.setdefault(type(drafter), []).append(place)
        else:
            try:
                ask(drafter, argument)
            except Exception as error:
                sequence.stop_drafting(error)
                stopped[place] = True
    for kind, places in together.items():
        rows = [asked[place] for place in places]
        try:
            ask_rows(kind, [sequence.drafter for sequence, _ in rows], [argument for _, argument in rows])
        except Exception as error:  # it is no matter of one row
            for place, (sequence, _) in zip(places, rows, strict=True):
                sequence.stop_drafting(error)
                stopped[place] = True
    return stopped


def _share_out(
    batch: Batch, share_out: Callable[[Sequence[TokenTree]], None], trees: list[TokenTree]
) -> list[TokenTree]:
    """The trees with what is sent of all proposals; without any if that fails, as it is no matter of one row."""
    try:
        share_out(trees)
    except Exception as error:
        for sequence in batch.sequences:
            sequence.stop_drafting(error)
        return [_without_draft(tree) for tree in trees]
    return trees


def _without_draft(tree: TokenTree) -> TokenTree:
    """The pending tokens of `tree`, whatever was done to the rest of it."""
    if tree.is_chain:
        return tree
    pending = tree.root + 1
    bare = TokenTree(tree.tokens[:pending])
    bare.needs_logits[:] = tree.needs_logits[:pending]
    return bare


def select_token(sequence: SequenceState, outputs: NodeOutputs, node: int) -> int:
    """The token selected after `node`."""
    if not sequence.sampler.needs_logits:
        return int(outputs.predictions[node])
    return sequence.sampler.select(sequence, outputs, node)


def _kept(sequence: SequenceState, tree: TokenTree, walk: Walk | None) -> list[int]:
    """The nodes whose keys and values stay: pending tokens and accepted path, up to the last token that was selected
    after them, which the next step sends as its root."""
    if walk is None:
        return [] if sequence.finished else list(range(len(tree)))
    return [*range(tree.root + 1), *walk.path]


def _settle(sequence: SequenceState, outputs: NodeOutputs, walk: Walk) -> tuple[StepResult, StepRecord]:
    """What the step came to; the sequence is told, its drafter not yet."""
    tree = walk.tree
    sequence.steps += 1
    sequence.finished = walk.stopped
    shaping = sequence.sampler.shaping if sequence.sampler.samples else None
    listed = outputs.top_ids, outputs.top_probabilities
    result = StepResult(tree, lambda: outputs.predictions, walk.path, walk.tokens, *listed, shaping)
    return result, StepRecord(sequence.index, sequence.steps, walk.tokens, len(tree) - tree.root, sequence.finished)
