"""Write docs/results.md from the raw rows in benchmarks/results/*.jsonl.

    python benchmarks/write_results.py [--results benchmarks/results] [--output docs/results.md]

Every number in the page is computed here from the rows that benchmarks/step_compression.py recorded, and from
nothing else, so that the same rows always give the same page.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LITTLE_REPETITION = 0.2
"""A prompt whose output has a smaller share of repeated cycles than this counts as little repeated."""

SHORTEST_JUDGED = 32
"""Shorter outputs, such as those of a model that stops at once, have no room for cycles: they prove nothing."""

LONGEST_SHOWN = 5
"""Steps that gave this many tokens or more share one column of the tables."""

Row = dict[str, Any]


class ResultsError(Exception):
    """A results file that cannot be used; the message says why and what to do."""


@dataclass
class Results:
    """One results file: one model on one set of prompts."""

    name: str
    header: Row
    references: list[Row]
    measurements: list[Row]

    def methods(self) -> list[str]:
        """Methods measured, in the order in which the file first names them."""
        return list(dict.fromkeys(row["method"] for row in self.measurements))

    def of_method(self, method: str) -> list[Row]:
        """The rows of one method, one for each prompt."""
        return [row for row in self.measurements if row["method"] == method]


@dataclass
class Summary:
    """What the rows of one method come to."""

    prompts: int
    identical: int
    tokens: int
    steps: int
    nodes: int
    lengths: Counter[int]
    tokens_before_cycles: int
    steps_before_cycles: int
    lowest: float
    highest: float

    @property
    def step_compression(self) -> float:
        """S of the set: all tokens over all steps."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def step_compression_before_cycles(self) -> float | None:
        """S up to the first repeated cycle of each output; `None` when all begin with one."""
        return self.tokens_before_cycles / self.steps_before_cycles if self.steps_before_cycles else None

    @property
    def mean_nodes(self) -> float:
        """Nodes per step over all steps of the set."""
        return self.nodes / self.steps if self.steps else 0.0

    def length_shares(self) -> list[float]:
        """Share of the steps that gave 1, 2, ... tokens; the last entry is `LONGEST_SHOWN` and above."""
        counts = [self.lengths[length] for length in range(1, LONGEST_SHOWN)]
        counts.append(self.steps - sum(counts))
        return [count / self.steps if self.steps else 0.0 for count in counts]


def parse_rows(text: str, source: str) -> list[Row]:
    """The rows of a results file. A last line without its line end was cut off by a crash and is dropped."""
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ResultsError(f"{source}, line {number} is no JSON ({error}); remove that line") from error
    if rows and rows[0].get("kind") != "header":
        raise ResultsError(f"{source} has no header row; it was not made by a benchmark of this folder")
    return rows


def read_results(path: Path) -> Results | None:
    """One results file, or `None` when nothing has been measured in it yet or another benchmark made it."""
    rows = parse_rows(path.read_text(encoding="utf-8"), path.name)
    if rows and "benchmark" in rows[0]:
        return None
    kinds: dict[str, list[Row]] = {"header": [], "reference": [], "measurement": []}
    for row in rows:
        kinds[row["kind"]].append(row)
    if not kinds["measurement"]:
        return None
    return Results(path.name, rows[0], kinds["reference"], kinds["measurement"])


def summarise(rows: Iterable[Row]) -> Summary:
    """Add up the rows of one method."""
    rows = list(rows)
    lengths: Counter[int] = Counter()
    for row in rows:
        lengths.update({int(length): count for length, count in row["accepted_lengths"].items()})
    per_prompt = [row["tokens"] / row["steps"] for row in rows]
    return Summary(
        prompts=len(rows),
        identical=sum(row["identical"] for row in rows),
        tokens=sum(row["tokens"] for row in rows),
        steps=sum(row["steps"] for row in rows),
        nodes=sum(row["nodes"] for row in rows),
        lengths=lengths,
        tokens_before_cycles=sum(row["tokens_before_cycles"] for row in rows),
        steps_before_cycles=sum(row["steps_before_cycles"] for row in rows),
        lowest=min(per_prompt, default=0.0),
        highest=max(per_prompt, default=0.0),
    )


def little_repeated(rows: Iterable[Row]) -> list[Row]:
    """The rows whose output is long enough to judge and has little of repeated cycles."""
    return [row for row in long_enough(rows) if row["cycle_share"] < LITTLE_REPETITION]


def long_enough(rows: Iterable[Row]) -> list[Row]:
    """The rows whose output has room for cycles."""
    return [row for row in rows if row["tokens"] >= SHORTEST_JUDGED]


def weighted_share(rows: Sequence[Row], key: str) -> float:
    """A share given per prompt, taken over all tokens of the set."""
    tokens = sum(row["tokens"] for row in rows)
    return sum(row[key] * row["tokens"] for row in rows) / tokens if tokens else 0.0


