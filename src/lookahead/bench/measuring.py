"""Measuring of benchmarks: loading of models, one method on one prompt, and the order of runs."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedModel

from lookahead.api.generation import generate
from lookahead.backends.loading import LoadedModel, load_model
from lookahead.backends.session import open_session
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.findings import model_identity
from lookahead.bench.rows import Key, Prompt, Row, RowsFile, check_same, encode, read_prompts
from lookahead.bench.suite import DEMO, MethodSpec, ModelSpec, Suite, TaskSpec
from lookahead.bench.summary import repeated_cycle_share, tokens_before_cycles
from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError, LookaheadError


@dataclass(frozen=True)
class BenchModel:
    """Loaded model of a benchmark, with sampling removed from its generation configuration.

    `settings` are those that affect the figures, with the identity of the weights.
    """

    spec: ModelSpec
    loaded: LoadedModel
    settings: Row


def load(spec: ModelSpec, device: torch.device) -> BenchModel:
    """Load a model, or make one with random weights.

    Raises:
        InvalidArgumentError: The model cannot be loaded; the message names it.
    """
    with _named(f"models: {spec.name!r}"):
        tokenizer = None if spec.tokenizer is None else _folder(spec.tokenizer)
        if spec.path is None:
            loaded = _random(spec, tokenizer or demo_model_path(), device)
        else:
            loaded = _trained(spec.path, spec.dtype, device, tokenizer)
    model = loaded.model
    settings = spec.settings() | {"architecture": type(model).__name__, "parameters": model.num_parameters()}
    return BenchModel(spec, loaded, settings | {"identity": model_identity(model)})


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except (LookaheadError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"{what} cannot be loaded: {error}") from error


def _folder(path: Path | str) -> Path:
    return demo_model_path() if path == DEMO else Path(path)


def _trained(
    path: Path | str, dtype: str | torch.dtype, device: torch.device, tokenizer: Path | None = None
) -> LoadedModel:
    """Load a model with trained weights. Its generation configuration keeps special tokens only: tasks set the rest."""
    loaded = load_model(_folder(path), dtype, device, tokenizer)
    if loaded.is_transformers:
        shipped = loaded.model.generation_config
        ends = shipped.eos_token_id
        pad = shipped.pad_token_id
        if pad is None:  # without one every call of `generate` would warn about it
            pad = ends[0] if isinstance(ends, list) else ends
        loaded.model.generation_config = GenerationConfig(
            bos_token_id=shipped.bos_token_id, eos_token_id=ends, pad_token_id=pad
        )
    return loaded


def _random(spec: ModelSpec, folder: Path, device: torch.device) -> LoadedModel:
    """Make a Llama with random weights and without an end-of-sequence token."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**{"vocab_size": len(tokenizer), **special, **spec.random})
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} tokens of the tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return LoadedModel(folder, model.to(getattr(torch, spec.dtype)).to(device).eval(), tokenizer)


Pass = tuple[int, int]
"""Number of tokens that a forward pass reads, and of tokens in the cache before it."""


@contextmanager
def noted_passes(model: PreTrainedModel) -> Iterator[list[Pass]]:
    """Collect the forward passes of a model inside a `with` block, as transformers does not report its steps."""
    passes: list[Pass] = []

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get(CACHE)
        passes.append((named["input_ids"].shape[1], 0 if cache is None else int(cache.get_seq_length())))

    with model.register_forward_pre_hook(note, with_kwargs=True):
        yield passes


def steps_of(passes: Sequence[Pass], prompt_tokens: int, tokens: int) -> tuple[list[int], list[int]]:
    """Nodes and added tokens of each step of a drafting method; the added tokens sum to `tokens`.

    Before a step the cache holds all of the text but the last token; before the first step it is empty.
    """
    ends = [cached + 1 - prompt_tokens for _, cached in passes[1:]] + [tokens]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    nodes = [read_tokens for read_tokens, _ in passes]
    if nodes:
        nodes[0] -= prompt_tokens - 1  # its last token is the root
    return nodes, lengths


WARM_UP_TOKENS = 8


