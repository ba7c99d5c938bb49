"""Kernels of a step of one text, counted on a simulated CUDA device, and the predicted time of a token.

    python benchmarks launches --output benchmarks/results/launches.jsonl

The device of `tests/backends/apart/simulated_cuda.py` captures the smallest pass of an Engine, with two and with three
layers of the shape of Llama 3.1 8B but narrow. Each row has one kernel more joined than the row before it.

A token takes the time to read all weights and a text of 512 tokens once, and a constant time for each kernel. The
constant is such that the first row, the library as it was measured on an H200, takes the measured time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lookahead import Engine, LookaheadConfig
from lookahead.backends import forward_result
from lookahead.bench.rows import Row, read_lines
from models import RANDOM, TOKENS
from probe import Probe, Unit, option

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS / "backends" / "apart"), str(_TESTS / "support")]

from lookahead.backends.transformers import fused  # noqa: E402
from simulated_cuda import CAPTURE, on_cuda, simulated_cuda  # noqa: E402

JOINED: dict[str, Sequence[tuple[Any, str, Any]]] = {
    "norms and rotary embeddings in one kernel each, as measured": (),
    "likeliest tokens in two kernels": [(forward_result, "_kernel_for", lambda *_: None)],
    "SiLU and product of gated layers in one": [(fused, "_is_gated", lambda _: False)],
    "residual sums by the norms after them": [(fused, "joined_kind", lambda _, kind: kind)],
    "writes to the cache by rotary embeddings": [(fused, "_writes_turned", lambda *_: False)],
}
"""Steps of joining, each with the parts of the library that leave it out."""

NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
CONTEXT = 512


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    measured: str = option("benchmarks/results/gpu-h200.jsonl", "rows of `gpu` with the time of a step")
    bandwidth: float = option(4.3, "terabytes a second that products of one row read")


def kernels(left_out: Sequence[str], layers: int) -> int:
    """Return the number of kernels of the smallest captured pass, with some steps of `JOINED` left out."""
    shape = RANDOM["8b"] | NARROW | {"num_hidden_layers": layers}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, **TOKENS), dtype=torch.bfloat16).eval()
    with simulated_cuda() as device, ExitStack() as stack:
        for place, name, stand_in in [part for step in left_out for part in JOINED[step]]:
            stack.enter_context(mock.patch.object(place, name, stand_in))
        Engine(on_cuda(model), LookaheadConfig(preset="autoregressive"), max_rows=1)
        captured = [event.what for event in device.take() if event.kind == CAPTURE]
    return min(int(what.split()[0]) for what in captured)


def read_bytes() -> int:
    """Return the bytes that a token of the large model reads: all weights but embeddings, and keys and values."""
    config = AutoConfig.for_model(**RANDOM["8b"], **TOKENS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = sum(tensor.nbytes for tensor in model.parameters()) - model.get_input_embeddings().weight.nbytes
    head = config.hidden_size // config.num_attention_heads
    return int(weights + CONTEXT * 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head)


def rows(options: Options) -> Iterator[Row]:
    """Yield the kernels and the predicted time after each step of joining."""
    about: Row = {"kind": "step", "engine": "static", "context": CONTEXT, "nodes": 1}
    steps = read_lines(Path(options.measured))
    measured = median(row["ms"] for row in steps if {**row, **about} == row)
    reading = read_bytes() / (1e9 * options.bandwidth)
    names = list(JOINED)
    of_kernel = 0.0
    for place, name in enumerate(names):
        two, three = (kernels(names[place + 1 :], layers) for layers in (2, 3))
        total = two + (RANDOM["8b"]["num_hidden_layers"] - 2) * (three - two)
        of_kernel = of_kernel or (measured - reading) / total
        yield {
            "kind": "kernels",
            "joined": name,
            "kernels_of_layer": three - two,
            "kernels": total,
            "gigabytes": read_bytes() / 1e9,
            "kernel_us": 1000 * of_kernel,
            "predicted_ms": reading + total * of_kernel,
        }


def probe(options: Options) -> Probe:
    """Make the only unit."""
    return Probe([Unit("kernels", partial(rows, options))], {"model": "8b", "dtype": "bfloat16"})
