"""Write the tables and plots of docs/paper.md from the raw rows in benchmarks/results/paper-*.jsonl.

    python benchmarks/write_paper_evaluation.py [--results benchmarks/results] [--output docs/paper.md]

Every number of ours is computed here from the rows that benchmarks/paper_evaluation.py recorded; those of the paper
stand in this file as they are printed there. Tables go between the two marks of the page, and plots into the folder
`images` beside it; what stands around the marks is left as it is, and a page that does not exist yet is begun.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lookahead.bench.repetition import tokens_before_cycles
from lookahead.bench.scaling_law import PAPER_LAW, Fit, Measured, fit
from paper_plots import check_plots, draw_law, draw_lengths, draw_sizes
from write_results import (
    ResultsError,
    Row,
    join_parts,
    marked_page,
    parse_rows,
    percent,
    summarise,
    table,
    weighted_share,
    write_whole,
)

SCRIPT = "benchmarks/write_paper_evaluation.py"

INTRODUCTION = """\
# The paper's evaluation, repeated

What the paper measured, measured with this library's `preset="paper"` on models at hand.
"""


@dataclass(frozen=True)
class Printed:
    """A row of Table 3 as the paper prints it: LLaMA-2-7B-Chat on MT-Bench, A100."""

    tag: int
    sizes: str
    prompt: bool
    speedup: float
    step_compression: float


TABLE_3 = {
    "prompt lookup": Printed(2, "prompt lookup", True, 1.44, 1.55),
    "(10,1,3)+text": Printed(3, "(10, 1, 3)", True, 1.36, 1.45),
    "(5,1,10)+text": Printed(4, "(5, 1, 10)", True, 1.36, 1.51),
    "(5,1,30)": Printed(5, "(5, 1, 30)", False, 1.04, 1.12),
    "(5,1,30)+text": Printed(6, "(5, 1, 30)", True, 1.46, 1.59),
    "(5,30,1)": Printed(7, "(5, 30, 1)", False, 1.61, 1.79),
    "(5,15,15)": Printed(8, "(5, 15, 15)", False, 1.78, 1.96),
    "(5,15,15)+text": Printed(9, "(5, 15, 15)", True, 1.88, 2.05),
}

TABLE_2 = {"greedy": "1.72 (CNN), 1.77 (XSum)", "temperature 1.0": "1.64 (CNN), 1.67 (XSum)"}
"""S of Table 2, LLaMA-2-7B-Chat."""

FEWEST_TOKENS = 50
"""Where fewer tokens than this come before the first cycle, their S is left out of the table by task."""

SHOWN_LENGTHS = {"(5,15,15)": "(5, 15, 15)", "(5,15,15)+text": "(5, 15, 15), prompt as reference"}


@dataclass
class Part:
    """One results file."""

    name: str
    header: Row
    references: list[Row]
    measurements: list[Row]

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.header["model"]["name"])

    def of(self, method: str) -> list[Row]:
        """The rows of one method."""
        return [row for row in self.measurements if row["method"] == method]

    def methods(self) -> list[str]:
        """Methods measured, in the order in which the file first names them."""
        return list(dict.fromkeys(row["method"] for row in self.measurements))


def read_part(path: Path) -> Part | None:
    """One results file, or `None` when nothing has been measured in it yet."""
    rows = parse_rows(path.read_text(encoding="utf-8"), path.name)
    if rows and rows[0].get("benchmark") != "paper":
        raise ResultsError(f"{path.name} was not made by benchmarks/paper_evaluation.py; call it by another name")
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("reference", "measurement")}
    return Part(path.name, rows[0], kinds["reference"], kinds["measurement"]) if kinds["measurement"] else None


def task_of(row: Row) -> str:
    """The task of a row, without the part of it that some name after a slash."""
    return str(row["task"]).partition("/")[0] or "prompts"


def compression(rows: Sequence[Row], before_cycles: bool = False) -> str:
    """S, or a dash where nothing was measured, or too little to say anything."""
    every = summarise(rows)
    if before_cycles and every.tokens_before_cycles < FEWEST_TOKENS:
        return "–"
    value = every.step_compression_before_cycles if before_cycles else every.step_compression
    return f"{value:.2f}" if value else "–"


def time_over_plain(part: Part, rows: Sequence[Row]) -> str:
    """CPU time over that of plain `generate` on the same prompts."""
    plain = {row["id"]: row["cpu_seconds"] for row in part.references}
    return f"{sum(row['cpu_seconds'] for row in rows) / sum(plain[row['id']] for row in rows):.2f}"


def ablation_table(part: Part) -> list[str]:
    """Table 3, theirs and ours."""
    head = ["row of Table 3: (N, W, G)", "prompt as reference", "S, paper", "S, here", "S of a single prompt"]
    head += ["S before the first cycle", "nodes per step", "CPU time over `generate`", "identical outputs"]
    lines = [["1: autoregressive", "", "1.00", "1.00", "", "", "1.0", "1.00", "by definition"]]
    for method, printed in TABLE_3.items():
        rows = part.of(method)
        if not rows:
            continue
        every = summarise(rows)
        before = every.step_compression_before_cycles
        lines.append(
            [
                f"{printed.tag}: {printed.sizes}",
                "yes" if printed.prompt else "no",
                f"{printed.step_compression:.2f}",
                f"**{every.step_compression:.2f}**",
                f"{every.lowest:.2f} to {every.highest:.2f}",
                "–" if before is None else f"{before:.2f}",
                f"{every.mean_nodes:.1f}",
                time_over_plain(part, rows),
                f"{every.identical} of {every.prompts}",
            ]
        )
    return table(head, lines)


def task_table(part: Part, before_cycles: bool = False) -> list[str]:
    """Rows of Table 3 by task: S, of whole outputs or of what comes before their first cycle."""
    tasks = list(dict.fromkeys(task_of(row) for row in part.measurements))
    lines = []
    for method, printed in TABLE_3.items():
        rows = part.of(method)
        if rows:
            cells = [compression([row for row in rows if task_of(row) == task], before_cycles) for task in tasks]
            reference = ", prompt as reference" if printed.prompt and printed.tag > 2 else ""
            lines.append([f"{printed.tag}: {printed.sizes}{reference}", f"{printed.step_compression:.2f}", *cells])
    title = f"S before the first cycle ({FEWEST_TOKENS} tokens or more)" if before_cycles else "S, whole outputs"
    return table([title, "paper, MT-Bench", *tasks], lines)


def text_table(part: Part) -> list[str]:
    """How much each task's output repeats itself."""
    lines = []
    for task in dict.fromkeys(task_of(row) for row in part.references):
        rows = [row for row in part.references if task_of(row) == task]
        shares = (percent(weighted_share(rows, key)) for key in ("cycle_share", "final_cycle_share"))
        before = sum(tokens_before_cycles(row["output"]) for row in rows)
        lines.append([task, str(len(rows)), f"{sum(row['tokens'] for row in rows):,}", f"{before:,}", *shares])
    return table(
        ["task", "prompts", "tokens", "before the first cycle", "in a repeated cycle", "in one that lasts to the end"],
        lines,
    )


