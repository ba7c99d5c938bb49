"""Metrics for Prometheus, with vLLM's names for equal meanings so that its dashboards work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lookahead.server.outbox import AnswerStep
from lookahead.serving import Engine

PROMPT_TOKENS = "vllm:prompt_tokens"
DISCONNECTED = "lookahead:disconnected_requests"
_GENERATED, _STEPS = "vllm:generation_tokens", "lookahead:steps"
_DRAFTS, _DRAFTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_LOOKED_UP, _REUSED = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"
_COUNTERS = {
    PROMPT_TOKENS: "Prompt tokens of requests.",
    _GENERATED: "Tokens generated.",
    _DRAFTS: "Steps of a request with a draft.",
    _DRAFTED: "Drafted tokens.",
    _ACCEPTED: "Accepted drafted tokens.",
    _LOOKED_UP: "Prompt tokens looked up in the prefix cache.",
    _REUSED: "Prompt tokens found in the prefix cache.",
    _STEPS: "Steps, counted for each request.",
    DISCONNECTED: "Requests of disconnected clients.",
}

_BY_DEPTH, FINISHED, REFUSED = f"{_ACCEPTED}_per_pos", "vllm:request_success", "lookahead:refused_requests"
_LABELLED = {
    _BY_DEPTH: ("Drafted tokens accepted, by depth.", "position"),
    FINISHED: ("Answers completed.", "finished_reason"),
    REFUSED: ("Requests refused, by status.", "status"),
}

_FIRST_TOKEN, _PER_TOKEN = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_QUEUE, WHOLE = "vllm:request_queue_time_seconds", "vllm:e2e_request_latency_seconds"
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_TIMES = {
    _FIRST_TOKEN: ("Until the first token.", (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)),
    _PER_TOKEN: ("Between tokens.", (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)),
    _QUEUE: ("Until the first step.", _REQUEST_SECONDS),
    WHOLE: ("Whole requests.", _REQUEST_SECONDS),
}
"""Help text and bucket bounds (seconds) of each histogram."""

_GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "vllm:num_requests_running": ("Running answers.", lambda engine: engine.load.running),
    "vllm:num_requests_waiting": ("Waiting answers.", lambda engine: engine.load.waiting),
    "lookahead:kv_bytes": ("Bytes of keys and values of running answers.", lambda engine: engine.load.kv_bytes),
    "lookahead:prefix_bytes": ("Bytes of the prefix cache.", lambda engine: engine.load.prefix_bytes),
    "vllm:kv_cache_usage_perc": (
        "Share of the memory for keys and values in use by running answers.",
        lambda engine: engine.load.kv_bytes / (engine.load.kv_limit_bytes or math.inf),
    ),
    "lookahead:kv_limit_bytes": (
        "Limit for keys and values in bytes, prefix cache included.",
        lambda engine: engine.load.kv_limit_bytes or math.inf,
    ),
}


class Durations(Collector):
    """Histogram of durations by model, which takes many at once. Use it in one thread.

    Args:
        name: Name for Prometheus.
        about: Help text.
        bounds: Upper bounds of the buckets in seconds, ascending.
        models: Names of the models.
    """

    def __init__(self, name: str, about: str, bounds: Sequence[float], models: Sequence[str]) -> None:
        self._name, self._about, self._bounds = name, about, (*bounds, math.inf)
        self._counts = {model: np.zeros(len(self._bounds), np.int64) for model in models}
        self._sums = dict.fromkeys(models, 0.0)

    def add(self, model: str, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Add each of `seconds` as often as `counts` says."""
        buckets = np.searchsorted(self._bounds, seconds)
        self._counts[model] += np.bincount(buckets, counts, len(self._bounds)).astype(np.int64)
        self._sums[model] += float(np.dot(seconds, counts))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram in Prometheus's form."""
        family = HistogramMetricFamily(self._name, self._about, labels=["model_name"])
        for model, counts in self._counts.items():
            names = map(floatToGoString, self._bounds)
            family.add_metric([model], list(zip(names, np.cumsum(counts).tolist(), strict=True)), self._sums[model])
        yield family


class Metrics:
    """Counts of the served models, labelled with their names.

    Args:
        engines: Engines by model name.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._registry = registry = CollectorRegistry()
        self._children: dict[tuple[str | int, ...], Any] = {}
        ProcessCollector(registry=registry)  # memory, time, open files of this process
        self._families: dict[str, Any] = {
            name: Counter(name, about, ["model_name"], registry=registry) for name, about in _COUNTERS.items()
        }
        for model, family in product(engines, list(self._families.values())):
            family.labels(model)  # export it even while it is 0
        self._durations = {name: Durations(name, *times, list(engines)) for name, times in _TIMES.items()}
        for durations in self._durations.values():
            registry.register(durations)
        for name, (about, label) in _LABELLED.items():
            self._families[name] = Counter(name, about, ["model_name", label], registry=registry)
        for name, (about, value) in _GAUGES.items():
            gauge = Gauge(name, about, ["model_name"], registry=registry)
            for model, engine in engines.items():
                gauge.labels(model).set_function(partial(value, engine))

    def count(self, model: str, name: str, amount: int = 1, *labels: str | int) -> None:
        """Add to a counter of a model; `labels` are its further labels."""
        self._child(name, model, *labels).inc(amount)

    def time(self, model: str, name: str, seconds: float) -> None:
        """Add a duration to a histogram of a model."""
        self._durations[name].add(model, [seconds], [1])

    def _child(self, name: str, *labels: str | int) -> Any:
        key = name, *labels
        if (child := self._children.get(key)) is None:
            child = self._children[key] = self._families[name].labels(*labels)
        return child

    def steps(self, model: str, steps: Sequence[AnswerStep]) -> None:
        """Count steps of requests, many at once."""
        if not steps:
            return
        generated, seconds, counts = 0, [], []
        for step in steps:
            tokens = len(step.tokens)
            generated += tokens
            if step.is_first:
                self.time(model, _FIRST_TOKEN, step.seconds)
            elif tokens:
                seconds.append(step.seconds / tokens)
                counts.append(tokens)
        self.count(model, _STEPS, len(steps))
        self.count(model, _GENERATED, generated)
        if counts:
            self._durations[_PER_TOKEN].add(model, seconds, counts)
        if drafts := [(step.nodes - 1, max(len(step.tokens) - 1, 0)) for step in steps if step.nodes > 1]:
            self.count(model, _DRAFTS, len(drafts))
            self.count(model, _DRAFTED, sum(sent for sent, _ in drafts))
            accepted = [tokens for _, tokens in drafts]
            self.count(model, _ACCEPTED, sum(accepted))
            for position in range(max(accepted)):
                self.count(model, _BY_DEPTH, sum(tokens > position for tokens in accepted), position)

    def count_prompts(self, model: str, answers: Sequence[Any], n: int) -> None:
        """Count the prompts and waiting times of complete answers, `n` to each prompt."""
        for answer in answers[::n]:
            self.count(model, _LOOKED_UP, len(answer.plan.prompt))
            self.count(model, _REUSED, answer.handle.statistics.reused_tokens)
        for answer in answers:
            if (seconds := answer.handle.statistics.queue_seconds) is not None:
                self.time(model, _QUEUE, seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
