"""Measure what a step costs: its time against the nodes it sends, beside transformers' own step and the memory limit.

For each context length these take turns, so that a machine that becomes slower meets all of them; medians count:

- a step of each size through the engine: layout, mask, forward pass, predictions, commit;
- `transformers`: its own one-token step, the forward pass with a `DynamicCache` and the choice of the likeliest token;
- `memory limit`: reading as much memory as the weights take (`WeightReader` of `lookahead/bench/tuning.py`).

On a CPU times are CPU times of the process. `--model random` is a Llama of half a billion random weights made on the
spot, `--model demo` the model that comes with the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from lookahead.bench.rows import Row
from lookahead.bench.tuning import CONTEXTS, NODE_COUNTS, StepBench, Stopwatch, WeightReader, bytes_read
from lookahead.errors import InvalidArgumentError
from probe import Probe, Unit, load_model, option

VARIANTS: dict[str, Row] = {
    "default": {"pack_weights": False},
    "packed": {"pack_weights": True},
    "static": {"pack_weights": False, "engine": "static"},
    "compiled": {"pack_weights": False, "engine": "compiled"},
    "invariant": {"pack_weights": False, "invariant": True},
    "packed and invariant": {"pack_weights": True, "invariant": True},
}
"""Engines to measure, each with what `LookaheadConfig` calls its options."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option("random", "`random`, `demo`, or the folder of a model")
    dtype: str = option("bfloat16", "number type of the weights")
    device: str = option("cpu", "where the model runs")
    contexts: tuple[int, ...] = option(CONTEXTS, "tokens of text before a step")
    nodes: tuple[int, ...] = option(NODE_COUNTS, "nodes of a step; 1 is always among them")
    variants: tuple[str, ...] = option(("default", "packed"), f"engines, of {', '.join(VARIANTS)}")
    repeats: int = option(9, "timings of each, after one that does not count")


class PlainSteps:
    """Transformers' own one-token steps after a text of a fixed length."""

    def __init__(self, model: Any, text: Sequence[int]) -> None:
        """Fill a `DynamicCache` with all of the text but its last token, which every step begins with."""
        self._model = model
        self._ids = torch.tensor([text], device=model.device)  # [1, context + 1]
        self._cache = DynamicCache(config=model.config)
        model(input_ids=self._ids[:, :-1], past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def forward(self) -> None:
        """The forward pass of one token, and the likeliest next one."""
        output = self._model(input_ids=self._ids[:, -1:], past_key_values=self._cache, use_cache=True)
        output.logits[:, -1].float().argmax(dim=-1).cpu()

    def undo(self) -> None:
        """Forget all tokens after the text."""
        self._cache.crop(self._ids.shape[1] - 1 - self._cache.get_seq_length())


class Bench:
    """One model, and what is measured of it."""

    def __init__(self, model: Any, options: Options) -> None:
        self.model = model
        self.nodes = sorted({1, *options.nodes})
        self.repeats = options.repeats
        self.variants = options.variants
        self.reader = WeightReader(model.device, bytes_read(model))

    def steps(self, context: int) -> Iterator[Row]:
        """Measure the variants after a text of `context` tokens; a row for each size, and for what stands beside it."""
        with torch.no_grad():
            benches = {name: StepBench(self.model, context, **VARIANTS[name]) for name in self.variants}
            plain = PlainSteps(self.model, benches[self.variants[0]].text)
            watch = Stopwatch(self.model.device)
            for repeat in range(self.repeats + 1):
                if repeat == 1:
                    watch.forget()  # the warm-up
                self._round(watch, benches, plain)
        row = {"kind": "step", "context": context, "repeats": self.repeats, "clock": watch.clock}
        limit = round(self.reader.seconds(watch.seconds("limit")), 9)
        yield {**row, "method": "transformers", "nodes": 1, **self._times(watch, "forward")}
        yield {**row, "method": "memory limit", "nodes": 1, "seconds": limit}
        for name in self.variants:
            for nodes in self.nodes:
                yield {**row, "method": name, "nodes": nodes, **self._times(watch, f"{name} {nodes}")}

    def _round(self, watch: Stopwatch, benches: dict[str, StepBench], plain: PlainSteps) -> None:
        """Time everything once."""
        watch.time("limit", self.reader.read)
        watch.time("forward", plain.forward)
        plain.undo()
        for nodes in self.nodes:
            for name, bench in benches.items():
                watch.time(f"{name} {nodes}", partial(bench.step, bench.tree(nodes)))
                bench.undo()

    def _times(self, watch: Stopwatch, name: str) -> Row:
        median = watch.median(name)
        return {"seconds": round(watch.seconds(name), 9), "wall": round(median.wall, 9), "cpu": round(median.cpu, 9)}


def probe(options: Options) -> Probe:
    """The units: each context, then the parts for each variant."""
    for name in options.variants:
        if name not in VARIANTS:
            raise InvalidArgumentError(f"--variants {name}: is none; choose from {', '.join(VARIANTS)}")
    loaded = load_model(options.model, options.dtype)
    model = loaded.model.to(options.device)
    bench = Bench(model, options)
    units = [Unit(f"context {context}", partial(bench.steps, context)) for context in options.contexts]
    return Probe(units, {"model": {**loaded.settings(), "weight_bytes": bytes_read(model)}})