def describe_method(row: Row) -> str:
    """The method of a row in the paper's words, with its sizes."""
    config = row["config"]
    if config["preset"] == "autoregressive":
        return "autoregressive"
    if config["preset"] == "jacobi":
        return f"Jacobi, block of {config['block_size']}"
    sizes = f"W={config['window_size']}, N={config['ngram_size']}, G={config['guess_set_size']}"
    from_prompt, from_output = config["pool_from_prompt"], config["pool_from_output"]
    if from_output is None:  # it follows the other
        from_output = from_prompt
    sources = [name for name, used in (("prompt", from_prompt), ("output", from_output)) if used]
    pool = f", pool also from {' and '.join(sources)}" if sources else ""
    return f"lookahead {sizes}{pool}"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose first column is text and whose other columns are numbers."""
    lines = [f"| {' | '.join(head)} |", f"| --- | {' | '.join('---:' for _ in head[1:])} |"]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def method_cells(rows: Sequence[Row]) -> list[str]:
    """One line of the main table."""
    every, few = summarise(rows), summarise(little_repeated(rows))
    before = every.step_compression_before_cycles
    return [
        describe_method(rows[0]),
        f"{every.mean_nodes:.1f}",
        f"**{every.step_compression:.2f}**",
        f"{every.lowest:.2f} to {every.highest:.2f}",
        percent(weighted_share(rows, "cycle_share")),
        "–" if before is None else f"{before:.2f} ({every.tokens_before_cycles:,})",
        f"{few.step_compression:.2f} ({few.prompts})" if few.prompts else "no such prompt",
        f"{every.identical} of {every.prompts}",
    ]


def main_table(results: Results) -> list[str]:
    """Method, nodes, S, repetition and identical outputs."""
    head = ["method", "nodes per step", "S", "S of a single prompt", "output in a repeated cycle"]
    head += ["S before the first cycle (tokens)", "S, little repeated prompts (how many)", "identical outputs"]
    return table(head, (method_cells(results.of_method(method)) for method in results.methods()))


def lengths_table(results: Results) -> list[str]:
    """How many tokens the steps gave."""
    head = ["share of the steps that gave", "1 token"]
    head += [f"{length} tokens" for length in range(2, LONGEST_SHOWN)] + [f"{LONGEST_SHOWN} or more"]
    lines = []
    for method in results.methods():
        rows = results.of_method(method)
        lines.append([describe_method(rows[0]), *map(percent, summarise(rows).length_shares())])
    return table(head, lines)


def setting_lines(results: Results) -> list[str]:
    """Model, prompts, machine and versions as a list."""
    return describe_settings(results.name, results.header, len({row["id"] for row in results.measurements}))


def describe_settings(file: str, header: Row, measured: int) -> list[str]:
    """What a header says, with the name of its file and how many prompts have been measured."""
    model, prompts, machine = header["model"], header["prompts"], header["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return [
        f"- Model: `{model['name']}` ({model['architecture']}, {model['parameters']:,} parameters, "
        f"vocabulary of {model['vocabulary']:,}), {header['dtype']}, weights {model['weights']}",
        f"- Prompts: `{prompts['file']}` (sha256 {prompts['sha256']}), {measured} of {prompts['count']}; "
        f"at most {header['max_new_tokens']} new tokens each, greedy, one prompt at a time",
        f"- Machine: {machine['device']}, CPU threads: {machine['threads']}; measured on {header['date']}",
        f"- Versions: {versions}",
        f"- Raw rows: `benchmarks/results/{file}`",
    ]


def repetition_text(results: Results) -> str:
    """How much the model repeats itself on these prompts, in words."""
    rows = results.references
    few, short = little_repeated(rows), len(rows) - len(long_enough(rows))
    cycles, final_cycles = (percent(weighted_share(rows, key)) for key in ("cycle_share", "final_cycle_share"))
    text = (
        f"Of the output of plain `generate`, {cycles} lies in a repeated cycle, {final_cycles} in one that lasts to "
        f"the end. {len(few)} of {len(rows)} prompts have less than {percent(LITTLE_REPETITION)} in repeated cycles."
    )
    if short:
        text += f" Outputs of fewer than {SHORTEST_JUDGED} tokens, too short to be counted there: {short}."
    if 2 * weighted_share(rows, "cycle_share") > 1:
        text += " **More than half of this output is repetition: S says more about that than about the methods.**"
    return text


def warnings(results: Results) -> list[str]:
    """What a reader must know before using this table: differing outputs, unfinished rows."""
    lines = []
    differing = sum(not row["identical"] for row in results.measurements)
    if differing:
        lines.append(f"**Outputs that differ from plain `generate`: {differing}.** They count in S all the same.")
    counts = {len(results.of_method(method)) for method in results.methods()}
    if len(counts) > 1:
        lines.append("**Unfinished:** not every method was measured on every prompt; do not compare.")
    return lines


def section(results: Results) -> list[str]:
    """All about one results file."""
    header = results.header
    parts = [
        [f"## {header['name']}, {header['model']['name']}"],
        *([line] for line in warnings(results)),
        main_table(results),
        [repetition_text(results)],
        lengths_table(results),
        setting_lines(results),
        *how_to_repeat(header),
    ]
    return join_parts(parts)


def how_to_repeat(header: Row) -> list[list[str]]:
    """The command of a run."""
    return [
        ["To repeat it, with the model and the prompts at paths of your own:"],
        ["```", header["command"], "```"],
    ]


def join_parts(parts: Iterable[Sequence[str]]) -> list[str]:
    """The lines of all parts, with an empty line between two of them."""
    lines: list[str] = []
    for part in parts:
        lines += ([""] if lines else []) + list(part)
    return lines


INTRODUCTION = f"""\
# Measured results

