"""Measure listing the likeliest tokens of a step's logits on a CPU, which drafting learns from.

The likeliest token alone (`argmax`); the eight likeliest with their probabilities, as the backend lists them; and the
same by a softmax of whole rows and the largest maxima of blocks, as it was done before. They take turns; CPU time of
the process, medians. Logits in bfloat16 are made float32 first where the way needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from lookahead.backends.predictions import argmax, top_predictions
from lookahead.backends.transformers.tuning import Stopwatch
from lookahead.bench.rows import Row
from probe import Probe, Unit, option

TOP_K = 8
BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    vocabulary: int = option(128_000, f"tokens that the model knows, a multiple of {BLOCK}")
    nodes: tuple[int, ...] = option((8, 32, 64), "nodes of a step")
    repeats: int = option(31, "timings of each")


def by_softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens lie in the blocks with the largest maxima; their probabilities by a softmax of all."""
    logits = logits.float()
    blocks = logits.view(len(logits), -1, BLOCK).amax(dim=-1).topk(TOP_K, dim=-1).indices
    places = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    ids = places.gather(1, logits.gather(1, places).topk(TOP_K, dim=-1).indices)
    return ids, torch.softmax(logits, dim=-1).gather(1, ids)


def time_listing(options: Options, nodes: int, dtype: str) -> Iterator[Row]:
    """A row for each way."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(nodes, options.vocabulary, generator=generator)
    logits = logits.to(getattr(torch, dtype))
    ways: dict[str, Callable[[], object]] = {
        "argmax": partial(argmax, logits),
        "softmax": partial(by_softmax, logits),
        "compiled loop": partial(top_predictions, logits, TOP_K),
    }
    watch = Stopwatch(logits.device)
    for _ in range(options.repeats):
        for name, way in ways.items():
            watch.time(name, way)
    for name in ways:
        yield {"kind": "listing", "way": name, "nodes": nodes, "type": dtype, "ms": round(1e3 * watch.seconds(name), 3)}


def probe(options: Options) -> Probe:
    """The units: each size and number type."""
    units = [
        Unit(f"{nodes} nodes, {dtype}", partial(time_listing, options, nodes, dtype))
        for nodes, dtype in product(options.nodes, ("float32", "bfloat16"))
    ]
    return Probe(units, {"vocabulary": options.vocabulary})
