"""Runs one method on one prompt, and notes what it did and took."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, process_time
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.api.generation import generate
from lookahead.bench.models import BenchModel, load_assistant, sharing_weights
from lookahead.bench.suite import MethodSpec, TaskSpec
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


@dataclass(frozen=True)
class Run:
    """What one call did.

    Attributes:
        output: The tokens generated.
        steps: Forward passes that decoded tokens.
        nodes_per_step: Tokens sent in each of them, those of the prompt not counted.
        accepted_lengths: Tokens that each of them added.
        cpu_seconds: CPU time of the call, all threads together.
        wall_seconds: Wall time of the call.
        seconds: Wall time by part of the step, empty for transformers.
    """

    output: list[int]
    steps: int
    nodes_per_step: list[int]
    accepted_lengths: list[int]
    cpu_seconds: float
    wall_seconds: float
    seconds: Mapping[str, float] = field(default_factory=dict)


class MethodRunner:
    """One method on one model.

    It works on a model object of its own, with the same weights. What the library learns from call to call about the
    model (its predictions, the cost of its steps) is then this method's alone.
    """

    def __init__(self, bench_model: BenchModel, method: MethodSpec) -> None:
        self.method = method
        self._loaded = bench_model
        self._assistant = load_assistant(method, bench_model.model)
        self._assistant_config = None if self._assistant is None else self._assistant.generation_config
        self._model: PreTrainedModel
        self.forget()

    def forget(self) -> None:
        """Begin anew with nothing learned."""
        plain = self.method.lookahead is None
        self._model = self._loaded.model if plain else sharing_weights(self._loaded.model)

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
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": task.max_new_tokens,
            "do_sample": task.sampling is not None,
        }
        if task.sampling is not None:
            drawing = task.sampling.settings()
            seed = drawing.pop("seed") + number
            arguments |= drawing
        devices = [input_ids.device] if input_ids.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # the caller's own draws go on as if nothing had happened
            if task.sampling is not None:
                torch.manual_seed(seed)
            if method.lookahead is not None:
                return self._with_lookahead(method, arguments)
            return self._with_transformers(method, arguments)

    def _with_lookahead(self, method: MethodSpec, arguments: dict[str, Any]) -> Run:
        def call() -> tuple[list[int], Any]:
            output: Any = generate(
                self._model, lookahead_config=method.lookahead, return_dict_in_generate=True, **arguments
            )
            return output.sequences[0, prompt:].tolist(), output.statistics

        prompt = arguments["input_ids"].shape[1]
        (output, statistics), cpu, wall = timed(call)
        return Run(
            output,
            statistics.steps,
            statistics.nodes_per_step,
            statistics.accepted_lengths,
            cpu,
            wall,
            asdict(statistics.seconds),
        )

    def _with_transformers(self, method: MethodSpec, arguments: dict[str, Any]) -> Run:
        prompt = arguments["input_ids"].shape[1]
        if self._assistant is not None:
            # transformers adapts how much is drafted, and keeps it there for the next call
            self._assistant.generation_config = copy.deepcopy(self._assistant_config)
            arguments = {**arguments, "assistant_model": self._assistant}
        # One token a step needs no counting, and so costs nothing.
        counter = None if method.is_reference else ForwardCounter(self._model, prompt)
        counting: AbstractContextManager[Any] = nullcontext() if counter is None else counter

        def call() -> list[int]:
            output = self._model.generate(**arguments, **method.transformers)
            new_tokens: list[int] = output[0, prompt:].tolist()
            return new_tokens

        with counting:
            output, cpu, wall = timed(call)
        if counter is None:
            return Run(output, len(output), [1] * len(output), [1] * len(output), cpu, wall)
        nodes, lengths = counter.steps(len(output))
        return Run(output, len(lengths), nodes, lengths, cpu, wall)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returns, its CPU and its wall time. It ends with reading tokens, for which it waits for a device."""
    wall, cpu = perf_counter(), process_time()
    result = call()
    return result, process_time() - cpu, perf_counter() - wall
