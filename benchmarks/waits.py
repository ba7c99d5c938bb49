"""Waits, copies and launches of a step, on a simulated CUDA device.

    python benchmarks waits --output benchmarks/results/waits.jsonl

The demo model continues recorded prompts, by `generate` and by an Engine. The device of
`tests/backends/apart/simulated_cuda.py` counts the actions of the host in each step after the prompts and the captures:
waits for the device, copies to it, replays of captured passes, and launches of kernels outside of the model.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from cases import Case, encoder_of, read_cases
from lookahead import Engine, LookaheadConfig
from lookahead.bench.rows import Row
from models import load_model, load_tokenizer
from probe import Probe, Unit, option

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS / "backends" / "apart"), str(_TESTS / "support")]

from simulated_cuda import CAPTURE, OPERATION, PAGEABLE, PINNED, REPLAY, WAIT, on_cuda, simulated_cuda  # noqa: E402

SELECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "top-k, top-p": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "log-probabilities": {"logprobs": 4},
    "repetition penalty": {"repetition_penalty": 1.1},
}
"""Arguments of a request."""

DRAFTS = {"no drafts": LookaheadConfig(preset="autoregressive"), "auto": LookaheadConfig()}
NAMES = {WAIT: "waits", PINNED: "copies", PAGEABLE: "pageable copies", REPLAY: "replays", OPERATION: "launches"}
STEPS = 12
"""Counted steps of an engine."""
MEMORY = 1 << 28
"""Bytes for keys and values of all requests."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    rows: list[int] = option([1, 16, 64], "numbers of requests at once")
    selections: list[str] = option(list(SELECTIONS), "arguments of a request", choices=SELECTIONS)
    texts: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction` and `input`")
    prompt: int = option(96, "tokens of a prompt")


@cache
def model_there() -> PreTrainedModel:
    """Return the model on the simulated device, which all units share, so that it is tried once."""
    return on_cuda(load_model("demo", ends=False))


def counted(steps: Sequence[Sequence[Any]]) -> Row:
    """Return the mean number of actions of each kind in a step, and the places of waits beyond the first one."""
    counts, places = Counter[str](), Counter[str]()
    for events in steps:
        counts.update(NAMES[event.kind] for event in events if event.kind in NAMES and not event.in_model)
        assert all(event.kind != CAPTURE for event in events)
        waits = [event.place for event in events if event.kind == WAIT]
        places.update(waits if len(waits) > 1 else ())
    means = {name: round(counts[name] / len(steps), 2) for name in NAMES.values()}
    return {**means, "steps": len(steps), "wait_places": dict(places.most_common(4))}


def engine_row(cases: Sequence[Case], drafts: str, selection: str) -> Iterator[Row]:
    """Yield the counts of an engine's steps after all requests have joined."""
    rows = len(cases)
    with simulated_cuda() as device:
        engine = Engine(model_there(), DRAFTS[drafts], max_rows=rows, prompt_tokens=4096, kv_bytes=MEMORY)
        how = {"max_new_tokens": 16 * STEPS, "do_sample": False, **SELECTIONS[selection]}
        handles = [engine.submit(case.prompt, seed=row, **how) for row, case in enumerate(cases)]
        for _ in range(4):
            engine.step()
        steps: list[Any] = []
        nodes = engine.statistics.nodes
        device.take()
        while len(steps) < STEPS and engine.step() == rows:
            steps.append(device.take())
        sent = (engine.statistics.nodes - nodes) / len(steps) / rows
        for handle in handles:
            handle.cancel()
        engine.run()
    about = {"kind": "engine", "rows": rows, "method": drafts, "selection": selection, "nodes_per_row": round(sent, 2)}
    yield about | counted(steps)


def call_row(case: Case, drafts: str, selection: str) -> Iterator[Row]:
    """Yield the counts of the steps of one `generate`, from the third one."""
    steps: list[Any] = []
    nodes: list[int] = []
    how = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0, **SELECTIONS[selection]}
    with simulated_cuda() as device:
        model, ids = model_there(), torch.tensor([case.prompt], device="cuda")

        def note(record: Any) -> None:
            steps.append(device.take())
            nodes.append(record.nodes)

        for on_step in (None, note):  # the first call captures
            torch.manual_seed(0)
            device.take()
            lookahead.generate(model, ids, lookahead_config=DRAFTS[drafts], on_step=on_step, **how)
    sent = round(sum(nodes[2:]) / len(nodes[2:]), 2)
    about = {"kind": "generate", "rows": 1, "method": drafts, "selection": selection, "nodes_per_row": sent}
    yield about | counted(steps[2:])


def probe(options: Options) -> Probe:
    """Make a unit for each number of rows, kind of drafts, and selection."""
    cases = read_cases(Path(options.texts), encoder_of(load_tokenizer("demo")), prompt=options.prompt)
    cases = [cases[row % len(cases)] for row in range(max(options.rows))]
    units = []
    for drafts, selection in product(DRAFTS, options.selections):
        if "logprobs" not in SELECTIONS[selection]:
            units.append(Unit(f"generate, {drafts}, {selection}", partial(call_row, cases[0], drafts, selection)))
        for rows in options.rows:
            work = partial(engine_row, cases[:rows], drafts, selection)
            units.append(Unit(f"{rows} rows, {drafts}, {selection}", work))
    return Probe(units, {"model": "demo", "dtype": "float32", "prompt": options.prompt})
