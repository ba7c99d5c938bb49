"""Lines of cases: what `worth` compares between two commits, and `standard` between settings.

Run as a program it measures cases for `worth` with the library of the checkout that `PYTHONPATH` names: it reads a JSON
object a line from its input, and answers with one. `{"line": ..., "turn": ..., "case": ...}` runs a case,
`{"begin": ..., "turn": ...}` begins a turn of a line. Cases go through what any version of the library has: `generate`,
`Engine`, vLLM's proposer, and the drafters of text alone. Prompts are others than those that weights were fitted to.
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
"""More prompts for the model of stories than the file has."""

FORCED = ("code_edits", "agent_traces", "answers")

Config = LookaheadConfig | None
Run = Callable[[Config, Case, int], Counts]
"""Decodes a case as configured, by transformers without a configuration, in a turn, whose number seeds the draws."""


@dataclass
class Line:
    """Cases that are compared under one name.

    Attributes:
        name: Its name.
        cases: All there are.
        per_turn: How many of them a turn has; each turn goes on behind the one before, and begins anew at the end.
        run: Measures a case.
        config: How `worth` decodes them.
        begin: Called when a turn begins: forgets what was learned.
        repeats: Whether measuring a case once more gives something new: times, draws.
    """

    name: str
    cases: Sequence[Case]
    per_turn: int
    run: Run
    config: Config = field(default_factory=LookaheadConfig)
    begin: Callable[[], Any] = lambda: None
    repeats: bool = False

    def of_turn(self, turn: int) -> list[Case]:
        """The cases of a turn; none where all were measured and nothing new could come of them."""
        places = range(turn * self.per_turn, (turn + 1) * self.per_turn)
        size = len(self.cases)
        return [self.cases[place % size] for place in places if place < size or self.repeats]


class Models:
    """Models, tokenizers and cases, made when they are first wanted.

    Args:
        shared: Folder of data and models.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared

    @cache  # noqa: B019, it lives as long as the process
    def load(self, name: str) -> Any:
        """`demo`, `demo bfloat16`, `stories`, or one of `RANDOM`; no token ends their texts."""
        name, _, dtype = name.partition(" ")
        return load_model(self._name(name), dtype or "float32", ends=False)

    def reload(self, name: str) -> None:
        """Load a model anew: what the library keeps for the old one goes with it."""
        type(self).load.cache_clear()
        self.load(name)

    @cache  # noqa: B019
    def task(self, name: str) -> list[Case]:
        """All prompts of a task: the last 320 tokens of each."""
        return read_cases(self._shared / f"data/{name}.jsonl", self._encode("demo"), prompt=320)

    @cache  # noqa: B019
    def prompts(self) -> list[Case]:
        """Code, classes, questions and instructions in turns."""
        tasks = self.task("humaneval")[32:], self.task("classeval"), self.task("gsm8k"), self.task("spec_bench")[::3]
        return [case for cases in itertools.zip_longest(*tasks) for case in cases if case is not None]

    @cache  # noqa: B019
    def stories(self) -> list[Case]:
        """Beginnings of stories."""
        encode = self._encode("stories")
        more = [Case(f"more/{who}/{first}", encode(f"{first} {who}")[-64:]) for who in WHO for first in BEGINNINGS]
        return read_cases(self._shared / "data/stories.jsonl", encode, prompt=64) + more

    @cache  # noqa: B019
    def recorded(self, name: str) -> list[Case]:
        """Every second recording of a file: weights were fitted to the others."""
        cases = read_cases(self._shared / f"data/{name}.jsonl", self._encode("demo"), prompt=1024, answer=192)
        return [case for case in cases[1::2] if len(case.answer) > 16]

    def _name(self, name: str) -> str:
        return str(self._shared / "models/stories260k") if name == "stories" else name

    @cache  # noqa: B019
    def _encode(self, name: str) -> Encode:
        return encoder_of(load_tokenizer(self._name(name)))