def square_points(part: Part, before_cycles: bool = False) -> list[Measured]:
    """S of all sizes with W = G whose pool the window alone fills."""
    points = []
    for method in part.methods():
        rows = part.of(method)
        config = rows[0]["config"]
        if config.get("window_size") == config.get("guess_set_size", 0) and not config["pool_from_prompt"]:
            every = summarise(rows)
            value = every.step_compression_before_cycles if before_cycles else every.step_compression
            if value is not None:
                points.append(Measured(config["window_size"], config["ngram_size"], value))
    return points


def is_large(point: Measured) -> bool:
    """Whether the law may be expected to hold: N large enough, as the paper asks, and a window of several columns."""
    return point.ngram_size >= 5 and point.window_size > 1


def can_fit(points: Sequence[Measured]) -> bool:
    """Whether a law can be fitted: to two sizes or more, one of which saves steps."""
    sizes = {(point.window_size, point.ngram_size) for point in points}
    return len(sizes) > 1 and any(point.step_compression > 1 for point in points)


def side_points(part: Part) -> dict[str, dict[int, float]]:
    """S at N=5 where one of W and G is 15, by the other; 15 itself belongs to both."""
    sides: dict[str, dict[int, float]] = {"W, with G=15": {}, "G, with W=15": {}}
    for method in part.methods():
        config = part.of(method)[0]["config"]
        if config.get("ngram_size") != 5 or config["pool_from_prompt"]:
            continue
        value = summarise(part.of(method)).step_compression
        if config["guess_set_size"] == 15:
            sides["W, with G=15"][config["window_size"]] = value
        if config["window_size"] == 15:
            sides["G, with W=15"][config["guess_set_size"]] = value
    return {name: values for name, values in sides.items() if len(values) > 1}


