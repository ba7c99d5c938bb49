"""Measure how many tokens an engine makes in a second of CPU time, with so many requests at once.

For each load and repeat the methods serve the same prompts, in one process. Engines take turns step by step, always the
one that has made the fewest tokens, so that what disturbs the machine disturbs all of them; who is first when all are
level changes from repeat to repeat, for the first to use some memory pays for it:

- `drafts`: an `Engine` as it comes; its n-gram memory is empty at the beginning of each run;
- `plain`: an `Engine` with `preset="autoregressive"`;
- `4 drafts`, `8 drafts`: an `Engine` whose requests draft for themselves, so many nodes a step;
- `batches`, `drafted batches`: `model.generate` and `lookahead.generate` with so many prompts a call, padded. Their
  sampled rows share one generator, so that only greedy texts can be compared.

Before the first repeat of a load the engines run once unmeasured, as an engine learns what steps cost from the first
ones. Beside them `generate`, each prompt by itself, with whose texts all are compared. Time is CPU time of the process;
an engine's clock runs while it is its turn. With `--answers` the texts are recorded ones, forced by a logits processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import LogitsProcessorList

import lookahead
from forced_text import Forced, read_cases
from forced_text import Options as ForcedOptions
from lookahead import Engine, LookaheadConfig, RequestHandle
from lookahead.backends.transformers.model_state import state_of
from lookahead.bench.rows import Row
from lookahead.drafting import DraftMemory, build_drafter
from probe import Probe, Unit, generate, load_model, option, prompts_of, token_ids
from recordings import Recording

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
    prompt_tokens: int = option(0, "cut prompts to so many tokens; 0 for whole ones")
    answers: str = option(
        "", "JSON lines with `id`, `output`, and `instruction` and `input` or `prompt`, to be written"
    )


class Run:
    """An engine, its requests, which all come at once, and the CPU time that it took for them.

    Args:
        engine: What serves them.
        submit: Submits them to it.
    """

    def __init__(self, engine: Engine, submit: Callable[[Engine], list[RequestHandle]]) -> None:
        self._engine = engine
        begin = process_time()
        self._handles = submit(engine)
        self.seconds = process_time() - begin
        self.finished = False

    @property
    def tokens(self) -> int:
        """How many it has made."""
        return self._engine.statistics.tokens

    @property
    def texts(self) -> Texts:
        """New tokens of each request."""
        return [handle.tokens for handle in self._handles]

    def step(self) -> None:
        """Run a step."""
        begin = process_time()
        self.finished = not self._engine.step()
        self.seconds += process_time() - begin

    def counts(self) -> Row:
        """Steps, and what they sent and brought for a request in the mean."""
        counts = self._engine.statistics
        nodes, tokens = counts.nodes / counts.rows, counts.tokens / counts.rows
        return {"steps": counts.steps, "nodes_per_row": nodes, "tokens_per_row": tokens}


class Serving:
    """One model, and every way of serving requests with it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        loaded = load_model(options.model, options.dtype)
        self._model: Any = loaded.model
        most = max([options.least_requests, *options.loads])
        self._cases: list[Recording] = []
        if options.answers:
            prompt = options.prompt_tokens or 4096
            limits = ForcedOptions(max_new_tokens=options.max_new_tokens, max_prompt_tokens=prompt)
            self._cases = read_cases("answers", Path(options.answers), loaded.tokenizer, most, limits)
            self._ids = [torch.tensor(case.prompt) for case in self._cases]
        else:
            prompts = prompts_of(Path(options.prompts), most)
            first = slice(options.prompt_tokens or None)
            self._ids = [token_ids(loaded.tokenizer, self._model, prompt.text)[0, first] for prompt in prompts]
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
        engines = [name for name in self._options.methods if not name.endswith("batches")]
        if load not in self._warm:
            self._warm.add(load)
            self._race(load, engines)
        rows = []
        first = repeat % len(engines)
        for name, run in self._race(load, [*engines[first:], *engines[:first]]).items():
            rows.append(self._row(name, load, run.texts, run.seconds) | run.counts())
        for name in self._options.methods:
            if name not in engines:
                state_of(self._model).memory = None
                begin = process_time()
                texts = self._batches(name.startswith("drafted"), load)
                rows.append(self._row(name, load, texts, process_time() - begin))
        plain = next((row["rate"] for row in rows if row["method"] == "plain"), None)
        for row in rows:
            wrong = row["differ"] and self._options.dtype == "float32"
            error = {"error": f"{row['method']} at {load}: {row['differ']} texts differ"} if wrong else {}
            yield {**row, "repeat": repeat, "over_plain": row["rate"] / plain if plain else None, **error}

    def _race(self, load: int, engines: Sequence[str]) -> dict[str, Run]:
        """New engines, which take turns until all of them are through; their memories are empty."""
        state_of(self._model).memory = None
        runs = {
            name: Run(Engine(self._model, self._config(name), max_rows=load), partial(self._submit, load))
            for name in engines
        }
        while running := [run for run in runs.values() if not run.finished]:
            min(running, key=lambda run: run.tokens).step()
        return runs

    def _submit(self, load: int, engine: Engine) -> list[RequestHandle]:
        numbers = range(self._requests(load))
        return [engine.submit(self._ids[number], seed=number, **self._arguments(number)) for number in numbers]

    def _row(self, name: str, load: int, texts: Texts, seconds: float) -> Row:
        expected = [self._reference(number)[0] for number in range(min(len(texts), self._options.compared))]
        tokens = sum(map(len, texts))
        row = {"kind": "serving", "load": load, "method": name, "rate": tokens / seconds, "tokens": tokens}
        row["differ"] = sum(own != other for own, other in zip(texts, expected, strict=False))
        return row | {"temperature": self._options.temperature, "seconds": seconds, "requests": len(texts)}

    def _requests(self, load: int) -> int:
        return min(max(load, self._options.least_requests), len(self._ids))

    def _arguments(self, number: int) -> dict[str, Any]:
        temperature = self._options.temperature
        found: dict[str, Any] = {"max_new_tokens": self._options.max_new_tokens, "do_sample": temperature > 0}
        if temperature:
            found["temperature"] = temperature
        if self._cases:
            case = self._cases[number]
            found |= {
                "max_new_tokens": len(case.answer),
                "logits_processor": LogitsProcessorList([Forced(case, len(case.prompt))]),
            }
        return found

    def _reference(self, number: int) -> tuple[list[int], float]:
        """The text that `generate` gives, and its CPU time."""
        if number not in self._expected:
            torch.manual_seed(number)
            begin = process_time()
            tokens, _ = generate(self._model, self._ids[number][None], None, **self._arguments(number))
            self._expected[number] = tokens, process_time() - begin
        return self._expected[number]

    def _config(self, name: str) -> LookaheadConfig:
        """That of the engine that a method is."""
        if name == "drafts":
            return LookaheadConfig(memory="process")
        if name == "plain":
            return LookaheadConfig(preset="autoregressive")
        nodes = int(name.split()[0]) + 1
        drafting = LookaheadConfig(step_budget=nodes)
        make = partial(build_drafter, drafting, memory=DraftMemory())
        return LookaheadConfig(drafter=make, step_budget=nodes)

    def _batches(self, drafted: bool, load: int) -> Texts:
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
            if drafted:
                call = partial(lookahead.generate, self._model, lookahead_config=LookaheadConfig(memory="process"))
            output = call(padded, attention_mask=mask, **self._arguments(0))
            for row in output[:, longest:].tolist():
                end = next((place for place, token in enumerate(row) if token in stops), len(row))
                texts.append(row[: end + 1])
        return texts


def probe(options: Options) -> Probe:
    """A unit for each load and repeat."""
    serving = Serving(options)
    units = [Unit("generate", serving.alone)]
    for repeat in range(options.repeats):
        for load in options.loads:
            units.append(Unit(f"{load} requests, run {repeat + 1}", partial(serving.rows, load, repeat)))
    return Probe(units, {"model": Path(options.model).name, "dtype": options.dtype, "temperature": options.temperature})
