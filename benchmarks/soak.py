"""Run random traffic on an engine, and look whether anything goes wrong.

Requests come at random, from one seed: greedy and sampled, of several lengths and priorities; some begin alike.
Some are cancelled, some have a processor that raises, some are too long for the memory. Every text is compared with
that of `generate`. A row for each period has the resident memory, which must level off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic, process_time, sleep
from typing import Any

import torch

from lookahead import Engine, InvalidArgumentError, RequestHandle
from lookahead.bench.rows import Row, resident_bytes
from probe import Probe, Unit, generate, load_model, option, prompts_of, token_ids

MOST_WAITING = 12
"""Requests that wait or run at most."""

SEEDS = 3
"""Seeds of each sampled prompt, few, so that texts need not be computed anew to compare."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, or the folder of a model")
    limit: int = option(24, "take the first so many prompts")
    minutes: float = option(60.0, "how long, in wall time")
    period: float = option(60.0, "seconds of a row")
    kv_bytes: int = option(32 * 2**20, "memory for keys and values")
    seed: int = option(0, "of the traffic")
    share: float = option(1.0, "share of a processor to use: requests come as slowly as that takes")


class FaultyProcessorError(Exception):
    """What a processor of the traffic raises."""


@dataclass
class Traffic:
    """A request, and what it should come to."""

    handle: RequestHandle
    prompt: int
    seed: int | None
    tokens: int
    fails: bool = False


@dataclass
class Soak:
    """The traffic, and what came of it."""

    options: Options
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        options = self.options
        loaded = load_model(options.model, "float32")
        self._model: Any = loaded.model
        system = token_ids(loaded.tokenizer, self._model, "# Write clear code, and say in a docstring what it does.\n")
        prompts = [
            token_ids(loaded.tokenizer, self._model, prompt.text)[0]
            for prompt in prompts_of(Path(options.prompts), options.limit)
        ]
        self._ids = [torch.cat([system[0], ids]) if number % 2 else ids for number, ids in enumerate(prompts)]
        self._texts: dict[tuple[int, int | None], list[int]] = {}
        self._random = Random(options.seed)
        self._engine = Engine(self._model, max_rows=8, kv_bytes=options.kv_bytes, prompt_tokens=64)
        self._open: list[Traffic] = []
        self._paid = process_time()

    def rows(self) -> Iterator[Row]:
        """A row for each period, and the verdict."""
        begin = last = monotonic()
        while monotonic() - begin < 60 * self.options.minutes:
            self._come()
            self._engine.step()
            self._settle()
            self._rest()
            if monotonic() - last >= self.options.period:
                last = monotonic()
                yield self._row("period", last - begin)
        self._engine.run()
        self._settle()
        self.counts["lost"] = len(self._open)
        row = self._row("soak", monotonic() - begin)
        wrong = self.counts["wrong"] + self.counts["lost"]
        yield {**row, **({"error": f"{wrong} requests went wrong"} if wrong else {})}

    def _rest(self) -> None:
        """Leave the processor to others for their share of the time."""
        if self.options.share < 1:
            spent = process_time() - self._paid
            if spent > 0.05:
                sleep(spent * (1 / self.options.share - 1))
                self._paid = process_time()

    def _row(self, kind: str, seconds: float) -> Row:
        load, statistics = self._engine.load, self._engine.statistics
        row = {"kind": kind, "minutes": seconds / 60, "resident_bytes": resident_bytes(), **self.counts}
        row |= {"kv_bytes": load.kv_bytes + load.prefix_bytes, "hit_rate": statistics.hit_rate}
        return row | {"preempted": statistics.preempted, "steps": statistics.steps, "tokens": statistics.tokens}

    def _come(self) -> None:
        random = self._random
        if len(self._open) >= MOST_WAITING or random.random() < 0.5:
            return
        number, seed = random.randrange(len(self._ids)), random.choice([None, *range(SEEDS)])
        tokens, kind = random.randrange(1, 64), random.random()
        arguments: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": seed is not None, "seed": seed or 0}
        if kind < 0.05:
            arguments["max_new_tokens"] = 10**6
        elif kind < 0.1:
            arguments["logits_processor"] = [_raises_after(random.randrange(1, 8))]
        try:
            handle = self._engine.submit(self._ids[number], priority=random.choice([0, 0, 1]), **arguments)
        except InvalidArgumentError:
            self.counts["refused" if kind < 0.05 else "wrong"] += 1
            return
        self._open.append(Traffic(handle, number, seed, tokens, 0.05 <= kind < 0.1))
        if kind > 0.85:
            random.choice(self._open).handle.cancel()

    def _settle(self) -> None:
        for traffic in [each for each in self._open if each.handle.done]:
            self._open.remove(traffic)
            self.counts[self._outcome(traffic)] += 1

    def _outcome(self, traffic: Traffic) -> str:
        expected = self._expected(traffic)
        told = traffic.handle.tokens
        try:
            traffic.handle.result()
        except CancelledError:
            return "cancelled" if told == expected[: len(told)] else "wrong"
        except FaultyProcessorError:
            return "failed" if traffic.fails and told == expected[: len(told)] else "wrong"
        return "right" if told == expected else "wrong"

    def _expected(self, traffic: Traffic) -> list[int]:
        key = traffic.prompt, traffic.seed
        if key not in self._texts:
            torch.manual_seed(traffic.seed or 0)
            ids, sample = self._ids[traffic.prompt][None], traffic.seed is not None
            self._texts[key], _ = generate(self._model, ids, None, max_new_tokens=64, do_sample=sample)
        return self._texts[key][: traffic.tokens]


def _raises_after(calls: int) -> Any:
    left = [calls]

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise FaultyProcessorError("as the traffic has it")
        return scores

    return process


def probe(options: Options) -> Probe:
    """One unit."""
    return Probe([Unit("soak", Soak(options).rows)], {"model": options.model, "seed": options.seed})