def square_table(points: Sequence[Measured], law: Fit) -> list[str]:
    """S by N and W = G: measured, and as the law has it."""
    sizes = sorted({point.window_size for point in points})
    values = {(p.ngram_size, p.window_size): p.step_compression for p in points}
    lines = []
    for length in sorted({point.ngram_size for point in points}):
        cells = [
            f"**{values[length, size]:.2f}** ({law.law.step_compression(size, length):.2f})"
            if (length, size) in values
            else "–"
            for size in sizes
        ]
        lines.append([f"N={length}", *cells])
    return table(["S, in brackets that of the fitted law", *(f"W=G={size}" for size in sizes)], lines)


def side_table(sides: Mapping[str, Mapping[int, float]]) -> list[str]:
    """S where one branch grows alone."""
    sizes = sorted({size for values in sides.values() for size in values})
    lines = [
        [name, *(f"{values[size]:.2f}" if size in values else "–" for size in sizes)] for name, values in sides.items()
    ]
    return table(["S at N=5", *map(str, sizes)], lines)


def law_table(part: Part) -> list[str]:
    """alpha and f, theirs and ours."""
    lines = [["paper: LLaMA-2-Chat-7B, MT-Bench (Fig. 4(b))", f"{PAPER_LAW.alpha}", f"{PAPER_LAW.f}", "not printed"]]
    for name, points in (
        ("here, whole outputs", square_points(part)),
        ("here, before the first cycle", square_points(part, before_cycles=True)),
        ("here, whole outputs, without N < 5 and W = 1", [p for p in square_points(part) if is_large(p)]),
    ):
        if can_fit(points):
            found = fit(points)
            figures = (f"{found.law.alpha:.3f}", f"{found.law.f:.3f}", f"{found.deviation:.3f}")
            lines.append([f"{name}, {len(points)} sizes", *figures])
    return table(["fit of Eq. 7", "α", "f", "root mean square deviation of S"], lines)


def lengths_of(rows: Sequence[Row]) -> Counter[int]:
    """How many steps gave so many tokens."""
    return summarise(rows).lengths


def length_tasks(parts: Sequence[Part]) -> dict[str, dict[str, Counter[int]]]:
    """Accepted lengths of the methods shown, by task and model."""
    found = {}
    for part in parts:
        for task in dict.fromkeys(task_of(row) for row in part.measurements):
            rows = {
                name: [row for row in part.of(method) if task_of(row) == task] for method, name in SHOWN_LENGTHS.items()
            }
            if all(rows.values()):
                found[f"{task}, {part.model}"] = {name: lengths_of(own) for name, own in rows.items()}
    return found


def lengths_table(parts: Sequence[Part]) -> list[str]:
    """Share of steps by accepted length, for each task."""
    lines = []
    for title, methods in length_tasks(parts).items():
        for name, lengths in methods.items():
            steps, tokens = sum(lengths.values()), sum(length * count for length, count in lengths.items())
            counts = [lengths[length] for length in range(1, 5)]
            shares = [percent(count / steps) for count in (*counts, steps - sum(counts))]
            lines.append([f"{title}: {name}", f"{tokens / steps:.2f}", *shares])
    return table(["steps that gave", "S", "1 token", "2", "3", "4", "5 or more"], lines)


def sampling_table(parts: Sequence[Part]) -> list[str]:
    """Pairs of prompt and seed, and how many were equal."""
    lines = []
    for part in parts:
        for setting in part.methods():
            rows = part.of(setting)
            every = summarise(rows)
            before = every.step_compression_before_cycles
            lines.append(
                [
                    f"{part.model}, {setting}",
                    str(len(rows)),
                    f"**{every.identical} of {every.prompts}**",
                    f"{every.tokens:,}",
                    f"{every.step_compression:.2f}",
                    "–" if before is None else f"{before:.2f}",
                    percent(weighted_share(rows, "cycle_share")),
                    TABLE_2.get(setting, ""),
                ]
            )
    head = ["model, sampling", "pairs of prompt and seed", "identical to `generate`, token for token", "tokens", "S"]
    return table([*head, "S before the first cycle", "in a repeated cycle", "S, Table 2"], lines)


def setting_lines(part: Part) -> list[str]:
    """Model, prompts, machine and versions as a list."""
    header = part.header
    model, machine = header["model"], header["machine"]
    prompts = ", ".join(f"`{file['file']}` (sha256 {file['sha256']})" for file in header["prompts"])
    count = len({row["id"].partition(" seed ")[0] for row in part.measurements})
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return [
        f"- Model: `{model['name']}` ({model['architecture']}, {model['parameters']:,} parameters, vocabulary of "
        f"{model['vocabulary']:,}), {header['dtype']}, weights {model['weights']}",
        f"- Prompts: {count} of {prompts}; at most {header['max_new_tokens']} new tokens each, one prompt at a time",
        f"- Machine: {machine['device']}, CPU threads: {machine['threads']}; measured on {header['date']}; {versions}",
        f"- Raw rows: `benchmarks/results/{part.name}`; to repeat it:",
        "",
        "```",
        header["command"],
        "```",
    ]


