"""`lookahead generate`: continue a prompt. `compare` and `chat` decode and record in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.console import Console

from lookahead.api.generation import generate
from lookahead.cli import process
from lookahead.cli.inputs import is_gguf
from lookahead.cli.loading import LoadedModel, load_for_decoding, memory_errors_explained, quiet_libraries
from lookahead.cli.rendering import Consoles, StepPrinter, counts_line, decode, print_json
from lookahead.cli.settings import DecodingSettings, GenerateSettings, Sampling
from lookahead.config import LookaheadConfig
from lookahead.core.statistics import Statistics, StepRecord
from lookahead.errors import InvalidArgumentError
from lookahead.text import Tokenizer
from lookahead.trace import Trace

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


def run(settings: GenerateSettings, text: str) -> int:
    """Continue `text`, print what was generated, and return the exit code."""
    if process.started_together():
        process.raise_on_interrupt()  # the other ranks are told
    with process.joined_ranks() as group:
        return _run(settings if group is None else process.on_own_device(settings), text, group)


def _run(settings: GenerateSettings, text: str, group: ParallelGroup | None) -> int:
    consoles = Consoles.create(no_color=settings.no_color)
    with quiet_libraries():
        loaded = load_for_decoding(settings, consoles.notes)
        prompt = encode_prompt(loaded, text, settings.max_new_tokens, consoles.notes)
        printer = None if settings.json else StepPrinter(consoles.out, loaded.tokenizer)
        recording = Recording()
        on_step = None if printer is None else printer.step
        options = text_options(loaded, settings.sampling, settings.repetition_penalty, settings.stop)
        seed_draws(settings.sampling)
        path = settings.trace if group is None or group.rank == 0 else None
        with traced(path, loaded, settings.config, consoles.notes) as config:
            # Where it is raised, recording.complete stays False, and what was generated is still printed.
            with suppress(KeyboardInterrupt), process.stopped_by_parent(group):
                decode_with_lookahead(loaded, prompt, config, recording, on_step, parallel=group, **options)
            if printer is None:
                report = run_report(loaded.tokenizer, recording) | request_report(settings, loaded, prompt)
                print_json(consoles.out, report | {"interrupted": not recording.complete})
            else:
                printer.finish()
                print_statistics(consoles.notes, recording)
    return process.OK if recording.complete else process.INTERRUPTED


def print_statistics(notes: Console, recording: Recording) -> None:
    """Print one line about the run."""
    statistics = recording.statistics
    line = counts_line(statistics.tokens, statistics.steps, recording.wall_seconds)
    line += f", {recording.wall_seconds:.2f} s, {statistics.mean_nodes:.1f} nodes per step"
    if recording.complete:
        line += " (" + ", ".join(f"{part} {time:.3f}" for part, time in recording.parts.items()) + ")"
    else:
        line = f"interrupted: {line}"
    notes.print(line, style="dim")


_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as the model's input.

    Attributes:
        text: The prompt, exactly as it was given.
        input_ids: Its tokens on the model's device. Shape [1, S].
        max_new_tokens: Most tokens to generate after it, within the model's context.
    """

    text: str
    input_ids: torch.Tensor
    max_new_tokens: int


def encode_prompt(loaded: LoadedModel, text: str, max_new_tokens: int, notes: Console) -> Prompt:
    """Tokenize the prompt and clip `max_new_tokens` to what the model's context has left."""
    encoded = loaded.tokenizer(text, return_tensors="pt", verbose=False)
    input_ids: torch.Tensor = encoded["input_ids"].to(loaded.model.device)  # [1, S]
    length = input_ids.shape[1]
    if length == 0:
        raise InvalidArgumentError("the prompt has no tokens for this model's tokenizer; give a longer one")
    room = None if loaded.context_length is None else loaded.context_length - length
    if room is None or room >= max_new_tokens:
        return Prompt(text, input_ids, max_new_tokens)
    if room < 1:
        raise InvalidArgumentError(
            f"the prompt has {length} tokens, but the model's context is {loaded.context_length}: "
            "shorten the prompt so that at least one more token fits"
        )
    notes.print(
        f"note: --max-new-tokens {max_new_tokens} clipped to {room}: the prompt has {length} tokens "
        f"and the model's context is {loaded.context_length}"
    )
    return Prompt(text, input_ids, room)


