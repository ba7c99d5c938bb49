"""Play recorded drafts and simulated clocks to what decides how many nodes a step sends: no model, seconds a run.

`record` runs a model once for each number of nodes and keeps, for each step, how likely each candidate was taken to be
and which were accepted. `play` lets each policy choose at each place of these texts: a step of n nodes brings what the
recorded run with about as many nodes brought there, and takes what a price curve says, with noise. It prints the speed
of each policy over that of the best fixed number of nodes, plain decoding among them; its mean number of nodes; and the
share of its steps that drafted. What it does not show: steps of chosen nodes fill the memory less than even ones do.

    python benchmarks/pace_simulator.py record build/pace.json
    python benchmarks/pace_simulator.py play build/pace.json
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead import LookaheadConfig
from lookahead.core.budget import ThroughputBudget
from lookahead.core.cost_model import CostModel
from lookahead.core.draft_account import DraftAccount
from lookahead.core.pace import Pace
from lookahead.core.step_costs import GRID, StepCosts
from lookahead.core.step_time import StepTime
from lookahead.core.watching import StepWatcher, WatchedStep
from lookahead.demo import demo_model_path

DATA, MODELS = Path("../shared/data"), Path("../shared/models")

SIZES = (4, 8, 16, 32, 64)
"""Nodes of a step that are recorded."""

LINES: dict[str, tuple[str, str, float]] = {
    "HumanEval": ("demo", "humaneval", 0.0),
    "GSM8K": ("demo", "gsm8k", 0.0),
    "HumanEval 0.8": ("demo", "humaneval", 0.8),
    "GSM8K 0.8": ("demo", "gsm8k", 0.8),
    "stories": ("stories", "stories", 0.0),
    "stories 1.0": ("stories", "stories", 1.0),
    "random 1.0": ("random", "stories", 1.0),
}
"""Model, prompts and temperature of each line."""

CURVES = {
    "AMX": (1.0, 1.05, 1.08, 1.1, 1.16, 1.29, 1.78, 2.9),
    "AVX-512": (1.0, 1.06, 1.16, 1.32, 1.72, 2.5, 4.0, 7.2),
    "float32": (1.0, 1.8, 1.85, 2.15, 2.85, 4.1, 6.7, 12.0),
    "GPU": (1.0, 1.03, 1.03, 1.03, 1.04, 1.05, 1.08, 1.15),
    "graphs": (1.0, 1.06, 1.06, 1.06, 1.10, 1.15, 1.25, 1.5),
    "rows": (1.0, 1.9, 3.6, 7.0, 14.0, 28.0, 56.0, 112.0),
}
"""Time of a step of 1, 2, 4, ... 128 nodes in plain steps, looking for drafts included, by kind of processor."""

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128)
_CAPTURED = (1, 8, 16, 32, 64, 128)
"""Sizes that steps are padded to where passes are captured in graphs."""


@dataclass(frozen=True)
class Recorded:
    """One text, decoded with one number of nodes.

    Attributes:
        starts: Tokens of the text before each step.
        likely: Of each step, how likely each candidate was taken to be.
        accepted: Of each step, the places in `likely` of those that were accepted.
    """

    starts: list[int]
    likely: list[list[float]]
    accepted: list[list[int]]

    def at(self, place: int) -> tuple[list[float], list[int]]:
        """The step that was run at a place of the text."""
        step = bisect_right(self.starts, place) - 1
        return self.likely[step], self.accepted[step]


@dataclass
class Text:
    """One text, by number of nodes."""

    length: int
    runs: dict[int, Recorded]


class Clock:
    """What steps take: a curve with noise, and now and then a step that others disturb."""

    def __init__(self, curve: str, seed: int = 0, noise: float = 0.03) -> None:
        self._curve, self._is_captured = CURVES[curve], curve == "graphs"
        self._random, self._noise = np.random.default_rng(seed), noise

    def usual(self, nodes: int) -> float:
        """Seconds of a step of so many nodes; of one, of a plain step."""
        if self._is_captured:
            nodes = next((size for size in _CAPTURED if size >= nodes), nodes)
        return float(np.interp(nodes, _KNOTS, self._curve))

    def __call__(self, nodes: int) -> float:
        """The same with noise."""
        disturbed = 3.0 if self._random.random() < 0.005 else 1.0
        return self.usual(nodes) * disturbed * float(np.exp(self._noise * self._random.normal()))


class Policy(Protocol):
    """Chooses how many candidates each step sends.

    Attributes:
        looked: About how many nodes the recorded run shall have that it is shown.
    """

    looked: float

    def begin(self) -> bool:
        """Whether the coming step drafts."""

    def choose(self, likely: list[float]) -> int:
        """How many of these candidates are sent."""

    def book(self, nodes: int, seconds: float, tokens: int, accepted: list[int]) -> None:
        """Note what the step took and brought."""


@dataclass
class Played:
    """What a policy came to."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    nodes: list[int] = field(default_factory=list)