<!-- Written by benchmarks/write_results.py from benchmarks/results/*.jsonl; do not edit by hand. -->

**S**, the step compression, is the number of tokens generated over the number of steps (forward passes of the
model, the one over the prompt included): all tokens of a set of prompts over all its steps. Autoregressive
decoding has S = 1. All methods run through the same loop and differ only in what they draft. A *node* is one
token that a step sends to the model besides the prompt.

## What these numbers show, and what they do not

- They show how many forward passes each method saves on these models, these prompts and this length of
  output, and that its output is the same: "identical outputs" counts the prompts for which the method gave,
  token for token, what plain `model.generate` gave on the same machine in the same number format.
- They do not show speed. A step with many nodes costs more than a step with one; how much more depends on the
  machine, and no times were taken. Compare S at like numbers of nodes.
- Repetition flatters. Inside a repeated cycle a method that drafts from n-grams guesses nearly everything. So
  the share of the output that lies in a repeated cycle stands beside S, and S is given twice more. "S before the
  first cycle" counts the steps that end before an output first goes round in a circle, if it does; this leans
  the other way, for it is the early part of each text, in which the pool is still filling. "S, little repeated
  prompts" takes the whole outputs of those prompts that have less than {percent(LITTLE_REPETITION)} in repeated
  cycles and at least {SHORTEST_JUDGED} tokens. A cycle is a block of tokens said at least twice in a row, in
  which at least eight tokens are repeats; the first copy of the block counts as well (`lookahead.bench.repetition`
  has the definition). Looser repetition, such as a phrase that returns later, is no cycle and yet helps.
- Look at the size of each model below. Models of a few million parameters repeat themselves more than large
  ones and write simpler text: these figures say little about what a large model would give.
- "S of a single prompt" gives the lowest and the highest of the prompts; with that much between prompts,
  small differences between methods on a small set mean little.
- Greedy decoding, one sequence at a time, one seed for the random tokens that the window starts from.
"""


def page(files: Iterable[Results]) -> str:
    """The whole page."""
    sections = [line for results in files for line in ["", *section(results)]]
    return INTRODUCTION + "\n".join(sections) + "\n"


def read_folder(folder: Path) -> list[Results]:
    """All results files of a folder, by name."""
    found = [read_results(path) for path in sorted(folder.glob("*.jsonl"))]
    return [results for results in found if results is not None]


def marks(script: str) -> tuple[str, str]:
    """The lines between which a script writes into a page."""
    return (
        f"<!-- From here to the next mark written by {script}; do not edit by hand. -->",
        f"<!-- End of what {script} writes. -->",
    )


def marked_page(old: str | None, introduction: str, script: str, content: str) -> str:
    """A page whose prose is kept by hand, with what a script writes between two marks.

    Args:
        old: The page as it was, `None` if there was none.
        introduction: What a new page begins with.
        script: The script that writes, as the marks name it.
        content: What it writes.

    Raises:
        ResultsError: The page lacks the marks.
    """
    first, last = marks(script)
    text = f"{introduction}\n{first}\n{last}\n" if old is None else old
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ResultsError(f"the page has no lines {first!r} and {last!r}; add them where the tables go")
    return f"{before}{first}\n\n{content.strip()}\n\n{last}{after}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit status is 0 when it was written."""
    parser = argparse.ArgumentParser(description="Write docs/results.md from benchmarks/results/*.jsonl.")
    add = parser.add_argument
    add("--results", type=Path, default=Path("benchmarks/results"), help="folder of .jsonl files")
    add("--output", type=Path, default=Path("docs/results.md"), help="page to write")
    options = parser.parse_args(arguments)
    try:
        files = read_folder(options.results)
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not files:
        print(f"error: no measurements in {options.results}; run step_compression.py first", file=sys.stderr)
        return 1
    write_whole(options.output, page(files))
    print(f"{options.output}: {len(files)} table{'s' if len(files) > 1 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
