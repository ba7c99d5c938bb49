"""The order of a benchmark's runs, and the loop over those that are not done yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lookahead.bench.method_runner import MethodRunner
from lookahead.bench.models import BenchModel, Prompt, encode, load, read_prompts
from lookahead.bench.rows import Request, ResultsFile, Row, build_row
from lookahead.bench.suite import MethodSpec, ModelSpec, Suite, TaskSpec


@dataclass(frozen=True)
class Watcher:
    """Receives the progress of a benchmark.

    Attributes:
        starting: Called with what is done next, in words.
        finished: Called once for each run, with its row, or with `None` if the file had it already.
    """

    starting: Callable[[str], None]
    finished: Callable[[Row | None], None]


class Benchmark:
    """A suite on one device, with its prompts read.

    All methods go through one prompt before the next prompt begins, so that a change of the machine's pace meets all
    of them; each prompt begins with another method. Repeats are passes over all prompts: within one a method with a
    memory meets them in order, with nothing learned before.
    """

    def __init__(self, suite: Suite, device: torch.device, limit: int | None = None) -> None:
        """Read the prompts.

        Args:
            suite: What to measure.
            device: Where models run.
            limit: Take only the first so many prompts of each task.

        Raises:
            InvalidArgumentError: A file of prompts cannot be used.
        """
        self._suite = suite
        self._device = device
        self._prompts = {task.name: read_prompts(task, limit) for task in suite.tasks}

    @property
    def runs(self) -> int:
        """How many runs there are in all."""
        tasks = [task for model in self._suite.models for task in self._suite.tasks_of(model)]
        prompts = sum(len(self._prompts[task.name]) for task in tasks)
        return prompts * len(self._suite.methods) * self._suite.repeats

    def measure(self, file: ResultsFile, circumstances: dict[str, Any], watcher: Watcher) -> None:
        """Measure what the file lacks.

        Raises:
            InvalidArgumentError: A model cannot be loaded, a method cannot run, or the file has rows of other settings.
        """
        for spec in self._suite.models:
            self._measure_model(spec, file, circumstances, watcher)

    def _measure_model(
        self, spec: ModelSpec, file: ResultsFile, circumstances: dict[str, Any], watcher: Watcher
    ) -> None:
        watcher.starting(f"loading {spec.name}")
        model = load(spec, self._device)
        passes = [
            [self._requests(model, task, prompt, repeat) for prompt in self._prompts[task.name]]
            for task in self._suite.tasks_of(spec)
            for repeat in range(self._suite.repeats)
        ]
        for requests in passes:
            for of_prompt in requests:
                file.check(of_prompt)
        runners: dict[str, MethodRunner] = {}
        for requests in passes:
            self._forget_unfinished(requests, file)
            fresh = _Fresh(model, runners)
            for of_prompt in requests:
                for request in of_prompt:
                    if request.key in file:
                        watcher.finished(None)
                        continue
                    watcher.starting(f"{spec.name} · {request.task.name} · {request.prompt.id} · {request.method.name}")
                    runner = fresh.runner(request)
                    run = runner.run(request.input_ids, request.task, request.prompt.number)
                    row = build_row(request, run, circumstances)
                    file.append(row)
                    watcher.finished(row)

    def _requests(self, model: BenchModel, task: TaskSpec, prompt: Prompt, repeat: int) -> list[Request]:
        """All methods on one prompt, in the order in which they take their turns."""
        input_ids = encode(prompt, task, model.tokenizer, model.context).to(self._device)
        first = (prompt.number + repeat) % len(self._suite.methods)
        turns = list(enumerate(self._suite.methods))
        return [
            Request(model, task, prompt, method, order, repeat, input_ids)
            for order, method in (*turns[first:], *turns[:first])
        ]

    def _forget_unfinished(self, requests: Sequence[Sequence[Request]], file: ResultsFile) -> None:
        """Drop the rows of methods with a memory that did not come to the end of the pass.

        What they had learned is gone; going on from the middle would measure something that never happens.
        """
        for method in self._suite.methods:
            if method.has_memory:
                keys = {request.key for of_prompt in requests for request in of_prompt if request.method == method}
                if not all(key in file for key in keys):
                    file.drop(keys)


class _Fresh:
    """Hands out runners for one pass: warmed up, and those with a memory with an empty one."""

    def __init__(self, model: BenchModel, runners: dict[str, MethodRunner]) -> None:
        self._model = model
        self._runners = runners
        self._ready: set[str] = set()

    def runner(self, request: Request) -> MethodRunner:
        method: MethodSpec = request.method
        if method.name not in self._ready:
            runner = self._runners.get(method.name)
            if runner is None:
                self._runners[method.name] = MethodRunner(self._model, method)
            elif method.has_memory:
                runner.forget()
            if runner is None or method.has_memory:
                self._runners[method.name].warm_up(request.input_ids, request.task)
            self._ready.add(method.name)
        return self._runners[method.name]