def play(texts: list[Text], clock: Clock, policy: Policy) -> Played:
    """Let a policy decode all texts, one after another."""
    played = Played()
    for text in texts:
        place = 0
        while place < text.length:
            drafts = policy.begin()
            accepted: list[int] = []
            sent = 0
            if drafts:
                size = SIZES[min(bisect_left(SIZES, policy.looked), len(SIZES) - 1)]
                likely, came_true = text.runs[size].at(place)
                sent = policy.choose(likely)
                accepted = [index for index in came_true if index < sent]
            nodes, tokens = 1 + sent, 1 + len(accepted)
            # What a disturbed step takes counts as usual here: it would be the luck of the draw.
            usual = clock.usual(nodes) if drafts else clock.usual(1)
            policy.book(nodes, clock(nodes) if drafts else clock(1), tokens, accepted)
            played.seconds += usual
            played.tokens += tokens
            played.steps += 1
            played.nodes.append(nodes)
            place += tokens
    return played


class Fixed:
    """Sends a fixed number of nodes; 1 is plain decoding."""

    def __init__(self, nodes: int) -> None:
        self.looked: float = nodes

    def begin(self) -> bool:
        return self.looked > 1

    def choose(self, likely: list[float]) -> int:
        return min(len(likely), int(self.looked) - 1)

    def book(self, nodes: int, seconds: float, tokens: int, accepted: list[int]) -> None:
        pass


class Today:
    """`ThroughputBudget` with a `DraftAccount`."""

    def __init__(self, curve: str, sampled: bool) -> None:
        costs = CostModel(_KNOTS, CURVES[curve], [0.0] * len(_KNOTS), pace=None)
        self._account = DraftAccount(costs, cautious=sampled)
        self._budget = ThroughputBudget(self._account)
        self.looked = 8.0

    def begin(self) -> bool:
        self._budget.begin()
        return not self._budget.backs_off

    def choose(self, likely: list[float]) -> int:
        self._budget.offer(np.array(likely), 100)
        grows = 2 if self._budget.chosen == len(likely) else 1  # memory is that of a run with about as many nodes
        self.looked += 0.05 * (grows * (1 + self._budget.chosen) - self.looked)
        return self._budget.chosen

    def book(self, nodes: int, seconds: float, tokens: int, accepted: list[int]) -> None:
        if not self._budget.backs_off:
            self._budget.learn(accepted)
        self._account.book(StepTime(nodes, 100, seconds, tokens, 1, not self._budget.backs_off))


class Even:
    """`Pace`, for one text."""

    def __init__(self, curve: str, sampled: bool, guess: bool = True) -> None:
        fixed = np.interp(GRID, _KNOTS, CURVES[curve]) if guess else None
        self.pace = Pace(StepCosts(fixed, captured=_CAPTURED if curve == "graphs" else ()))
        self._rests = False
        self.looked: float = 1

    def begin(self) -> bool:
        self._rests, self.looked = self.pace.rests, self.pace.nodes
        return not self._rests

    def choose(self, likely: list[float]) -> int:
        return self.pace.choose(np.array(likely[: int(self.looked) - 1]))

    def book(self, nodes: int, seconds: float, tokens: int, accepted: list[int]) -> None:
        if not self._rests:
            self.pace.learn(int(self.looked), accepted)
        self.pace.book(StepTime(nodes, 100, seconds, tokens, 1, not self._rests))


