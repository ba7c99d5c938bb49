"""Measure texts that the model would not write by itself: a logits processor leaves only the recorded token.

Recorded answers, edits of code, steps of agents and turns of talks, are written by a model with random weights, as a
grammar or a tool's protocol makes a model write what it would not choose. What is drafted from the model's own
predictions is wrong there; what is drafted from the text is not. For each case the methods take turns: plain
`model.generate`, its prompt lookup (ten tokens at most: those that the processor, asked beforehand, allows), the same
with a processor that does not answer beforehand, as a model does not, `context_matches` and `auto` at a number of
nodes, drafts from text alone, `auto` with as many nodes as pay, the same with a source that knows what the processor
forbids, and with the unchanged code as the text that is expected, where there is one. Every text is compared with the
recorded one. Times are CPU times of a call, the pass over the prompt included.

S hardly depends on the size of the model: for that alone, `--layers 1 --hidden-size 64` will do. `--family granite` is
a hybrid, which runs on chains, and `--family bart` an encoder-decoder, whose encoder reads the prompt. `extracts` are
every third sentence of an article.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from cases import Case, Counts, Forced, encoder_of, generate, read_cases, read_extracts
from lookahead import LookaheadConfig
from lookahead.bench.measuring import ForwardCounter
from lookahead.bench.models import BenchModel, sharing_weights
from lookahead.bench.rows import Row
from lookahead.core.protocols import StepResult
from lookahead.drafting.auto.sources import TokenPaths
from lookahead.drafting.text_only import build_text_drafter
from lookahead.errors import InvalidArgumentError
from probe import FAMILIES, Probe, Turns, Unit, Way, option, random_model

LEAST = 0.2
"""Least probability of a token that is drafted from text alone."""

TASKS = ("edits", "traces", "talks", "extracts")


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
    methods: tuple[str, ...] = option((), "of those above, by the names that rows have; all if not given")


class Permits:
    """A source that drafts nothing, and knows of each draft what the processor forbids, as prompt lookup does."""

    name = "forced text"

    def __init__(self, case: Case) -> None:
        self._answer = list(case.answer)
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


def ways_of(loaded: BenchModel, nodes: int) -> dict[str, Way]:
    """The methods by name. Those of this library have a model object of their own, with nothing learned elsewhere."""

    def drafts(config: LookaheadConfig) -> Way:
        model = sharing_weights(loaded.model)
        return lambda case, _: generate(model, case, config)

    def lookup(case: Case, _: int, answers: bool = True) -> Counts:
        with ForwardCounter(loaded.model, len(case.prompt)) as counter:
            processors = LogitsProcessorList([Forced(case, len(case.prompt), answers)])
            counts = generate(loaded.model, case, None, prompt_lookup_num_tokens=10, logits_processor=processors)
        sent, lengths = counter.steps(len(counts.tokens))
        return replace(counts, steps=len(lengths), nodes=sum(sent))

    def permitted(model: Any, case: Case, _: int) -> Counts:
        return generate(model, case, LookaheadConfig(sources=(partial(Permits, case),)))

    def predicted(model: Any, case: Case, _: int) -> Counts | None:
        expected = torch.tensor(case.expected)
        return generate(model, case, LookaheadConfig(), prediction=expected) if case.expected else None

    return {
        "transformers": lambda case, _: generate(loaded.model, case, None),
        "prompt lookup": lookup,
        "prompt lookup, unasked": partial(lookup, answers=False),
        f"context_matches, {nodes} nodes": drafts(LookaheadConfig(preset="context_matches", step_budget=nodes)),
        f"auto, {nodes} nodes": drafts(LookaheadConfig(step_budget=nodes)),
        f"text only, {nodes} nodes": drafts(LookaheadConfig(drafter=partial(build_text_drafter, nodes, least=LEAST))),
        "auto": drafts(LookaheadConfig()),
        "auto, told": partial(permitted, sharing_weights(loaded.model)),
        "auto, predicted text": partial(predicted, sharing_weights(loaded.model)),
    }


def cases_of(options: Options, tokenizer: Any) -> Iterator[tuple[str, Case]]:
    """Each task with its cases."""
    counts = dict(
        zip(TASKS, (options.edit_count, options.trace_count, options.talk_count, options.extract_count), strict=True)
    )
    for task in options.tasks:
        read = read_extracts if task == "extracts" else read_cases
        for case in read(Path(getattr(options, task)), encoder_of(tokenizer), counts[task]):
            prompt, answer = case.prompt[-options.max_prompt_tokens :], case.answer[: options.max_new_tokens]
            yield task, replace(case, prompt=prompt, answer=answer)


def probe(options: Options) -> Probe:
    """The units: each case.

    Raises:
        InvalidArgumentError: A method that is asked for does not exist.
    """
    loaded = random_model(options.family, options.layers, options.hidden_size, options.dtype)
    ways = ways_of(loaded, options.nodes)
    unknown = [name for name in options.methods if name not in ways]
    if unknown:
        raise InvalidArgumentError(f"--methods {unknown[0]!r} is none of {', '.join(map(repr, ways))}")
    turns = Turns({name: ways[name] for name in options.methods or ways})

    def measure(task: str, case: Case) -> Iterator[Row]:
        return ({"task": task, **row} for row in turns.rows(case))

    cases = cases_of(options, loaded.tokenizer)
    units = [Unit(f"{task}, {case.id}", partial(measure, task, case)) for task, case in cases]
    lengths = {"max_prompt_tokens": options.max_prompt_tokens, "max_new_tokens": options.max_new_tokens}
    return Probe(units, {"model": loaded.settings(), **lengths, "methods": list(options.methods or ways)})
