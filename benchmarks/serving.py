"""Measure how many tokens an engine makes in a second of CPU time, with so many requests at once.

For each load and repeat the methods take turns on the same prompts, in one process:

- `drafts`: an `Engine` as it comes; its n-gram memory is empty at the beginning of each run;
- `plain`: an `Engine` with `preset="autoregressive"`;
- `4 drafts`, `8 drafts`: an `Engine` whose requests draft for themselves, so many nodes a step;
- `batches`, `drafted batches`: `model.generate` and `lookahead.generate` with so many prompts a call, padded. Their
  sampled rows share one generator, so that only greedy texts can be compared.

Before the first repeat of a load `drafts` and `plain` run once unmeasured, as an engine learns what steps cost from the
first ones. Beside them `generate`, each prompt by itself, with whose texts all are compared, and once for each of
`--batch-loads` `generate_batch`, transformers' continuous batching. Time is CPU time of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import GenerationConfig

import lookahead
from lookahead import Engine, LookaheadConfig, RequestHandle
from lookahead.backends.transformers.model_state import neighbours, state_of
from lookahead.bench.rows import Row
from lookahead.drafting import DraftMemory, build_drafter
from probe import Probe, Unit, generate, load_model, option, prompts_of, token_ids

Texts = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, `random`, or the folder of a model")
    dtype: str = option("float32", "number type of the weights")
    loads: tuple[int, ...] = option((1, 4, 16, 64), "requests at once")
    repeats: int = option(3, "runs of each method at each load")
    max_new_tokens: int = option(64, "tokens to generate at most")
    temperature: float = option(0.0, "of sampling with a seed; 0 for greedy decoding")
    methods: tuple[str, ...] = option(("drafts", "plain", "4 drafts", "8 drafts"), "what is measured")
    batch_loads: tuple[int, ...] = option((4,), "requests at once of generate_batch")
    least_requests: int = option(8, "requests of a run, at least; at small loads they follow each other")
    compared: int = option(64, "compare the first so many texts with those of generate")
    prompt_tokens: int = option(0, "cut prompts to so many tokens; 0 for whole ones")


class Serving:
    """One model, and every way of serving requests with it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        loaded = load_model(options.model, options.dtype)
        self._model: Any = loaded.model
        most = max([options.least_requests, *options.loads])
        prompts = prompts_of(Path(options.prompts), most)
        cut = options.prompt_tokens or None
        self._ids = [token_ids(loaded.tokenizer, self._model, prompt.text)[0, :cut] for prompt in prompts]
        self._expected: dict[int, tuple[list[int], float]] = {}
        self._warm: set[int] = set()

    def alone(self) -> Iterator[Row]:
        """Each prompt by itself."""
        for load in self._options.loads:
            chosen = range(min(self._requests(load), self._options.compared))
            seconds = sum(self._reference(number)[1] for number in chosen)
            tokens = sum(len(self._reference(number)[0]) for number in chosen)
            yield {"kind": "serving", "load": load, "method": "generate", "rate": tokens / seconds, "tokens": tokens}

    def rows(self, load: int, repeat: int) -> Iterator[Row]:
        """All methods at a load."""
        methods = {name: self._method(name) for name in self._options.methods}
        if load not in self._warm:
            self._warm.add(load)
            for name in ("drafts", "plain"):
                if name in methods:
                    methods[name](load)
        names = list(methods)
        plain: float | None = None
        rows: list[Row] = []
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            state_of(self._model).memory = None
            rows.append({**self._row(name, load, methods[name]), "repeat": repeat})
            plain = rows[-1]["rate"] if name == "plain" else plain
        for row in rows:
            wrong = row["differ"] and self._options.dtype == "float32"
            error = {"error": f"{row['method']} at {load}: {row['differ']} texts differ"} if wrong else {}
            yield {**row, "over_plain": row["rate"] / plain if plain else None, **error}

    def continuous_batching(self, load: int) -> Iterator[Row]:
        """`generate_batch` at a load."""
        yield self._row("generate_batch", load, self._generate_batch)

    def _row(self, name: str, load: int, method: Callable[[int], tuple[Texts, Row]]) -> Row:
        begin = process_time()
        texts, more = method(load)
        seconds = process_time() - begin
        expected = [self._reference(number)[0] for number in range(min(len(texts), self._options.compared))]
        tokens = sum(map(len, texts))
        row = {"kind": "serving", "load": load, "method": name, "rate": tokens / seconds, "tokens": tokens}
        row["differ"] = sum(own != other for own, other in zip(texts, expected, strict=False))
        row |= {"temperature": self._options.temperature, "seconds": seconds, "requests": len(texts)}
        return row | more

    def _requests(self, load: int) -> int:
        return min(max(load, self._options.least_requests), len(self._ids))

    @property
    def _arguments(self) -> dict[str, Any]:
        temperature = self._options.temperature
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        return {"max_new_tokens": self._options.max_new_tokens, **sampling}

    def _reference(self, number: int) -> tuple[list[int], float]:
        """The text that `generate` gives, and its CPU time."""
        if number not in self._expected:
            torch.manual_seed(number)
            begin = process_time()
            tokens, _ = generate(self._model, self._ids[number][None], None, **self._arguments)
            self._expected[number] = tokens, process_time() - begin
        return self._expected[number]

    def _method(self, name: str) -> Callable[[int], tuple[Texts, Row]]:
        if name == "drafts":
            return partial(self._engine, LookaheadConfig(memory="process"))
        if name == "plain":
            return partial(self._engine, LookaheadConfig(preset="autoregressive"))
        if name.endswith("batches"):
            return partial(self._batches, LookaheadConfig(memory="process") if name.startswith("drafted") else None)
        nodes = int(name.split()[0]) + 1

        def serve(load: int) -> tuple[Texts, Row]:
            drafting = LookaheadConfig(step_budget=nodes)
            make = partial(build_drafter, drafting, memory=DraftMemory(), neighbours=neighbours(self._model))
            return self._engine(LookaheadConfig(drafter=make, step_budget=nodes), load)

        return serve

    def _engine(self, config: LookaheadConfig, load: int) -> tuple[Texts, Row]:
        engine = Engine(self._model, config, max_rows=load)
        chosen = self._ids[: self._requests(load)]
        handles = [engine.submit(ids, seed=number, **self._arguments) for number, ids in enumerate(chosen)]
        engine.run()
        counts = engine.statistics
        more = {"steps": counts.steps, "nodes_per_row": counts.nodes / counts.rows}
        more |= {"tokens_per_row": counts.tokens / counts.rows, **_latencies(handles)}
        more |= {"by_load": {rows: [own.nodes, own.rows] for rows, own in counts.by_load.items()}}
        return [handle.tokens for handle in handles], more

    def _batches(self, config: LookaheadConfig | None, load: int) -> tuple[Texts, Row]:
        """Padded batches; a text ends with its first end-of-sequence token."""
        chosen, texts = self._ids[: self._requests(load)], list[list[int]]()
        ends = self._model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        for begin in range(0, len(chosen), load):
            part = chosen[begin : begin + load]
            longest = max(map(len, part))
            mask = torch.stack([torch.arange(longest) >= longest - len(ids) for ids in part]).long()
            padded = torch.stack([torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in part])
            call: Any = self._model.generate
            if config is not None:
                call = partial(lookahead.generate, self._model, lookahead_config=config)
            output = call(padded, attention_mask=mask, **self._arguments)
            for row in output[:, longest:].tolist():
                end = next((place for place, token in enumerate(row) if token in stops), len(row))
                texts.append(row[: end + 1])
        return texts, {}

    def _generate_batch(self, load: int) -> tuple[Texts, Row]:
        settings = GenerationConfig.from_dict({**self._model.generation_config.to_dict(), **self._arguments})
        texts: Texts = []
        chosen: Sequence[torch.Tensor] = self._ids[: self._requests(load)]
        for begin in range(0, len(chosen), load):
            part = [ids.tolist() for ids in chosen[begin : begin + load]]
            found = self._model.generate_batch(inputs=part, generation_config=settings, progress_bar=False)
            texts += [found[f"req_{number}"].generated_tokens for number in range(len(part))]
        return texts, {}