@dataclass
class Recording:
    """What one run did. It grows step by step, so that an interruption loses nothing.

    Attributes:
        tokens_by_step: The token ids that each step added.
        output: The token ids that were returned at the end, `None` before.
        statistics: Counted along with the steps; the times by part arrive at the end.
        wall_seconds: Wall time of the run.
        cpu_seconds: CPU time of the run, all threads together.
    """

    tokens_by_step: list[list[int]] = field(default_factory=list)
    output: list[int] | None = None
    statistics: Statistics = field(default_factory=Statistics)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.output is not None

    @property
    def tokens(self) -> list[int]:
        """All generated token ids: those returned, or those of the steps before an interruption."""
        if self.output is not None:
            return self.output
        return [token for step in self.tokens_by_step for token in step]

    @property
    def parts(self) -> dict[str, float]:
        """Wall time by part, in seconds, which add up to all of it: `other` is printing and what the rest leave out."""
        seconds = self.statistics.seconds
        return {**asdict(seconds), "other": self.wall_seconds - seconds.total}

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of wall time."""
        return self.statistics.tokens / self.wall_seconds if self.wall_seconds else 0.0

    def add(self, step: StepRecord) -> None:
        """Keep one step."""
        self.tokens_by_step.append(list(step.tokens))
        self.statistics.steps += 1
        self.statistics.record(step)


def decode_with_lookahead(
    loaded: LoadedModel,
    prompt: Prompt,
    config: LookaheadConfig,
    recording: Recording,
    on_step: Callable[[list[int]], None] | None = None,
    **options: Any,
) -> Any:
    """Decode with lookahead into `recording`, greedily unless `options` of `lookahead.generate` say otherwise.

    Returns:
        What `lookahead.generate` returned.
    """

    def keep(step: StepRecord) -> None:
        recording.add(step)
        if on_step is not None:
            on_step(step.tokens)

    def run() -> Any:
        output: Any = generate(
            loaded.model,
            lookahead_config=config,
            on_step=keep,
            return_dict_in_generate=True,
            **_arguments(loaded, prompt) | options,
        )
        recording.output = output.sequences[0, prompt.input_ids.shape[1] :].tolist()
        recording.statistics.seconds = output.statistics.seconds
        recording.statistics.invariant_rows = output.statistics.invariant_rows
        return output

    return _timed(run, loaded, recording)


def text_options(
    loaded: LoadedModel, sampling: Sampling | None, repetition_penalty: float | None, stop: Sequence[str] | None
) -> dict[str, Any]:
    """Arguments of `generate` that decide about the text: how tokens are chosen, and where it ends."""
    options: dict[str, Any] = {}
    if sampling is not None:
        given = {name: value for name, value in asdict(sampling).items() if value is not None and name != "seed"}
        options |= loaded.sampling | given | {"do_sample": True}
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if stop:
        options["stop_strings"] = list(stop)
    return options


def seed_draws(sampling: Sampling | None) -> int | None:
    """Seed the draws that come, with a new seed where none is given; the seed, `None` for greedy decoding."""
    if sampling is None:
        return None
    if sampling.seed is None:
        return torch.seed()
    torch.manual_seed(sampling.seed)
    return sampling.seed


def decode_plainly(loaded: LoadedModel, prompt: Prompt, **options: Any) -> Recording:
    """Decode without lookahead, greedily unless `options` say otherwise; every token is a step of one node.

    By transformers alone; by llama.cpp without a draft if the model is a GGUF file, as fast as this library can run it.
    """
    recording = Recording()
    if is_gguf(loaded.path):
        decode_with_lookahead(loaded, prompt, LookaheadConfig(preset="autoregressive"), recording, **options)
        return recording

    def run() -> None:
        sequences = loaded.model.generate(**_arguments(loaded, prompt) | options)  # [1, S + new tokens]
        new_tokens: list[int] = sequences[0, prompt.input_ids.shape[1] :].tolist()
        for number, token in enumerate(new_tokens, start=1):
            recording.add(StepRecord(index=0, step=number, tokens=[token], nodes=1))
        recording.output = new_tokens

    _timed(run, loaded, recording)
    return recording


def _arguments(loaded: LoadedModel, prompt: Prompt) -> dict[str, Any]:
    return {
        "input_ids": prompt.input_ids,
        # Without it transformers would take a pad token in the prompt for padding.
        "attention_mask": torch.ones_like(prompt.input_ids),
        "max_new_tokens": prompt.max_new_tokens,
        "do_sample": False,
        # For models whose generation configuration holds stop strings.
        "tokenizer": loaded.tokenizer,
    }


def _timed(run: Callable[[], _T], loaded: LoadedModel, recording: Recording) -> _T:
    advice = "a smaller window (-W 5 -N 3 -G 5), a shorter text or a smaller --max-new-tokens"
    if loaded.dtype == "float32":
        advice += ", or --dtype bfloat16"
    wall, cpu = perf_counter(), process_time()
    try:
        with memory_errors_explained(f"on {loaded.model.device} while decoding", advice):
            return run()
    finally:
        recording.wall_seconds = perf_counter() - wall
        recording.cpu_seconds = process_time() - cpu


def run_report(tokenizer: Tokenizer, recording: Recording) -> dict[str, Any]:
    """What one run generated, counted and took."""
    statistics = recording.statistics
    parts = recording.parts
    return {
        "text": decode(tokenizer, recording.tokens),
        "tokens": recording.tokens,
        "steps": statistics.steps,
        "step_compression": statistics.step_compression,
        "nodes_per_step": statistics.nodes_per_step,
        "accepted_lengths": statistics.accepted_lengths,
        "invariant_rows": statistics.invariant_rows,
        "tokens_per_second": recording.tokens_per_second,
        "seconds": {
            "wall": recording.wall_seconds,
            "cpu": recording.cpu_seconds,
            # The times by part come with the finished output only.
            **(parts if recording.complete else dict.fromkeys(parts)),
        },
    }


def request_report(settings: DecodingSettings, loaded: LoadedModel, prompt: Prompt) -> dict[str, Any]:
    """What to decode, and with which model."""
    return {
        "prompt": prompt.text,
        "prompt_tokens": prompt.input_ids.shape[1],
        "max_new_tokens": prompt.max_new_tokens,
        "model": str(loaded.path),
        "dtype": loaded.dtype,
        "device": str(loaded.model.device),
        "preset": settings.config.preset,
        "sampling": None if settings.sampling is None else asdict(settings.sampling),
        "repetition_penalty": settings.repetition_penalty,
        "stop": settings.stop or [],
        "config": asdict(settings.config) | {"memory": str(settings.config.memory)},
        "versions": process.versions(),
    }


@contextmanager
def traced(
    path: Path | None, loaded: LoadedModel, config: LookaheadConfig, notes: Console
) -> Iterator[LookaheadConfig]:
    """A configuration that records what is decoded, and writes it to `path` in the end, if one is given.

    Raises:
        InvalidArgumentError: It cannot be written.
    """
    if path is None:
        yield config
        return
    facts = {"model": loaded.path.resolve().name, "type": loaded.dtype, "device": str(loaded.model.device)}
    trace = Trace(path, loaded.tokenizer, facts=facts | {"preset": config.preset})
    try:
        yield replace(config, trace=trace)
    finally:
        if trace.texts:
            size, steps = trace.write().stat().st_size, sum(len(text.steps) for text in trace.texts)
            notes.print(f"{path}: {steps} steps, {size / 1000:.0f} kB", style="dim")
