"""Measure ways to compute the attention of a tree step on a CPU, for a model whose heads share keys and values.

One layer's attention after a cached text: as transformers' `sdpa` calls torch, with a dense mask and repeated keys; the
same with torch's `enable_gqa`; with the query heads of a group folded into rows (`folded_attention.py`); as two
plain matrix products around a softmax; and, at one context, with FlexAttention, compiled for each shape, whose mask
function reads which node sees which from a tensor. They take turns; CPU time of the process, medians. `differing` is
the share of results that differ from the first in any bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lookahead.backends.transformers.tuning import Stopwatch
from lookahead.bench.rows import Row
from probe import Probe, Unit, option

HEADS, SHARED, HEAD_SIZE = 16, 4, 64
FLEX_CONTEXT = 512
CALLS = 3
"""Calls of a timing."""

Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    contexts: tuple[int, ...] = option((128, 512, 2048), f"tokens of text; FlexAttention is measured at {FLEX_CONTEXT}")
    nodes: tuple[int, ...] = option((1, 16, 32, 64), "nodes of a step")
    repeats: int = option(15, "timings of each")


def ways(context: int, nodes: int, dtype: torch.dtype, flex: Callable[..., torch.Tensor]) -> dict[str, Attend]:
    """Each way, ready to be called, on the same numbers; results are `[1, heads, nodes, head size]`."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, count, HEAD_SIZE, generator=generator).to(dtype)
        for heads, count in ((HEADS, nodes), (SHARED, context + nodes), (SHARED, context + nodes))
    )
    group = HEADS // SHARED
    # Chains of four below the root: a node sees the text, the root and the chain up to itself.
    place = torch.arange(nodes)
    sees = (place[:, None] >= place) & (((place[:, None] - 1) // 4 == (place - 1) // 4) | (place == 0))
    sees = torch.cat([torch.ones(nodes, context, dtype=torch.bool), sees], dim=1)
    mask = torch.zeros(1, 1, nodes, context + nodes, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)
    dense = None if nodes == 1 else mask
    folded_mask = None if nodes == 1 else mask.expand(1, group, -1, -1).reshape(1, 1, group * nodes, -1)
    block_mask = create_block_mask(lambda b, h, q, k: sees[q, k], None, None, nodes, context + nodes, device="cpu")

    def sdpa(**options: object) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, dense, **options)

    def repeated() -> torch.Tensor:
        keys, values = (states.repeat_interleave(group, dim=1) for states in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, dense)

    def folded() -> torch.Tensor:
        rows = query.reshape(1, SHARED, group * nodes, HEAD_SIZE)
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, folded_mask)
        return out.view(1, HEADS, nodes, HEAD_SIZE)

    def products() -> torch.Tensor:
        rows = query.reshape(SHARED, group * nodes, HEAD_SIZE)
        scores = torch.bmm(rows, key[0].transpose(1, 2)).float() * HEAD_SIZE**-0.5
        if folded_mask is not None:
            scores = scores + folded_mask[0].float()
        return torch.bmm(torch.softmax(scores, dim=-1).to(dtype), value[0]).view(1, HEADS, nodes, HEAD_SIZE)

    methods: dict[str, Attend] = {
        "sdpa, keys repeated": repeated,
        "sdpa, enable_gqa": lambda: sdpa(enable_gqa=True),
        "sdpa, heads folded": folded,
        "two products": products,
    }
    if context == FLEX_CONTEXT:  # each shape is compiled for a quarter of a minute
        methods["FlexAttention"] = lambda: flex(query, key, value, block_mask=block_mask, enable_gqa=True)
    return methods


@torch.no_grad()
def measure(context: int, nodes: int, dtype: torch.dtype, repeats: int, flex: Callable[..., torch.Tensor]) -> list[Row]:
    """A row for each way."""
    methods = ways(context, nodes, dtype, flex)
    first = next(iter(methods.values()))()
    differing: dict[str, float] = {}
    for name, attend in list(methods.items()):
        try:
            differing[name] = float((attend() != first).float().mean())
        except Exception as error:  # torch says in many ways that it cannot
            print(f"{name} cannot be run with {nodes} nodes in {dtype}: {error}".splitlines()[0], file=sys.stderr)
            del methods[name]
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(repeats):
        for name, attend in methods.items():
            watch.time(name, lambda attend=attend: [attend() for _ in range(CALLS)])
    row = {"kind": "attention", "context": context, "nodes": nodes, "dtype": str(dtype).removeprefix("torch.")}
    return [
        {**row, "method": name, "ms": 1000 * watch.seconds(name) / CALLS, "differing": differing[name]}
        for name in methods
    ]


def probe(options: Options) -> Probe:
    """The units: each number type, context and number of nodes."""
    flex = torch.compile(flex_attention, dynamic=False)
    torch._dynamo.config.recompile_limit = 64
    sizes = product((torch.bfloat16, torch.float32), options.contexts, options.nodes)
    units = [
        Unit(f"{str(dtype).removeprefix('torch.')}, {c}, {n}", partial(measure, c, n, dtype, options.repeats, flex))
        for dtype, c, n in sizes
    ]
    return Probe(units, {"heads": HEADS, "shared": SHARED, "head_size": HEAD_SIZE})
