"""Compare `stream_generate` with mlx-lm's own in seeded random cases, on tiny random models.

    python tests/on_mlx/run_mlx_cases.py --cases 500
    python tests/on_mlx/run_mlx_cases.py --cases 500 --output benchmarks/results/mlx-cases.jsonl
    python tests/on_mlx/run_mlx_cases.py --only gpt_oss --cases 40

The number of a case determines it. Tokens, text, reasons to end, random state and length of the prompt cache must be
equal. With `--output`, each case is written at once, and cases in the file are not run again. The exit code is 1 if
any case is wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from datetime import date
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from lookahead import LookaheadConfig
from lookahead.backends.mlx.model import MLXModel
from lookahead.bench.rows import RowsFile, describe_machine, kept_lines
from lookahead.core.statistics import Statistics
from lookahead.drafting import compile_loops
from lookahead.integrations.mlx import stream_generate
from mlx_zoo import CHAINS, TREES, VOCABULARY, build_module, tokenizer

SAMPLERS: list[dict[str, Any]] = [
    *({}, {}, {"temp": 0.7}, {"temp": 1.0, "top_p": 0.8}, {"temp": 1.2, "min_p": 0.05}, {"temp": 0.9, "top_k": 7}),
    {"temp": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
]
PENALTIES: list[dict[str, Any]] = [
    *({}, {}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.4}, {"frequency_penalty": 0.2}),
    {"logit_bias": {3: 4.0, 5: -2.0}},
]
CONFIGS = [
    LookaheadConfig(),
    LookaheadConfig(step_budget=8),
    LookaheadConfig(step_budget=24),
    LookaheadConfig(preset="context_matches"),
    LookaheadConfig(preset="token_recycling"),
]
WEIGHTS = [None, None, None, 8, 4]
"""Bits of weights; `None` for float32."""


@lru_cache(maxsize=64)
def model_of(architecture: str, seed: int, bits: int | None) -> MLXModel:
    module = build_module(architecture, seed)
    if bits is not None:
        nn.quantize(module, 32, bits, class_predicate=lambda _, one: hasattr(one, "to_quantized") and _fits(one))
    return MLXModel(module, tokenizer())


def _fits(layer: Any) -> bool:
    return layer.weight.shape[-1] % 32 == 0


def draw_case(number: int, names: list[str]) -> dict[str, Any]:
    """Draw the options of a case as plain values."""
    draws = random.Random(number)
    words = [draws.randrange(VOCABULARY) for _ in range(draws.randrange(1, 30))]
    chains = names[number % len(names)] in CHAINS
    return {
        "case": number,
        "architecture": names[number % len(names)],
        "weights": draws.randrange(3),
        "bits": draws.choice(WEIGHTS),
        "prompt": words * draws.choice([1, 2, 3]),
        "second": [draws.randrange(VOCABULARY) for _ in range(draws.choice([0, 0, 1, 9]))],
        "max_tokens": draws.choice([1, 12, 40, 64]),
        "sampler": draws.randrange(len(SAMPLERS)),
        "penalties": draws.randrange(len(PENALTIES)),
        "config": draws.randrange(3 if chains else len(CONFIGS)),
        "prefill_step_size": draws.choice([2048, 2048, 16, 5]),
        "max_kv_size": draws.choice([None, None, None, 24, 80]),
        "end": draws.choice([None, draws.randrange(VOCABULARY)]),
    }


def run_turns(case: dict[str, Any], way: Any, target: Any, model: MLXModel, **extra: Any) -> tuple[Any, float]:
    """Answers of one or two turns with a prompt cache, and their CPU time."""
    words = tokenizer(() if case["end"] is None else (case["end"],))
    cache = make_prompt_cache(model.mlx, case["max_kv_size"])
    options: dict[str, Any] = {"max_tokens": case["max_tokens"], "prefill_step_size": case["prefill_step_size"]}
    if SAMPLERS[case["sampler"]]:
        options["sampler"] = make_sampler(**SAMPLERS[case["sampler"]])
    options["logits_processors"] = make_logits_processors(**PENALTIES[case["penalties"]])
    mx.random.seed(case["case"])
    found: list[Any] = []
    start = process_time()
    for prompt in (case["prompt"], case["second"]):
        if prompt:
            answers = way(target, words, prompt, prompt_cache=cache, **options, **extra)
            found += [(answer.token, answer.text, answer.finish_reason) for answer in answers]
            found.append((mx.random.state[0].tolist(), getattr(cache[-1], "offset", None)))
    return found, process_time() - start


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in both ways; return its row."""
    model = model_of(case["architecture"], case["weights"], case["bits"])
    statistics = Statistics()
    plain, cpu_plain = run_turns(case, mlx_lm.stream_generate, model.mlx, model)
    extra = {"lookahead_config": CONFIGS[case["config"]], "statistics": statistics}
    drafted, cpu = run_turns(case, stream_generate, model, model, **extra)
    kept = ("case", "architecture", "bits", "sampler", "penalties", "config", "prefill_step_size", "max_kv_size")
    return {
        **{name: case[name] for name in kept},
        "kind": "case",
        "method": model.way,
        "difference": model.difference,
        "tokens": statistics.tokens,
        "steps": statistics.steps,
        "cpu_seconds": round(cpu, 4),
        "cpu_seconds_mlx_lm": round(cpu_plain, 4),
        "equal": int(plain == drafted),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=[*TREES, *CHAINS])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    names = [options.only] if options.only else [*TREES, *CHAINS]
    compile_loops()
    path = options.output or Path(tempfile.mkdtemp()) / "rows.jsonl"
    kept = kept_lines(path, lambda row: row["kind"] == "header")
    with RowsFile(path, kept, lambda row: row.get("case")) as rows:
        if not kept:
            versions = {name: version(name) for name in ("mlx", "mlx-lm", "torch", "transformers")}
            machine = {"machine": describe_machine(torch.device("cpu")), "system": platform.system()}
            rows.append({"kind": "header", **machine, "versions": versions, "date": date.today().isoformat()})
        for number in range(options.first, options.first + options.cases):
            if number not in rows:
                row = run_case(draw_case(number, names))
                rows.append(row)
                if not row["equal"]:
                    print("wrong:", json.dumps(row), flush=True)
        found = [row for row in rows.rows if row["kind"] == "case"]
    wrong = sum(not row["equal"] for row in found)
    steps, tokens = (sum(row[name] for row in found) for name in ("steps", "tokens"))
    print(f"{len(found)} cases, {wrong} wrong; S {tokens / max(steps, 1):.2f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
