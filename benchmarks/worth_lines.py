"""What `worth.py` compares: lines of cases, measured in a process of one checkout that answers requests.

It runs with `PYTHONPATH` at the checkout's `src`, reads a JSON object a line from its input, and answers with one:
`{"line": ..., "turn": ..., "case": ...}` runs a case, `{"begin": ..., "turn": ...}` begins a turn of a line. Cases
go through what any version of the library has: `generate`, `Engine`, vLLM's proposer, and the text-only drafters.
Prompts are others than those that weights were fitted to.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

import lookahead
from lookahead import Engine, LookaheadConfig
from lookahead.demo import demo_model_path
from lookahead.drafting.text_only import build_text_chain_drafter, build_text_drafter
from lookahead.integrations.vllm import LookaheadProposer

try:
    from lookahead.core.step import Batch, decode
except ModuleNotFoundError:  # the name that it had in 0.1
    from lookahead.core.decoder import Batch, decode

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from playback import PlayedBackend, PlayedRow, TextScript, VLLMLoop, played_sequence, vllm_config

ROOM = 512
"""Tokens of a text of the small models at most."""

BEGINNINGS = ("Once upon a time, there was a", "One day, a", "In a small house lived a", "Long ago, in a forest, a")
WHO = ("little bear", "brave girl", "grumpy cat", "boy named Ben", "tiny bird", "kind queen", "lazy dog", "red truck")
"""More prompts for the model of stories than the file has."""


@dataclass(frozen=True)
class Case:
    """A prompt and, where the text is recorded, its answer and what was expected, in tokens."""

    id: str
    prompt: list[int]
    answer: Sequence[int] = ()
    expected: Sequence[int] = ()


@dataclass(frozen=True)
class Counts:
    """What a case came to: tokens, steps of all texts together, and CPU seconds."""

    tokens: int
    steps: int
    seconds: float


@dataclass
class Line:
    """Cases that are compared under one name.

    Attributes:
        name: Its name.
        cases: All there are.
        per_turn: How many of them a turn has; each turn goes on behind the one before, and begins anew at the end.
        run: Measures a case; also takes the turn, which seeds draws.
        begin: Called when a turn begins: forgets what was learned.
        repeats: Whether measuring a case once more gives something new: times, draws.
    """

    name: str
    cases: Sequence[Case]
    per_turn: int
    run: Callable[[Case, int], Counts]
    begin: Callable[[], Any] = lambda: None
    repeats: bool = False

    def of_turn(self, turn: int) -> list[Case]:
        """The cases of a turn; none where all were measured and nothing new could come of them."""
        places = range(turn * self.per_turn, (turn + 1) * self.per_turn)
        size = len(self.cases)
        return [self.cases[place % size] for place in places if place < size or self.repeats]


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Leaves only the recorded token."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Logits that leave the recorded token alone."""
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._case.answer[input_ids.shape[1] - len(self._case.prompt)]] = 0
        return forced


