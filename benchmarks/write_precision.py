"""Write docs/precision.md from the raw rows in benchmarks/results/precision-*.jsonl.

    python benchmarks/write_precision.py [--results benchmarks/results] [--output docs/precision.md]

Every number in the page is computed here from the rows that benchmarks/precision.py recorded, and from nothing
else, so that the same rows always give the same page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import median

from write_results import (
    ResultsError,
    Row,
    describe_settings,
    how_to_repeat,
    join_parts,
    parse_rows,
    table,
    write_whole,
)

GAP_EDGES = (0.0625, 0.125, 0.25, 0.5, 1.0)
"""Where the columns of the table of gaps end; the first column is for exact ties."""

PLAIN = {
    "copies": "plain, the prompt four times in a batch",
    "batch": "plain, in a padded batch of four prompts",
    "float32": "plain, float32",
}


@dataclass
class Precision:
    """One results file: one model in one number format."""

    name: str
    header: Row
    references: list[Row]
    measurements: list[Row]
    probe: Row | None

    def methods(self) -> list[str]:
        """Methods measured, in the order in which the file first names them."""
        return list(dict.fromkeys(row["method"] for row in self.measurements))

    def margins(self) -> list[str]:
        """The methods that are lookahead decoding, the one without a margin first."""
        return sorted((method for method in self.methods() if is_margin(method)), key=margin_of)

    def of(self, method: str) -> list[Row]:
        """The rows of one method, one for each prompt."""
        return [row for row in self.measurements if row["method"] == method]

    def differing(self, method: str) -> list[Row]:
        """The rows of one method whose text is another than plain decoding's."""
        return [row for row in self.of(method) if not row["identical"]]


def read_precision(path: Path) -> Precision | None:
    """One results file, or `None` when nothing has been measured in it yet."""
    rows = parse_rows(path.read_text(encoding="utf-8"), path.name)
    kinds: dict[str, list[Row]] = {"header": [], "reference": [], "measurement": [], "probe": []}
    for row in rows:
        kinds[row["kind"]].append(row)
    if not kinds["measurement"]:
        return None
    probe = kinds["probe"][0] if kinds["probe"] else None
    return Precision(path.name, rows[0], kinds["reference"], kinds["measurement"], probe)


def is_margin(method: str) -> bool:
    """Whether a method is lookahead decoding."""
    return method.startswith("margin ")


def margin_of(method: str) -> float:
    """The `tie_margin` in the name of a method."""
    return float(method.removeprefix("margin "))


def describe(method: str) -> str:
    """A method in words."""
    if is_margin(method):
        margin = margin_of(method)
        return f"lookahead, `tie_margin={margin:g}`" if margin else "lookahead"
    return PLAIN.get(method, 'no drafts (`preset="autoregressive"`)')


def compared_tokens(rows: Iterable[Row]) -> int:
    """Tokens up to each text's first difference, that one included, or its end: those that could have differed."""
    return sum(row["tokens"] if row["identical"] else row["first_difference"] + 1 for row in rows)


