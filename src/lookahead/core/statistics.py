"""Counts and times of one call of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class StepRecord:
    """One decoding step of one sequence, passed to an `on_step` callback.

    Attributes:
        index: Index of the sequence in the batch.
        step: Number of the step, from 1; the prefill is step 1.
        tokens: The token ids that the step added to the text, in order; at least one.
        nodes: Nodes of the token tree, including the root, without prompt tokens.
        finished: Whether the text is complete with this step.
    """

    index: int
    step: int
    tokens: list[int]
    nodes: int
    finished: bool = False


OnStep = Callable[[StepRecord], None]


@dataclass
class Seconds:
    """Wall time by part, in seconds: before the first step of a call, and summed over its steps.

    On a GPU kernels run asynchronously, so the wait for them counts as `verify`, the first part that reads a result.

    Attributes:
        prepare: Before the first step: model checks and set-up in the first call, reading arguments, and passes over
            parts of a long prompt. Only `lookahead.generate` measures it.
        draft: Proposing tokens, and learning from their outcome.
        forward: Forward passes of the model.
        verify: Selecting tokens.
        commit: Keeping keys and values of accepted tokens.
    """

    prepare: float = 0.0
    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.prepare + self.draft + self.forward + self.verify + self.commit

    def since(self, before: Seconds) -> Seconds:
        """Return the difference to an earlier copy, part by part."""
        return Seconds(*(getattr(self, part.name) - getattr(before, part.name) for part in fields(self)))


@dataclass
class Statistics:
    """Counts and times of one call of `generate`.

    Attributes:
        steps: Forward passes of the model that decoded tokens, the prefill included.
        prefill_passes: Forward passes before the first step that processed parts of a long prompt and decoded nothing:
            with `prefill_chunk_size`, or for a long prompt in a batch.
        tokens: Tokens generated, over all sequences of the batch.
        nodes_per_step: Nodes of each step of one sequence (without prompt tokens), one entry per step and sequence, in
            the order of the steps.
        accepted_lengths: Tokens that each step added to one sequence, in the same order.
        seconds: Wall time by part.
        state_bytes: Bytes of recurrent states copied to undo rejected drafts; 0 for models without recurrent states.
        invariant_rows: Minimum number of rows of any product with `LookaheadConfig.invariant`; 0 without it.
        engine: The engine that ran, "dynamic" or "static"; see `LookaheadConfig.engine`.
        sources: Statistics of each sequence's drafter at the end: entries, hit rates and more of the n-gram pool
            (`NGramPool.statistics`) or memory (`DraftMemory.statistics`). A pool or memory shared by several calls
            counts all of them.
    """

    steps: int = 0
    prefill_passes: int = 0
    tokens: int = 0
    nodes_per_step: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    state_bytes: int = 0
    invariant_rows: int = 0
    engine: str = "dynamic"
    sources: list[dict[str, Any]] = field(default_factory=list)

    def record(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Count a step, given the nodes and the new tokens of each sequence."""
        self.tokens += sum(tokens)
        self.nodes_per_step += nodes
        self.accepted_lengths += tokens

    @property
    def step_compression(self) -> float:
        """S, the mean number of tokens that a step adds to a sequence (Eq. 6); 1 is plain decoding."""
        return self.tokens / len(self.accepted_lengths) if self.accepted_lengths else 0.0

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes that a step sends for a sequence."""
        return sum(self.nodes_per_step) / len(self.nodes_per_step) if self.nodes_per_step else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and derived values as plain numbers and lists, ready for JSON."""
        return {**asdict(self), "step_compression": self.step_compression, "mean_nodes": self.mean_nodes}
