"""Measure what `invariant=True` keeps, and what it costs.

Texts: for each prompt plain `model.generate`, plain decoding of ours in this mode, and drafts of several kinds in this
mode, whose logits are compared with those of plain decoding bit by bit; and drafts without this mode, for scale.

Steps: a tree of each size after a text, with and without the mode, with and without packed weights. They take turns;
CPU time of the process, medians.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers import ModelRunner, engine_model
from lookahead.bench.models import BenchModel
from lookahead.bench.prompts import Prompt, read_prompts
from lookahead.bench.rows import Row
from lookahead.bench.suite import TaskSpec
from lookahead.core.token_tree import TokenTree
from probe import Probe, Unit, load_model, option, token_ids

DRAFTS: dict[str, dict[str, Any]] = {
    "auto, 7 nodes": {"step_budget": 7},
    "auto, 33 nodes": {"step_budget": 33},
    "paper": {"preset": "paper"},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option("demo", "`demo`, `random`, or the folder of a model")
    dtype: str = option("bfloat16", "number type of the weights")
    prompts: str = option("", "JSON lines with `id`, and `prompt` or `turns`; no texts without")
    limit: int = option(40, "take the first so many prompts")
    max_new_tokens: int = option(128, "tokens to generate at most")
    context: int = option(512, "tokens of text before the steps")
    nodes: tuple[int, ...] = option((1, 16, 32, 64), "nodes of a step")
    repeats: int = option(9, "timings of each")


def texts(loaded: BenchModel, options: Options, prompt: Prompt) -> Iterator[Row]:
    """A row for each kind of drafts."""
    model: Any = loaded.model
    ids = token_ids(loaded.tokenizer, model, prompt.text)
    kwargs: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    kwargs |= {"return_dict_in_generate": True, "output_logits": True}
    theirs = model.generate(ids, **kwargs)

    def decode(**config: Any) -> Any:
        return lookahead.generate(model, ids, lookahead_config=LookaheadConfig(**config), **kwargs)

    plain = decode(preset="autoregressive", invariant=True)
    kinds = {"plain": plain} | {name: decode(invariant=True, **config) for name, config in DRAFTS.items()}
    kinds["drafts without it"] = decode(step_budget=33)
    for name, output in kinds.items():
        same = torch.equal(output.sequences, plain.sequences)
        bits = same and all(torch.equal(got, wanted) for got, wanted in zip(output.logits, plain.logits, strict=True))
        row: Row = {"kind": "text", "prompt": prompt.id, "method": name, "tokens": len(output.logits)}
        row |= {"steps": output.statistics.steps, "same_text": same, "same_bits": bits}
        if not bits and name in DRAFTS:
            row["error"] = f"{name} changed a bit of prompt {prompt.id}"
        yield {**row, "same_as_transformers": torch.equal(output.sequences, theirs.sequences)}


def _runner(model: PreTrainedModel, options: Options, packed: bool, invariant: bool) -> ModelRunner:
    runner = ModelRunner(engine_model(model, packed, invariant=invariant), 1)
    text = [place * 7 % model.config.vocab_size for place in range(options.context)]
    runner.forward([TokenTree(text)])
    runner.commit([range(options.context)])
    return runner


def _tree(nodes: int) -> TokenTree:
    """A root and chains of four."""
    tree = TokenTree([5])
    first = 11
    while len(tree) < nodes:
        tree.add_candidates([first + step for step in range(min(4, nodes - len(tree)))])
        first += 5
    return tree


@torch.no_grad()
def steps(loaded: BenchModel, options: Options, packed: bool, nodes: int) -> Iterator[Row]:
    """A row for a step with, and one for a step without."""
    runners = {on: _runner(loaded.model, options, packed, on) for on in (False, True)}
    tree, times = _tree(nodes), {on: [] for on in runners}
    for turn in range(options.repeats + 1):
        for on, runner in runners.items():
            begin = process_time()
            runner.forward([tree])
            runner.commit([[]])
            if turn:  # the first ones do what is done once
                times[on].append(1000 * (process_time() - begin))
    for on, taken in times.items():
        row: Row = {"kind": "step", "model": options.model, "packed": packed, "nodes": nodes, "invariant": on}
        yield {**row, "context": options.context, "ms": median(taken)}


def probe(options: Options) -> Probe:
    """The units: each prompt, each kind of step."""
    loaded = load_model(options.model, options.dtype)
    units = []
    if options.prompts:
        path = Path(options.prompts)
        prompts = read_prompts(TaskSpec(path.stem, path))[: options.limit]
        units += [Unit(prompt.id, partial(texts, loaded, options, prompt)) for prompt in prompts]
    units += [
        Unit(f"{nodes} nodes{', packed' * packed}", partial(steps, loaded, options, packed, nodes))
        for packed, nodes in product((False, True), options.nodes)
    ]
    return Probe(units, {"dtype": options.dtype, "max_new_tokens": options.max_new_tokens})
