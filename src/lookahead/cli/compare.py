"""`lookahead compare`: decode one prompt plainly and with lookahead, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import truediv
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from lookahead.backends.loading import LoadedModel
from lookahead.bench.summary import first_difference, repeated_cycle_share
from lookahead.cli.generate import (
    PromptInput,
    Recording,
    decode_plainly,
    decode_with_lookahead,
    encode_prompt,
    request_report,
    run_report,
    seed_draws,
    text_options,
)
from lookahead.cli.loading import load_for_decoding
from lookahead.cli.settings import CompareSettings
from lookahead.cli.signals import DIFFERENT, INTERRUPTED, OK
from lookahead.cli.terminal import Consoles, StepPrinter, decode, measuring_progress, print_json, visible
from lookahead.demo import DEMO_PROMPT
from lookahead.text import Tokenizer

WARM_UP_TOKENS = 8

Rounds = list[tuple[Recording, Recording]]
"""Pairs of finished runs, plain and lookahead."""


def parting(plain: list[int], lookahead: list[int]) -> dict[str, int | None] | None:
    """First position where two outputs differ, with both tokens there; `None` for an output that has ended."""
    position = first_difference(lookahead, plain)
    if position is None:
        return None
    sides = {"plain": plain, "lookahead": lookahead}
    return {"position": position} | {name: next(iter(side[position:]), None) for name, side in sides.items()}


def run(settings: CompareSettings, consoles: Consoles, text: str) -> int:
    """Compare both sides on the prompt `text`, print the result, and return the exit code."""
    repeats, is_demo = settings.repeats, text == DEMO_PROMPT
    if is_demo:
        consoles.notes.print("note: no prompt was given, so the built-in demonstration prompt is used")
    loaded = load_for_decoding(settings, consoles.notes)
    prompt = encode_prompt(loaded, text, settings.max_new_tokens, consoles.notes)
    rounds: Rounds = []
    with suppress(KeyboardInterrupt):
        _run_rounds(loaded, prompt, settings, rounds, consoles.notes)
    report, interrupted = comparison_report(rounds, loaded.tokenizer), len(rounds) < repeats
    if settings.json:
        report |= request_report(settings, loaded, prompt)
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
            consoles.out.print(comparison_table(report))
        if report["first_difference"] is not None:
            consoles.out.print(_difference_line(report["first_difference"], loaded))
    if interrupted:
        return INTERRUPTED
    return OK if report["first_difference"] is None else DIFFERENT


def _run_rounds(
    loaded: LoadedModel, prompt: PromptInput, settings: CompareSettings, rounds: Rounds, notes: Console
) -> None:
    """Append pairs of runs to `rounds`. Sides alternate, so that a change of the machine's speed affects both."""
    options, seed = text_options(loaded, settings), seed_draws(loaded, settings.sampling_seed)
    short = replace(prompt, max_new_tokens=min(WARM_UP_TOKENS, prompt.max_new_tokens))
    with measuring_progress(notes) as progress:
        task = progress.add_task("warming up", total=2 * settings.repeats + 2)

        def run(side: str, number: int) -> Recording:
            what = f"{side} {number}/{settings.repeats}" if number else "warming up"
            progress.update(task, description=what, refresh=True)
            seed_draws(loaded, seed)  # both sides draw the same random numbers
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
    """Comparison as plain numbers and lists; all values are `None` without a finished round."""
    if not rounds:
        return {"identical": None, "first_difference": None, "plain": None, "lookahead": None}
    differences = (parting(plain.tokens, lookahead.tokens) for plain, lookahead in rounds)
    difference = next((difference for difference in differences if difference is not None), None)
    plain, other = (_side_report(side, tokenizer) for side in zip(*rounds, strict=True))
    return {"identical": difference is None, "first_difference": difference, "plain": plain, "lookahead": other}


def _side_report(runs: Sequence[Recording], tokenizer: Tokenizer) -> dict[str, Any]:
    cpu, wall = [run.cpu_seconds for run in runs], [run.wall_seconds for run in runs]
    tokens = [max(1, run.statistics.tokens) for run in runs]
    return run_report(tokenizer, runs[0]) | {
        "cpu_seconds_per_token": median(map(truediv, cpu, tokens)),
        "wall_seconds_per_token": median(map(truediv, wall, tokens)),
        "repeated_cycle_share": repeated_cycle_share(runs[0].tokens),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
    }


def comparison_table(report: dict[str, Any]) -> Table:
    """Table of the figures of both sides, and their ratios."""
    table = Table()
    table.add_column()
    for name in ("plain", "lookahead", "plain / lookahead"):
        table.add_column(name, justify="right")
    sides: list[dict[str, Any]] = [report["plain"], report["lookahead"]]
    steps = [side["steps"] for side in sides]
    table.add_row("tokens", *(str(len(side["tokens"])) for side in sides))
    table.add_row("steps", *map(str, steps), _ratio(*steps))
    table.add_row("step compression", *(f"{side['step_compression']:.2f}" for side in sides))
    table.add_row("nodes per step", *(f"{sum(side['nodes_per_step']) / max(1, side['steps']):.1f}" for side in sides))
    for clock in ("CPU", "wall"):
        seconds = [side[f"{clock.lower()}_seconds_per_token"] for side in sides]
        table.add_row(f"{clock} time per token", *(f"{1000 * time:.2f} ms" for time in seconds), _ratio(*seconds))
    table.add_row("inside a repeated cycle", *(f"{side['repeated_cycle_share']:.0%}" for side in sides))
    table.add_section()
    table.add_row("outputs identical", "", "yes" if report["identical"] else "no")
    return table


def _ratio(plain: float, lookahead: float) -> str:
    return f"{plain / lookahead:.2f}x" if lookahead else ""


def _difference_line(difference: dict[str, int | None], loaded: LoadedModel) -> str:
    def described(token: int | None) -> str:
        return "the end" if token is None else f"{token} {decode(loaded.tokenizer, [token])!r}"

    line = (
        f"first difference at new token {difference['position']} (from 0): "
        f"plain {described(difference['plain'])}, lookahead {described(difference['lookahead'])}"
    )
    if loaded.dtype != "float32":
        exact = "--dtype float32" if loaded.is_transformers else "a model with float32 weights"
        line += f"; in {loaded.dtype} rounding can decide between close tokens, compare with {exact}"
    return line
