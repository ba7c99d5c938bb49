"""The measuring process of `python benchmarks host`, with the library that `PYTHONPATH` names.

It answers each line of JSON with one line. `{"open": WAY, "rows": ROWS}` opens an Engine, or `generate` for 0 rows.
`{"turn": NUMBER}` decodes the texts and returns the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import lookahead
from cases import Case, encoder_of, forced, lengthened, read_cases
from lookahead import Engine, LookaheadConfig
from lookahead.drafting import compile_loops
from lookahead.errors import LookaheadError
from models import load_tokenizer
from stubbed import DEVICE, Marks, Table, table_model

TEXTS = 16
"""Number of different texts. Further rows repeat them."""

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{drafts}{', ' if how else ''}{how}": (config, arguments)
    for drafts, config in {
        "no drafts": {"preset": "autoregressive"},
        "auto, one memory": {"memory": "process"},
        "auto, a memory each": {"memory": "request"},
    }.items()
    for how, arguments in {
        "": {},
        "temperature": {"do_sample": True, "temperature": 0.2, "top_k": 0},
        "top-k, top-p": {"do_sample": True, "temperature": 0.2, "top_k": 20, "top_p": 0.9},
        "forced": {"forced": True},
    }.items()
    if drafts != "auto, a memory each" or not how
}
"""Configuration and arguments of `submit`. At this temperature only the recorded token is sampled."""

CALLS: dict[str, dict[str, Any]] = {
    "no drafts": {"preset": "autoregressive"},
    "auto": {"memory": "request"},
    "no drafts, static": {"preset": "autoregressive", "engine": "static"},
    "auto, static": {"engine": "static", "memory": "request"},
}
"""Configurations of `generate`: eager as on a CPU, and with fixed shapes as on a GPU."""

STEPS = 48
"""Maximum number of steps of an Engine in a turn. Its requests are cancelled then."""

KV_BYTES = 1 << 28
"""Memory of an Engine for keys and values: without it, an Engine takes half of the memory of a GPU."""

SKIPPED = 4
"""The first quarter of the steps is not counted."""

CALLED = 6
"""Number of texts that `generate` decodes in a turn."""


def middle(values: Sequence[float]) -> float:
    """Return the median of nanoseconds, in microseconds."""
    return round(float(np.median(values)) / 1000, 1)


def figures(steps: Sequence[float], parts: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return microseconds of steps, and by part of other steps, from nanoseconds."""
    if not len(steps) or not len(parts):
        raise LookaheadError("too few steps to count; use longer texts or more --new-tokens")
    named: dict[str, list[float]] = {}
    for step in parts:
        for name, nanoseconds in step.items():
            named.setdefault(name, []).append(nanoseconds)
    return {
        "us": middle(steps),
        "mean_us": round(float(np.mean(steps)) / 1000, 1),
        "low_us": round(float(np.percentile(steps, 25)) / 1000, 1),
        "parts_us": {name: middle(values) for name, values in named.items()},
        "counted": len(steps),
    }


