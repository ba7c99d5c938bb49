"""Where steps of `auto` end, and what perfect ranking or perfect coverage would bring.

    python benchmarks step_ends --output benchmarks/results/step-ends.jsonl

A step ends after the last accepted node, whose next token was not drafted. Each row is a step: whether memory or
matches proposed this token, whether first, and its probability. `ranking` is the number of tokens of the step if
proposed tokens of the text came first. For `coverage`, tokens that were not proposed are accepted, others as ranked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cases import Case, encoder_of, generate, read_cases
from lookahead.bench.rows import Row
from lookahead.config import LookaheadConfig
from lookahead.core.compiled import compiled
from lookahead.core.results import StepResult
from lookahead.drafting import AutoDrafter, DraftMemory, compile_loops
from lookahead.drafting.auto.texts import TextArrays, find_matches, read_context
from models import load_model, load_tokenizer
from probe import Probe, Unit, option

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from fit_weights import candidates_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    data: str = option("../shared/data", "folder of prompts")
    tasks: list[str] = option(["humaneval", "classeval", "gsm8k", "spec_bench"], "names of its files")
    nodes: list[int] = option([16, 64], "nodes of a step")
    limit: int = option(6, "number of prompts of each file: the second, the fourth, ...")


@compiled
def _match(
    place: int, node: int, nodes: NDArray[Any], texts: TextArrays, context: NDArray[np.int64], followed: NDArray[Any]
) -> int:
    return find_matches(place, node, context, read_context(place, node, nodes, texts, context), nodes, texts, followed)


class EndingDrafter(AutoDrafter):
    """`AutoDrafter` that knows the text, and records where steps end.

    Attributes:
        text: Prompt and answer.
        ends: A row for each step.
    """

    text: list[int]
    ends: list[Row]

    def observe(self, result: StepResult) -> None:
        """Record the end of the step, then learn."""
        batch = self._batch
        if batch is not None and int(batch.sent[self.place]):
            begin = int(batch.length_of(self.place))
            if begin + len(result.tokens) < len(self.text):
                drafted = batch.trees[self.place].copy()
                likely = float(drafted["probability"][1 : int(batch.sent[self.place]) + 1].min())
                self.ends.append(self._end(self.text[begin:], len(result.tokens), likely, len(drafted) - 1))
                batch.trees[self.place] = drafted
        super().observe(result)

    def _end(self, rest: Sequence[int], taken: int, likely: float, nodes: int) -> Row:
        """Follow the text in the proposals of the sources, and describe the end of a step that added `taken` tokens."""
        batch = self._batch
        assert batch is not None
        tree, room, row = batch.trees[self.place], batch.room, Row()
        path, ranking, coverage = 1.0, 0, 0
        for level, token in enumerate(rest[: nodes + 1]):
            if level >= max(taken, ranking + 1, coverage + 1):
                break
            if level:
                tree[level]["token"], tree[level]["parent"], tree[level]["depth"] = rest[level - 1], level - 1, level
            _match(self.place, level, tree, batch.texts, room.context, room.followed)
            tokens, features, length = candidates_of(batch, self.place, level)
            weights = batch.state.weights[0, length]
            scores = np.exp(features @ weights) if len(tokens) else np.zeros(0)
            of_token = scores[tokens == token]
            share = float(of_token[0] / (scores.sum() + np.exp(weights[0]))) if len(of_token) else 0.0
            path *= share or 1.0
            ranking = level + 1 if ranking == level and level < nodes and share else ranking
            coverage = level + 1 if path >= likely and coverage == level and level < nodes else coverage
            if level == taken - 1:
                is_first = share > 0 and bool(of_token[0] >= scores.max())
                row = {"context": length, "level": min(level, 1), "proposed": int(share > 0), "first": int(is_first)}
                row["probability"] = round(share, 4)
        return {**row, "tokens": taken, "ranking": max(ranking + 1, taken), "coverage": max(coverage + 1, taken)}


def ends_of(model: Any, task: str, cases: Sequence[Case], nodes: int) -> Iterator[Row]:
    """Yield a row for each step of the cases' texts."""
    for case in cases:
        config = LookaheadConfig(step_budget=nodes)
        drafter = EndingDrafter(DraftMemory(), nodes)
        drafter.text, drafter.ends = [*case.prompt, *generate(model, case, config, max_new_tokens=128).tokens], []
        generate(model, case, LookaheadConfig(drafter=lambda one=drafter: one, step_budget=nodes), max_new_tokens=128)
        for row in drafter.ends:
            yield {"kind": "step", "task": task, "id": case.id, "nodes": nodes, **row}


def probe(options: Options) -> Probe:
    """Make a unit for each task and number of nodes."""
    compile_loops()
    model, encode = load_model("demo", ends=False), encoder_of(load_tokenizer("demo"))
    units = []
    for task in options.tasks:
        cases = read_cases(Path(options.data) / f"{task}.jsonl", encode, prompt=320)[1::2][: options.limit]
        for nodes in options.nodes:
            units.append(Unit(f"{task}, {nodes} nodes", partial(ends_of, model, task, cases, nodes)))
    return Probe(units, {"model": "demo", "dtype": "float32"})
