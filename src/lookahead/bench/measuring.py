"""How a benchmark is measured: one method on one prompt, and the order of all that are not done yet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from time import perf_counter, process_time
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.api.generation import generate
from lookahead.bench.models import BenchModel, Prompt, encode, load, load_assistant, read_prompts, sharing_weights
from lookahead.bench.rows import Request, Row, RowsFile, Run, build_row, check_request
from lookahead.bench.suite import MethodSpec, ModelSpec, Suite, TaskSpec
from lookahead.errors import InvalidArgumentError, LookaheadError


class ForwardCounter:
    """Notes, before each forward pass, how many tokens it reads and how many are cached already.

    From the two follow the tokens that each step of a drafting method sends and adds, for transformers itself reports
    neither. A context manager: it is on inside a `with` block.
    """

    def __init__(self, model: PreTrainedModel, prompt_tokens: int) -> None:
        """Nothing happens yet.

        Args:
            model: The model whose passes count.
            prompt_tokens: Length of the prompt.
        """
        self._model = model
        self._prompt = prompt_tokens
        self._passes: list[tuple[int, int]] = []

    def __enter__(self) -> ForwardCounter:
        self._hook = self._model.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()

    def steps(self, tokens: int) -> tuple[list[int], list[int]]:
        """The nodes that each step sent and the tokens that it added, `tokens` in all.

        Before a step all of the text is cached but its last token; before the first one nothing is.
        """
        cached = [length for _, length in self._passes[1:]]
        ends = [length + 1 - self._prompt for length in cached] + [tokens]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        nodes = [sent for sent, _ in self._passes]
        if nodes:
            nodes[0] -= self._prompt - 1  # its last token is the root
        return nodes, lengths

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get("past_key_values")
        self._passes.append((named["input_ids"].shape[1], 0 if cache is None else int(cache.get_seq_length())))


WARM_UP_TOKENS = 8

Starting = Callable[[str], None]
Finished = Callable[[Row | None], None]


class MethodRunner:
    """One method on one model.

    It works on a model object of its own, with the same weights. What the library learns from call to call about the
    model (its predictions, the cost of its steps) is then this method's alone.
    """

    def __init__(self, bench_model: BenchModel, method: MethodSpec) -> None:
        self.method = method
        self._assistant = load_assistant(method, bench_model.model)
        self._assistant_config = None if self._assistant is None else self._assistant.generation_config
        self._model: Any = bench_model.model if method.lookahead is None else sharing_weights(bench_model.model)

    def warm_up(self, input_ids: torch.Tensor, task: TaskSpec) -> None:
        """A short call that is not measured: the library tries the model, packs weights, transformers sets things up.

        Raises:
            InvalidArgumentError: transformers refuses the method's arguments; the message names the method.
        """
        method = self.method
        if method.lookahead is not None:  # the memory stays empty
            method = replace(method, lookahead=replace(method.lookahead, memory="request"))
        short = replace(task, max_new_tokens=min(WARM_UP_TOKENS, task.max_new_tokens))
        try:
            self._call(method, input_ids, short, 0)
        except LookaheadError as error:
            raise InvalidArgumentError(f"methods: {self.method.name!r} does not run: {error}") from error
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            if method.lookahead is not None:
                raise  # no error of the benchmark file
            raise InvalidArgumentError(f"methods: {self.method.name!r}: transformers refuses it: {error}") from error

    def run(self, input_ids: torch.Tensor, task: TaskSpec, number: int) -> Run:
        """Measure one call.

        Args:
            input_ids: The prompt, `[1, S]`.
            task: How much and how to generate.
            number: Place of the prompt in its file, of which the seed of the draws is made.
        """
        return self._call(self.method, input_ids, task, number)

    def _call(self, method: MethodSpec, input_ids: torch.Tensor, task: TaskSpec, number: int) -> Run:
        arguments: dict[str, Any] = {"max_new_tokens": task.max_new_tokens, "do_sample": task.sampling is not None}
        arguments |= {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        devices = [input_ids.device] if input_ids.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # the caller's own draws go on as if nothing had happened
            if task.sampling is not None:
                drawing = task.sampling.settings()
                torch.manual_seed(drawing.pop("seed") + number)
                arguments |= drawing
            if method.lookahead is not None:
                return self._with_lookahead(method, arguments)
            return self._with_transformers(method, arguments)

    def _with_lookahead(self, method: MethodSpec, arguments: dict[str, Any]) -> Run:
        call = partial(generate, self._model, lookahead_config=method.lookahead, return_dict_in_generate=True)
        tokens, output, cpu, wall = timed(call, arguments)
        found: Any = output.statistics
        seconds = asdict(found.seconds)
        return Run(tokens, found.steps, found.nodes_per_step, found.accepted_lengths, cpu, wall, seconds)

    def _with_transformers(self, method: MethodSpec, arguments: dict[str, Any]) -> Run:
        if self._assistant is not None:
            # transformers adapts how much is drafted, and keeps it there for the next call
            self._assistant.generation_config = copy.deepcopy(self._assistant_config)
            arguments = {**arguments, "assistant_model": self._assistant}
        call = partial(self._model.generate, return_dict_in_generate=True, **method.transformers)
        if method.is_reference:  # one token a step needs no counting, and so costs nothing
            tokens, _, cpu, wall = timed(call, arguments)
            nodes = lengths = [1] * len(tokens)
        else:
            with ForwardCounter(self._model, arguments["input_ids"].shape[1]) as counter:
                tokens, _, cpu, wall = timed(call, arguments)
            nodes, lengths = counter.steps(len(tokens))
        return Run(tokens, len(lengths), nodes, lengths, cpu, wall)


def timed(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[int], Any, float, float]:
    """The new tokens of a call of `generate`, what it returned, its CPU and its wall time.

    It ends with reading the tokens, for which it waits for a device.
    """
    wall, cpu = perf_counter(), process_time()
    output = call(**arguments)
    tokens: list[int] = output.sequences[0, arguments["input_ids"].shape[1] :].tolist()
    return tokens, output, process_time() - cpu, perf_counter() - wall


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

    def measure(self, file: RowsFile, circumstances: Row, starting: Starting, finished: Finished) -> None:
        """Measure what the file lacks.

        Args:
            file: The rows there are.
            circumstances: Versions and machine of this run.
            starting: Called with what is done next, in words.
            finished: Called once for each run, with its row, or with `None` if the file had it already.

        Raises:
            InvalidArgumentError: A model cannot be loaded, a method cannot run, or the file has rows of other settings.
        """
        for spec in self._suite.models:
            starting(f"loading {spec.name}")
            self._measure_model(spec, file, circumstances, starting, finished)

    def _measure_model(
        self, spec: ModelSpec, file: RowsFile, circumstances: Row, starting: Starting, finished: Finished
    ) -> None:
        model = load(spec, self._device)
        passes = [
            [self._requests(model, task, prompt, repeat) for prompt in self._prompts[task.name]]
            for task in self._suite.tasks_of(spec)
            for repeat in range(self._suite.repeats)
        ]
        for request in chain(*chain(*passes)):
            check_request(file, request, circumstances)
        runners: dict[str, MethodRunner] = {}
        for requests in passes:
            self._forget_unfinished(requests, file)
            ready: set[str] = set()
            for request in chain(*requests):
                if request.key in file:
                    finished(None)
                    continue
                starting(f"{spec.name} · {request.task.name} · {request.prompt.id} · {request.method.name}")
                if request.method.name not in ready:
                    self._prepare(request, runners)
                    ready.add(request.method.name)
                run = runners[request.method.name].run(request.input_ids, request.task, request.prompt.number)
                row = build_row(request, run, circumstances)
                file.append(row)
                finished(row)

    def _prepare(self, request: Request, runners: dict[str, MethodRunner]) -> None:
        """Warm a method up before its first run of a pass; one with a memory begins with an empty one."""
        method = request.method
        if method.name not in runners or method.has_memory:
            runners[method.name] = MethodRunner(request.model, method)
            runners[method.name].warm_up(request.input_ids, request.task)

    def _requests(self, model: BenchModel, task: TaskSpec, prompt: Prompt, repeat: int) -> list[Request]:
        """All methods on one prompt, in the order in which they take their turns."""
        input_ids = encode(prompt, task, model.tokenizer, model.context).to(self._device)
        first = (prompt.number + repeat) % len(self._suite.methods)
        turns = list(enumerate(self._suite.methods))
        return [
            Request(model, task, prompt, method, order, repeat, input_ids)
            for order, method in (*turns[first:], *turns[:first])
        ]

    def _forget_unfinished(self, requests: Sequence[Sequence[Request]], file: RowsFile) -> None:
        """Drop the rows of methods with a memory that did not come to the end of the pass.

        What they had learned is gone; going on from the middle would measure something that never happens.
        """
        for method in self._suite.methods:
            if method.has_memory:
                keys = {request.key for of_prompt in requests for request in of_prompt if request.method == method}
                if not all(key in file for key in keys):
                    file.drop(keys)
