"""Lines of cases, which `worth` compares between two commits, and `standard` between settings.

As a program it measures cases for `worth` with the library in `PYTHONPATH`. It reads one JSON object per line and
answers each with one: `{"line": ..., "turn": ..., "case": ...}` runs a case, `{"begin": ..., "turn": ...}` begins a
turn of a line. Cases use functions of all versions of the library: `generate`, `Engine`, vLLM's proposer, and text
drafters. Their prompts were not used to fit the drafters' weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import lookahead
from cases import Case, Counts, Encode, encoder_of, generate, now, read_cases
from lookahead import Engine, LookaheadConfig
from lookahead.drafting import AutoDrafter, DraftMemory, compile_loops
from lookahead.integrations.vllm import LookaheadProposer
from models import load_model, load_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from playback import VLLMLoop, play_text, vllm_config

BEGINNINGS = ("Once upon a time, there was a", "One day, a", "In a small house lived a", "Long ago, in a forest, a")
WHO = ("little bear", "brave girl", "grumpy cat", "boy named Ben", "tiny bird", "kind queen", "lazy dog", "red truck")
"""Parts of further prompts for the story model."""

FORCED = ("code_edits", "agent_traces", "answers")

Config = LookaheadConfig | None
Run = Callable[[Config, Case, int], Counts]
"""Function that decodes a case with a configuration (`None` for transformers) and the number of the turn as seed."""


@dataclass
class Line:
    """Cases that are compared under one name.

    Attributes:
        name: Name of the line.
        cases: All cases.
        per_turn: Number of cases in a turn; turns continue through the cases, and wrap around at the end.
        run: Function that measures a case.
        config: Configuration for `worth`.
        begin: Function that is called at the start of a turn, to reset memories.
        repeats: Whether a repeated case gives a new result: another time or other draws.
    """

    name: str
    cases: Sequence[Case]
    per_turn: int
    run: Run
    config: Config = field(default_factory=lambda: LookaheadConfig(memory="request"))
    begin: Callable[[], Any] = lambda: None
    repeats: bool = False

    def of_turn(self, turn: int) -> list[Case]:
        """Cases of a turn; without `repeats`, none after all have been measured."""
        places = range(turn * self.per_turn, (turn + 1) * self.per_turn)
        size = len(self.cases)
        return [self.cases[place % size] for place in places if place < size or self.repeats]


class Models:
    """Models, tokenizers and cases, made on first use.

    Args:
        shared: Folder of data and models.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared

    @cache  # noqa: B019, the object lives as long as the process
    def load(self, name: str) -> Any:
        """Load `demo`, `demo bfloat16`, `stories`, or one of `RANDOM`, without an end-of-sequence token."""
        name, _, dtype = name.partition(" ")
        return load_model(self._name(name), dtype or "float32", ends=False)

    def reload(self, name: str) -> None:
        """Load a model again, without the memory that the library keeps for the old object."""
        type(self).load.cache_clear()
        self.load(name)

    @cache  # noqa: B019
    def task(self, name: str) -> list[Case]:
        """Prompts of a task, cut to their last 320 tokens."""
        return read_cases(self._shared / f"data/{name}.jsonl", self._encode("demo"), prompt=320)

    @cache  # noqa: B019
    def prompts(self) -> list[Case]:
        """Prompts of four tasks, interleaved: code, classes, questions and instructions."""
        tasks = self.task("humaneval")[32:], self.task("classeval"), self.task("gsm8k"), self.task("spec_bench")[::3]
        return [case for cases in itertools.zip_longest(*tasks) for case in cases if case is not None]

    @cache  # noqa: B019
    def stories(self) -> list[Case]:
        """Prompts for the story model."""
        encode = self._encode("stories")
        more = [Case(f"more/{who}/{first}", encode(f"{first} {who}")[-64:]) for who in WHO for first in BEGINNINGS]
        return read_cases(self._shared / "data/stories.jsonl", encode, prompt=64) + more

    @cache  # noqa: B019
    def recorded(self, name: str) -> list[Case]:
        """Every second recording of a file; the others were used to fit the drafters' weights."""
        cases = read_cases(self._shared / f"data/{name}.jsonl", self._encode("demo"), prompt=1024, answer=192)
        return [case for case in cases[1::2] if len(case.answer) > 16]

    @cache  # noqa: B019
    def extracts(self) -> list[Case]:
        """Long prompts of recordings; the answer is every third block of 64 tokens."""
        cases = [case for file in FORCED for case in self.recorded(file) if len(case.prompt) >= 384]
        return [
            replace(
                case, answer=[token for at in range(0, len(case.prompt), 192) for token in case.prompt[at : at + 64]]
            )
            for case in cases
        ]

    def _name(self, name: str) -> str:
        return str(self._shared / "models/stories260k") if name == "stories" else name

    @cache  # noqa: B019
    def _encode(self, name: str) -> Encode:
        return encoder_of(load_tokenizer(self._name(name)))


