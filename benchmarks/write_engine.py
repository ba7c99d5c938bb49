"""Write the tables of docs/engine.md from the raw rows in benchmarks/results/engine-*.jsonl.

    python benchmarks/write_engine.py [--results benchmarks/results] [--output docs/engine.md]

Every number in the tables is computed here from the rows that benchmarks/engine.py recorded. They go between the two
marks of the page; what stands around them is left as it is, and a page that does not exist yet is begun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from write_results import ResultsError, Row, join_parts, marked_page, parse_rows, table, write_whole

SCRIPT = "benchmarks/write_engine.py"

TARGETS = {16: 1.12, 32: 1.35, 64: 1.75}
"""What a step of so many nodes should take at most, over the one-token step."""

INTRODUCTION = """\
# What a step costs

Lookahead decoding pays when a step of many nodes takes little longer than a step of one. How much longer it takes is
a matter of the machine, the model, its number format and the length of the text. `lookahead tune` measures it for a
model on your machine; this page has two models on one machine, measured with `make bench-engine`.

- A **step** is all that the engine does for a tree that is drafted already: the order of the nodes, the mask, the
  forward pass, the predictions, and keeping the accepted path in the cache. Trees are a root and candidates of four
  tokens each; every node is read.
- **Transformers' own step** is the forward pass of one token with a `DynamicCache` and the choice of the likeliest
  token; **`generate`, a token** is what each further token takes in `model.generate`, which does more around it.
- The **memory limit** is the time to read as many bytes as the weights take, once, on the same machine: the sum of an
  array of float32 numbers of that size, the fastest reading that torch offers there. A one-token step multiplies each
  weight with one number, so that reading is nearly all of its work, and no step can be shorter. It leaves out keys and
  values, which a step reads too. A model that fits into the processor's caches is read from there.
- All of these take turns, after a round that does not count, and medians are shown. On a CPU they are medians of the
  CPU time of the process, since wall time counts the work of others on a shared machine.
