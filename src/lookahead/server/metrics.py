"""What Prometheus is told. Names are vLLM's where they mean the same, so that its dashboards work."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

if TYPE_CHECKING:
    from lookahead.server.generation import Answer

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
"""Bounds of histograms, in seconds."""


class Metrics:
    """Counts of one served model, labelled with its name.

    Args:
        model: Its name.
        others: Of another model of the same server; all are told together.
    """

    def __init__(self, model: str, others: Metrics | None = None) -> None:
        self._registry: CollectorRegistry = CollectorRegistry() if others is None else others._registry
        self._families: dict[str, Any] = {} if others is None else others._families
        if others is None:
            ProcessCollector(registry=self._registry)  # memory, time, open files of this process
        self._model = model
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self.generated_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Steps of a request that carried a draft.")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted: nodes but the root.")
        self.accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._asked = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._reused = self._counter("vllm:prefix_cache_hits", "Prompt tokens that another text had.")
        self.steps = self._counter("lookahead:steps", "Steps, counted for each request by itself.")
        self.disconnected = self._counter("lookahead:disconnected_requests", "Requests whose client went away.")
        self._accepted_per_position = self._labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by depth.", "position"
        )
        self._finished = self._labelled_counter("vllm:request_success", "Answers completed.", "finished_reason")
        self._refused = self._labelled_counter("lookahead:refused_requests", "Requests refused, by status.", "status")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Until the first token.", FIRST_TOKEN)
        self.per_token = self._histogram("vllm:inter_token_latency_seconds", "Between tokens.", PER_TOKEN)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Until the first step.", WHOLE)
        self.whole = self._histogram("vllm:e2e_request_latency_seconds", "Whole requests.", WHOLE)

    def gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a number that is asked for when it is told."""
        self._family(Gauge, name, about).labels(self._model).set_function(value)

    def step(self, tokens: int, nodes: int) -> None:
        """Count a step of one request."""
        self.steps.inc()
        self.generated_tokens.inc(tokens)
        if nodes > 1:
            self.drafts.inc()
            self.draft_tokens.inc(nodes - 1)
            self.accepted_tokens.inc(max(tokens - 1, 0))
            for position in range(tokens - 1):
                self._accepted_per_position.labels(self._model, str(position)).inc()

    def through(self, answers: Sequence[Answer], count: int) -> None:
        """Count the prompts of answers that are through, `count` of each, and how long these waited."""
        for answer in answers[::count]:
            self._asked.inc(len(answer.plan.prompt))
            self._reused.inc(answer.handle.statistics.reused_tokens)
        for answer in answers:
            waited = answer.handle.statistics.queue_seconds
            if waited is not None:
                self._queue.observe(waited)

    def finished(self, reason: str) -> None:
        """Count an answer."""
        self._finished.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        """Count a request that was not answered."""
        self._refused.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str) -> Counter:
        made: Counter = self._family(Counter, name, about).labels(self._model)
        return made

    def _labelled_counter(self, name: str, about: str, label: str) -> Counter:
        made: Counter = self._family(Counter, name, about, label)
        return made

    def _histogram(self, name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
        made: Histogram = self._family(Histogram, name, about, buckets=bounds).labels(self._model)
        return made

    def _family(self, kind: type[Any], name: str, about: str, *labels: str, **more: Any) -> Any:
        """The numbers of one name, of all models."""
        if name not in self._families:
            self._families[name] = kind(name, about, ["model_name", *labels], registry=self._registry, **more)
        return self._families[name]


class RequestClock:
    """Times one request, and counts what it does.

    Args:
        metrics: Where to count.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begin = perf_counter()
        self._last: dict[int, float] = {}
        self.finished: Counts[str] = Counts()

    def step(self, answer: int, tokens: int, nodes: int) -> None:
        """A step of an answer."""
        now = perf_counter()
        before = self._last.get(answer)
        self._last[answer] = now
        self._metrics.step(tokens, nodes)
        if before is None:
            self._metrics.first_token.observe(now - self._begin)
        elif tokens:
            for _ in range(tokens):
                self._metrics.per_token.observe((now - before) / tokens)

    def finish(self, reason: str) -> None:
        """An answer is complete."""
        self.finished[reason] += 1
        self._metrics.finished(reason)

    def leave(self) -> None:
        """The client has gone before the answers were complete."""
        self._metrics.disconnected.inc()

    def end(self) -> None:
        """The request is through."""
        self._metrics.whole.observe(perf_counter() - self._begin)