class Runner:
    """Functions that measure a case; a line binds their first arguments."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._text_memory: Any = None

    def texts(
        self, name: str, new: int, config: Config, case: Case, turn: int, heat: float = 0.0, expects: bool = False
    ) -> Counts:
        """Run `generate`, forced to the answer of the case if any; `expects` passes `case.expected` as `prediction`."""
        more: dict[str, Any] = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {}
        if not case.answer:
            more["max_new_tokens"] = new
        if expects:
            more["prediction"] = torch.tensor(case.expected)
        torch.manual_seed(1000 * turn + len(case.prompt))
        counts = generate(self._models.load(name), case, config, **more)
        assert not case.answer or counts.tokens == list(case.answer)
        return counts

    def serve(self, load: int, config: Config, case: Case, turn: int) -> Counts:
        """Run an engine with `load` rows; the first request is the case, and every second one is sampled.

        At most `load` or 16 further requests wait at first. Without waiting requests the last steps would have few
        rows, which cost more per token.
        """
        if config is None:
            config = LookaheadConfig(step_budget=1)  # no room for drafts
        elif config.preset == "auto" and config.step_budget is not None:
            config = replace(config, step_budget=load * config.step_budget)  # the line's nodes are per request
        cases = self._models.prompts()
        first = cases.index(case)
        begin = now("cpu")
        engine = Engine(self._models.load("demo"), config, max_rows=load)
        handles = []
        for seed in range(load + min(load, 16)):
            prompt = cases[(first + seed) % len(cases)].prompt
            handles.append(engine.submit(prompt, seed=seed, max_new_tokens=64, do_sample=seed % 2 == 1))
        while engine.step():
            pass
        seconds = now("cpu") - begin
        return Counts([token for handle in handles for token in handle.tokens], engine.statistics.rows, 0, seconds)

    def replay(
        self, nodes: int, chains: bool, across: bool, config: Config, case: Case, turn: int, is_certain: bool = False
    ) -> Counts:
        """Draft for a recorded answer from text only; `across` also uses earlier requests of the turn.

        If `is_certain`, also draft from predictions of the answer with probability 1.
        """
        if across and self._text_memory is None:
            self._text_memory = DraftMemory.of_texts()
        begin = now("cpu")
        memory = DraftMemory() if is_certain else DraftMemory.of_texts()
        drafter = AutoDrafter(self._text_memory if across else memory, nodes, chains=chains)
        nodes_per_step = play_text(case.prompt, case.answer, drafter).nodes_per_step
        return Counts(case.answer, len(nodes_per_step), sum(nodes_per_step), now("cpu") - begin)

    def forget(self) -> None:
        """Reset the memory of earlier requests."""
        self._text_memory = None

    def propose(self, drafted: int, config: Config, case: Case, turn: int) -> Counts:
        """Run vLLM's proposer: on a recorded answer with its tokens only, else with logits of the story model."""
        settings, answer, model = {"learn": "tokens"}, case.answer, None
        if not answer:
            settings, model = {}, self._models.load("stories")
            answer = list(generate(model, case, None, max_new_tokens=128).tokens)
        head = SimpleNamespace(compute_logits=lambda logits: logits)  # the part of vLLM's model that the proposer uses
        room = len(case.prompt) + len(answer) + drafted + 1
        proposer = LookaheadProposer(vllm_config(4096, drafted, 1, room, **settings))
        proposer.load_model(head if model else None)

        def read(texts: list[list[int]], drafts: list[list[int]]) -> None:
            with torch.inference_mode():
                logits = model(torch.tensor([texts[0] + drafts[0]])).logits[0]
            head.compute_logits(logits[len(texts[0]) - 1 :].clone())

        begin = now("cpu")
        loop = VLLMLoop(proposer, room, read if model else None)
        loop.run([case.prompt], [answer])
        return Counts(answer, len(loop.steps), 0, now("cpu") - begin)


def quick_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """Yield lines for S at fixed numbers of nodes."""
    demo, stories = models.prompts(), models.stories()
    for nodes in (16, 64):
        shared = LookaheadConfig(step_budget=nodes)
        fixed = replace(shared, memory="request")
        yield Line(f"demo, {nodes} nodes", demo, 24, partial(runner.texts, "demo", 128), fixed)
        yield Line(f"stories, {nodes} nodes", stories, 22, partial(runner.texts, "stories", 200), fixed)
        # the memory belongs to the model object, so each turn loads the model again
        forget, name = partial(models.reload, "stories"), f"stories, memory kept, {nodes} nodes"
        yield Line(name, stories, 22, partial(runner.texts, "stories", 200), shared, forget)
        for file in FORCED:
            yield Line(
                f"forced {file}, {nodes} nodes", models.recorded(file), 48, partial(runner.texts, "tiny", 0), fixed
            )
    for nodes in (4, 8, 16, 64):
        fixed = LookaheadConfig(step_budget=nodes, memory="request")
        yield Line(
            f"sampled, {nodes} nodes", demo, 14, partial(runner.texts, "demo", 96, heat=0.8), fixed, repeats=True
        )
        run = partial(runner.texts, "stories", 200, heat=1.0)
        yield Line(f"stories sampled, {nodes} nodes", stories, 22, run, fixed, repeats=True)
    fixed = LookaheadConfig(step_budget=16, memory="request")
    run = partial(runner.texts, "tiny", 0, expects=True)
    yield Line("forced code_edits, predicted, 16 nodes", models.recorded("code_edits"), 48, run, fixed)
    yield from replay_lines(models, runner)
    yield Line("vLLM, logits, 8 drafted", stories, 11, partial(runner.propose, 8))