"""


@dataclass
class EngineResults:
    """One results file: one model on one machine."""

    name: str
    header: Row
    measurements: list[Row]
    parts: list[Row]

    def contexts(self) -> list[int]:
        """Context lengths measured, ascending."""
        return sorted({row["context"] for row in self.measurements})

    def variants(self) -> list[str]:
        """Variants of the engine, in the order in which the file first names them."""
        return list(dict.fromkeys(row["method"] for row in self.measurements))

    def row(self, variant: str, context: int) -> Row | None:
        """What was measured of a variant after a text of that length, if it was."""
        rows = (row for row in self.measurements if row["method"] == variant and row["context"] == context)
        return next(rows, None)


def read_engine(path: Path) -> EngineResults | None:
    """One results file, or `None` when nothing has been measured in it yet."""
    rows = parse_rows(path.read_text(encoding="utf-8"), path.name)
    if not rows:
        return None
    if rows[0].get("benchmark") != "engine":
        raise ResultsError(f"{path.name} was not made by benchmarks/engine.py; call it by another name")
    measurements = [row for row in rows if row["kind"] == "measurement"]
    parts = [row for row in rows if row["kind"] == "parts"]
    return EngineResults(path.name, rows[0], measurements, parts) if measurements else None


def milliseconds(seconds: float) -> str:
    """A time in ms, with as many digits as say something."""
    digits = 2 if seconds < 0.1 else 1
    return f"{1000 * seconds:.{digits}f}"


def describe_variant(row: Row) -> str:
    """The options of a variant, in words."""
    chosen = [f"`{name}={value}`" for name, value in row["config"].items() if value]
    return ", ".join(chosen) if chosen else "default engine"


def over_single(row: Row, nodes: int) -> float | None:
    """Time of a step of that size over that of one node; `None` if that size was not measured."""
    seconds = {step["nodes"]: step["seconds"] for step in row["steps"]}
    return seconds[nodes] / seconds[1] if nodes in seconds else None


def targets_table(results: EngineResults) -> list[str]:
    """What was aimed at, beside what was measured."""
    contexts = results.contexts()
    head = ["", "target", *(f"context {context:,}" for context in contexts)]
    lines = []
    for variant in results.variants():
        rows = [results.row(variant, context) for context in contexts]
        name = describe_variant(next(row for row in rows if row is not None))
        own = [
            None if row is None else row["steps"][0]["seconds"] / row["transformers_forward"]["seconds"] for row in rows
        ]
        lines.append([f"{name}: one token, over transformers' own step", "≤ 1.00", *(_judged(x, 1.0) for x in own)])
        for nodes, target in TARGETS.items():
            values = [None if row is None else over_single(row, nodes) for row in rows]
            cells = [_judged(value, target) for value in values]
            lines.append([f"{name}: {nodes} nodes, over one token", f"≤ {target:.2f}", *cells])
    return table(head, lines)


def _judged(value: float | None, target: float) -> str:
    if value is None:
        return "–"
    return f"**{value:.2f}**" if round(value, 2) <= target else f"{value:.2f}"


def steps_table(row: Row) -> list[str]:
    """Each size: its time, and that over all it is compared with."""
    head = ["nodes", "ms", "over one token", "over transformers' own step", "over `generate`, a token"]
    head += ["over the memory limit"]
    others = (
        row["steps"][0]["seconds"],
        row["transformers_forward"]["seconds"],
        row["transformers_generate"]["seconds"],
        row["memory_limit"],
    )
    lines = []
    for step in row["steps"]:
        ratios = (f"{step['seconds'] / other:.2f}" for other in others)
        lines.append([str(step["nodes"]), milliseconds(step["seconds"]), *ratios])
    return table(head, lines)


def steps_text(row: Row) -> str:
    """What the sizes of one table are compared with."""
    return (
        f"**Context {row['context']:,}, {describe_variant(row)}.** Transformers' own step: "
        f"{milliseconds(row['transformers_forward']['seconds'])} ms; `generate`, a token: "
        f"{milliseconds(row['transformers_generate']['seconds'])} ms; memory limit: "
        f"{milliseconds(row['memory_limit'])} ms. Medians of {row['repeats']}."
    )


def parts_table(results: EngineResults) -> list[str]:
    """What the parts of a step take in decoding."""
    names = list(dict.fromkeys(name for row in results.parts for name in row["seconds"]))
    head = ["wall time of a step, ms", "nodes per step", *names]
    lines = []
    for row in results.parts:
        parts = (f"{1000 * row['seconds'][name]:.2f}" if name in row["seconds"] else "–" for name in names)
        lines.append([describe_variant(row), f"{row['mean_nodes']:.0f}", *parts])
    return table(head, lines)


def setting_lines(results: EngineResults) -> list[str]:
    """Model, machine and versions as a list."""
    header = results.header
    model, machine = header["model"], header["machine"]
    instructions = machine["instructions"]
    amx = "with AMX" if any(name.startswith("amx") for name in instructions) else "without AMX"
    processor = f" ({amx}; {', '.join(instructions)})" if instructions else ""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    limits = [row["memory_limit"] for row in results.measurements]
    bandwidth = model["weight_bytes"] / (sum(limits) / len(limits)) / 1e9
    return [
        f"- Model: `{model['name']}` ({model['architecture']}, {model['parameters']:,} parameters, "
        f"vocabulary of {model['vocabulary']:,}), {header['dtype']}, weights {model['weights']}",
        f"- Machine: {machine['device']}{processor}, CPU threads: {machine['threads']}; measured on {header['date']}",
        f"- A step reads {model['weight_bytes'] / 1e6:,.0f} MB of weights; memory was read at {bandwidth:.1f} GB/s",
        f"- Versions: {versions}",
        f"- Raw rows: `benchmarks/results/{results.name}`",
    ]


def section(results: EngineResults) -> list[str]:
    """All about one results file."""
    parts: list[Sequence[str]] = [[f"## {results.header['model']['name']}, {results.header['dtype']}"]]
    parts += [setting_lines(results), ["Targets, bold where they are met:"], targets_table(results)]
    for context in results.contexts():
        for variant in results.variants():
            row = results.row(variant, context)
            if row is not None:
                parts += [[steps_text(row)], steps_table(row)]
    if results.parts:
        context = results.parts[0]["context"]
        text = (
            f"Parts of a step, decoding with W=15, N=5, G=15 after {context:,} tokens; `forward` holds layout and mask:"
        )
        parts += [[text], parts_table(results)]
    return join_parts([*parts, ["To repeat it:"], ["```", results.header["command"], "```"]])


def tables(files: Iterable[EngineResults]) -> str:
    """All that goes between the marks."""
    return "\n".join(line for results in files for line in ["", *section(results)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables; the exit status is 0 when they were written."""
    parser = argparse.ArgumentParser(description="Write docs/engine.md from benchmarks/results/engine-*.jsonl.")
    add = parser.add_argument
    add("--results", type=Path, default=Path("benchmarks/results"), help="folder of engine-*.jsonl files")
    add("--output", type=Path, default=Path("docs/engine.md"), help="page to write")
    options = parser.parse_args(arguments)
    try:
        found = [read_engine(path) for path in sorted(options.results.glob("engine-*.jsonl"))]
        files = [results for results in found if results is not None]
        if not files:
            raise ResultsError(f"no measurements in {options.results}; run engine.py first")
        # The larger model first: it is the one that such a library is for.
        files.sort(key=lambda results: -results.header["model"]["parameters"])
        old = options.output.read_text(encoding="utf-8") if options.output.exists() else None
        text = marked_page(old, INTRODUCTION, SCRIPT, tables(files))
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_whole(options.output, text)
    print(f"{options.output}: {len(files)} model{'s' if len(files) > 1 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
