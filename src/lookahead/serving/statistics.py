"""What an engine and its requests counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookahead.core.statistics import Statistics


@dataclass
class LoadStatistics:
    """Counts of the steps of a load.

    Attributes:
        steps: Forward passes.
        rows: Rows served, over all of them.
        nodes: Nodes sent, prompt tokens not counted.
        tokens: Tokens generated.
    """

    steps: int = 0
    rows: int = 0
    nodes: int = 0
    tokens: int = 0


@dataclass
class EngineStatistics(LoadStatistics):
    """Counts of an engine.

    Attributes:
        preempted: How often a running request had to wait again for want of memory.
        prompt_tokens: Tokens of the texts that requests began with, computed or reused.
        reused_tokens: Those whose keys and values another text had.
        by_load: Counts by the number of rows: of 1, of 2, of 3 to 4, of 5 to 8, ... rows, under the largest.
    """

    preempted: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    by_load: dict[int, LoadStatistics] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were reused."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def count(self, rows: int, nodes: int, tokens: int) -> None:
        """Count a step."""
        load = 1 << max(rows - 1, 0).bit_length()
        for each in (self, self.by_load.setdefault(load, LoadStatistics())):
            each.steps += 1
            each.rows += rows
            each.nodes += nodes
            each.tokens += tokens


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has to do at the moment.

    Attributes:
        waiting: Requests that wait for their turn.
        running: Requests that run.
        kv_bytes: Bytes of keys and values that running requests hold.
        prefix_bytes: Bytes of those that are kept for requests that begin alike.
        most_kv_bytes: Most bytes of both; any number if `None`.
    """

    waiting: int
    running: int
    kv_bytes: int
    prefix_bytes: int
    most_kv_bytes: int | None = None


@dataclass
class RequestStatistics(Statistics):
    """Counts and times of one request; `seconds` stays empty, as steps are shared.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those whose keys and values another text had.
        predicted_tokens: Tokens of the output that were where `prediction` had them.
        queue_seconds: From `submit` to the first step that it takes part in; `None` before that.
        first_token_seconds: From `submit` to the first token; `None` before there is one.
        total_seconds: From `submit` to the end; `None` before it.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    predicted_tokens: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None
