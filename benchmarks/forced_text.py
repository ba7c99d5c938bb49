"""Measure texts that the model would not write by itself: a logits processor leaves only the recorded token.

Recorded answers, edits of code, steps of agents and turns of talks, are written by a model with random weights, as a
grammar or a tool's protocol makes a model write what it would not choose. What is drafted from the model's own
predictions is wrong there; what is drafted from the text is not. For each case the methods take turns: plain
`model.generate`, its prompt lookup (ten tokens at most: those that the processor, asked beforehand, allows), the same
with a processor that does not answer beforehand, as a model does not, `context_matches` and `auto` at a number of
nodes, drafts from text alone, `auto` with as many nodes as pay, the same with a source that tells it what the
processor forbids, and with the unchanged code as the text that is expected, where there is one. Every text is compared
with the recorded one. Times are CPU times of a call, the pass over the prompt included.

S hardly depends on the size of the model: for that alone, `--layers 1 --hidden-size 64` will do. `--family granite` is
a hybrid, which runs on chains, and `--family bart` an encoder-decoder, whose encoder reads the prompt. `extracts` are
every third sentence of an article.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from lookahead import LookaheadConfig
from lookahead.bench.measuring import ForwardCounter
from lookahead.bench.models import BenchModel, sharing_weights
from lookahead.bench.repetition import repeated_cycle_share
from lookahead.bench.rows import Row
from lookahead.core.protocols import StepResult
from lookahead.drafting.auto.sources import TokenPaths
from lookahead.drafting.text_only import build_text_drafter
from lookahead.errors import InvalidArgumentError
from probe import FAMILIES, Probe, Unit, generate, option, random_model, text_start
from recordings import Encode, Recording, read_recordings

PLAIN, LOOKUP = "transformers", "prompt lookup"
UNASKED = "prompt lookup, unasked"
PREDICTED = "auto, predicted text"
TOLD = "auto, told"
LEAST = 0.2
"""Least probability of a token that is drafted from text alone."""

TASKS = ("edits", "traces", "talks", "extracts")
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    edits: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction`, `input` and `output`")
    traces: str = option("../shared/data/agent_traces.jsonl", "JSON lines with `id`, `prompt` and `output`")
    talks: str = option("../shared/data/answers.jsonl", "JSON lines with `id`, `prompt` and `output`")
    extracts: str = option("../shared/data/spec_bench.jsonl", "JSON lines with `id`, `task` and `turns`")
    tasks: tuple[str, ...] = option(TASKS[:2], f"what is written, of {', '.join(TASKS)}")
    edit_count: int = option(20, "take the first so many edits")
    trace_count: int = option(10, "take the first so many steps of agents")
    talk_count: int = option(10, "take the first so many turns of talks")
    extract_count: int = option(40, "take the first so many articles")
    family: str = option("llama", f"the model, of {', '.join(FAMILIES)}")
    layers: int | None = option(
        None, "layers of the model; 32 of the Llama of 461 million parameters, 24 of the hybrid"
    )
    hidden_size: int = option(1024, "its hidden size")
    dtype: str = option("bfloat16", "number type of the weights")
    max_prompt_tokens: int = option(1536, "take only so many tokens of the end of a prompt")
    max_new_tokens: int = option(256, "take only so many tokens of the beginning of an answer")
    nodes: int = option(16, "nodes of a step")
    pack_weights: bool = option(False, "run this library's methods with packed weights")
    methods: tuple[str, ...] = option((), "of those above, by the names that rows have; all if not given")
    repeats: int = option(1, "runs of each method on each case")


class Forced(LogitsProcessor):
    """Leaves only the recorded token at each place after the prompt.

    Args:
        case: The text.
        start: Tokens before it.
        answers: Whether prompt lookup, which asks about each token before it sends it, is told the text. It asks with
            logits that are all the same.
    """

    def __init__(self, case: Recording, start: int, answers: bool = True) -> None:
        self._case, self._start = case, start
        self._answers = answers

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """See transformers; input_ids: `[1, S]`, scores: `[1, vocabulary]`."""
        place = input_ids.shape[1] - self._start
        if place >= len(self._case.answer):  # prompt lookup asks for more than it may send
            return scores  # type: ignore[return-value]
        if not self._answers and bool((scores == scores[0, 0]).all()):
            return scores  # type: ignore[return-value]
        token = self._case.answer[place]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, token] = 0
        return forced  # type: ignore[return-value]


class Told:
    """A source that drafts nothing, and knows of each draft what the processor forbids, as prompt lookup does."""

    name = "forced text"

    def __init__(self, case: Recording) -> None:
        self._answer = case.answer
        self._tokens = 0

    def start(self, prompt: Sequence[int]) -> None:
        """See `lookahead.drafting.auto.sources.Source`."""

    def propose(self) -> TokenPaths:
        """See `Source`."""
        return TokenPaths((), (), ())

    def observe(self, result: StepResult) -> None:
        """See `Source`."""
        self._tokens += len(result.tokens)

    def permits(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """See `lookahead.drafting.auto.sources.permitted`."""
        places = [self._tokens - 1]  # of the text itself, and of each node in the answer
        for parent in parents:
            places.append(places[parent] + 1)
        return [self._answer[place : place + 1] == [token] for token, place in zip(tokens, places[1:], strict=True)]


def methods_of(options: Options) -> dict[str, LookaheadConfig | None]:
    """The methods by name; `None` for those of transformers.

    Raises:
        InvalidArgumentError: A method that is asked for does not exist.
    """
    nodes = options.nodes
    known: dict[str, LookaheadConfig | None] = {
        PLAIN: None,
        LOOKUP: None,
        UNASKED: None,
        f"context_matches, {nodes} nodes": LookaheadConfig(preset="context_matches", step_budget=nodes),
        f"auto, {nodes} nodes": LookaheadConfig(step_budget=nodes),
        f"text only, {nodes} nodes": LookaheadConfig(drafter=partial(build_text_drafter, nodes, least=LEAST)),
        "auto": LookaheadConfig(),
        TOLD: LookaheadConfig(),
        PREDICTED: LookaheadConfig(),
    }
    unknown = [name for name in options.methods if name not in known]
    if unknown:
        raise InvalidArgumentError(f"--methods {unknown[0]!r} is none of {', '.join(map(repr, known))}")
    chosen = {name: known[name] for name in options.methods or known}
    if not options.pack_weights:
        return chosen
    return {name: config and replace(config, pack_weights=True) for name, config in chosen.items()}


def read_extracts(path: Path, encode: Encode, count: int) -> list[Recording]:
    """The first articles that a file asks to summarize, and every third sentence of each."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [(row["id"], row["turns"][0]) for row in rows if row["task"] == "summarization"][:count]
    answers = (" ".join(re.split(r"(?<=[.!?]) +", text.partition(": ")[2])[::3]) for _, text in texts)
    return [
        Recording(name, encode(text), encode(answer), []) for (name, text), answer in zip(texts, answers, strict=True)
    ]