def interval(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval (Wilson's) of a share of which `hits` of `of` were seen."""
    if of == 0:
        return 0.0, 1.0
    z, share = 1.96, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def number(value: float) -> str:
    """A logit gap, as short as it goes."""
    return f"{value:.4g}"


def difference_cells(results: Precision, method: str) -> list[str]:
    """One line of the main table."""
    rows, differing = results.of(method), results.differing(method)
    low, high = interval(len(differing), len(rows))
    places = [row["first_difference"] for row in differing]
    gaps = [row["gap"] for row in differing if row["gap"] is not None]
    return [
        describe(method),
        f"**{len(differing)}** of {len(rows)}",
        f"{100 * low:.0f} to {100 * high:.0f} %",
        f"{1000 * len(differing) / compared_tokens(rows):.2f}",
        f"{median(places):.0f} ({min(places)} to {max(places)})" if places else "–",
        f"{number(median(gaps))}, {number(max(gaps))}" if gaps else "–",
    ]


def difference_table(results: Precision) -> list[str]:
    """How often each way of decoding differs from plain decoding, and where."""
    head = ["decoding", "prompts that differ", "95 % interval", "differences per 1,000 tokens"]
    head += ["first difference at new token: median (range)", "gap there: median, largest"]
    order = ["autoregressive", *results.margins(), *PLAIN]
    measured = results.methods()
    return table(head, (difference_cells(results, method) for method in order if method in measured))


def cost_table(results: Precision) -> list[str]:
    """What a margin costs."""
    head = [
        "`tie_margin`",
        "tokens",
        "steps",
        "steps without a draft",
        "S",
        "more steps per token",
        "texts that differ",
    ]
    lines = []
    base = step_compression(results.of(results.margins()[0]))
    for method in results.margins():
        rows = results.of(method)
        counts = [sum(row[key] for row in rows) for key in ("tokens", "steps", "undrafted")]
        compression = step_compression(rows)
        cells = [f"{margin_of(method):g}", *(f"{count:,}" for count in counts), f"{compression:.2f}"]
        lines.append([*cells, f"{100 * (base / compression - 1):+.0f} %", str(len(results.differing(method)))])
    return table(head, lines)


def step_compression(rows: Iterable[Row]) -> float:
    """S: all tokens over all steps."""
    tokens, steps = (sum(counts) for counts in zip(*((row["tokens"], row["steps"]) for row in rows), strict=True))
    return tokens / steps


def gap_columns(gaps: Sequence[float]) -> list[int]:
    """How many gaps are ties, how many lie below each edge, and how many beyond the last."""
    counts, below = [sum(gap == 0 for gap in gaps)], 0.0
    for edge in GAP_EDGES:
        counts.append(sum(below <= gap < edge and gap > 0 for gap in gaps))
        below = edge
    return [*counts, sum(gap >= below for gap in gaps)]


def gap_table(results: Precision) -> list[str]:
    """How far the second best token was behind: everywhere, and where texts first differ."""
    edges = [f"{edge:g}" for edge in GAP_EDGES]
    head = ["gap between the two best logits", "0", f"below {edges[0]}"]
    head += [f"below {edge}" for edge in edges[1:]] + [f"{edges[-1]} or more"]
    every = [gap for row in results.references for gap in row["gaps"]]
    lines = [["all tokens of the plain texts", *(f"{100 * count / len(every):.1f} %" for count in gap_columns(every))]]
    groups = {
        "first differences, lookahead": results.margins()[:1],
        "first differences, lookahead with a margin": results.margins()[1:],
        "first differences, plain in a batch": ["copies", "batch"],
        "first differences, plain in float32": ["float32"],
    }
    for name, methods in groups.items():
        gaps = [row["gap"] for method in methods for row in results.differing(method) if row["gap"] is not None]
        lines.append([name, *map(str, gap_columns(gaps))])
    return table(head, lines)


def finding_control(results: Precision) -> str:
    rows, differing = results.of("autoregressive"), results.differing("autoregressive")
    if differing:
        return (
            f"**Without drafts {len(differing)} of {len(rows)} texts differ. That is a bug: such steps must be plain.**"
        )
    return f"Steps without a draft are plain decoding's own: all {len(rows)} texts are the same."


def finding_lookahead(results: Precision) -> str:
    plain = results.margins()[0]
    rows, differing = results.of(plain), results.differing(plain)
    counts = [f"{len(results.differing(method))} ({describe(method)})" for method in PLAIN]
    text = (
        f"Lookahead decoding gave another text on {len(differing)} of {len(rows)} prompts, one difference in "
        f"{compared_tokens(rows) / max(len(differing), 1):,.0f} tokens. "
        if differing
        else f"Lookahead decoding gave the same text on all {len(rows)} prompts. "
    )
    text += f"Without any lookahead transformers' own texts differ on {', '.join(counts)} of them."
    if differing:
        others = {row["id"] for method in PLAIN for row in results.differing(method)}
        shared = sum(row["id"] in others for row in differing)
        text += f" On {shared} of the {len(differing)} prompts one of those differs as well."
    return text


def finding_ties(results: Precision) -> str:
    gaps = [row["gap"] for row in results.measurements if row["gap"] is not None]
    every = [gap for row in results.references for gap in row["gaps"]]
    if not gaps:
        return "No text differed."
    close = sum(gap <= max(gaps) for gap in every)
    return (
        f"All first differences, of every method, lie where the two best logits are at most {number(max(gaps))} "
        f"apart; {100 * close / len(every):.1f} % of the tokens of the plain texts are as close as that, and "
        f"{100 * sum(gap == 0 for gap in every) / len(every):.1f} % are exact ties."
    )


def finding_margin(results: Precision) -> str:
    without, *margins = results.margins()
    base, rows = len(results.differing(without)), results.of(without)
    if not margins:
        return "No `tie_margin` was measured."
    best = min(margins, key=lambda method: (len(results.differing(method)), margin_of(method)))
    left = len(results.differing(best))
    counts = ", ".join(f"{len(results.differing(method))} ({margin_of(method):g})" for method in margins)
    text = f"With a `tie_margin` {counts} texts differ, without one {base}. "
    if left >= base:
        return text + "**No margin made it better, and every margin costs steps: leave it at 0 here.**"
    low, high = interval(base, len(rows))
    text += f"`tie_margin={margin_of(best):g}` left the fewest. "
    if low <= left / len(rows) <= high:
        return text + "With so few differences that may be chance: it lies in the interval of the value without."
    return text + "It reduces the differences; it does not rule them out."


def finding_probe(results: Precision) -> list[str]:
    """What rounds differently on this machine, as far as a probe of single operations tells."""
    probe = results.probe
    if probe is None:
        return []
    rows = probe["rows"]
    return [
        "- Where it comes from, by a probe of single operations with random numbers in the model's sizes: of what its "
        f"linear layers give, {100 * probe['linear']:.2g} % changed when {rows} rows were multiplied at once instead "
        f"of one; of what attention gives, {100 * probe['attention']:.2g} % changed when {rows} queries went together "
        f"and a mask hid {rows} further keys."
    ]


def warnings(results: Precision) -> list[str]:
    """What a reader must know before using the tables."""
    if len({len(results.of(method)) for method in results.methods()}) > 1:
        return ["**Unfinished:** not every method was measured on every prompt; do not compare."]
    return []


def section(results: Precision) -> list[str]:
    """All about one results file."""
    header = results.header
    findings = (finding_control, finding_lookahead, finding_ties, finding_margin)
    parts = [
        [f"## {header['dtype']}: {header['name']}, {header['model']['name']}"],
        *([line] for line in warnings(results)),
        [*(f"- {finding(results)}" for finding in findings), *finding_probe(results)],
        difference_table(results),
        cost_table(results),
        gap_table(results),
        describe_settings(results.name, header, len({row["id"] for row in results.measurements})),
        *how_to_repeat(header),
    ]
    return join_parts(parts)


INTRODUCTION = """\
# Lookahead decoding in 16 bits

<!-- Written by benchmarks/write_precision.py from benchmarks/results/precision-*.jsonl; do not edit by hand. -->

In float32 greedy lookahead decoding gives the tokens of `model.generate` ([docs/results.md](results.md)). In bfloat16
and float16 it gives them up to rounding. A step with a draft sends many tokens at once, and matrix products and
attention over many rows add the same numbers in another order than over one. With 8 or 11 significant bits that
moves a logit by a step or two of its format, and where two tokens are that close the other one may be chosen. The
text then goes on from there: it is another text, neither better nor worse.

Nothing about this is special to lookahead decoding. The same model gives other texts in a batch than alone, so
that is measured here as well.

**`tie_margin`** (a field of `LookaheadConfig`, 0 by default) names no token from a step with a draft when the best
logit is less than the margin above the second, and decides with a step without a draft instead. It cannot make the
text plain decoding's for certain: that step still reads the keys and values of tokens that were accepted from steps
with a draft, and those are rounded in the other order, too. How much it brings is measured, not promised.

How to read the tables: plain greedy `model.generate` with one prompt in the same number format is what all is
compared with. *Differences per 1,000 tokens* counts each text up to its first difference, as what comes after is
another text. The *gap* is that between plain decoding's two largest logits at the token that first differs.
*Steps without a draft* are those that decided what a step before them had put off. S is tokens per step.

These are few prompts and one small model on one machine. Other devices round in other places; large models have
larger logits, whose 16-bit steps are wider. The command below each table measures your own.
"""


def page(files: Iterable[Precision]) -> str:
    """The whole page."""
    sections = [line for results in files for line in ["", *section(results)]]
    return INTRODUCTION + "\n".join(sections) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit status is 0 when it was written."""
    parser = argparse.ArgumentParser(description="Write docs/precision.md from benchmarks/results/precision-*.jsonl.")
    add = parser.add_argument
    add("--results", type=Path, default=Path("benchmarks/results"), help="folder of precision-*.jsonl files")
    add("--output", type=Path, default=Path("docs/precision.md"), help="page to write")
    options = parser.parse_args(arguments)
    try:
        found = [read_precision(path) for path in sorted(options.results.glob("precision-*.jsonl"))]
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    files = [results for results in found if results is not None]
    if not files:
        print(f"error: no measurements in {options.results}; run precision.py first", file=sys.stderr)
        return 1
    write_whole(options.output, page(files))
    print(f"{options.output}: {len(files)} number format{'s' if len(files) > 1 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