class Models:
    """Models, tokenizers and cases, made when they are first wanted.

    Args:
        shared: Folder of data and models.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared

    @cache  # noqa: B019, it lives as long as the process
    def load(self, name: str) -> Any:
        """`demo`, `demo bfloat16`, `stories`; with random weights a Llama, `hard`, `forced`, `tiny`, or `hybrid`."""
        if name in ("demo", "demo bfloat16", "stories"):
            path = self._shared / "models/stories260k" if name == "stories" else demo_model_path()
            dtype = torch.bfloat16 if name == "demo bfloat16" else torch.float32
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
            model.generation_config.eos_token_id = None  # every text has all its tokens
            model.generation_config.pad_token_id = 0
            return model.eval()
        if name == "hybrid":
            from probe import random_model  # of this checkout

            return random_model("granite", 6, 256, "float32").model
        hidden, layers, heads = {"hard": (256, 4, 4), "forced": (512, 8, 8), "tiny": (32, 1, 1)}[name]
        config = AutoConfig.for_model(
            "llama", vocab_size=4096, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
            num_attention_heads=heads, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    @cache  # noqa: B019
    def tokenizer(self, name: str) -> Any:
        """That of a model; those with random weights take the demo model's."""
        path = self._shared / "models/stories260k" if name == "stories" else demo_model_path()
        return AutoTokenizer.from_pretrained(path, local_files_only=True)

    def read(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of `data`."""
        return [json.loads(line) for line in (self._shared / f"data/{name}.jsonl").open(encoding="utf-8")]

    @cache  # noqa: B019
    def prompts(self, most: int = 320) -> list[Case]:
        """Code, classes, questions and instructions in turns, the last `most` tokens of each."""
        files = [self.read("humaneval")[32:], self.read("classeval"), self.read("gsm8k"), self.read("spec_bench")[::3]]
        rows = [row for rows in itertools.zip_longest(*files) for row in rows if row is not None]
        return [self._prompt("demo", row["id"], row.get("prompt") or row["turns"][0], most) for row in rows]

    @cache  # noqa: B019
    def task(self, name: str) -> list[Case]:
        """All prompts of a task."""
        return [self._prompt("demo", row["id"], row.get("prompt") or row["turns"][0], 320) for row in self.read(name)]

    def stories(self) -> list[Case]:
        """Beginnings of stories."""
        rows = [(row["id"], row["prompt"]) for row in self.read("stories")]
        rows += [(f"more/{who}/{first}", f"{first} {who}") for who in WHO for first in BEGINNINGS]
        return [self._prompt("stories", *row, 64) for row in rows]

    def _prompt(self, model: str, name: str, text: str, most: int) -> Case:
        return Case(str(name), self.tokenizer(model)(text).input_ids[-most:])

    @cache  # noqa: B019
    def recorded(self, name: str, most_prompt: int = 1024, most_answer: int = 192) -> list[Case]:
        """Every second recording of a file: weights were fitted to the others."""
        encode, cases = self.tokenizer("demo"), []
        for row in self.read(name)[1::2]:
            prompt = row["prompt"] if "prompt" in row else f"{row['instruction']}\n\n{row['input']}\n\n"
            answer = encode(row["output"]).input_ids[:most_answer]
            expected = encode(row["input"]).input_ids if "input" in row else []
            if len(answer) > 16:
                cases.append(Case(str(row["id"]), encode(prompt).input_ids[-most_prompt:], answer, expected))
        return cases


class Runner:
    """Measures cases."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._text_memory: Any = None

    def generate(
        self, name: str, config: LookaheadConfig | None, new: int, case: Case, turn: int, sampled: float = 0.0,
        expects: bool = False,
    ) -> Counts:  # fmt: skip
        """A call of `generate`, of transformers' without `config`; forced where the case has an answer."""
        model, ids = self._models.load(name), torch.tensor([case.prompt])
        more: dict[str, Any] = {"do_sample": sampled > 0, "max_new_tokens": new}
        if sampled:
            more |= {"temperature": sampled, "top_k": 0}
        if case.answer:
            more |= {"max_new_tokens": len(case.answer), "logits_processor": LogitsProcessorList([Forced(case)])}
        if expects:
            more["prediction"] = torch.tensor(case.expected)
        torch.manual_seed(1000 * turn + len(case.prompt))
        call = model.generate if config is None else partial(lookahead.generate, model, lookahead_config=config)
        begin = process_time()
        output = call(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **more)
        seconds = process_time() - begin
        if config is None:
            added = output.sequences.shape[1] - len(case.prompt)
            return Counts(added, added, seconds)
        assert not case.answer or output.sequences[0, len(case.prompt) :].tolist() == list(case.answer)
        return Counts(output.statistics.tokens, len(output.statistics.accepted_lengths), seconds)

    def serve(self, load: int, config: LookaheadConfig, new: int, case: Case, turn: int) -> Counts:
        """As many requests at once, the first of which is the case, every second one sampled."""
        cases = self._models.prompts()
        first = cases.index(case)
        requests = [cases[(first + number) % len(cases)] for number in range(load)]
        begin = process_time()
        engine = Engine(self._models.load("demo"), config, max_rows=load)
        handles = [
            engine.submit(each.prompt, seed=number, max_new_tokens=new, do_sample=number % 2 == 1)
            for number, each in enumerate(requests)
        ]
        while engine.step():
            pass
        seconds = process_time() - begin
        return Counts(sum(len(handle.tokens) for handle in handles), engine.statistics.rows, seconds)

    def replay(self, build: Callable[..., Any], nodes: int, across: bool, case: Case, turn: int) -> Counts:
        """Drafts from texts alone for a recorded answer; `across`: also from the requests before it in this turn."""
        if across and self._text_memory is None:
            self._text_memory = lookahead.drafting.text_only.text_memory()
        begin = process_time()
        drafter = build(nodes, self._text_memory) if across else build(nodes)
        batch = Batch([played_sequence(case.prompt, case.answer, drafter)])
        decode(PlayedBackend([PlayedRow(TextScript([*case.prompt, *case.answer]))]), batch)
        return Counts(len(case.answer), batch.statistics.steps, process_time() - begin)

    def forget(self) -> None:
        """Forget texts of other requests."""
        self._text_memory = None

    def propose(self, drafted: int, case: Case, turn: int) -> Counts:
        """vLLM's proposer without logits."""
        room = len(case.prompt) + len(case.answer) + drafted + 1
        proposer = LookaheadProposer(vllm_config(4096, drafted, 1, room, learn="tokens"))
        proposer.load_model(None)
        begin = process_time()
        loop = VLLMLoop(proposer, room)
        loop.run([case.prompt], [case.answer])
        return Counts(len(case.answer), len(loop.steps), process_time() - begin)

    def propose_with_logits(self, drafted: int, new: int, case: Case, turn: int) -> Counts:
        """vLLM's proposer that reads the logits of the model of stories."""
        model, ids = self._models.load("stories"), torch.tensor([case.prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)[0].tolist()
        head = _Head()
        proposer = LookaheadProposer(vllm_config(ROOM, drafted, 1, ROOM))
        proposer.load_model(head)

        def read(texts: list[list[int]], drafts: list[list[int]]) -> None:
            with torch.inference_mode():
                logits = model(torch.tensor([texts[0] + drafts[0]])).logits[0]
            head.compute_logits(logits[len(texts[0]) - 1 :].clone())

        begin = process_time()
        loop = VLLMLoop(proposer, ROOM, read)
        loop.run([case.prompt], [text[len(case.prompt) :]])
        return Counts(len(text) - len(case.prompt), len(loop.steps), process_time() - begin)


class _Head:
    """What the proposer reads of vLLM's model."""

    def compute_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """They are computed already."""
        return logits


def quick_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """S at fixed numbers of nodes."""
    for nodes in (16, 64):
        fixed, kept = LookaheadConfig(step_budget=nodes), LookaheadConfig(step_budget=nodes, memory="process")
        run, name = partial(runner.generate), f"{nodes} nodes"
        yield Line(f"demo, {name}", models.prompts(), 24, partial(run, "demo", fixed, 128))
        yield Line(f"stories, {name}", models.stories(), 22, partial(run, "stories", fixed, 200))
        # the memory is the model's, so the turn begins with a copy of the model
        forget = partial(_forget, models, "stories")
        yield Line(f"stories, memory kept, {name}", models.stories(), 22, partial(run, "stories", kept, 200), forget)
        for file in ("code_edits", "agent_traces", "answers"):
            yield Line(f"forced {file}, {name}", models.recorded(file), 48, partial(run, "tiny", fixed, 0))
    for nodes in (4, 8, 16, 64):
        fixed, name = LookaheadConfig(step_budget=nodes), f"{nodes} nodes"
        sampled = partial(runner.generate, "demo", fixed, 96, sampled=0.8)
        yield Line(f"sampled, {name}", models.prompts(), 14, sampled, repeats=True)
        sampled = partial(runner.generate, "stories", fixed, 200, sampled=1.0)
        yield Line(f"stories sampled, {name}", models.stories(), 22, sampled, repeats=True)
    expects = partial(runner.generate, "tiny", LookaheadConfig(step_budget=16), 0, expects=True)
    yield Line("forced code_edits, predicted, 16 nodes", models.recorded("code_edits"), 48, expects)
    yield from replay_lines(models, runner)
    yield Line("vLLM, logits, 8 drafted", models.stories(), 11, partial(runner.propose_with_logits, 8, 128))


def replay_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """Drafts from texts alone, without a model."""
    recordings = [case for file in ("code_edits", "agent_traces", "answers") for case in models.recorded(file)]
    for nodes, build in ((16, build_text_chain_drafter), (16, build_text_drafter), (64, build_text_drafter)):
        name = f"replay, {'tree' if build is build_text_drafter else 'chain'} of {nodes}"
        yield Line(name, recordings, len(recordings), partial(runner.replay, build, nodes, False))
    across = partial(runner.replay, build_text_drafter, 32, True)
    yield Line("replay, tree of 32, memory kept", recordings, len(recordings), across, runner.forget)
    yield Line("vLLM, tokens, 8 drafted", recordings, len(recordings), partial(runner.propose, 8))


def full_lines(models: Models, runner: Runner) -> Iterator[Line]:
    """S and time, at fixed numbers of nodes and with as many as pay."""
    auto, kept = LookaheadConfig(), LookaheadConfig(memory="process")
    demo, stories = models.prompts(), models.stories()
    for name, config in (("auto", auto), ("16 nodes", LookaheadConfig(step_budget=16))):
        run = partial(runner.generate)
        yield Line(f"demo, {name}", demo, 16, partial(run, "demo", config, 128))
        yield Line(f"stories, {name}", stories, 16, partial(run, "stories", config, 200))
        for file in ("code_edits", "agent_traces"):
            yield Line(f"forced {file}, {name}", models.recorded(file), 8, partial(run, "forced", config, 0))
    forget = partial(_forget, models, "demo")
    yield Line("demo, memory kept, auto", demo, 16, partial(runner.generate, "demo", kept, 128), forget)
    for heat in (0.8, 1.0):
        sampled = partial(runner.generate, "demo", auto, 96, sampled=heat)
        yield Line(f"sampled, temperature {heat}, auto", demo, 16, sampled)
    yield Line("hard, auto", demo, 8, partial(runner.generate, "hard", auto, 192, sampled=1.0))
    yield Line("short calls, auto", demo, 32, partial(runner.generate, "hard", auto, 16, sampled=1.0))
    for load in (2, 8):
        yield Line(f"serving {load} requests, auto", demo[::load], 8, partial(runner.serve, load, kept, 64), forget)
    yield from replay_lines(models, runner)


def _forget(models: Models, name: str) -> None:
    """Load the models anew: what the library keeps for a model goes with it."""
    type(models).load.cache_clear()
    models.load(name)


def main() -> None:
    """Answer requests until the input ends."""
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
    make = quick_lines if options.quick else full_lines
    lines = {line.name: line for line in make(models, Runner(models))}
    if not options.quick:
        lines = {name: _repeating(line) for name, line in lines.items()}
    print(json.dumps(list(lines)), file=answers, flush=True)
    for request in map(json.loads, sys.stdin):
        line, turn = lines[request.get("line", request.get("begin"))], request["turn"]
        cases = line.of_turn(turn)
        if "begin" in request:
            if cases:
                line.begin()
                line.run(cases[-1], turn)  # what is made once for a model is not measured
                line.begin()
            answer: Any = [case.id for case in cases]
        else:
            counts = line.run(cases[request["case"]], turn)
            answer = {"tokens": counts.tokens, "steps": counts.steps, "seconds": counts.seconds}
        print(json.dumps(answer), file=answers, flush=True)


def _repeating(line: Line) -> Line:
    """The same cases in each turn: times are never the same."""
    line.repeats, line.cases = True, line.cases[: line.per_turn]
    return line


if __name__ == "__main__":
    main()
