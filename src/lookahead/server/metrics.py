"""What Prometheus is told. Names are vLLM's where they mean the same, so that its dashboards work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from lookahead.serving import Engine
from lookahead.serving.handle import EngineLoad

if TYPE_CHECKING:
    from lookahead.server.generation import Answer

PROMPT_TOKENS = "vllm:prompt_tokens"
LEFT = "lookahead:disconnected_requests"
_GENERATED, _STEPS = "vllm:generation_tokens", "lookahead:steps"
_DRAFTS, _DRAFTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_ASKED, _REUSED = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"
_COUNTERS = {
    PROMPT_TOKENS: "Prompt tokens of requests.",
    _GENERATED: "Tokens generated.",
    _DRAFTS: "Steps of a request that carried a draft.",
    _DRAFTED: "Tokens drafted: nodes but the root.",
    _ACCEPTED: "Drafted tokens accepted.",
    _ASKED: "Prompt tokens looked up.",
    _REUSED: "Prompt tokens that another text had.",
    _STEPS: "Steps, counted for each request by itself.",
    LEFT: "Requests whose client went away.",
}

_BY_DEPTH, FINISHED, REFUSED = f"{_ACCEPTED}_per_pos", "vllm:request_success", "lookahead:refused_requests"
_LABELLED = {
    _BY_DEPTH: ("Drafted tokens accepted, by depth.", "position"),
    FINISHED: ("Answers completed.", "finished_reason"),
    REFUSED: ("Requests refused, by status.", "status"),
}

FIRST_TOKEN, PER_TOKEN = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_QUEUE, WHOLE = "vllm:request_queue_time_seconds", "vllm:e2e_request_latency_seconds"
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_TIMES = {
    FIRST_TOKEN: ("Until the first token.", (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)),
    PER_TOKEN: ("Between tokens.", (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)),
    _QUEUE: ("Until the first step.", _REQUEST_SECONDS),
    WHOLE: ("Whole requests.", _REQUEST_SECONDS),
}
"""What each histogram is about, and its bounds, in seconds."""


_GAUGES: dict[str, tuple[str, Callable[[EngineLoad], float]]] = {
    "vllm:num_requests_running": ("Answers that are being made.", lambda load: load.running),
    "vllm:num_requests_waiting": ("Answers that wait for their turn.", lambda load: load.waiting),
    "lookahead:kv_bytes": ("Keys and values of running answers.", lambda load: load.kv_bytes),
    "lookahead:prefix_bytes": ("Keys and values that are kept.", lambda load: load.prefix_bytes),
    "vllm:kv_cache_usage_perc": (
        "Share of the memory for keys and values that running answers hold.",
        lambda load: load.kv_bytes / (load.most_kv_bytes or math.inf),
    ),
    "lookahead:kv_limit_bytes": (
        "Most bytes of keys and values, kept ones included.",
        lambda load: load.most_kv_bytes or math.inf,
    ),
}


class Metrics:
    """Counts of one served model, labelled with its name.

    Args:
        model: Its name.
        engine: Its engine.
        others: Of another model of the same server; all are told together.
    """

    def __init__(self, model: str, engine: Engine, others: Metrics | None = None) -> None:
        self._model = model
        self._registry: CollectorRegistry = CollectorRegistry() if others is None else others._registry
        self._families: dict[str, Any] = {} if others is None else others._families
        if others is None:
            ProcessCollector(registry=self._registry)  # memory, time, open files of this process
            for name, (about, label) in _LABELLED.items():
                self._family(Counter, name, about, label)
        for name, about in _COUNTERS.items():
            self._family(Counter, name, about).labels(model)  # which is told from now on, even if it stays 0
        for name, (about, bounds) in _TIMES.items():
            self._family(Histogram, name, about, buckets=bounds).labels(model)
        for name, (about, value) in _GAUGES.items():
            self._family(Gauge, name, about).labels(model).set_function(lambda value=value: value(engine.load))

    def count(self, name: str, amount: int = 1, label: str | int | None = None) -> None:
        """Add to a counter; `label` is what it has besides the model."""
        labels = (self._model,) if label is None else (self._model, label)
        self._families[name].labels(*labels).inc(amount)

    def time(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        self._families[name].labels(self._model).observe(seconds)

    def step(self, tokens: int, nodes: int) -> None:
        """Count a step of one request."""
        self.count(_STEPS)
        self.count(_GENERATED, tokens)
        if nodes > 1:
            self.count(_DRAFTS)
            self.count(_DRAFTED, nodes - 1)
            self.count(_ACCEPTED, max(tokens - 1, 0))
            for position in range(tokens - 1):
                self.count(_BY_DEPTH, label=position)

    def through(self, answers: Sequence[Answer], count: int) -> None:
        """Count the prompts of answers that are through, `count` of each, and how long these waited."""
        for answer in answers[::count]:
            self.count(_ASKED, len(answer.plan.prompt))
            self.count(_REUSED, answer.handle.statistics.reused_tokens)
        for answer in answers:
            if (waited := answer.handle.statistics.queue_seconds) is not None:
                self.time(_QUEUE, waited)

    def refused(self, status: int) -> None:
        """Count a request that was not answered."""
        self.count(REFUSED, label=status)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _family(self, kind: type[Any], name: str, about: str, *labels: str, **more: Any) -> Any:
        """The numbers of one name, of all models."""
        if name not in self._families:
            self._families[name] = kind(name, about, ["model_name", *labels], registry=self._registry, **more)
        return self._families[name]
