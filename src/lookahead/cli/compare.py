"""`lookahead compare`: plain decoding and lookahead decoding of one prompt, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lookahead.backends.loading import LoadedModel
from lookahead.bench.summary import first_difference, repeated_cycle_share
from lookahead.cli import process
from lookahead.cli.generate import (
    Prompt,
    Recording,
    decode_plainly,
    decode_with_lookahead,
    encode_prompt,
    request_report,
    run_report,
    seed_draws,
    text_options,
)
from lookahead.cli.loading import load_for_decoding, quiet_libraries
from lookahead.cli.rendering import Consoles, StepPrinter, decode, measuring_progress, print_json, visible
from lookahead.cli.settings import CompareSettings
from lookahead.demo import DEMO_PROMPT
from lookahead.text import Tokenizer

WARM_UP_TOKENS = 8


Rounds = list[tuple[Recording, Recording]]
"""Runs of both sides, plain and lookahead, that came to their end."""


def parting(plain: list[int], lookahead: list[int]) -> dict[str, int | None] | None:
    """The first position at which two outputs differ, and the token of each there, `None` for one that has ended."""
    position = first_difference(lookahead, plain)
    if position is None:
        return None
    sides = {"plain": plain, "lookahead": lookahead}
    return {"position": position} | {name: next(iter(side[position:]), None) for name, side in sides.items()}


def first_parting(rounds: Rounds) -> dict[str, int | None] | None:
    """The first difference between the sides in any round, `None` if there is none."""
    found = (parting(plain.tokens, lookahead.tokens) for plain, lookahead in rounds)
    return next((difference for difference in found if difference is not None), None)


def run(settings: CompareSettings, text: str) -> int:
    """Compare on the prompt `text`, which may be the built-in one, print, and return the exit code."""
    repeats, is_demo = settings.repeats, text == DEMO_PROMPT
    consoles = Consoles.create(no_color=settings.no_color)
    if is_demo:
        consoles.notes.print("note: no prompt was given, so the built-in demonstration prompt is used")
    with quiet_libraries():
        loaded = load_for_decoding(settings, consoles.notes)
        prompt = encode_prompt(loaded, text, settings.max_new_tokens, consoles.notes)
        rounds: Rounds = []
        with suppress(KeyboardInterrupt):
            _run_rounds(loaded, prompt, settings, rounds, consoles.notes)
    difference, interrupted = first_parting(rounds), len(rounds) < repeats
    if settings.json:
        report = comparison_report(rounds, loaded.tokenizer) | request_report(settings, loaded, prompt)
        print_json(consoles.out, report | {"demo_prompt": is_demo, "repeats": repeats, "interrupted": interrupted})
    else:
        if interrupted:
            consoles.notes.print(f"interrupted after {len(rounds)} of {repeats} rounds")
        if rounds:
            consoles.notes.print(f"prompt:\n{visible(text)}\noutput:", style="dim")
            printer = StepPrinter(consoles.out, loaded.tokenizer)
            for tokens in rounds[0][1].tokens_by_step:
                printer.step(tokens)
            printer.finish()
            consoles.out.print()
            consoles.out.print(comparison_table(rounds))
        if difference is not None:
            consoles.out.print(_difference_line(difference, loaded))
    if interrupted:
        return process.INTERRUPTED
    return process.OK if difference is None else process.DIFFERENT


def _run_rounds(loaded: LoadedModel, prompt: Prompt, settings: CompareSettings, rounds: Rounds, notes: Console) -> None:
    """Fill `rounds`; the sides take turns, so that a change of the machine's pace meets both."""
    options, seed = text_options(loaded, settings), seed_draws(settings)
    short = replace(prompt, max_new_tokens=min(WARM_UP_TOKENS, prompt.max_new_tokens))
    with measuring_progress(notes) as progress:
        task = progress.add_task("warming up", total=2 * settings.repeats + 2)

        def run(side: str, number: int) -> Recording:
            what = f"{side} {number}/{settings.repeats}" if number else "warming up"
            progress.update(task, description=what, refresh=True)
            torch.manual_seed(seed)  # both sides draw the same
            recording, text = Recording(), prompt if number else short
            if side == "plain":
                decode_plainly(loaded, text, recording, **options)
            else:
                decode_with_lookahead(loaded, text, settings.config, recording, **options)
            progress.update(task, advance=1, refresh=True)
            return recording

        for number in range(settings.repeats + 1):
            pair = run("plain", number), run("lookahead", number)
            if number:
                rounds.append(pair)