def _latencies(handles: Sequence[RequestHandle]) -> Row:
    """How long the requests waited, in wall seconds: median and ninth of ten."""
    counts = [(len(handle.tokens), handle.statistics) for handle in handles]
    first = [own.first_token_seconds or 0.0 for _, own in counts]
    later = [((own.total_seconds or 0.0) - wait) for (_, own), wait in zip(counts, first, strict=True)]
    tokens = [seconds / (count - 1) for seconds, (count, _) in zip(later, counts, strict=True) if count > 1]
    found: Row = {}
    for name, values in (("first_token_seconds", first), ("token_seconds", tokens)):
        ordered = sorted(values)
        found |= {name: ordered[len(ordered) // 2], f"{name}_90": ordered[len(ordered) * 9 // 10]}
    return found


def probe(options: Options) -> Probe:
    """A unit for each load and repeat."""
    serving = Serving(options)
    units = [Unit("generate", serving.alone)]
    for repeat in range(options.repeats):
        for load in options.loads:
            units.append(Unit(f"{load} requests, run {repeat + 1}", partial(serving.rows, load, repeat)))
    for load in options.batch_loads:
        units.append(Unit(f"generate_batch, {load} requests", partial(serving.continuous_batching, load)))
    return Probe(units, {"model": Path(options.model).name, "dtype": options.dtype, "temperature": options.temperature})
