"""Count what lookahead parallelism runs and sends, on as many ranks as it is started with.

    torchrun --nproc-per-node 4 benchmarks parallel --output benchmarks/results/parallel-demo.jsonl

Rank 0 keeps a row for each setting: the nodes that each rank ran, how many of them were there in duplicate, the bytes
that one rank sent, and the step compression.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from lookahead import LookaheadConfig
from lookahead.bench.models import BenchModel
from lookahead.bench.rows import Row
from lookahead.demo import DEMO_PROMPT
from lookahead.errors import InvalidArgumentError
from lookahead.parallel import ParallelGroup, Traffic, join, scale_config
from probe import Probe, Unit, generate, load_model, option, token_ids

SIZES = ((15, 5, 15), (10, 5, 10), (7, 5, 7), (15, 7, 15))
WINDOW, NGRAM = 15, 5
"""W = G and N of the paper for a 7B model (Table 4)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option("demo", "`demo`, or the folder of a model")
    max_new_tokens: int = option(96, "tokens of each run")


def probe(options: Options) -> Probe:
    """One unit: the runs on these ranks.

    Raises:
        InvalidArgumentError: torchrun did not start this process.
    """
    if "WORLD_SIZE" not in os.environ:
        raise InvalidArgumentError("start it with torchrun, which says how many ranks there are")
    loaded, ranks = load_model(options.model, "float32"), os.environ["WORLD_SIZE"]
    writes = os.environ["RANK"] == "0"
    return Probe([Unit(f"{ranks} ranks", partial(runs, loaded, options))], {"model": loaded.settings()}, writes)


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