class Runner:
    """Ways of measuring a case; a line fixes their first arguments."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._text_memory: Any = None

    def texts(
        self, name: str, new: int, config: Config, case: Case, turn: int, heat: float = 0.0, expects: bool = False
    ) -> Counts:
        """`generate` of a model, upon which answers are forced; `expects`: what is expected is the `prediction`."""
        more: dict[str, Any] = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {}
        if not case.answer:
            more["max_new_tokens"] = new
        if expects:
            more["prediction"] = torch.tensor(case.expected)
        torch.manual_seed(1000 * turn + len(case.prompt))
        counts = self.generate(self._models.load(name), case, config, **more)
        assert not case.answer or counts.tokens == list(case.answer)
        return counts

    def generate(self, model: Any, case: Case, config: Config, **more: Any) -> Counts:
        """`generate` of a case."""
        return generate(model, case, config, **more)

    def serve(self, load: int, config: Config, case: Case, turn: int) -> Counts:
        """An engine of so many requests at once, the first of which is the case; every second one is sampled.

        As many wait at first, 16 at most: where none do, steps of few rows cost each of them more, and saved tokens
        bring less.
        """
        if config is None:
            config = LookaheadConfig(step_budget=1)  # no room for drafts
        elif config.preset == "auto" and config.step_budget is not None:
            config = replace(config, step_budget=load * config.step_budget)  # nodes are those of each request
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

    def drafting(self, rows: int, config: Config, case: Case, turn: int) -> Counts:
        """Seconds that steps book as drafting, of a batch of texts: all before a pass and after its tokens."""
        prompts = [case.prompt[place:] + case.prompt[:place] for place in range(0, 8 * rows, 8)]  # all are different
        ids = torch.tensor(prompts)
        arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 128, "do_sample": False}
        model = self._models.load("demo")
        output = lookahead.generate(model, ids, lookahead_config=config, return_dict_in_generate=True, **arguments)
        found = output.statistics
        tokens = output.sequences[:, ids.shape[1] :].flatten().tolist()
        return Counts(tokens, found.steps, sum(found.nodes_per_step), found.seconds.draft)

    def replay(self, nodes: int, chains: bool, across: bool, config: Config, case: Case, turn: int) -> Counts:
        """Drafts from texts alone for a recorded answer; `across`: also from the requests before it in this turn."""
        if across and self._text_memory is None:
            self._text_memory = DraftMemory.of_texts()
        begin = now("cpu")
        drafter = AutoDrafter(self._text_memory if across else DraftMemory.of_texts(), nodes, chains=chains)
        sent = play_text(case.prompt, case.answer, drafter).nodes_per_step
        return Counts(case.answer, len(sent), sum(sent), now("cpu") - begin)

    def forget(self) -> None:
        """Forget texts of other requests."""
        self._text_memory = None

    def propose(self, drafted: int, config: Config, case: Case, turn: int) -> Counts:
        """vLLM's proposer: for a recorded answer from its tokens, else with the logits of the model of stories."""
        settings, answer, model = {"learn": "tokens"}, case.answer, None
        if not answer:
            settings, model = {}, self._models.load("stories")
            answer = list(generate(model, case, None, max_new_tokens=128).tokens)
        head = SimpleNamespace(compute_logits=lambda logits: logits)  # what the proposer reads of vLLM's model
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
    """S at fixed numbers of nodes."""
    demo, stories = models.prompts(), models.stories()
    for nodes in (16, 64):
        fixed, kept = LookaheadConfig(step_budget=nodes), LookaheadConfig(step_budget=nodes, memory="process")
        yield Line(f"demo, {nodes} nodes", demo, 24, partial(runner.texts, "demo", 128), fixed)
        yield Line(f"stories, {nodes} nodes", stories, 22, partial(runner.texts, "stories", 200), fixed)
        # the memory is the model's, so the turn begins with a copy of the model
        forget, name = partial(models.reload, "stories"), f"stories, memory kept, {nodes} nodes"
        yield Line(name, stories, 22, partial(runner.texts, "stories", 200), kept, forget)
        for file in FORCED:
            yield Line(
                f"forced {file}, {nodes} nodes", models.recorded(file), 48, partial(runner.texts, "tiny", 0), fixed
            )
    for nodes in (4, 8, 16, 64):
        fixed = LookaheadConfig(step_budget=nodes)
        yield Line(
            f"sampled, {nodes} nodes", demo, 14, partial(runner.texts, "demo", 96, heat=0.8), fixed, repeats=True
        )
        run = partial(runner.texts, "stories", 200, heat=1.0)
        yield Line(f"stories sampled, {nodes} nodes", stories, 22, run, fixed, repeats=True)
    run, fixed = partial(runner.texts, "tiny", 0, expects=True), LookaheadConfig(step_budget=16)
    yield Line("forced code_edits, predicted, 16 nodes", models.recorded("code_edits"), 48, run, fixed)
    yield from replay_lines(models, runner)
    yield Line("vLLM, logits, 8 drafted", stories, 11, partial(runner.propose, 8))


