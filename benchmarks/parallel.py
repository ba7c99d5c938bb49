"""Count what lookahead parallelism runs and sends, on as many ranks as it is started with.

    torchrun --nproc-per-node 4 benchmarks/parallel.py --output benchmarks/results/parallel-demo.jsonl
    python benchmarks/parallel.py --curve --output benchmarks/results/parallel-demo.jsonl

Rank 0 appends a line for each setting: the nodes that each rank ran, how many of them were there in duplicate, the
bytes that one rank sent, and the step compression. With `--curve` the cost of a step in one process is measured
instead, which `parallel_report.py` predicts speed-ups from.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import lookahead
from common import load_model
from lookahead import LookaheadConfig
from lookahead.backends.transformers.tuning import measure
from lookahead.demo import DEMO_PROMPT
from lookahead.parallel import ParallelGroup, Traffic, join, scale_config

SIZES = ((15, 5, 15), (10, 5, 10), (7, 5, 7), (15, 7, 15))
NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def main() -> int:
    """Measure what the command line asks for."""
    options = _parse()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, "float32", "cpu")
    if options.curve:
        measured = measure(model, NODES, [256], options.repeats)
        _append(options.output, {"kind": "curve", "model": options.model, **measured.to_dict()})
        return 0
    prompt = tokenizer(DEMO_PROMPT, return_tensors="pt").input_ids
    with join() as group:
        for sizes in SIZES:
            config = LookaheadConfig(preset="paper", window_size=sizes[0], ngram_size=sizes[1], guess_set_size=sizes[2])
            for do_sample in (False, True):
                _run(group, model, prompt, config, do_sample, False, options)
        config = LookaheadConfig(preset="paper", window_size=15, ngram_size=5, guess_set_size=15)
        _run(group, model, prompt, scale_config(config, group.size), False, True, options)
        _run(group, model, prompt, LookaheadConfig(preset="auto"), False, True, options)
    return 0


def _run(
    group: ParallelGroup,
    model: Any,
    prompt: torch.Tensor,
    config: LookaheadConfig,
    do_sample: bool,
    scaled: bool,
    options: argparse.Namespace,
) -> None:
    group.traffic = Traffic()
    torch.manual_seed(0)
    started = perf_counter()
    output = lookahead.generate(
        model,
        prompt,
        attention_mask=torch.ones_like(prompt),
        lookahead_config=config,
        parallel=group,
        max_new_tokens=options.max_new_tokens,
        do_sample=do_sample,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    seconds = perf_counter() - started
    traffic = group.traffic
    if group.rank:
        return
    settled = traffic.loads[config.ngram_size :] or traffic.loads
    row = {
        "kind": "traffic",
        "model": options.model,
        "ranks": group.size,
        "preset": config.preset,
        "sizes": [config.window_size, config.ngram_size, config.guess_set_size],
        "do_sample": do_sample,
        "scaled": scaled,
        "steps": traffic.steps,
        "exchanges": traffic.exchanges,
        "bytes_per_step": traffic.bytes_per_step,
        "most_bytes": traffic.most_bytes,
        "start_bytes": traffic.start_bytes,
        "loads": [sum(step[rank] for step in settled) / len(settled) for rank in range(group.size)],
        "largest": sum(max(step) for step in settled) / len(settled),
        "redundant": sum(traffic.redundant[config.ngram_size :]) / max(1, len(traffic.redundant[config.ngram_size :])),
        "step_compression": output.statistics.step_compression,
        "verify_seconds": output.statistics.seconds.verify,
        "seconds": seconds,
    }
    _append(options.output, row)


def _append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="folder of the model, or demo")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines that are added to")
    parser.add_argument("--curve", action="store_true", help="measure the cost of a step in one process instead")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of each run (default: 96)")
    parser.add_argument("--repeats", type=int, default=15, help="of each step of the curve (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
