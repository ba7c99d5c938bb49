"""Measure what `invariant=True` costs: a tree of each size after a text, with and without it, packed and not.

Steps of both kinds take turns in one process; CPU time, medians.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from time import process_time

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers import ModelRunner, engine_model
from lookahead.backends.transformers.packed_linear import can_pack
from lookahead.bench.models import BenchModel
from lookahead.bench.rows import Row
from lookahead.core.token_tree import TokenTree
from probe import Probe, Unit, load_model, option


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option("demo", "`demo`, `random`, or the folder of a model")
    dtype: str = option("bfloat16", "number type of the weights")
    context: int = option(512, "tokens of text before the steps")
    nodes: tuple[int, ...] = option((1, 16, 32, 64), "nodes of a step")
    repeats: int = option(9, "timings of each")


def _runner(model: PreTrainedModel, options: Options, packed: bool, invariant: bool) -> ModelRunner:
    """With a text in its cache whose keys and values are random, as a prompt of that length takes long."""
    runner = ModelRunner(engine_model(model, packed, invariant=invariant), 1)
    runner.forward([TokenTree([3])])
    runner.commit([[0]])
    for number, layer in enumerate(runner.cache.layers):
        first = [states[:, :, :1].expand(-1, -1, options.context - 1, -1) for states in (layer.keys, layer.values)]
        runner.cache.update(*map(torch.randn_like, first), number)
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
    """A row for a step without, and one for a step with."""
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
        yield {**row, "context": options.context, "repeats": options.repeats, "ms": median(taken)}


def probe(options: Options) -> Probe:
    """The units: each kind of step."""
    loaded = load_model(options.model, options.dtype)
    packs = any(can_pack(module) for module in loaded.model.modules())
    units = [
        Unit(f"{nodes} nodes{', packed' * packed}", partial(steps, loaded, options, packed, nodes))
        for packed, nodes in product((False, True) if packs else (False,), options.nodes)
    ]
    return Probe(units, {"dtype": options.dtype})
