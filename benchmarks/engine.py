"""Measure what a step costs: its time against the nodes it sends, beside transformers' own step and the memory limit.

For each context length these take turns, so that a machine that becomes slower meets all of them; medians count:

- a step of each size through the engine: layout, mask, forward pass, predictions, commit;
- `transformers`: its own one-token step, the forward pass with a `DynamicCache` and the choice of the likeliest token;
- `generate`: `model.generate`, per token: the difference between eight more tokens and none, over eight;
- `memory limit`: reading as much memory as the weights take (`WeightReader` of `backends/transformers/tuning.py`).

On a CPU times are CPU times of the process. `--model random` is a Llama of half a billion random weights made on the
spot, `--model demo` the model that comes with the package. At last the paper's configuration decodes a few tokens after
the shortest context, to see what the parts of a step take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from lookahead import LookaheadConfig
from lookahead.backends.transformers.tuning import CONTEXTS, NODE_COUNTS, StepBench, Stopwatch, WeightReader, bytes_read
from lookahead.bench.rows import Row
from lookahead.errors import InvalidArgumentError
from probe import Probe, Unit, generate, load_model, option

VARIANTS: dict[str, Row] = {
    "default": {"pack_weights": False},
    "packed": {"pack_weights": True},
    "static": {"pack_weights": False, "engine": "static"},
    "compiled": {"pack_weights": False, "engine": "compiled"},
    "invariant": {"pack_weights": False, "invariant": True},
    "packed and invariant": {"pack_weights": True, "invariant": True},
}
"""Engines to measure, each with what `LookaheadConfig` calls its options."""

PAPER = LookaheadConfig(preset="paper", window_size=15, ngram_size=5, guess_set_size=15)

PER_GENERATE = 8
"""Tokens that the time per token of `generate` is taken over."""

TOKENS_OF_PARTS = 24
"""New tokens that are decoded to see what the parts of a step take."""


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

    def generate(self, tokens: int) -> None:
        """`model.generate` of so many tokens; each takes one forward pass of one token."""
        self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            past_key_values=self._cache,
            max_new_tokens=tokens,
            do_sample=False,
        )

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
        long, short = (self._times(watch, f"generate {tokens}") for tokens in (1 + PER_GENERATE, 1))
        per_token = {key: round((long[key] - short[key]) / PER_GENERATE, 9) for key in long}
        limit = round(self.reader.seconds(watch.seconds("limit")), 9)
        yield {**row, "method": "transformers", "nodes": 1, **self._times(watch, "forward")}
        yield {**row, "method": "generate", "nodes": 1, **per_token}
        yield {**row, "method": "memory limit", "nodes": 1, "seconds": limit}
        for name in self.variants:
            for nodes in self.nodes:
                yield {**row, "method": name, "nodes": nodes, **self._times(watch, f"{name} {nodes}")}

    def _round(self, watch: Stopwatch, benches: dict[str, StepBench], plain: PlainSteps) -> None:
        """Time everything once."""
        watch.time("limit", self.reader.read)
        works: list[tuple[str, Callable[[], None]]] = [("forward", plain.forward)]
        works += [(f"generate {tokens}", partial(plain.generate, tokens)) for tokens in (1, 1 + PER_GENERATE)]
        for name, work in works:
            watch.time(name, work)
            plain.undo()
        for nodes in self.nodes:
            for name, bench in benches.items():
                watch.time(f"{name} {nodes}", partial(bench.step, bench.tree(nodes)))
                bench.undo()

    def _times(self, watch: Stopwatch, name: str) -> Row:
        median = watch.median(name)
        return {"seconds": round(watch.seconds(name), 9), "wall": round(median.wall, 9), "cpu": round(median.cpu, 9)}

    def parts(self, variant: str, context: int) -> Iterator[Row]:
        """Wall time of the parts of a step, the first one (the prompt's) left out, in the paper's configuration."""
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(0)).to(self.model.device)
        config = LookaheadConfig.from_dict(asdict(PAPER) | VARIANTS[variant])
        # The first is the warm-up: what is captured or compiled, is then.
        calls = [
            generate(self.model, ids, config, max_new_tokens=tokens) for tokens in (TOKENS_OF_PARTS, 1, TOKENS_OF_PARTS)
        ]
        runs = [output.statistics for _, output in calls[1:]]
        steps = runs[1].steps - runs[0].steps
        first, whole = (asdict(run.seconds) for run in runs)
        nodes = sum(runs[1].nodes_per_step[runs[0].steps :])
        seconds = {part: round((whole[part] - first[part]) / max(1, steps), 9) for part in whole}
        row = {"kind": "parts", "method": variant, "context": context, "steps": steps}
        yield {**row, "mean_nodes": round(nodes / max(1, steps), 2), "seconds": seconds}


def probe(options: Options) -> Probe:
    """The units: each context, then the parts for each variant."""
    for name in options.variants:
        if name not in VARIANTS:
            raise InvalidArgumentError(f"--variants {name}: is none; choose from {', '.join(VARIANTS)}")
    loaded = load_model(options.model, options.dtype)
    model = loaded.model.to(options.device)
    model.generation_config.eos_token_id = None  # nothing may end a text early
    model.generation_config.pad_token_id = 0
    bench = Bench(model, options)
    shortest = min(options.contexts)
    units = [Unit(f"context {context}", partial(bench.steps, context)) for context in options.contexts]
    units += [Unit(f"parts, {name}", partial(bench.parts, name, shortest)) for name in options.variants]
    return Probe(units, {"model": {**loaded.settings(), "weight_bytes": bytes_read(model)}})
