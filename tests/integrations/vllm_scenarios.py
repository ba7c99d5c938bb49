"""Scenarios of the vLLM tests, each in its own process, in vLLM's environment.

    python tests/integrations/vllm_scenarios.py SCENARIO OUTPUT

writes the results as JSON. Numba must not be imported before the engine is created, or vLLM 0.32 does not start on
CPUs.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm

from lookahead.demo import demo_model_path

NEW, PROMPTS = 48, 40
PROPOSER = "lookahead.integrations.vllm.LookaheadProposer"


class Model:
    """vLLM's engine in this process, run step by step."""

    def __init__(self, drafted: int = 0, settings: dict[str, Any] | None = None, **arguments: Any) -> None:
        common: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16}
        if drafted:
            drafts = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": drafted}
            common |= {"speculative_config": drafts, "additional_config": {"lookahead": settings or {}}}
        model = vllm.LLM(str(demo_model_path()), disable_log_stats=True, **{**common, **arguments})
        self.engine, self.tokenizer = model.llm_engine, model.get_tokenizer()
        self.steps = self._made = 0

    @property
    def proposer(self) -> Any:
        core = self.engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.drafter

    def prompts(self) -> list[list[int]]:
        """Return pieces of Python's standard library, of different lengths."""
        source = "".join(inspect.getsource(module) for module in (json, textwrap, inspect))
        ids = self.tokenizer(source).input_ids
        random = Random(0)
        starts = [random.randrange(len(ids) - 300) for _ in range(PROMPTS)]
        return [ids[start : start + random.randint(8, 250)] for start in starts]

    def add(self, prompt: list[int], new: int = NEW, **sampling: Any) -> str:
        self._made += 1
        sampling_params = vllm.SamplingParams(**{"temperature": 0, "max_tokens": new, "ignore_eos": True, **sampling})
        self.engine.add_request(str(self._made), {"prompt_token_ids": prompt}, sampling_params)
        return str(self._made)

    def step(self) -> dict[str, list[int]]:
        self.steps += 1
        ended = [output for output in self.engine.step() if output.finished]
        return {output.request_id: list(output.outputs[0].token_ids) for output in ended}

    def texts(self, prompts: Sequence[list[int]], at_once: int = 16, **sampling: Any) -> list[list[int]]:
        waiting, running, texts = list(enumerate(prompts)), {}, {}
        while waiting or running:
            while waiting and len(running) < at_once:
                number, prompt = waiting.pop(0)
                running[self.add(prompt, **sampling)] = number
            for name, text in self.step().items():
                texts[running.pop(name)] = text
        return [texts[number] for number in range(len(prompts))]


def without_drafts() -> dict[str, Any]:
    """Return the reference texts."""
    model = Model()
    return {"version": vllm.__version__, "texts": model.texts(model.prompts(), 1)}


def with_drafts() -> dict[str, Any]:
    """Return texts of single requests, sixteen at once, aborted ones, with log-probabilities, and sampled ones."""
    model = Model(8, {"adaptive": False})
    prompts, results = model.prompts(), {}
    for at_once in (1, 16):
        before = model.steps
        results[f"texts, {at_once} at once"] = model.texts(prompts, at_once)
        results[f"steps, {at_once} at once"] = model.steps - before
    results["statistics"] = asdict(model.proposer.statistics)
    results["aborted"] = _arriving(model, prompts)
    results["with log-probabilities"] = model.texts(prompts[:8], prompt_logprobs=2, logprobs=2)
    results["sampled"] = model.texts(prompts[:8], temperature=1.0, seed=3)
    return results


def _arriving(model: Model, prompts: Sequence[list[int]]) -> dict[int, list[int]]:
    """Return the texts of completed requests, by the number of the prompt."""
    random, waiting, running, texts = Random(1), list(range(len(prompts))), {}, {}
    random.shuffle(waiting)
    while waiting or running:
        if waiting and random.random() < 0.4:
            number = waiting.pop()
            running[model.add(prompts[number])] = number
        if running and random.random() < 0.03:
            name = random.choice(list(running))
            model.engine.abort_request([name])
            del running[name]
        for name, text in model.step().items():
            texts[running.pop(name)] = text
    return texts


def with_little_memory() -> dict[str, Any]:
    """Prefill prompts in parts, share prefixes, and preempt requests; pace decides the drafts."""
    room = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 320}
    model = Model(6, enable_chunked_prefill=True, enable_prefix_caching=True, **room)
    prompts = model.prompts()
    return {"texts": model.texts([*prompts, *prompts]), "statistics": asdict(model.proposer.statistics)}


def contract() -> dict[str, Any]:
    """Record the arguments of the proposer's calls."""
    model = Model(4)
    proposer, calls = model.proposer, []
    propose = proposer.propose

    def recording(*arguments: Any, **named: Any) -> list[list[int]]:
        sampled, lengths, tokens = arguments[:3]
        is_list = isinstance(sampled, list) and all(isinstance(new, list) for new in sampled)
        ends = [tokens[row, lengths[row] - len(new) : lengths[row]].tolist() for row, new in enumerate(sampled)]
        calls.append({"lists": is_list, "named": sorted(named), "given": len(arguments), "ends": ends == sampled})
        return propose(*arguments, **named)

    proposer.propose = recording
    model.texts(model.prompts()[:3], new=5)
    result = {"class": type(proposer).__name__, "reads": proposer._target is not None, "calls": calls}
    return {**result, "statistics": asdict(proposer.statistics)}


def unknown_setting() -> dict[str, Any]:
    """Return the error of an unknown setting."""
    try:
        Model(4, {"adaptiv": False})
    except Exception as error:  # vLLM may wrap ours in its own
        return {"error": f"{error!r} {error.__cause__!r}"}
    return {"error": ""}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(globals()[sys.argv[1]]()), encoding="utf-8")
