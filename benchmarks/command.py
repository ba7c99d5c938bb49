"""Run a probe, which is a measurement beside `lookahead bench`, or make tables and plots of results.

    python benchmarks replay --recordings code_edits.jsonl --output benchmarks/results/replay.jsonl

Rows are written to disk unit by unit; the same command resumes an interrupted run. The exit status is 0 when all is
measured, 1 when a result is wrong, 2 for an invalid argument, and 130 when interrupted. Tables of the pages are made
from the rows by `make tables`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import HfArgumentParser

from lookahead.bench.rows import Row, RowsFile, check_same, kept_lines, versions
from lookahead.cli.signals import DIFFERENT, ERROR, INTERRUPTED, OK
from lookahead.cli.terminal import measuring_progress
from lookahead.drafting import compile_loops
from lookahead.errors import LookaheadError
from plots import draw_plots
from probe import Probe, machine_of
from tables import fill_tables
from worth import compare_commits

PROBES = {
    "gpu": "one GPU: step times and kernels, requests at once, a server, correctness, in three calls",
    "gguf_models": "texts, steps and CPU time of GGUF models, compared with llama-cpp-python",
    "mlx_models": "a model of MLX on a Mac: equal texts, speed beside mlx-lm, times of passes by nodes",
    "standard": "`auto` compared with the best of its parts, line by line, in CPU time",
    "load": "public load generator on the server, with drafts and without, and on transformers serve",
    "launches": "kernels of a step of 8B, counted on a simulated GPU, with predicted times",
    "waits": "waits, copies and launches of a step, on a simulated GPU",
    "host": "host time of steps, by part, with a model of free forward passes",
    "same_bits": "bits of every logit of invariant texts, compared with plain decoding",
    "step_ends": "where steps of `auto` end: tokens that no source proposed, and how others are ranked",
    "replay": "drafts for recorded answers, without a model",
}

COMMANDS: dict[str, Callable[[Sequence[str], Console], int]] = {
    "tables": fill_tables,
    "plots": draw_plots,
    "worth": compare_commits,
}
"""Commands that are not probes; each has its own options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in COMMANDS:
        return guarded(lambda console: COMMANDS[words[0]](words[1:], console))
    probe_options, options = parse(words)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return guarded(lambda console: run(probe_options, options, console))


def guarded(command: Callable[[Console], int]) -> int:
    """Run a command, and return its exit status. Errors are printed in one line on standard error."""
    console = Console(stderr=True)
    try:
        return command(console)
    except KeyboardInterrupt:
        console.print("interrupted; finished units are in the output, run the same command again to resume")
        return INTERRUPTED
    except (LookaheadError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return ERROR


def run(probe_options: Any, options: argparse.Namespace, console: Console) -> int:
    """Measure the units that the file lacks, and return the exit status."""
    name = options.probe
    probe: Probe = importlib.import_module(name).probe(probe_options)
    compile_loops()  # before any unit is timed
    machine = machine_of(torch.device(getattr(probe_options, "device", "cpu")))
    header = {"unit": "header", "kind": "header", "benchmark": name, **probe.header, "options": named(probe_options)}
    header |= {"machine": machine, "versions": versions(), "date": date.today().isoformat()}
    lines = kept_lines(options.output, lambda row: row.get("benchmark") == name, restart=options.restart)
    if lines:  # options may differ from the header's
        check_same(options.output, lines[0], {name: header[name] for name in header.keys() - {"options", "date"}})
    with (
        RowsFile(options.output, lines or [header], lambda row: row["unit"]) as file,
        measuring_progress(console) as bar,
    ):
        task = bar.add_task(name, total=len(probe.units))
        for unit in probe.units:
            bar.update(task, description=unit.name, refresh=True)
            if unit.name not in file:
                file.append(*({"unit": unit.name, **row} for row in list(unit.measure())))
            bar.update(task, advance=1, refresh=True)
    errors = [row["error"] for row in file.rows if row.get("error")]
    for error in errors:
        console.print(error, style="red", markup=False)
    return DIFFERENT if errors else OK


def named(options: Any) -> Row:
    """Options of a probe for its header, with file names in place of local paths."""

    def name(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [name(one) for one in value]
        return Path(value).name if isinstance(value, str) else value

    return {key: name(value) for key, value in asdict(options).items()}


def parse(words: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Parse the command line: return the options of its probe, and those of all probes."""
    module = importlib.import_module(words[0]) if words and words[0] in PROBES else None
    listed = "\n".join(f"  {probe:16} {what}" for probe, what in PROBES.items())
    commands = "\n".join(f"  {other:16} {(call.__doc__ or '').splitlines()[0]}" for other, call in COMMANDS.items())
    parser = HfArgumentParser(
        [] if module is None else [module.Options],
        prog="python benchmarks",
        description=__doc__ if module is None else module.__doc__,
        epilog=f"probes:\n{listed}\ncommands with options of their own:\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("probe", choices=list(PROBES), metavar="PROBE", help="one of the probes below")
    add("--output", required=True, type=Path, help="JSON lines; units in the file are not measured again")
    add("--restart", action="store_true", help="discard the rows of an existing file")
    add("--threads", type=int, default=1, help="CPU threads (1)")
    *parsed, unknown = parser.parse_args_into_dataclasses(list(words), True, look_for_args_file=False)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed[0], parsed[1]