class Texts:
    """Recorded texts, and the model that generates them."""

    def __init__(self, path: Path, prompt: int, new: int) -> None:
        cases = read_cases(path, encoder_of(load_tokenizer("demo")), prompt=prompt)
        self.table = Table(prompt + new + 512)
        self.cases = [self.table.add(lengthened(cases[place:], prompt, new)) for place in range(min(TEXTS, len(cases)))]
        self.model = table_model(2 * (prompt + new) + 512)

    def arguments(self, case: Case, more: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a request."""
        plain = {"do_sample": False, "max_new_tokens": len(case.answer), "eos_token_id": None, "pad_token_id": 0}
        rest = {name: value for name, value in more.items() if name != "forced"}
        return plain | rest | (forced(case) if "forced" in more else {})


class EngineRun:
    """An Engine that serves one request for each row.

    Args:
        texts: Their texts.
        way: A key of `WAYS`.
        rows: Number of requests.
    """

    def __init__(self, texts: Texts, way: str, rows: int) -> None:
        config, self._more = WAYS[way]
        self._texts, self._rows, self._marks = texts, rows, Marks()
        DEVICE.table = texts.table
        limits = {"max_rows": rows, "prompt_tokens": 1 << 30, "kv_bytes": KV_BYTES}
        self._engine = Engine(texts.model, LookaheadConfig(**config), **limits)
        if config.get("memory") == "process":
            self.turn()  # fills the memory

    def turn(self) -> dict[str, Any]:
        """Decode the texts and return the figures."""
        cases, engine, submits = self._texts.cases, self._engine, []
        handles = []
        for row in range(self._rows):
            case = cases[row % len(cases)]
            arguments = self._texts.arguments(case, self._more)
            begin = DEVICE.host()
            handles.append((engine.submit(case.prompt, seed=row, **arguments), list(case.answer)))
            submits.append(DEVICE.host() - begin)
        steps = list(self._steps())
        for handle, _ in handles:
            handle.cancel()
        engine.run()
        steps = steps[len(steps) // SKIPPED :]
        plain = [step for step in steps if not step["parts"]]
        return {
            **figures([step["host"] for step in plain], [step["parts"] for step in steps if step["parts"]]),
            "before_us": middle([step["before"] for step in plain]),
            "after_us": middle([step["host"] - step["before"] for step in plain]),
            "submit_us": middle(submits),
            "nodes": round(float(np.mean([step["nodes"] for step in steps])), 1),
            "tokens": round(float(np.mean([step["tokens"] for step in steps])), 1),
            "equal": all(list(handle.tokens) == answer[: len(handle.tokens)] for handle, answer in handles),
        }

    def _steps(self) -> Iterator[dict[str, Any]]:
        """Yield the steps of all rows after the step of the prompts. Every third one is timed by part."""
        engine, counts, marks = self._engine, self._engine.statistics, self._marks
        engine.step()
        for number in range(STEPS):
            marks.switch(number % 3 == 2)
            marks.times.clear()
            DEVICE.launches.clear()
            nodes, tokens = counts.nodes, counts.tokens
            begin = DEVICE.host()
            left = engine.step()
            end = DEVICE.host()
            if left < self._rows:
                break
            yield {
                "host": end - begin,
                "before": DEVICE.launches[0] - begin,
                "parts": _parts(marks.times, DEVICE.launches[0], begin, end),
                "nodes": counts.nodes - nodes,
                "tokens": counts.tokens - tokens,
            }
        marks.switch(False)


def _parts(times: Sequence[tuple[str, int]], launch: int, begin: int, end: int) -> dict[str, int]:
    """Return nanoseconds of each part of a step. The part around the pass is split there."""
    parts: dict[str, int] = {}
    since = begin
    for name, at in times:
        if since < launch <= at:
            parts["stage"] = launch - since
            since, name = launch, "launched" if name == "forward" else name
        parts[name] = parts.get(name, 0) + at - since
        since = at
    if times:
        parts["notify"] = end - since
    return parts


class CallRun:
    """Calls of `generate`, one text each. A step lasts from pass to pass."""

    def __init__(self, texts: Texts, way: str) -> None:
        self._texts, self._config, self._marks = texts, LookaheadConfig(**CALLS[way]), Marks()
        DEVICE.table, DEVICE.pooled = None, False
        self._generate(texts.cases[0])  # trials of the model run its own forward pass
        DEVICE.table = texts.table

    def turn(self) -> dict[str, Any]:
        """Decode the texts and return the figures. Every third call is timed by part."""
        plain: list[float] = []
        parts: list[dict[str, float]] = []
        steps, nodes, tokens, equal = 0, 0, 0, True
        for number, case in enumerate(self._texts.cases[:CALLED]):
            in_parts = number % 3 == 2
            self._marks.switch(in_parts)
            self._marks.times.clear()
            DEVICE.launches.clear()
            output = self._generate(case)
            equal &= output.sequences[0, len(case.prompt) :].tolist() == case.answer
            counted = DEVICE.launches[1:]
            counted = counted[len(counted) // SKIPPED :]
            if in_parts:
                parts += _between(self._marks.times, counted)
            else:
                plain += np.diff(counted).tolist()
            steps, nodes = steps + output.statistics.steps, nodes + sum(output.statistics.nodes_per_step)
            tokens += output.statistics.tokens
        self._marks.switch(False)
        of_step = {"nodes": round(nodes / steps, 1), "tokens": round(tokens / steps, 1)}
        return {**figures(plain, parts), **of_step, "equal": equal}

    def _generate(self, case: Case) -> Any:
        ids = torch.tensor([case.prompt])
        return lookahead.generate(
            self._texts.model,
            ids,
            attention_mask=torch.ones_like(ids),
            lookahead_config=self._config,
            return_dict_in_generate=True,
            **self._texts.arguments(case, {}),
        )


def _between(times: Sequence[tuple[str, int]], launches: Sequence[int]) -> Iterator[dict[str, float]]:
    """Yield nanoseconds of the parts of each step from pass to pass."""
    for begin, end in pairwise(launches):
        since, parts = begin, dict[str, float]()
        for name, at in [*(mark for mark in times if begin < mark[1] <= end), ("stage", end)]:
            name = {"forward": "launched", "plan": "notify"}.get(name, name)
            parts[name], since = parts.get(name, 0) + at - since, at
        yield parts


def main() -> None:
    """Answer requests until the input ends."""
    compile_loops()  # no unit is to wait for them, nor to go without
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--src", required=True, type=Path, help="expected folder of the library")
    parser.add_argument("--texts", required=True, type=Path)
    parser.add_argument("--prompt", required=True, type=int)
    parser.add_argument("--new-tokens", required=True, type=int)
    options = parser.parse_args()
    assert Path(lookahead.__file__).is_relative_to(options.src.resolve()), f"{lookahead.__file__}: another library"
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    DEVICE.install()
    texts = Texts(options.texts, options.prompt, options.new_tokens)
    run: Any = None
    print(json.dumps(True), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = True
        if "open" in request:
            run = None  # with its memory
            rows = request["rows"]
            run = EngineRun(texts, request["open"], rows) if rows else CallRun(texts, request["open"])
        else:
            answer = run.turn()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