def load(path: Path) -> dict[str, list[Text]]:
    """The texts of each line that `record` wrote."""
    return {
        line: [Text(length, {int(size): Recorded(*run) for size, run in runs.items()}) for length, runs in texts]
        for line, texts in json.loads(path.read_text()).items()
    }


class StepsOfText:
    """Takes down the steps of one text; a `Recorder`."""

    def __init__(self) -> None:
        self.run = Recorded([], [], [])
        self.length = 0

    def begin(self, prompt: Sequence[int]) -> StepWatcher:
        return self._note

    def _note(self, step: WatchedStep) -> None:
        first = step.result.tree.root + 1
        self.run.starts.append(self.length)
        self.run.likely.append([round(origin.probability or 0.0, 4) for origin in step.explanation.origins])
        self.run.accepted.append([node - first for node in step.result.path])
        self.length += len(step.result.tokens)


def record(path: Path, prompts: int = 10, tokens: int = 160) -> None:
    """Run each line with each number of nodes, and write what its steps were."""
    lines: dict[str, Any] = {}
    for line, (name, task, temperature) in LINES.items():
        model, tokenizer = load_line(name)
        asked = [json.loads(row)["prompt"] for row in (DATA / f"{task}.jsonl").read_text().splitlines()[:prompts]]
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        lines[line] = []
        for seed, prompt in enumerate(asked):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            runs: dict[int, Any] = {}
            for size in SIZES:
                torch.manual_seed(seed)
                steps = StepsOfText()
                lookahead.generate(
                    model,
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    lookahead_config=LookaheadConfig(step_budget=size, trace=steps),
                    **how,
                )
                runs[size] = [steps.run.starts, steps.run.likely, steps.run.accepted]
            lines[line].append([tokens, runs])
        print(line, flush=True)
    path.write_text(json.dumps(lines))


def load_line(name: str) -> tuple[Any, Any]:
    """Model and tokenizer of a line; texts end with their length."""
    folder = {"demo": demo_model_path(), "stories": MODELS / "stories260k"}.get(name, demo_model_path())
    if name == "random":
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, **sizes)).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    return model, AutoTokenizer.from_pretrained(folder)


def compare(path: Path, seeds: int = 4) -> None:
    """Print the speed of each policy over that of the best fixed number of nodes."""
    for line, texts in load(path).items():
        for curve in CURVES:
            rates = {}
            for nodes in (1, *SIZES):
                played = play(texts, Clock(curve), Fixed(nodes))
                rates[nodes] = played.tokens / played.seconds
            best = max(rates, key=rates.__getitem__)
            shown = [f"{line:14s} {curve:8s} best {best:3d} {rates[best]:5.2f}"]
            for name, make in POLICIES.items():
                figures = []
                for seed in range(seeds):
                    order = np.random.default_rng(seed).permutation(len(texts))
                    policy = make(curve, LINES[line][2] > 0)
                    played = play([texts[place] for place in order], Clock(curve, seed), policy)
                    drafted = [nodes for nodes in played.nodes if nodes > 1]
                    speed = played.tokens / played.seconds / rates[best]
                    figures.append((speed, sum(drafted) / max(len(drafted), 1), len(drafted) / played.steps))
                shown.append("{} {:.3f} ({:.0f}, {:.2f})".format(name, *np.mean(figures, axis=0)))
            print("  ".join(shown), flush=True)


POLICIES: dict[str, Callable[[str, bool], Policy]] = {
    "today": Today,
    "pace": Even,
    "pace without a guess": lambda curve, sampled: Even(curve, sampled, guess=False),
}
"""By name, for a price curve and for whether tokens are sampled."""


if __name__ == "__main__":
    commands = {"record": record, "play": compare}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](Path(sys.argv[2]))