def replay_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """Drafts from texts alone, without a model."""
    cases = [case for file in FORCED for case in models.recorded(file)]
    if hasattr(DraftMemory, "of_texts"):
        for nodes, chains in ((16, True), (16, False), (64, False)):
            name = f"replay, {'chain' if chains else 'tree'} of {nodes}"
            yield Line(name, cases, len(cases), partial(runner.replay, nodes, chains, False))
        across = partial(runner.replay, 32, False, True)
        yield Line("replay, tree of 32, memory kept", cases, len(cases), across, begin=runner.forget)
    yield Line("vLLM, tokens, 8 drafted", cases, len(cases), partial(runner.propose, 8))


def text_lines(models: Models, runner: Runner, count: int) -> Iterator[Line]:
    """What people do with a model, each of so many cases: what `standard` compares settings on, and `worth` times."""
    for task in ("humaneval", "gsm8k"):
        cases = models.task(task)[-count:]
        for model in ("demo", "demo bfloat16"):
            yield Line(f"{task}, {model}", cases, count, partial(runner.texts, model, 128))
        yield Line(f"{task} sampled at 0.8, demo", cases, count, partial(runner.texts, "demo", 96, heat=0.8))
    for heat in (0.0, 0.8, 1.0):
        name = f"stories{f' sampled at {heat:g}' if heat else ''}"
        yield Line(name, models.stories()[:count], count, partial(runner.texts, "stories", 200, heat=heat))
    mixed = models.prompts()[:count]
    yield Line("hard", mixed, count, partial(runner.texts, "hard", 192, heat=1.0))
    short = models.prompts()[: 4 * count]  # one of them says little
    yield Line("short calls", short, count, partial(runner.texts, "hard", 16, heat=1.0))
    for file in FORCED[:2]:
        for model in ("forced", "hybrid"):
            yield Line(f"forced {file}, {model}", models.recorded(file)[:count], count, partial(runner.texts, model, 0))
    for load in (1, 4, 16, 64):
        yield Line(f"Engine, {load} requests", mixed[: max(count // load, 4)], count, partial(runner.serve, load))


def full_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """S and time, with as many nodes as pay and at fixed numbers."""
    fixed, kept = LookaheadConfig(step_budget=16), LookaheadConfig(memory="process")
    for line in text_lines(models, runner, 12):
        yield line
        if line.name in ("humaneval, demo", "stories", "forced code_edits, forced"):
            yield replace(line, name=f"{line.name}, 16 nodes", config=fixed)
    demo, forget = models.prompts(), partial(models.reload, "demo")
    yield Line("demo, memory kept", demo, 16, partial(runner.texts, "demo", 128), kept, forget)
    long = [case for case in demo if len(case.prompt) > 200]
    for rows, nodes in ((1, 16), (16, 4)):
        config, name = LookaheadConfig(step_budget=nodes), f"drafting alone, {rows} texts of {nodes} nodes"
        yield Line(name, long, 6 if rows == 1 else 2, partial(runner.drafting, rows), config)
    yield from replay_lines(models, runner)


def main() -> None:
    """Answer requests until the input ends."""
    compile_loops()  # no unit is to wait for them, nor to go without
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--src", type=Path, required=True, help="where the library has to come from")
    options = parser.parse_args()
    assert Path(lookahead.__file__).is_relative_to(options.src), f"{lookahead.__file__} is not from {options.src}"
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    models = Models(options.shared)
    lines = {line.name: line for line in (quick_lines if options.quick else full_lines)(models, Runner(models))}
    if not options.quick:  # the same cases in each turn: times are never the same
        lines = {name: replace(line, repeats=True, cases=line.cases[: line.per_turn]) for name, line in lines.items()}
    print(json.dumps(list(lines)), file=answers, flush=True)
    for request in map(json.loads, sys.stdin):
        line, turn = lines[request.get("line", request.get("begin"))], request["turn"]
        cases = line.of_turn(turn)
        if "begin" in request:
            if cases:
                line.begin()
                line.run(line.config, cases[-1], turn)  # what is made once for a model is not measured
                line.begin()
            answer: Any = [case.id for case in cases]
        else:
            counts = line.run(line.config, cases[request["case"]], turn)
            answer = {"tokens": len(counts.tokens), "steps": counts.steps, "seconds": counts.seconds}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
