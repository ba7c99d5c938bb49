"""Rows of a results file: what each run was asked, did and took, as plain values."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from lookahead.backends.transformers.cost_store import device_name
from lookahead.bench.method_runner import Run
from lookahead.bench.models import BenchModel
from lookahead.bench.prompts import Prompt
from lookahead.bench.repetition import repeated_cycle_share, tokens_before_cycles
from lookahead.bench.suite import MethodSpec, TaskSpec


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The processor that does the work, and how many threads it may use."""
    return {"type": device.type, "device": device_name(device), "threads": torch.get_num_threads()}


def resident_bytes() -> int | None:
    """Memory of this process that lies in RAM, in bytes; `None` where that cannot be had.

    From the system itself on Linux, elsewhere from psutil, if that is installed.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        return int(import_module("psutil").Process().memory_info().rss)
    except ImportError:
        return None


Row = dict[str, Any]
Key = tuple[str, str, str, str, int]


@dataclass(frozen=True)
class Request:
    """One run that a benchmark asks for.

    Attributes:
        model: The model.
        task: The task.
        prompt: The prompt.
        method: The method.
        order: Its place among the methods, from 0.
        repeat: Which pass over the prompts, from 0.
        input_ids: The prompt as it is sent, `[1, S]`.
    """

    model: BenchModel
    task: TaskSpec
    prompt: Prompt
    method: MethodSpec
    order: int
    repeat: int
    input_ids: torch.Tensor

    @property
    def key(self) -> Key:
        """What tells its row from others."""
        return (self.model.spec.name, self.task.name, self.method.name, self.prompt.id, self.repeat)

    def settings(self) -> dict[str, Any]:
        """All that its figures depend on, but for machine and versions."""
        prompt = hashlib.sha256(json.dumps(self.input_ids.tolist()).encode()).hexdigest()[:16]
        return {
            "model": self.model.settings(),
            "task": {**self.task.settings(), "input": prompt},
            "method": self.method.settings(),
        }


def key_of(row: Mapping[str, Any]) -> Key:
    """What tells a row from others."""
    return (row["model"], row["task"], row["method"], row["prompt"], row["repeat"])


def build_row(request: Request, run: Run, circumstances: Mapping[str, Any]) -> Row:
    """The row of a run.

    Args:
        request: What was asked.
        run: What happened.
        circumstances: Versions and machine.
    """
    model, task, method, prompt, repeat = request.key
    settings = request.settings()
    early = steps_within(run.accepted_lengths, tokens_before_cycles(run.output))
    return {
        "model": model,
        "task": task,
        "method": method,
        "prompt": prompt,
        "repeat": repeat,
        "order": request.order,
        "reference": request.method.is_reference,
        "exact": request.model.spec.exact and request.method.keeps_draws(request.task),
        "prompt_tokens": request.input_ids.shape[1],
        "tokens": len(run.output),
        "steps": run.steps,
        "S": round(len(run.output) / run.steps, 4) if run.steps else 0.0,
        "cpu_seconds": round(run.cpu_seconds, 6),
        "wall_seconds": round(run.wall_seconds, 6),
        "seconds": {part: round(seconds, 6) for part, seconds in run.seconds.items()},
        "resident_bytes": resident_bytes(),
        "cycle_share": round(repeated_cycle_share(run.output), 4),
        "tokens_before_cycles": sum(early),
        "steps_before_cycles": len(early),
        "S_before_cycles": round(sum(early) / len(early), 4) if early else None,
        "nodes_per_step": run.nodes_per_step,
        "accepted_lengths": run.accepted_lengths,
        "output": run.output,
        "config": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
        "settings": settings,
        **circumstances,
        "date": date.today().isoformat(),
    }


def steps_within(lengths: Sequence[int], tokens: int) -> list[int]:
    """The lengths of the steps, first ones first, that end within the first so many tokens."""
    return [length for length, end in zip(lengths, accumulate(lengths), strict=True) if end <= tokens]