class MethodRunner:
    """Runner of one method on one model.

    It has its own model object with shared weights. So predictions and step times that the library learns about the
    model are not shared with other methods.
    """

    def __init__(self, bench_model: BenchModel, method: MethodSpec) -> None:
        model = bench_model.loaded.model
        self.method = method
        self._model: Any = model if method.lookahead is None else open_session(model).sharing_weights()
        self._assistant: PreTrainedModel | None = None
        if method.assistant is not None:
            with _named(f"methods: the assistant of {method.name!r}"):
                self._assistant = _trained(method.assistant, model.dtype, model.device).model
        self._assistant_config = None if self._assistant is None else self._assistant.generation_config

    def warm_up(self, input_ids: torch.Tensor, task: TaskSpec) -> None:
        """Make a short call that is not measured, for one-time work: checks of the model and packing of weights.

        Raises:
            InvalidArgumentError: transformers rejects the method's arguments; the message names the method.
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
                raise  # not caused by the benchmark file
            raise InvalidArgumentError(f"methods: {self.method.name!r}: transformers rejects it: {error}") from error

    def run(self, input_ids: torch.Tensor, task: TaskSpec, number: int) -> Row:
        """Measure one call, and return its output, times, and nodes and added tokens per step as fields of a row.

        Nodes include the root, not the prompt. `number`, the index of the prompt in its file, is added to the seed.
        """
        return self._call(self.method, input_ids, task, number)

    def _call(self, method: MethodSpec, input_ids: torch.Tensor, task: TaskSpec, number: int) -> Row:
        arguments: dict[str, Any] = {"max_new_tokens": task.max_new_tokens, "do_sample": task.sampling is not None}
        arguments |= {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        devices = [input_ids.device] if input_ids.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # keep the caller's random state
            if task.sampling is not None:
                drawing = asdict(task.sampling)
                torch.manual_seed(drawing.pop("seed") + number)
                arguments |= drawing
            if method.lookahead is not None:
                return self._with_lookahead(method, arguments)
            return self._with_transformers(method, arguments)

    def _with_lookahead(self, method: MethodSpec, arguments: dict[str, Any]) -> Row:
        row, output = timed(partial(generate, self._model, lookahead_config=method.lookahead), arguments)
        statistics: Any = output.statistics
        seconds = {part: round(seconds, 6) for part, seconds in asdict(statistics.seconds).items()}
        return row | {
            "nodes_per_step": statistics.nodes_per_step,
            "accepted_lengths": statistics.accepted_lengths,
            "seconds": seconds,
        }

    def _with_transformers(self, method: MethodSpec, arguments: dict[str, Any]) -> Row:
        if self._assistant is not None:
            # transformers adapts the draft length and stores it in the configuration
            self._assistant.generation_config = copy.deepcopy(self._assistant_config)
            arguments = {**arguments, "assistant_model": self._assistant}
        call = partial(self._model.generate, **method.transformers)
        if method.is_reference:  # one token per step, so no hook is needed
            row, _ = timed(call, arguments)
            nodes = lengths = [1] * len(row["output"])
        else:
            with noted_passes(self._model) as passes:
                row, _ = timed(call, arguments)
            nodes, lengths = steps_of(passes, arguments["input_ids"].shape[1], len(row["output"]))
        return row | {"nodes_per_step": nodes, "accepted_lengths": lengths, "seconds": {}}


def timed(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Row, Any]:
    """Run `generate`, and return the new tokens with CPU and wall seconds, and its output.

    The time includes reading the tokens, which waits for the device.
    """
    wall = perf_counter()
    cpu = process_time()
    output = call(**arguments, return_dict_in_generate=True)
    tokens = output.sequences[0, arguments["input_ids"].shape[1] :].tolist()
    cpu = process_time() - cpu
    wall = perf_counter() - wall
    return {"output": tokens, "cpu_seconds": round(cpu, 6), "wall_seconds": round(wall, 6)}, output


@dataclass(frozen=True)
class TimedRun:
    """One run of a benchmark.

    `order` is the index of the method in the suite, `repeat` of the pass over the prompts; `input_ids` is `[1, S]`.
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
        """Key of the run's row."""
        return (self.model.spec.name, self.task.name, self.method.name, self.prompt.id, self.repeat)

    def settings(self) -> Row:
        """Settings that affect the figures, except machine and versions."""
        prompt = hashlib.sha256(json.dumps(self.input_ids.tolist()).encode()).hexdigest()[:16]
        task = {**self.task.settings(), "input": prompt}
        return {"model": self.model.settings, "task": task, "method": self.method.settings()}

    def row(self, run: Row, circumstances: Row) -> Row:
        """Row of a run: the result of `MethodRunner.run`, settings, and circumstances (versions and machine)."""
        output = run["output"]
        lengths = run["accepted_lengths"]
        early = steps_within(lengths, tokens_before_cycles(output))
        return {
            **dict(zip(("model", "task", "method", "prompt", "repeat"), self.key, strict=True)),
            "order": self.order,
            "reference": self.method.is_reference,
            "exact": self.model.spec.exact and self.method.keeps_draws(self.task),
            "prompt_tokens": self.input_ids.shape[1],
            "tokens": len(output),
            "steps": len(lengths),
            "S": round(len(output) / len(lengths), 4) if lengths else 0.0,
            "cycle_share": round(repeated_cycle_share(output), 4),
            "tokens_before_cycles": sum(early),
            "steps_before_cycles": len(early),
            "S_before_cycles": round(sum(early) / len(early), 4) if early else None,
            **run,
            "settings": self.settings(),
            **circumstances,
            "date": date.today().isoformat(),
        }


