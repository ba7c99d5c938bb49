"""Measure texts that the model would not write by itself: a logits processor leaves only the recorded token.

Recorded answers, edits of code and steps of agents, are written by a Llama of random weights, as a grammar or a tool's
protocol makes a model write what it would not choose. What is drafted from the model's own predictions is wrong there;
what is drafted from the text is not. For each case the methods take turns: plain `model.generate`, its prompt lookup
(ten tokens at most: those that the processor, asked beforehand, allows), `context_matches` and `auto` at a number of
nodes, and `auto` with as many as pay. Every text is compared with the recorded one. Times are CPU times of a call, the
pass over the prompt included.

S hardly depends on the size of the model: for that alone, `--layers 1 --hidden-size 64` will do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from lookahead import LookaheadConfig
from lookahead.bench.forward_counter import ForwardCounter
from lookahead.bench.models import BenchModel, load, sharing_weights
from lookahead.bench.rows import Row
from lookahead.bench.suite import ModelSpec
from lookahead.errors import InvalidArgumentError
from probe import RANDOM_CONFIG, Probe, Unit, generate, option

PLAIN, LOOKUP = "transformers", "prompt lookup"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    edits: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction`, `input` and `output`")
    traces: str = option("../shared/data/agent_traces.jsonl", "JSON lines with `id`, `prompt` and `output`")
    edit_count: int = option(20, "take the first so many edits")
    trace_count: int = option(10, "take the first so many steps of agents")
    layers: int = option(32, "layers of the model")
    hidden_size: int = option(1024, "its hidden size; 32 layers of 1024 make 461 million parameters")
    dtype: str = option("bfloat16", "number type of the weights")
    max_prompt_tokens: int = option(1536, "take only so many tokens of the end of a prompt")
    max_new_tokens: int = option(256, "take only so many tokens of the beginning of an answer")
    nodes: int = option(16, "nodes of a step")
    methods: tuple[str, ...] = option((), "of those above, by the names that rows have; all if not given")
    repeats: int = option(1, "runs of each method on each case")


@dataclass(frozen=True)
class Case:
    """A prompt and the answer to be written, in tokens."""

    id: str
    prompt: list[int]
    answer: list[int]


class Forced(LogitsProcessor):
    """Leaves only the recorded token at each place after the prompt."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """See transformers; input_ids: `[1, S]`, scores: `[1, vocabulary]`."""
        place = input_ids.shape[1] - len(self._case.prompt)
        if place >= len(self._case.answer):  # prompt lookup asks for more than it may send
            return scores  # type: ignore[return-value]
        token = self._case.answer[place]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, token] = 0
        return forced  # type: ignore[return-value]


def methods_of(options: Options) -> dict[str, LookaheadConfig | None]:
    """The methods by name; `None` for those of transformers.

    Raises:
        InvalidArgumentError: A method that is asked for does not exist.
    """
    nodes = options.nodes
    known: dict[str, LookaheadConfig | None] = {
        PLAIN: None,
        LOOKUP: None,
        f"context_matches, {nodes} nodes": LookaheadConfig(preset="context_matches", step_budget=nodes),
        f"auto, {nodes} nodes": LookaheadConfig(step_budget=nodes),
        "auto": LookaheadConfig(),
    }
    unknown = [name for name in options.methods if name not in known]
    if unknown:
        raise InvalidArgumentError(f"--methods {unknown[0]!r} is none of {', '.join(map(repr, known))}")
    return {name: known[name] for name in options.methods or known}


def read_cases(path: Path, tokenizer: PreTrainedTokenizerBase, count: int, options: Options) -> list[Case]:
    """The first cases of a file; an edit's prompt is its instruction and the code to be changed.

    Raises:
        InvalidArgumentError: A line holds something else.
    """
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        if "id" not in row or "output" not in row or not ("prompt" in row or {"instruction", "input"} <= row.keys()):
            raise InvalidArgumentError(f"{path.name} needs `id`, `output`, and `prompt` or `instruction` and `input`")
        prompt = row["prompt"] if "prompt" in row else f"{row['instruction']}\n\n{row['input']}\n\n"
        text, answer = tokenizer(prompt).input_ids, tokenizer(row["output"]).input_ids
        cases.append(Case(str(row["id"]), text[-options.max_prompt_tokens :], answer[: options.max_new_tokens]))
    return cases


class Bench:
    """The methods on one model, each with a model object of its own."""

    def __init__(self, loaded: BenchModel, methods: Mapping[str, LookaheadConfig | None], repeats: int) -> None:
        self._methods = methods
        self._models = {name: loaded.model if config is None else None for name, config in methods.items()}
        self._loaded = loaded
        self._repeats = repeats

    def rows(self, task: str, case: Case) -> Iterator[Row]:
        """A row for each method and repeat."""
        for repeat in range(self._repeats):
            for name in self._methods:
                output, nodes, lengths, seconds = self._run(name, case)
                row: Row = {"kind": "run", "task": task, "id": case.id, "method": name, "repeat": repeat}
                row |= {"prompt_tokens": len(case.prompt), "tokens": len(output), "steps": len(lengths)}
                row |= {"nodes": sum(nodes), "cpu_seconds": seconds, "equal": output == case.answer}
                if not row["equal"]:
                    row["error"] = f"{name} on {case.id}: another text than the recorded one"
                yield row

    def _run(self, name: str, case: Case) -> tuple[list[int], list[int], list[int], float]:
        config = self._methods[name]
        if self._models[name] is None:  # what is done once for a model is not measured
            self._models[name] = sharing_weights(self._loaded.model)
            short = Case(case.id, case.prompt, case.answer[:WARM_UP_TOKENS])
            self._call(name, short)
        if config is not None or name == PLAIN:
            return self._call(name, case)
        with ForwardCounter(self._loaded.model, len(case.prompt)) as counter:
            output, _, _, seconds = self._call(name, case)
        return output, *counter.steps(len(output)), seconds

    def _call(self, name: str, case: Case) -> tuple[list[int], list[int], list[int], float]:
        config, ids = self._methods[name], torch.tensor([case.prompt])
        lookup = {"prompt_lookup_num_tokens": 10} if name == LOOKUP else {}
        processors = LogitsProcessorList([Forced(case)])
        begin = process_time()
        text, output = generate(
            self._models[name], ids, config, max_new_tokens=len(case.answer), logits_processor=processors, **lookup
        )
        seconds = process_time() - begin
        if config is None:
            return text, [1] * len(text), [1] * len(text), seconds
        return text, output.statistics.nodes_per_step, output.statistics.accepted_lengths, seconds


def probe(options: Options) -> Probe:
    """The units: each case."""
    sizes = {"num_hidden_layers": options.layers, "hidden_size": options.hidden_size}
    spec = ModelSpec("random Llama", None, random={**RANDOM_CONFIG, **sizes}, dtype=options.dtype)
    loaded = load(spec, torch.device("cpu"))
    bench = Bench(loaded, methods_of(options), options.repeats)
    tasks: Sequence[tuple[str, str, int]] = (
        ("edits", options.edits, options.edit_count),
        ("traces", options.traces, options.trace_count),
    )
    units = []
    for task, path, count in tasks:
        for case in read_cases(Path(path), loaded.tokenizer, count, options):
            units.append(Unit(f"{task}, {case.id}", partial(bench.rows, task, case)))
    lengths = {"max_prompt_tokens": options.max_prompt_tokens, "max_new_tokens": options.max_new_tokens}
    return Probe(units, {"model": loaded.settings(), **lengths, "methods": list(methods_of(options))})
