"""Measure ways to compute the attention of a tree step on a CPU, for a model whose heads share keys and values.

    python benchmarks/attention.py --output benchmarks/results/attention/cpu.jsonl --markdown docs/engine.md

One layer's attention after a cached text: as transformers' `sdpa` calls torch, with a dense mask and repeated keys; the
same with torch's `enable_gqa`; with the query heads of a group folded into rows (`folded_attention.py`); as two
plain matrix products around a softmax; and, at one context, with FlexAttention, compiled for each shape, whose mask
function reads which node sees which from a tensor. They take turns; CPU time of the process, medians. What differs from
the first in any bit is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time

import torch
from rich.console import Console
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from common import device_name, instruction_sets, parse_positive, progress_bar, to_line, versions
from lookahead.bench.markdown import into_page
from write_results import Row, write_whole

HEADS, SHARED, HEAD_SIZE = 16, 4, 64
CONTEXTS, NODES = (128, 512, 2048), (1, 16, 32, 64)
FLEX_CONTEXT = 512
Attend = Callable[[], torch.Tensor]


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
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, attend in methods.items():
            begin = process_time()
            for _ in range(3):
                attend()
            times[name].append((process_time() - begin) / 3)
    return [
        {
            "context": context,
            "nodes": nodes,
            "dtype": str(dtype).removeprefix("torch."),
            "method": name,
            "ms": 1000 * median(taken),
            "differing": differing[name],
        }
        for name, taken in times.items()
    ]


def tables(rows: list[Row], header: Row) -> str:
    """Markdown: a table for each number type."""
    lines = [
        f"One layer of {HEADS} heads that share {SHARED} of keys and values, head size {HEAD_SIZE}; one thread of "
        f"{header['machine']} ({', '.join(header['instruction_sets'])}); torch {header['versions']['torch']}. In "
        "brackets the share of results that differ from the first column in any bit.",
    ]
    names = list(dict.fromkeys(row["method"] for row in rows))
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines += ["", f"| {dtype}: context, nodes | {' | '.join(f'{name}, ms' for name in names)} |"]
        lines.append("| --- |" + " ---: |" * len(names))
        for context in CONTEXTS:
            for nodes in NODES:
                found = {
                    row["method"]: row
                    for row in rows
                    if (row["dtype"], row["context"], row["nodes"]) == (dtype, context, nodes)
                }
                cells = [
                    f"{found[name]['ms']:.3f} ({100 * found[name]['differing']:.1f} %)" if name in found else "–"
                    for name in names
                ]
                lines.append(f"| {context:,}, {nodes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure all, write rows and page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines, written anew")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="page whose `attention` section is replaced")
    parser.add_argument("--repeats", type=parse_positive, default=15, metavar="N")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    flex = torch.compile(flex_attention, dynamic=False)
    torch._dynamo.config.recompile_limit = 64
    header: Row = {
        "machine": device_name(torch.device("cpu")),
        "instruction_sets": instruction_sets(),
        "versions": versions(),
    }
    rows: list[Row] = []
    settings = [(c, n, d) for d in (torch.bfloat16, torch.float32) for c in CONTEXTS for n in NODES]
    with torch.no_grad(), progress_bar(Console(stderr=True)) as bar:
        for context, nodes, dtype in bar.track(settings):
            rows += measure(context, nodes, dtype, arguments.repeats, flex)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.output, "".join(to_line(row) for row in [header, *rows]))
    if arguments.markdown is not None:
        page = arguments.markdown.read_text(encoding="utf-8")
        write_whole(arguments.markdown, into_page(page, tables(rows, header), "attention"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
