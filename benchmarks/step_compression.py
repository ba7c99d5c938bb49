"""Measure how many steps each decoding method needs on a set of prompts, and that its output is the same.

    python benchmarks/step_compression.py --model PATH --prompts FILE.jsonl --name humaneval \\
        --max-new-tokens 128 --dtype float32 --output benchmarks/results/humaneval.jsonl

For each prompt plain `model.generate` runs once, then each method; every output is compared with the plain
one, token for token. Each row is on the disk before the next one is measured, and rows that the file already
has are not measured again: an interrupted run goes on where it stopped when it is started once more.

Prompts are JSON lines with `id`, `prompt` (or `turns`, of which the first is used, as it stands) and, if they
belong to one, `task`. `--model demo` is the model that comes with the package. The exit status is 0 when all
outputs were identical, 1 when some differ or an argument cannot work, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common import (
    DTYPES,
    PAPER,
    Prompt,
    ResultsFile,
    add_options,
    command_line,
    describe_run,
    first_difference,
    generate_plain,
    generate_with,
    load_model,
    progress_bar,
    read_prompts,
    run_safely,
)
from lookahead import LookaheadConfig
from lookahead.bench.repetition import final_cycle_share, repeated_cycle_share, tokens_before_cycles
from write_results import Row, describe_method, read_results, summarise

METHODS: dict[str, LookaheadConfig] = {
    "autoregressive": LookaheadConfig(preset="autoregressive"),
    "jacobi": LookaheadConfig(preset="jacobi"),
    "paper": replace(PAPER, pool_from_prompt=False, pool_from_output=False),
    "paper+prompt": replace(PAPER, pool_from_prompt=True, pool_from_output=False),
    "paper+prompt+output": replace(PAPER, pool_from_prompt=True, pool_from_output=True),
}


def reference_row(prompt: Prompt, output: list[int]) -> Row:
    """What the file keeps of plain `generate`: all of its output, to compare with after an interruption."""
    return {
        "kind": "reference",
        "id": prompt.id,
        "task": prompt.task,
        "tokens": len(output),
        "cycle_share": round(repeated_cycle_share(output), 4),
        "final_cycle_share": round(final_cycle_share(output), 4),
        "output": output,
    }


def measurement_row(prompt: Prompt, method: str, output: list[int], statistics: Any, expected: list[int]) -> Row:
    """What the file keeps of one method on one prompt."""
    if statistics.tokens != len(output):
        raise RuntimeError(
            f"{method} on {prompt.id}: the statistics count {statistics.tokens} tokens, the output has {len(output)}"
        )
    lengths = Counter(statistics.accepted_lengths)
    early = steps_within(statistics.accepted_lengths, tokens_before_cycles(output))
    return {
        "kind": "measurement",
        "id": prompt.id,
        "task": prompt.task,
        "method": method,
        "tokens": len(output),
        "steps": statistics.steps,
        "S": round(len(output) / statistics.steps, 4),
        "nodes": sum(statistics.nodes_per_step),
        "mean_nodes": round(statistics.mean_nodes, 2),
        "accepted_lengths": {str(length): lengths[length] for length in sorted(lengths)},
        "identical": output == expected,
        "first_difference": first_difference(output, expected),
        "cycle_share": round(repeated_cycle_share(output), 4),
        "tokens_before_cycles": sum(early),
        "steps_before_cycles": len(early),
        "config": asdict(METHODS[method]),
    }


def steps_within(lengths: Sequence[int], tokens: int) -> list[int]:
    """The lengths of the steps, first ones first, that end within the first so many tokens."""
    ends = accumulate(lengths)
    return [length for length, end in zip(lengths, ends, strict=True) if end <= tokens]


def measure(
    file: ResultsFile, prompts: Sequence[Prompt], methods: Sequence[str], model: Any, tokenizer: Any
) -> Iterator[tuple[Prompt, str]]:
    """Measure what the file lacks; yields the prompt and the method of every row that it then has."""
    max_new_tokens = file.rows[0]["max_new_tokens"]
    for prompt in prompts:
        done = file.methods_done(prompt)
        input_ids = tokenizer(prompt.text, return_tensors="pt").input_ids.to(model.device)
        for method in methods:
            if method not in done:
                reference = file.reference(prompt)
                if reference is None:
                    reference = reference_row(prompt, generate_plain(model, input_ids, max_new_tokens))
                    file.append(reference)
                output, statistics = generate_with(METHODS[method], model, input_ids, max_new_tokens)
                file.append(measurement_row(prompt, method, output, statistics, reference["output"]))
            yield prompt, method


def show_summary(path: Path, console: Console) -> bool:
    """Print what the file says now; returns whether all outputs in it are identical."""
    results = read_results(path)
    if results is None:
        return True
    shown = Table(title=f"{results.header['name']}, {results.header['model']['name']}")
    for title in ("method", "nodes per step", "S", "identical outputs"):
        shown.add_column(title, justify="left" if title == "method" else "right")
    for method in results.methods():
        rows = results.of_method(method)
        summary = summarise(rows)
        identical = f"{summary.identical} of {summary.prompts}"
        figures = (f"{summary.mean_nodes:.1f}", f"{summary.step_compression:.3f}", identical)
        shown.add_row(describe_method(rows[0]), *figures)
    console.print(shown)
    return all(row["identical"] for row in results.measurements)


def parse_methods(text: str) -> list[str]:
    """The methods named in `--methods`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name!r} is no method; choose from {', '.join(METHODS)}")
    return names


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add = parser.add_argument
    add("--methods", type=parse_methods, default=list(METHODS), help=f"comma-separated ({','.join(METHODS)})")
    add("--dtype", choices=list(DTYPES), default="float32", help="number format of the model (float32)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and show; returns the exit status."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prompts = read_prompts(options.prompts, options.limit)
    model, tokenizer = load_model(options.model, options.dtype, options.device)
    own = ["--methods", ",".join(options.methods)] if options.methods != list(METHODS) else []
    header = describe_run(options, model, command_line("step_compression.py", options, own))
    configs = {method: asdict(config) for method, config in METHODS.items()}
    with (
        ResultsFile(options.output, header, configs, restart=options.restart) as file,
        progress_bar(console) as progress,
    ):
        task = progress.add_task(options.name, total=len(prompts) * len(options.methods))
        for prompt, method in measure(file, prompts, options.methods, model, tokenizer):
            progress.update(task, advance=1, description=f"{prompt.id} {method}")
    if show_summary(options.output, console):
        return 0
    console.print("Some outputs differ from plain `generate`: see `first_difference`.", style="red")
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse_options(arguments)
    console = Console(stderr=True)
    return run_safely(lambda: run(options, console), options.output, console)


if __name__ == "__main__":
    sys.exit(main())
