"""Measure how many tokens an engine makes in a second of CPU time, with so many requests at once.

For each load and repeat the methods serve the same prompts, in one process and in turns: each repeat begins with
another one.

- `drafts`: an `Engine` as it comes; its n-gram memory is empty at the beginning of each run;
- `plain`: an `Engine` with `preset="autoregressive"`;
- `4 drafts`, `8 drafts`: an `Engine` whose requests draft for themselves, so many nodes a step;
- `batches`: `model.generate` with so many prompts a call, padded. Its sampled rows share one generator, so that only
  greedy texts can be compared.

Before the first repeat of a load each runs once unmeasured, as an engine learns what steps cost from the first ones.
Beside them `generate`, each prompt by itself, with whose texts all are compared. Time is CPU time of the process. With
`--answers` the texts are recorded ones, forced by a logits processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from cases import Counts, Forced, encoder_of, generate, now, read_cases
from lookahead import Engine, LookaheadConfig, RequestHandle
from lookahead.backends.transformers.model_state import state_of
from lookahead.bench.rows import Row
from lookahead.drafting import DraftMemory, build_drafter
from probe import Probe, Unit, load_model, option

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
    least_requests: int = option(8, "requests of a run, at least; at small loads they follow each other")
    compared: int = option(64, "compare the first so many texts with those of generate")
    prompt_tokens: int = option(0, "take only so many tokens of a prompt, the last ones; 0 for whole ones")
    answers: str = option(
        "", "JSON lines with `id`, `output`, and `instruction` and `input` or `prompt`, to be written"
    )


class Serving:
    """One model, and every way of serving requests with it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        loaded = load_model(options.model, options.dtype)
        self._model: Any = loaded.model
        most, path = max([options.least_requests, *options.loads]), Path(options.answers or options.prompts)
        lengths = {"prompt": options.prompt_tokens or None, "answer": options.max_new_tokens if options.answers else 0}
        self._cases = read_cases(path, encoder_of(loaded.tokenizer), most, **lengths)
        self._warm: set[int] = set()
        self._reference = lru_cache(maxsize=None)(self._generate)

    def alone(self) -> Iterator[Row]:
        """Each prompt by itself."""
        for load in self._options.loads:
            found = [self._reference(number) for number in range(min(self._requests(load), self._options.compared))]
            seconds, tokens = sum(counts.seconds for counts in found), sum(len(counts.tokens) for counts in found)
            yield {"kind": "serving", "load": load, "method": "generate", "rate": tokens / seconds, "tokens": tokens}

    def rows(self, load: int, repeat: int) -> Iterator[Row]:
        """All methods at a load."""
        names, first = self._options.methods, repeat % len(self._options.methods)
        if load not in self._warm:
            self._warm.add(load)
            for name in names:
                self._run(name, load)
        rows = [self._run(name, load) for name in (*names[first:], *names[:first])]
        plain = next((row["rate"] for row in rows if row["method"] == "plain"), None)
        for row in rows:
            wrong = row["differ"] and self._options.dtype == "float32"
            error = {"error": f"{row['method']} at {load}: {row['differ']} texts differ"} if wrong else {}
            yield {**row, "repeat": repeat, "over_plain": row["rate"] / plain if plain else None, **error}

    def _run(self, name: str, load: int) -> Row:
        """Serve all requests of a load, which come at once, with an empty memory."""
        state_of(self._model).memory = None
        more: Row = {}
        begin = now("cpu")
        if name == "batches":
            texts = self._batches(load)
        else:
            engine = Engine(self._model, config_of(name), max_rows=load)
            handles = self._submit(load, engine)
            engine.run()
            texts, counts = [handle.tokens for handle in handles], engine.statistics
            more = {"steps": counts.steps, "nodes_per_row": counts.nodes / counts.rows}
            more["tokens_per_row"] = counts.tokens / counts.rows
        seconds = now("cpu") - begin
        expected = [list(self._reference(number).tokens) for number in range(min(len(texts), self._options.compared))]
        tokens = sum(map(len, texts))
        row = {"kind": "serving", "load": load, "method": name, "rate": tokens / seconds, "tokens": tokens}
        row["differ"] = sum(text != other for text, other in zip(texts, expected, strict=False))
        return row | {"temperature": self._options.temperature, "seconds": seconds, "requests": len(texts)} | more

    def _submit(self, load: int, engine: Engine) -> list[RequestHandle]:
        handles = []
        for number in range(self._requests(load)):
            case, arguments = self._cases[number], self._arguments()
            if case.answer:
                arguments["max_new_tokens"] = len(case.answer)
                arguments["logits_processor"] = LogitsProcessorList([Forced(case)])
            handles.append(engine.submit(case.prompt, seed=number, **arguments))
        return handles

    def _requests(self, load: int) -> int:
        return min(max(load, self._options.least_requests), len(self._cases))

    def _arguments(self) -> dict[str, Any]:
        temperature = self._options.temperature
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        return sampling | {"max_new_tokens": self._options.max_new_tokens}

    def _generate(self, number: int) -> Counts:
        """What `generate` makes of a prompt."""
        torch.manual_seed(number)
        case, arguments = self._cases[number], self._arguments()
        return generate(
            self._model, case, None, **arguments | ({"max_new_tokens": len(case.answer)} if case.answer else {})
        )

    def _batches(self, load: int) -> Texts:
        """Padded batches; a text ends with its first end-of-sequence token."""
        texts, ends = Texts(), self._model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        prompts = [torch.tensor(case.prompt) for case in self._cases[: self._requests(load)]]
        for begin in range(0, len(prompts), load):
            part = prompts[begin : begin + load]
            longest = max(map(len, part))
            mask = torch.stack([torch.arange(longest) >= longest - len(ids) for ids in part]).long()
            padded = torch.stack([torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in part])
            output = self._model.generate(padded, attention_mask=mask, **self._arguments())
            for row in output[:, longest:].tolist():
                end = next((place for place, token in enumerate(row) if token in stops), len(row))
                texts.append(row[: end + 1])
        return texts


def config_of(method: str) -> LookaheadConfig:
    """That of the engine that a method is."""
    if method == "drafts":
        return LookaheadConfig(memory="process")
    if method == "plain":
        return LookaheadConfig(preset="autoregressive")
    nodes = int(method.split()[0]) + 1
    make = partial(build_drafter, LookaheadConfig(step_budget=nodes), memory=DraftMemory())
    return LookaheadConfig(drafter=make, step_budget=nodes)


def probe(options: Options) -> Probe:
    """A unit for each load and repeat."""
    serving = Serving(options)
    units = [Unit("generate", serving.alone)]
    for repeat in range(options.repeats):
        for load in options.loads:
            units.append(Unit(f"{load} requests, run {repeat + 1}", partial(serving.rows, load, repeat)))
    return Probe(units, {"model": Path(options.model).name, "dtype": options.dtype, "temperature": options.temperature})
