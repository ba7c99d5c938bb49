"""`lookahead generate`: continue a prompt."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from lookahead.cli import process
from lookahead.cli.decoding import (
    Recording,
    decode_with_lookahead,
    request_report,
    run_report,
    seed_draws,
    text_options,
)
from lookahead.cli.loading import load_for_decoding, quiet_libraries
from lookahead.cli.prompt import encode_prompt
from lookahead.cli.ranks import joined_ranks, on_own_device, started_together, stopped_by_parent
from lookahead.cli.rendering import Consoles, StepPrinter, print_json
from lookahead.cli.settings import GenerateSettings

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


def run(settings: GenerateSettings, text: str) -> int:
    """Continue `text`, print what was generated, and return the exit code."""
    if started_together():
        process.raise_on_interrupt()  # the other ranks are told
    with joined_ranks() as group:
        return _run(settings if group is None else on_own_device(settings), text, group)


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
        # Where it is raised, recording.complete stays False, and what was generated is still printed.
        with suppress(KeyboardInterrupt), stopped_by_parent(group):
            decode_with_lookahead(loaded, prompt, settings.config, recording, on_step, parallel=group, **options)
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
    line = (
        f"{statistics.tokens} tokens in {statistics.steps} steps, step compression {statistics.step_compression:.2f}, "
        f"{statistics.mean_nodes:.1f} nodes per step, {recording.tokens_per_second:.1f} tokens/s, "
        f"{recording.wall_seconds:.2f} s"
    )
    if recording.complete:
        seconds = asdict(statistics.seconds)
        line += " (" + ", ".join(f"{part} {time:.3f}" for part, time in seconds.items()) + ")"
    else:
        line = f"interrupted: {line}"
    notes.print(line, style="dim")
