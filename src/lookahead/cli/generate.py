"""`lookahead generate`: continue a prompt; also decoding and records for `compare` and `chat`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from lookahead.api.generation import generate
from lookahead.backends.loading import LoadedModel
from lookahead.backends.session import open_session
from lookahead.bench.rows import versions
from lookahead.cli.loading import load_for_decoding, memory_errors_explained
from lookahead.cli.settings import DecodingSettings
from lookahead.cli.signals import INTERRUPTED, OK, handling, raise_on_interrupt
from lookahead.cli.terminal import Consoles, StepPrinter, counts_line, decode, print_json
from lookahead.config import LookaheadConfig
from lookahead.core.statistics import Statistics, StepRecord
from lookahead.errors import InvalidArgumentError
from lookahead.parallel.launcher import environment_number, started_together
from lookahead.text import Tokenizer
from lookahead.trace import Trace

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


def run(settings: DecodingSettings, consoles: Consoles, text: str) -> int:
    """Continue `text`, print the new tokens, and return the exit code."""
    if not started_together():
        return _run(settings, consoles, text, None)
    raise_on_interrupt()  # so that rank 0 can stop the other ranks
    from lookahead.parallel import join  # late, as it imports torch.distributed

    with ExitStack() as stack:
        group = stack.enter_context(join())
        if group.rank:  # only rank 0 prints
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        if settings.device is None and torch.cuda.is_available():
            number = environment_number("LOCAL_RANK", 0) % torch.cuda.device_count()
            settings = replace(settings, device=f"cuda:{number}")
        return _run(settings, consoles, text, group)


def _run(settings: DecodingSettings, consoles: Consoles, text: str, group: ParallelGroup | None) -> int:
    loaded = load_for_decoding(settings, consoles.notes)
    prompt = encode_prompt(loaded, text, settings.max_new_tokens, consoles.notes)
    printer = None if settings.json else StepPrinter(consoles.out, loaded.tokenizer)
    recording = Recording(None if printer is None else printer.step)
    seed_draws(loaded, settings.sampling_seed)
    # The launcher of ranks turns Ctrl-C into SIGTERM for rank 0.
    is_first = group is not None and group.rank == 0
    stopping = handling(signal.SIGTERM, signal.default_int_handler) if is_first else nullcontext()
    with traced(settings, loaded, consoles.notes) as config:
        # After KeyboardInterrupt `recording.complete` stays False, and the tokens so far are printed.
        with suppress(KeyboardInterrupt), stopping:
            options = text_options(loaded, settings)
            decode_with_lookahead(loaded, prompt, config, recording, parallel=group, **options)
        if printer is None:
            report = run_report(loaded.tokenizer, recording) | request_report(settings, loaded, prompt)
            print_json(consoles.out, report | {"interrupted": not recording.complete})
        else:
            printer.finish()
            print_statistics(consoles.notes, recording)
    return OK if recording.complete else INTERRUPTED


def print_statistics(notes: Console, recording: Recording) -> None:
    """Print one line of statistics about the run."""
    statistics = recording.statistics
    line = counts_line(statistics.tokens, statistics.steps, recording.wall_seconds)
    line += f", {recording.wall_seconds:.2f} s, {statistics.mean_nodes:.1f} nodes per step"
    if recording.complete:
        line += " (" + ", ".join(f"{part} {time:.3f}" for part, time in recording.parts.items()) + ")"
    else:
        line = f"interrupted: {line}"
    notes.print(line, style="dim")


@dataclass(frozen=True)
class PromptInput:
    """Prompt as text and as input `[1, S]` on the model's device.

    `max_new_tokens` is within the model's context.
    """

    text: str
    input_ids: torch.Tensor
    max_new_tokens: int


def encode_prompt(loaded: LoadedModel, text: str, max_new_tokens: int, notes: Console) -> PromptInput:
    """Tokenize the prompt and clip `max_new_tokens` to the rest of the model's context."""
    prompt = fitted(loaded, text, loaded.tokenizer(text, return_tensors="pt", verbose=False).input_ids, max_new_tokens)
    if prompt.max_new_tokens < max_new_tokens:
        notes.print(
            f"note: --max-new-tokens {max_new_tokens} clipped to {prompt.max_new_tokens}: the prompt has "
            f"{prompt.input_ids.shape[1]} tokens and the model's context is {loaded.context_length}"
        )
    return prompt


