"""Count what lookahead parallelism runs and sends, on as many ranks as it is started with.

    torchrun --nproc-per-node 4 benchmarks parallel --output benchmarks/results/parallel-demo.jsonl

Rank 0 keeps a row for each setting: the nodes that each rank ran, how many of them were there in duplicate, the bytes
that one rank sent, and the step compression. Started without torchrun it measures the cost of a step in one process
instead, and predicts speed-ups from that curve and from a roofline, by the paper's scaling law.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from lookahead import LookaheadConfig
from lookahead.backends.transformers.tuning import measure
from lookahead.bench.models import BenchModel
from lookahead.bench.rows import Row
from lookahead.bench.scaling_law import PAPER_LAW
from lookahead.core.step_costs import StepCosts
from lookahead.demo import DEMO_PROMPT
from lookahead.parallel import ParallelGroup, Traffic, join, scale_config
from probe import Probe, Unit, generate, load_model, option, token_ids

SIZES = ((15, 5, 15), (10, 5, 10), (7, 5, 7), (15, 7, 15))
NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 256

WINDOW, NGRAM = 15, 5
"""W = G and N of the paper for a 7B model (Table 4)."""

DEVICES = range(1, 9)

A100_NODE = 2 * 7e9 / (312e12 * 0.5)
"""Seconds of arithmetic for a node of a 7B model, at half of an A100's 312 TFLOP/s."""
A100_STEP = 2 * 7e9 / 1.555e12
"""Seconds that reading 7B half-precision weights once takes an A100 of 40 GB (1.555 TB/s)."""

StepTime = Callable[[float], float]
"""Seconds of a step, by its nodes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option("demo", "`demo`, or the folder of a model")
    max_new_tokens: int = option(96, "tokens of each run")
    repeats: int = option(15, "timings of each step of the curve")


def probe(options: Options) -> Probe:
    """One unit: the runs on these ranks, or the curve."""
    loaded = load_model(options.model, "float32")
    header = {"model": loaded.settings()}
    if "WORLD_SIZE" not in os.environ:
        return Probe([Unit("curve", partial(curve, loaded, options))], header)
    ranks, own = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return Probe([Unit(f"{ranks} ranks", partial(runs, loaded, options))], header, writes=own == 0)


def runs(loaded: BenchModel, options: Options) -> Iterator[Row]:
    """All settings on these ranks."""
    with join() as group:
        for window, ngram, guesses in SIZES:
            config = LookaheadConfig(preset="paper", window_size=window, ngram_size=ngram, guess_set_size=guesses)
            for do_sample in (False, True):
                yield traffic(group, loaded, config, options, do_sample=do_sample)
        config = LookaheadConfig(preset="paper", window_size=WINDOW, ngram_size=NGRAM, guess_set_size=WINDOW)
        yield traffic(group, loaded, scale_config(config, group.size), options, scaled=True)
        yield traffic(group, loaded, LookaheadConfig(preset="auto"), options)


def traffic(
    group: ParallelGroup,
    loaded: BenchModel,
    config: LookaheadConfig,
    options: Options,
    *,
    do_sample: bool = False,
    scaled: bool = False,
) -> Row:
    """One run."""
    group.traffic = Traffic()
    torch.manual_seed(0)
    prompt = token_ids(loaded.tokenizer, loaded.model, DEMO_PROMPT)
    started = perf_counter()
    arguments = {"max_new_tokens": options.max_new_tokens, "do_sample": do_sample, "pad_token_id": 0}
    _, output = generate(loaded.model, prompt, config, parallel=group, **arguments)
    seconds = perf_counter() - started
    counted = group.traffic
    settled = counted.loads[config.ngram_size :] or counted.loads or [[0] * group.size]
    redundant = counted.redundant[config.ngram_size :]
    sizes = [config.window_size, config.ngram_size, config.guess_set_size]
    setting = ", ".join(map(str, sizes)) + " (scaled)" * scaled if config.preset == "paper" else f"`{config.preset}`"
    return {
        "kind": "traffic",
        "ranks": group.size,
        "preset": config.preset,
        "sizes": sizes,
        "setting": setting,
        "do_sample": do_sample,
        "decoding": "sampled" if do_sample else "greedy",
        **{
            name: getattr(counted, name)
            for name in ("steps", "exchanges", "bytes_per_step", "most_bytes", "start_bytes")
        },
        "exchanges_per_step": counted.exchanges / counted.steps,
        "loads": [sum(step[rank] for step in settled) / len(settled) for rank in range(group.size)],
        "largest": sum(max(step) for step in settled) / len(settled),
        "redundant": sum(redundant) / max(1, len(redundant)),
        "step_compression": output.statistics.step_compression,
        "verify_seconds": output.statistics.seconds.verify,
        "seconds": seconds,
    }


def curve(loaded: BenchModel, options: Options) -> Iterator[Row]:
    """The cost of a step in one process, and what the scaling law makes of it."""
    measured = measure(loaded.model, NODES, [CONTEXT], options.repeats)
    yield {"kind": "curve", **measured.to_dict()}
    yield from predictions(measured.to_dict()["points"])


def predictions(points: list[Row]) -> Iterator[Row]:
    """Predicted speed-ups over plain decoding, by devices and the choice of W = G and N."""
    cost = StepCosts.fit((point["nodes"], point["context"], point["seconds"]) for point in points)

    def on_cpu(nodes: float) -> float:
        return float(cost.expected(nodes, CONTEXT))

    curves: dict[str, StepTime] = {
        "a CPU thread and the demo model (measured curve)": on_cpu,
        "an A100 and a 7B model (roofline, not measured)": lambda nodes: max(A100_STEP, nodes * A100_NODE),
    }
    sizes = [(window, ngram) for window in range(1, 121) for ngram in range(2, 13)]
    for name, step_time in curves.items():
        for devices in DEVICES:
            chosen = {
                f"W = G = {WINDOW}, N = {NGRAM} in all": speed_up(step_time, devices, WINDOW, NGRAM),
                f"W = G = {WINDOW} a device, N = {NGRAM}": speed_up(step_time, devices, WINDOW * devices, NGRAM),
                "best W = G and N": max(speed_up(step_time, devices, window, ngram) for window, ngram in sizes),
            }
            for choice, value in chosen.items():
                yield {"kind": "prediction", "curve": name, "choice": choice, "devices": devices, "speed_up": value}


def speed_up(step_time: StepTime, devices: int, window: int, ngram: int) -> float:
    """Predicted tokens per second over plain decoding on one such device."""
    return PAPER_LAW.step_compression(window, ngram) * step_time(1) / step_time(largest_load(devices, window, ngram))


def largest_load(devices: int, window: int, ngram: int) -> float:
    """Nodes of the fullest rank: an equal share of (W + G)(N-1) nodes, the root, and half of the trunk if W is cut."""
    share = 2 * window * (ngram - 1) / devices
    return share + 1 if devices == 1 else share + 1 + window / 4
