"""What the tests of vLLM run, each scenario in a process of its own, in vLLM's environment.

    python tests/integrations/vllm_scenarios.py SCENARIO OUTPUT

writes what it found as JSON. Nothing here imports numba before the engine is made, for vLLM 0.32
does not start on CPUs then.
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
    """vLLM's engine in this process, step by step."""

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
        """Pieces of Python's own library, of different lengths."""
        source = "".join(inspect.getsource(module) for module in (json, textwrap, inspect))
        ids = self.tokenizer(source).input_ids
        random = Random(0)
        starts = [random.randrange(len(ids) - 300) for _ in range(PROMPTS)]
        return [ids[start : start + random.randint(8, 250)] for start in starts]

    def add(self, prompt: list[int], new: int = NEW, **sampling: Any) -> str:
        self._made += 1
        asked = vllm.SamplingParams(**{"temperature": 0, "max_tokens": new, "ignore_eos": True, **sampling})
        self.engine.add_request(str(self._made), {"prompt_token_ids": prompt}, asked)
        return str(self._made)

    def step(self) -> dict[str, list[int]]:
        self.steps += 1
        ended = [output for output in self.engine.step() if output.finished]
        return {output.request_id: list(output.outputs[0].token_ids) for output in ended}

    def texts(self, prompts: Sequence[list[int]], at_once: int = 16, **asked: Any) -> list[list[int]]:
        waiting, running, texts = list(enumerate(prompts)), {}, {}
        while waiting or running:
            while waiting and len(running) < at_once:
                number, prompt = waiting.pop(0)
                running[self.add(prompt, **asked)] = number
            for name, text in self.step().items():
                texts[running.pop(name)] = text
        return [texts[number] for number in range(len(prompts))]


def without_drafts() -> dict[str, Any]:
    """The texts to compare with."""
    model = Model()
    return {"version": vllm.__version__, "texts": model.texts(model.prompts(), 1)}


def with_drafts() -> dict[str, Any]:
    """One request at a time; sixteen; arriving and aborted; with log-probabilities; sampled."""
    model = Model(8, {"adaptive": False})
    prompts, found = model.prompts(), {}
    for at_once in (1, 16):
        before = model.steps
        found[f"texts, {at_once} at once"] = model.texts(prompts, at_once)
        found[f"steps, {at_once} at once"] = model.steps - before
    found["statistics"] = asdict(model.proposer.statistics)
    found["aborted"] = _arriving(model, prompts)
    found["with log-probabilities"] = model.texts(prompts[:8], prompt_logprobs=2, logprobs=2)
    found["sampled"] = model.texts(prompts[:8], temperature=1.0, seed=3)
    return found


def _arriving(model: Model, prompts: Sequence[list[int]]) -> dict[int, list[int]]:
    """The texts of those that were not aborted, by the number of the prompt."""
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
    """Prompts in parts, shared prefixes, and requests that are preempted; drafts by the clock."""
    room = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 12, "block_size": 32, "max_model_len": 320}
    model = Model(6, enable_chunked_prefill=True, enable_prefix_caching=True, **room)
    prompts = model.prompts()
    return {"texts": model.texts([*prompts, *prompts]), "statistics": asdict(model.proposer.statistics)}


def contract() -> dict[str, Any]:
    """What the proposer is called with."""
    model = Model(4)
    proposer, calls = model.proposer, []
    asked = proposer.propose

    def recording(*given: Any, **named: Any) -> list[list[int]]:
        sampled, lengths, tokens = given[:3]
        is_list = isinstance(sampled, list) and all(isinstance(new, list) for new in sampled)
        ends = [tokens[row, lengths[row] - len(new) : lengths[row]].tolist() for row, new in enumerate(sampled)]
        calls.append({"lists": is_list, "named": sorted(named), "given": len(given), "ends": ends == sampled})
        return asked(*given, **named)

    proposer.propose = recording
    model.texts(model.prompts()[:3], new=5)
    found = {"class": type(proposer).__name__, "reads": proposer._target is not None, "calls": calls}
    return {**found, "statistics": asdict(proposer.statistics)}


def unknown_setting() -> dict[str, Any]:
    """What is said of a setting that there is not."""
    try:
        Model(4, {"adaptiv": False})
    except Exception as error:  # whichever vLLM makes of ours
        return {"error": f"{error!r} {error.__cause__!r}"}
    return {"error": ""}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(globals()[sys.argv[1]]()), encoding="utf-8")