def fitted(
    loaded: LoadedModel,
    text: str,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    what: str = "the prompt has",
    advice: str = "shorten the prompt so that at least one more token fits",
) -> PromptInput:
    """Make a prompt of tokens `[1, S]`, with `max_new_tokens` clipped to the rest of the model's context.

    Raises:
        InvalidArgumentError: The prompt has no tokens, or no room for a new one: a message of `what`, the length, and
            `advice`.
    """
    length, context = input_ids.shape[1], loaded.context_length
    if length == 0:
        raise InvalidArgumentError("the prompt has no tokens for this model's tokenizer; give a longer one")
    if context is not None and length >= context:
        raise InvalidArgumentError(f"{what} {length} tokens, but the model's context is {context}: {advice}")
    room = max_new_tokens if context is None else min(max_new_tokens, context - length)
    return PromptInput(text, input_ids.to(loaded.model.device), room)


@dataclass
class Recording:
    """Record of one run. It grows step by step, so that an interruption loses nothing.

    `on_step` is called with the token ids of each step. `statistics` are updated after each step, their times
    by part at the end. Seconds of the CPU are summed over all threads.
    """

    on_step: Callable[[list[int]], None] | None = None
    tokens_by_step: list[list[int]] = field(default_factory=list)
    complete: bool = False
    statistics: Statistics = field(default_factory=Statistics)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """All generated token ids."""
        return [token for step in self.tokens_by_step for token in step]

    @property
    def parts(self) -> dict[str, float]:
        """Wall time by part, in seconds; the parts add up to `wall_seconds`. `other` includes printing."""
        seconds = self.statistics.seconds
        return {**asdict(seconds), "other": self.wall_seconds - seconds.total}

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        self.tokens_by_step.append(list(step.tokens))
        self.statistics.steps += 1
        self.statistics.record([step.nodes], [len(step.tokens)])
        if self.on_step is not None:
            self.on_step(step.tokens)


def decode_with_lookahead(
    loaded: LoadedModel, prompt: PromptInput, config: LookaheadConfig, recording: Recording, **options: Any
) -> Any:
    """Decode with lookahead into `recording`, and return the output of `lookahead.generate`, which takes `options`."""
    with _timed(loaded, recording):
        output: Any = generate(
            loaded.model,
            lookahead_config=config,
            on_step=recording.add,
            return_dict_in_generate=True,
            **arguments_of(loaded, prompt) | options,
        )
        recording.statistics = output.statistics
    return output


def text_options(loaded: LoadedModel, settings: DecodingSettings) -> dict[str, Any]:
    """Arguments of `generate` that affect the text: sampling, repetition penalty and stop strings."""
    options: dict[str, Any] = {"do_sample": settings.sample}
    if settings.sampling is not None:
        options |= loaded.sampling | settings.sampling
    if settings.repetition_penalty is not None:
        options["repetition_penalty"] = settings.repetition_penalty
    if settings.stop:
        options["stop_strings"] = list(settings.stop)
    return options


def seed_draws(loaded: LoadedModel, seed: int | None) -> int:
    """Seed the random numbers of the model's engine with `seed`, or with a new one, and return it."""
    seed = torch.seed() if seed is None else seed
    open_session(loaded.model).seed(seed)
    return seed