def comparison_report(rounds: Rounds, tokenizer: Tokenizer) -> dict[str, Any]:
    """The comparison as plain numbers and lists; what no finished round has measured is `None`."""
    if not rounds:
        return {"identical": None, "first_difference": None, "plain": None, "lookahead": None}
    difference = first_parting(rounds)
    sides = zip(("plain", "lookahead"), zip(*rounds, strict=True), strict=True)
    report = {"identical": difference is None, "first_difference": difference}
    return report | {name: _side_report(runs, tokenizer) for name, runs in sides}


def _side_report(runs: Sequence[Recording], tokenizer: Tokenizer) -> dict[str, Any]:
    cpu, wall = _seconds_per_token(runs)
    return run_report(tokenizer, runs[0]) | {
        "cpu_seconds_per_token": cpu,
        "wall_seconds_per_token": wall,
        "repeated_cycle_share": repeated_cycle_share(runs[0].tokens),
        "cpu_seconds": [run.cpu_seconds for run in runs],
        "wall_seconds": [run.wall_seconds for run in runs],
    }


def _seconds_per_token(runs: Sequence[Recording]) -> tuple[float, float]:
    """Medians of the CPU time and of the wall time."""
    cpu = median(run.cpu_seconds / max(1, run.statistics.tokens) for run in runs)
    wall = median(run.wall_seconds / max(1, run.statistics.tokens) for run in runs)
    return cpu, wall


def comparison_table(rounds: Rounds) -> Table:
    """The figures of both sides and how they relate."""
    plain, other = zip(*rounds, strict=True)
    a, b = plain[0].statistics, other[0].statistics
    table = Table()
    table.add_column()
    for name in ("plain", "lookahead", "plain / lookahead"):
        table.add_column(name, justify="right")
    table.add_row("tokens", str(a.tokens), str(b.tokens))
    table.add_row("steps", str(a.steps), str(b.steps), _ratio(a.steps, b.steps))
    table.add_row("step compression", f"{a.step_compression:.2f}", f"{b.step_compression:.2f}")
    table.add_row("nodes per step", f"{a.mean_nodes:.1f}", f"{b.mean_nodes:.1f}")
    for clock, before, after in zip(("CPU", "wall"), _seconds_per_token(plain), _seconds_per_token(other), strict=True):
        row = (f"{1000 * before:.2f} ms", f"{1000 * after:.2f} ms", _ratio(before, after))
        table.add_row(f"{clock} time per token", *row)
    shares = (f"{repeated_cycle_share(side[0].tokens):.0%}" for side in (plain, other))
    table.add_row("inside a repeated cycle", *shares)
    table.add_section()
    table.add_row("outputs identical", "", "yes" if first_parting(rounds) is None else "no")
    return table


def _ratio(plain: float, lookahead: float) -> str:
    return f"{plain / lookahead:.2f}x" if lookahead else ""


def _difference_line(difference: dict[str, int | None], loaded: LoadedModel) -> str:
    def shown(token: int | None) -> str:
        return "the end" if token is None else f"{token} {decode(loaded.tokenizer, [token])!r}"

    line = (
        f"first difference at new token {difference['position']} (from 0): "
        f"plain {shown(difference['plain'])}, lookahead {shown(difference['lookahead'])}"
    )
    if loaded.dtype != "float32":
        exact = "a file of float32 weights" if loaded.is_gguf else "--dtype float32"
        line += f"; in {loaded.dtype} rounding can decide between close tokens, compare with {exact}"
    return line
