"""What one call of `generate` counted and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class StepRecord:
    """One decoding step of one sequence, as it is handed to an `on_step` callback.

    Attributes:
        index: Which sequence of the batch.
        step: Number of the step, from 1; the prefill is step 1.
        tokens: The token ids that the step added to the text, in order; at least one.
        nodes: Nodes of the token tree that the step sent, prompt tokens not counted, the root counted.
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
    """Wall time by part, in seconds: of a call before its first step, and of its steps, summed over all of them.

    On a GPU kernels run while Python goes on, so the wait for them falls to `verify`, the first part that
    reads a result.

    Attributes:
        prepare: Before the first step: checking the model and making what runs it, which the first call does, reading
            arguments, and passes that carry parts of a long prompt. Only `lookahead.generate` has it.
        draft: Proposing tokens, and learning from what came of them.
        forward: Forward passes of the model.
        verify: Selecting tokens.
        commit: Keeping keys and values of what was accepted.
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
        """What was added since these were `before`."""
        return Seconds(*(getattr(self, part.name) - getattr(before, part.name) for part in fields(self)))


@dataclass
class Statistics:
    """Counts and times of one call of `generate`.

    Attributes:
        steps: Forward passes of the model that decoded tokens, the prefill included.
        prefill_passes: Forward passes before the first step that carried parts of a long prompt and decoded
            nothing: with `prefill_chunk_size`, or for a long prompt in a batch.
        tokens: Tokens generated, over all sequences of the batch.
        nodes_per_step: Nodes that each step sent for one sequence (prompt tokens not counted), one entry per
            step and sequence, in the order of the steps.
        accepted_lengths: Tokens that each step added to one sequence, in the same order.
        seconds: Wall time by part.
        state_bytes: Bytes of running states copied so that rejected drafts could be undone; 0 for models without such
            states.
        invariant_rows: Least number of rows of any product with `LookaheadConfig.invariant`; 0 without it.
        engine: The engine that ran: "dynamic" or "static"; see `LookaheadConfig.engine`.
        sources: What each sequence drafts from at the end: entries, hit rates and so on of the n-gram pool
            (`NGramPool.statistics`) or memory (`DraftMemory.statistics`); counts go on over calls that share it.
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

    def record(self, step: StepRecord) -> None:
        """Count one step of one sequence."""
        self.tokens += len(step.tokens)
        self.nodes_per_step.append(step.nodes)
        self.accepted_lengths.append(len(step.tokens))

    @property
    def step_compression(self) -> float:
        """S, the mean number of tokens that a step adds to a sequence (Eq. 6); 1 is plain decoding."""
        return self.tokens / len(self.accepted_lengths) if self.accepted_lengths else 0.0

    @property
    def mean_nodes(self) -> float:
        """Mean number of nodes that a step sends for a sequence."""
        return sum(self.nodes_per_step) / len(self.nodes_per_step) if self.nodes_per_step else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and lists, ready for JSON."""
        return {**asdict(self), "step_compression": self.step_compression, "mean_nodes": self.mean_nodes}
