"""Measure how CPU time per token and resident memory grow with the length of the text.

    python benchmarks/growth.py --output benchmarks/results/growth.jsonl --markdown docs/benchmarks.md

A small Llama with random weights and a large context continues a short prompt; nothing ends the text early. Each method
runs in a process of its own, so that its memory is its own, and repeats take turns. Marks are set at the lengths: a row
holds, for each of them, the CPU time per token since the mark before it, and the resident memory there.

Random weights under sampling are the hardest case for a drafting method, for hardly anything can be foreseen; greedily
(`--temperature 0`) the text of such a model soon repeats itself, and nearly all can. The exit status is 0 when all
outputs were identical to those of transformers, 1 when some differ, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

import lookahead
from common import parse_positive, progress_bar, run_safely, to_line, versions
from lookahead import LookaheadConfig
from lookahead.bench.machine import describe_machine, resident_bytes
from lookahead.bench.markdown import into_page
from write_results import ResultsError, Row, parse_rows, write_whole

METHODS: dict[str, LookaheadConfig | None] = {
    "transformers": None,
    "plain engine": LookaheadConfig(preset="autoregressive"),
    "auto": LookaheadConfig(preset="auto"),
}
LENGTHS = (256, 1024, 4096)
PROMPT_TOKENS = 32
WARM_UP_TOKENS = 16
VOCABULARY = 4096


@dataclass
class Marks:
    """What was used when the text had grown to certain lengths.

    Attributes:
        lengths: The lengths to note, in new tokens.
        reached: For each of them: new tokens there, CPU seconds since the beginning, resident bytes.
    """

    lengths: Sequence[int]
    reached: list[tuple[int, float, int | None]] = field(default_factory=list)
    start: float = field(default_factory=process_time)

    def note(self, tokens: int) -> None:
        """The text has so many new tokens now."""
        while len(self.reached) < len(self.lengths) and tokens >= self.lengths[len(self.reached)]:
            self.reached.append((tokens, process_time() - self.start, resident_bytes()))


class MarkingCriterion(StoppingCriteria):
    """Never stops, and tells the marks of every token."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._marks.note(input_ids.shape[1] - PROMPT_TOKENS)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def build_model(longest: int) -> LlamaForCausalLM:
    """The model: 6 million parameters, room for the longest text, no token that ends one."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest + PROMPT_TOKENS + 1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def measure(method: str, lengths: Sequence[int], temperature: float, seed: int) -> Row:
    """One run in this process; the row without what all rows share."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    model = build_model(lengths[-1])
    prompt = torch.randint(VOCABULARY, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
    generate(model, method, prompt, Marks([]), WARM_UP_TOKENS, temperature, seed)
    before = resident_bytes()
    marks = Marks(lengths)
    output, steps = generate(model, method, prompt, marks, lengths[-1], temperature, seed)
    return {
        "method": method,
        "tokens": len(output),
        "S": round(len(output) / steps, 4),
        "resident_before": before,
        "marks": [
            {"length": length, "tokens": tokens, "cpu_seconds": round(seconds, 6), "resident_bytes": memory}
            for length, (tokens, seconds, memory) in zip(lengths, marks.reached, strict=True)
        ],
        "output": hashlib.sha256(json.dumps(output).encode()).hexdigest()[:16],
    }


def generate(
    model: LlamaForCausalLM,
    method: str,
    prompt: torch.Tensor,
    marks: Marks,
    tokens: int,
    temperature: float,
    seed: int,
) -> tuple[list[int], int]:
    """New tokens, and the steps that they took."""
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": tokens}
    arguments |= {"do_sample": temperature > 0}
    if temperature > 0:
        arguments |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    config = METHODS[method]
    if config is None:
        whole = model.generate(prompt, stopping_criteria=[MarkingCriterion(marks)], **arguments)
        return whole[0, PROMPT_TOKENS:].tolist(), whole.shape[1] - PROMPT_TOKENS
    grown = 0

    def on_step(step: Any) -> None:
        nonlocal grown
        grown += len(step.tokens)
        marks.note(grown)

    output = lookahead.generate(
        model, prompt, lookahead_config=config, on_step=on_step, return_dict_in_generate=True, **arguments
    )
    return output.sequences[0, PROMPT_TOKENS:].tolist(), output.statistics.steps


def in_own_process(method: str, lengths: Sequence[int], temperature: float, seed: int) -> Row:
    """`measure`, in a fresh process that ends afterwards; in a group of its own, since Ctrl-C is for this one."""
    asked = json.dumps([method, list(lengths), temperature, seed])
    command = [sys.executable, __file__, "--measure", asked, "--output", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, start_new_session=True)
    row: Row = json.loads(done.stdout)
    return row


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells a row from others."""
    return (row["temperature"], row["repeat"], row["method"], *(mark["length"] for mark in row["marks"]))


def identical(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row's output is that of transformers."""
    plain = next(other for other in rows if key_of(other) == key_of({**row, "method": "transformers"}))
    return bool(row["output"] == plain["output"])


def table(header: Row, rows: Sequence[Row]) -> str:
    """Medians over the repeats, in Markdown."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["temperature"], row["method"]), []).append(row)
    lengths = [mark["length"] for mark in rows[0]["marks"]]
    titles = [f"CPU ms per token, {start + 1:,} to {end:,}" for start, end in zip([0, *lengths], lengths, strict=False)]
    titles += [f"MiB more at {length:,}" for length in lengths]
    lines = [f"| decoding | method | S | {' | '.join(titles)} | identical |"]
    lines += ["| --- | --- |" + " ---: |" * (len(titles) + 2)]
    for (temperature, method), group in groups.items():
        times = [median(window(row, number) for row in group) for number in range(len(lengths))]
        memory = [median(grown(row, number) for row in group) for number in range(len(lengths))]
        how = f"temperature {temperature:g}" if temperature else "greedy"
        figures = [f"{median(row['S'] for row in group):.2f}"]
        figures += [f"{1000 * seconds:.2f}" for seconds in times] + [f"{mib:.1f}" for mib in memory]
        same = "yes" if all(identical(row, rows) for row in group) else "NO"
        lines.append(f"| {how} | {method} | {' | '.join(figures)} | {same} |")
    used = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    repeats = len({row["repeat"] for row in rows})
    where = f"on one thread of {header['machine']['device']}; {used}"
    lines += ["", f"Medians of {repeats} runs, each in a process of its own, {where}."]
    return "\n".join(lines) + "\n"


def window(row: Row, number: int) -> float:
    """CPU seconds per token between two marks."""
    here, before = row["marks"][number], row["marks"][number - 1] if number else {"tokens": 0, "cpu_seconds": 0.0}
    tokens = here["tokens"] - before["tokens"]
    return (here["cpu_seconds"] - before["cpu_seconds"]) / tokens if tokens else 0.0


def grown(row: Row, number: int) -> float:
    """MiB that the process has grown by since before the text began."""
    memory = row["marks"][number]["resident_bytes"]
    return 0.0 if memory is None else (memory - row["resident_before"]) / 2**20


def kept_rows(options: argparse.Namespace, header: Row) -> list[Row]:
    """The rows that the file has already, but for those with other marks; its header is left out.

    Raises:
        ResultsError: The file is that of another benchmark, or another machine.
    """
    if not options.output.exists() or options.restart:
        return []
    rows = parse_rows(options.output.read_text(encoding="utf-8"), options.output.name)
    if rows and rows[0] != header:
        raise ResultsError(
            f"{options.output.name} was made by another benchmark, on another machine or with other versions; choose "
            "another --output, or begin this file anew with --restart"
        )
    return [row for row in rows[1:] if [mark["length"] for mark in row["marks"]] == options.lengths]


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure what is missing, write and show; returns the exit status."""
    machine = {**describe_machine(torch.device("cpu")), "threads": 1}
    header = {"kind": "header", "benchmark": "growth", "machine": machine, "versions": versions()}
    rows = kept_rows(options, header)
    done = {key_of(row) for row in rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.output, "".join(map(to_line, [header, *rows])))
    with progress_bar(console, auto_refresh=False) as progress, options.output.open("a", encoding="utf-8") as file:
        task = progress.add_task("growth", total=options.repeats * len(METHODS))
        for repeat, method in product(range(options.repeats), METHODS):
            progress.update(task, description=method, refresh=True)
            if (options.temperature, repeat, method, *options.lengths) not in done:
                measured = in_own_process(method, options.lengths, options.temperature, repeat)
                rows.append({"temperature": options.temperature, "repeat": repeat, **measured})
                file.write(to_line(rows[-1]))
                file.flush()
            progress.update(task, advance=1, refresh=True)
    tables = table(header, sorted(rows, key=lambda row: row["temperature"]))
    if options.markdown is not None:
        page = options.markdown.read_text(encoding="utf-8") if options.markdown.exists() else ""
        options.markdown.write_text(into_page(page, tables, "growth"), encoding="utf-8")
    print(tables)
    return 0 if all(identical(row, rows) for row in rows) else 1


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", required=True, type=Path, help="results file (.jsonl); an unfinished one is gone on with")
    add("--markdown", type=Path, help="page with a section `growth` to put the table into")
    add("--lengths", type=parse_positive, nargs="+", default=list(LENGTHS), help="marks, in new tokens (256 1024 4096)")
    add("--restart", action="store_true", help="throw the rows of an existing file away")
    add("--temperature", type=float, default=1.0, help="of the draws, 0 for greedy decoding (1.0)")
    add("--repeats", type=parse_positive, default=3, help="runs of each method (3)")
    add("--measure", help=argparse.SUPPRESS)  # how this script calls itself for one run
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse_options(arguments)
    if options.measure is not None:
        print(json.dumps(measure(*json.loads(options.measure))))
        return 0
    console = Console(stderr=True)
    return run_safely(lambda: run(options, console), options.output, console)


if __name__ == "__main__":
    sys.exit(main())