def replay_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """Yield lines for drafts from text only, without a model."""
    cases = [case for file in FORCED for case in models.recorded(file)]
    for nodes, chains in ((16, True), (16, False), (64, False)):
        name = f"replay, {'chain' if chains else 'tree'} of {nodes}"
        yield Line(name, cases, len(cases), partial(runner.replay, nodes, chains, False))
    for nodes in (16, 64):
        run = partial(runner.replay, nodes, False, False, is_certain=True)
        yield Line(f"replay, certain predictions, tree of {nodes}", cases, len(cases), run)
        extracts = models.extracts()
        yield Line(f"replay of extracts, certain predictions, tree of {nodes}", extracts, len(extracts), run)
    across = partial(runner.replay, 32, False, True)
    yield Line("replay, tree of 32, memory kept", cases, len(cases), across, begin=runner.forget)
    yield Line("vLLM, tokens, 8 drafted", cases, len(cases), partial(runner.propose, 8))


def text_lines(models: Models, runner: Runner, count: int) -> Iterator[Line]:
    """Yield lines for common uses of models, with `count` cases each, for `standard` and the times of `worth`."""
    of_all_kinds = slice(3, None, 20)
    parts = {"humaneval": slice(-count, None), "gsm8k": slice(-count, None), "spec_bench": of_all_kinds}
    for task, part in parts.items():
        cases = models.task(task)[part][:count]
        for model in ("demo", "demo bfloat16"):
            yield Line(f"{task}, {model}", cases, count, partial(runner.texts, model, 128))
        yield Line(f"{task} sampled at 0.8, demo", cases, count, partial(runner.texts, "demo", 96, heat=0.8))
    for heat in (0.0, 0.8, 1.0):
        name = f"stories{f' sampled at {heat:g}' if heat else ''}"
        yield Line(name, models.stories()[:count], count, partial(runner.texts, "stories", 200, heat=heat))
    mixed = models.prompts()[:count]
    yield Line("hard", mixed, count, partial(runner.texts, "hard", 192, heat=1.0))
    short = models.prompts()[: 4 * count]  # a single short call has few tokens
    yield Line("short calls", short, count, partial(runner.texts, "hard", 16, heat=1.0))
    for file in FORCED[:2]:
        for model in ("forced", "hybrid"):
            yield Line(f"forced {file}, {model}", models.recorded(file)[:count], count, partial(runner.texts, model, 0))
    for load in (1, 4, 16, 64):
        yield Line(f"Engine, {load} requests", mixed[: max(count // load, 4)], count, partial(runner.serve, load))


def full_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """Yield lines for S and time, with the default number of nodes and with fixed numbers."""
    fixed, shared = LookaheadConfig(step_budget=16, memory="request"), LookaheadConfig()
    for line in text_lines(models, runner, 12):
        yield line
        if line.name in ("humaneval, demo", "stories", "forced code_edits, forced"):
            yield replace(line, name=f"{line.name}, 16 nodes", config=fixed)
    demo, forget = models.prompts(), partial(models.reload, "demo")
    yield Line("demo, memory kept", demo, 16, partial(runner.texts, "demo", 128), shared, forget)
    yield from replay_lines(models, runner)


def main() -> None:
    """Answer requests until the input ends."""
    compile_loops()  # before any case is timed
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--src", type=Path, required=True, help="folder that the library must be imported from")
    options = parser.parse_args()
    assert Path(lookahead.__file__).is_relative_to(options.src), f"{lookahead.__file__} is not from {options.src}"
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    models = Models(options.shared)
    lines = {line.name: line for line in (quick_lines if options.quick else full_lines)(models, Runner(models))}
    if not options.quick:  # the same cases in each turn, to repeat their times
        lines = {name: replace(line, repeats=True, cases=line.cases[: line.per_turn]) for name, line in lines.items()}
    print(json.dumps(list(lines)), file=answers, flush=True)
    for request in map(json.loads, sys.stdin):
        line, turn = lines[request.get("line", request.get("begin"))], request["turn"]
        cases = line.of_turn(turn)
        if "begin" in request:
            if cases:
                line.begin()
                line.run(line.config, cases[-1], turn)  # warm up
                line.begin()
            answer: Any = [case.id for case in cases]
        else:
            counts = line.run(line.config, cases[request["case"]], turn)
            answer = {"tokens": len(counts.tokens), "steps": counts.steps, "seconds": counts.seconds}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