def warnings(parts: Sequence[Part]) -> list[str]:
    """What a reader must know before using the tables: differing outputs, unfinished rows."""
    lines = []
    for part in parts:
        differing = sum(not row["identical"] for row in part.measurements)
        if differing:
            lines.append(f"**{part.name}: {differing} outputs differ from plain `generate`.**")
        counts = {len(part.of(method)) for method in part.methods() if method != "greedy"}
        if len(counts) > 1:
            lines.append(f"**{part.name} is unfinished:** not every method was measured on every prompt.")
    return lines


def image(name: str, text: str) -> list[str]:
    """A plot in the page."""
    return [f"![{text}](images/{name})"]


def tables(parts: Sequence[Part], images: Path) -> str:
    """All that goes between the marks; draws the plots into `images`."""
    images.mkdir(parents=True, exist_ok=True)
    by_kind = {kind: [part for part in parts if part.header["part"] == kind] for kind in ("grid", "tasks", "sampling")}
    sections: list[Sequence[str]] = [[line] for line in warnings(parts)]
    for part in by_kind["grid"]:
        sections += [[f"## Table 3: which branch matters ({part.model})"], ablation_table(part), text_table(part)]
        sections += [setting_lines(part)]
    for part in by_kind["tasks"]:
        sections += [[f"## Table 3 by task ({part.model})"], task_table(part), task_table(part, before_cycles=True)]
        sections += [["All tasks together:"], ablation_table(part), text_table(part)]
        sections += [setting_lines(part)]
    for part in by_kind["grid"]:
        points, sides = square_points(part), side_points(part)
        if not can_fit(points):
            continue
        found, prompts = fit(points), len(part.references)
        law = f"α={found.law.alpha:.3f}, f={found.law.f:.3f}"
        draw_sizes(
            images / f"paper-sizes-{part.model}.png", points, sides, f"S, {part.model}, {prompts} prompts, greedy"
        )
        draw_law(images / f"paper-law-{part.model}.png", points, found, f"Eq. 7 fitted to {part.model}: {law}")
        sections += [[f"## Fig. 4(a): S against W, N and G ({part.model})"], square_table(points, found)]
        sections += [side_table(sides)] if sides else []
        sections += [image(f"paper-sizes-{part.model}.png", "S against W, N and G")]
        sections += [[f"## Section 4: the scaling law, fitted ({part.model})"], law_table(part)]
        sections += [image(f"paper-law-{part.model}.png", "Measured S and the fitted law")]
    shown = by_kind["tasks"] + by_kind["grid"]
    if tasks := length_tasks(shown):
        draw_lengths(images / "paper-lengths.png", tasks, "tokens that a step gave, (N, W, G)")
        sections += [["## Fig. 5's tasks: how many tokens a step gives"], lengths_table(shown)]
        sections += [image("paper-lengths.png", "Accepted lengths by task")]
    if by_kind["sampling"]:
        sections += [["## Table 2: sampling"], sampling_table(by_kind["sampling"])]
        sections += [setting_lines(part) for part in by_kind["sampling"]]
    return "\n".join(join_parts(sections)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit status is 0 when it was written."""
    parser = argparse.ArgumentParser(description="Write docs/paper.md from benchmarks/results/paper-*.jsonl.")
    add = parser.add_argument
    add("--results", type=Path, default=Path("benchmarks/results"), help="folder of paper-*.jsonl files")
    add("--output", type=Path, default=Path("docs/paper.md"), help="page to write; plots go into images/ beside it")
    options = parser.parse_args(arguments)
    try:
        check_plots()
        found = [read_part(path) for path in sorted(options.results.glob("paper-*.jsonl"))]
        parts = [part for part in found if part is not None]
        if not parts:
            raise ResultsError(f"no measurements in {options.results}; run paper_evaluation.py first")
        old = options.output.read_text(encoding="utf-8") if options.output.exists() else None
        text = marked_page(old, INTRODUCTION, SCRIPT, tables(parts, options.output.parent / "images"))
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_whole(options.output, text)
    print(f"{options.output}: {len(parts)} results file{'s' if len(parts) > 1 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