def read_cases(task: str, path: Path, tokenizer: Any, count: int, options: Options) -> list[Recording]:
    """The first recordings of a file: the ends of their prompts, and the beginnings of their answers."""
    prompt, answer = slice(-options.max_prompt_tokens, None), slice(options.max_new_tokens)
    read = read_extracts if task == "extracts" else read_recordings
    recordings = read(path, lambda text: list(tokenizer(text).input_ids), count)
    return [replace(case, prompt=case.prompt[prompt], answer=case.answer[answer]) for case in recordings]


class Bench:
    """The methods on one model, each with a model object of its own."""

    def __init__(self, loaded: BenchModel, methods: Mapping[str, LookaheadConfig | None], repeats: int) -> None:
        self._methods = methods
        self._models = {name: loaded.model if config is None else None for name, config in methods.items()}
        self._loaded = loaded
        self._repeats = repeats

    def rows(self, task: str, case: Recording) -> Iterator[Row]:
        """A row for each method and repeat."""
        for repeat in range(self._repeats):
            for name in self._methods:
                if name == PREDICTED and not case.expected:
                    continue
                output, nodes, lengths, seconds = self._run(name, case)
                row: Row = {"kind": "run", "task": task, "id": case.id, "method": name, "repeat": repeat}
                row |= {"prompt_tokens": len(case.prompt), "tokens": len(output), "steps": len(lengths)}
                row |= {"nodes": sum(nodes), "cpu_seconds": seconds, "equal": output == case.answer}
                row["cycle_tokens"] = round(repeated_cycle_share(output) * len(output), 3)
                if not row["equal"]:
                    row["error"] = f"{name} on {case.id}: another text than the recorded one"
                yield row

    def _run(self, name: str, case: Recording) -> tuple[list[int], list[int], list[int], float]:
        config = self._methods[name]
        if self._models[name] is None:  # what is done once for a model is not measured
            self._models[name] = sharing_weights(self._loaded.model)
            self._call(name, replace(case, answer=case.answer[:WARM_UP_TOKENS]))
        if config is not None or name == PLAIN:
            return self._call(name, case)
        with ForwardCounter(self._loaded.model, len(case.prompt)) as counter:
            output, _, _, seconds = self._call(name, case)
        return output, *counter.steps(len(output)), seconds

    def _call(self, name: str, case: Recording) -> tuple[list[int], list[int], list[int], float]:
        config, ids = self._methods[name], torch.tensor([case.prompt])
        more: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if name in (LOOKUP, UNASKED) else {}
        if name == PREDICTED:
            more["prediction"] = torch.tensor(case.expected)
        if name == TOLD and config is not None:
            config = replace(config, sources=(partial(Told, case),))
        start = text_start(self._loaded.model, len(case.prompt))
        processors = LogitsProcessorList([Forced(case, start, answers=name != UNASKED)])
        begin = process_time()
        text, output = generate(
            self._models[name], ids, config, max_new_tokens=len(case.answer), logits_processor=processors, **more
        )
        seconds = process_time() - begin
        if config is None:
            return text, [1] * len(text), [1] * len(text), seconds
        return text, output.statistics.nodes_per_step, output.statistics.accepted_lengths, seconds


def probe(options: Options) -> Probe:
    """The units: each case."""
    loaded = random_model(options.family, options.layers, options.hidden_size, options.dtype)
    bench = Bench(loaded, methods_of(options), options.repeats)
    files = {
        "edits": (options.edits, options.edit_count),
        "traces": (options.traces, options.trace_count),
        "talks": (options.talks, options.talk_count),
        "extracts": (options.extracts, options.extract_count),
    }
    units = []
    for task in options.tasks:
        path, count = files[task]
        for case in read_cases(task, Path(path), loaded.tokenizer, count, options):
            units.append(Unit(f"{task}, {case.id}", partial(bench.rows, task, case)))
    lengths = {"max_prompt_tokens": options.max_prompt_tokens, "max_new_tokens": options.max_new_tokens}
    settings = {**lengths, "pack_weights": options.pack_weights, "methods": list(methods_of(options))}
    return Probe(units, {"model": loaded.settings(), **settings})