def decode_plainly(loaded: LoadedModel, prompt: PromptInput, recording: Recording, **options: Any) -> None:
    """Decode without lookahead into `recording`; every token is a step of one node.

    Runs `model.generate` of transformers; for other engines this library's fastest decoding without drafts.
    """
    if not loaded.is_transformers:
        decode_with_lookahead(loaded, prompt, LookaheadConfig(preset="autoregressive"), recording, **options)
        return

    with _timed(loaded, recording):
        sequences = loaded.model.generate(**arguments_of(loaded, prompt) | options)  # [1, S + new tokens]
        for number, token in enumerate(sequences[0, prompt.input_ids.shape[1] :].tolist(), start=1):
            recording.add(StepRecord(index=0, step=number, tokens=[token], nodes=1))


def arguments_of(loaded: LoadedModel, prompt: PromptInput) -> dict[str, Any]:
    """Arguments of `generate` for the prompt."""
    return {
        "input_ids": prompt.input_ids,
        # Without a mask transformers treats pad tokens in the prompt as padding.
        "attention_mask": torch.ones_like(prompt.input_ids),
        "max_new_tokens": prompt.max_new_tokens,
        # Required if the model's generation configuration has stop strings.
        "tokenizer": loaded.tokenizer,
    }


@contextmanager
def _timed(loaded: LoadedModel, recording: Recording) -> Iterator[None]:
    """Record the times of a block in `recording`, and add advice to out-of-memory errors."""
    advice = "a smaller window (-W 5 -N 3 -G 5), a shorter text or a smaller --max-new-tokens"
    if loaded.dtype == "float32":
        advice += ", or --dtype bfloat16"
    wall, cpu = perf_counter(), process_time()
    try:
        with memory_errors_explained(f"on {loaded.model.device} while decoding", advice):
            yield
        recording.complete = True
    finally:
        recording.wall_seconds = perf_counter() - wall
        recording.cpu_seconds = process_time() - cpu


def run_report(tokenizer: Tokenizer, recording: Recording) -> dict[str, Any]:
    """Report of one run: text, tokens, counts and times in seconds."""
    statistics, parts = recording.statistics, recording.parts
    counts = ("steps", "step_compression", "nodes_per_step", "accepted_lengths", "invariant_rows")
    return {
        "text": decode(tokenizer, recording.tokens),
        "tokens": recording.tokens,
        **{name: getattr(statistics, name) for name in counts},
        "tokens_per_second": statistics.tokens / recording.wall_seconds,
        "seconds": {
            "wall": recording.wall_seconds,
            "cpu": recording.cpu_seconds,
            # Only a finished run has times by part.
            **(parts if recording.complete else dict.fromkeys(parts)),
        },
    }


def request_report(settings: DecodingSettings, loaded: LoadedModel, prompt: PromptInput) -> dict[str, Any]:
    """Report of the request: prompt, model, options and versions."""
    return {
        "prompt": prompt.text,
        "prompt_tokens": prompt.input_ids.shape[1],
        "max_new_tokens": prompt.max_new_tokens,
        "model": loaded.origin or str(loaded.path),
        "dtype": loaded.dtype,
        "device": str(loaded.model.device),
        "preset": settings.config.preset,
        "sampling": settings.sampling,
        "sampling_seed": settings.sampling_seed,
        "repetition_penalty": settings.repetition_penalty,
        "stop": settings.stop or [],
        "config": asdict(settings.config) | {"memory": str(settings.config.memory)},
        "versions": versions(),
    }


@contextmanager
def traced(settings: DecodingSettings, loaded: LoadedModel, notes: Console) -> Iterator[LookaheadConfig]:
    """Yield the configuration, with a trace if the settings name a page for it; the page is written at the end."""
    path, config = settings.page, settings.config
    if path is None:
        yield config
        return
    facts = {"model": loaded.title, "type": loaded.dtype, "device": str(loaded.model.device)}
    trace = Trace(path, loaded.tokenizer, facts=facts | {"preset": config.preset})
    try:
        yield replace(config, trace=trace)
    finally:
        if trace.texts:
            size, steps = trace.write().stat().st_size, sum(len(text.steps) for text in trace.texts)
            notes.print(f"{path}: {steps} steps, {size / 1000:.0f} kB", style="dim")