def steps_within(lengths: Sequence[int], tokens: int) -> list[int]:
    """Lengths of the first steps, as far as they end within the first `tokens` tokens."""
    return [length for length, end in zip(lengths, accumulate(lengths), strict=True) if end <= tokens]


class Benchmark:
    """Suite on one device, with its prompts.

    All methods run on one prompt before the next one, so that a change of the machine's speed affects all of them. Each
    prompt begins with another method. Repeats are passes over all prompts. In each pass a method with a memory begins
    with an empty one and takes the prompts in order.
    """

    def __init__(self, suite: Suite, device: torch.device, limit: int | None = None) -> None:
        """Read the prompts; with `limit` only the first ones of each task."""
        self._suite = suite
        self._device = device
        self._prompts = {task.name: read_prompts(task, limit) for task in suite.tasks}

    @property
    def runs(self) -> int:
        """Total number of runs."""
        tasks = [task for model in self._suite.models for task in self._suite.tasks_of(model)]
        prompts = sum(len(self._prompts[task.name]) for task in tasks)
        return prompts * len(self._suite.methods) * self._suite.repeats

    def measure(self, file: RowsFile, circumstances: Row, starting: Callable[[str], None]) -> Iterator[Row | None]:
        """Measure the runs that are not in the file; yield the row of each run, `None` if it was in the file.

        Args:
            file: Rows of earlier runs; new rows are appended.
            circumstances: Versions and machine of this run.
            starting: Called with a description of the next work.

        Raises:
            InvalidArgumentError: A model cannot be loaded, a method cannot run, or the file has rows of other settings.
        """
        for spec in self._suite.models:
            starting(f"loading {spec.name}")
            yield from self._measure_model(spec, file, circumstances, starting)

    def _measure_model(
        self, spec: ModelSpec, file: RowsFile, circumstances: Row, starting: Callable[[str], None]
    ) -> Iterator[Row | None]:
        model = load(spec, self._device)
        passes = [
            [self._requests(model, task, prompt, repeat) for prompt in self._prompts[task.name]]
            for task in self._suite.tasks_of(spec)
            for repeat in range(self._suite.repeats)
        ]
        for request in chain(*chain(*passes)):
            if request.key in file:
                row = file[request.key]
                what = f" {request.method.name!r} on {request.prompt.id!r}"
                check_same(file.path, {**row, **row["settings"]}, {**request.settings(), **circumstances}, what)
        runners: dict[str, MethodRunner] = {}
        for requests in passes:
            self._forget_unfinished(requests, file)
            # methods with a memory begin every pass with an empty one
            runners = {name: runner for name, runner in runners.items() if not runner.method.has_memory}
            for request in chain(*requests):
                method = request.method
                if request.key in file:
                    yield None
                    continue
                starting(f"{spec.name} · {request.task.name} · {request.prompt.id} · {method.name}")
                if method.name not in runners:
                    runners[method.name] = MethodRunner(model, method)
                    runners[method.name].warm_up(request.input_ids, request.task)
                run = runners[method.name].run(request.input_ids, request.task, request.prompt.number)
                row = request.row(run, circumstances)
                file.append(row)
                yield row

    def _requests(self, model: BenchModel, task: TaskSpec, prompt: Prompt, repeat: int) -> list[TimedRun]:
        """Runs of all methods on one prompt, in order; the first method rotates from prompt to prompt."""
        loaded = model.loaded
        input_ids = encode(prompt, task, loaded.tokenizer, loaded.context_length).to(self._device)
        first = (prompt.number + repeat) % len(self._suite.methods)
        turns = list(enumerate(self._suite.methods))
        return [
            TimedRun(model, task, prompt, method, order, repeat, input_ids)
            for order, method in (*turns[first:], *turns[:first])
        ]

    def _forget_unfinished(self, requests: Sequence[Sequence[TimedRun]], file: RowsFile) -> None:
        """Drop the rows of an unfinished pass of methods with a memory: it is lost, so the rest would differ."""
        for method in self._suite.methods:
            if method.has_memory:
                keys = {request.key for of_prompt in requests for request in of_prompt if request.method == method}
                if not all(key in file for key in keys):
                    file.drop(keys)
