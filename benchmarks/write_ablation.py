"""Write the tables of docs/drafting.md from the raw rows of benchmarks/ablation.py and benchmarks/drafting_cost.py.

    python benchmarks/write_ablation.py [--results benchmarks/results] [--output docs/drafting.md]

Every number in the tables is computed here from the rows in ablation-*.jsonl, drafting-cost.jsonl and, for what a step
takes, engine-random.jsonl. They go between the two marks of the page; what stands around them is left as it is, and a
page that does not exist yet is begun.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from write_results import (
    ResultsError,
    Row,
    Summary,
    describe_settings,
    how_to_repeat,
    join_parts,
    marked_page,
    parse_rows,
    percent,
    summarise,
    table,
    weighted_share,
    write_whole,
)

SCRIPT = "benchmarks/write_ablation.py"

WHOLE = "all"
"""The variant that the others are compared with."""

LARGEST_SHARE, SHARE_NODES = 0.03, 32
"""Drafting should take at most this share of a step of so many nodes of the model of engine-random.jsonl."""

LONGEST, LONGEST_NODES = 300.0, 64
"""Microseconds that drafting should take at most in a step of so many nodes."""

BUDGETS = {"fixed": "fixed by `step_budget`", "chosen": "chosen by cost"}

INTRODUCTION = """\
# What `preset="auto"` drafts

Decoding sends a small tree of guesses with each step and keeps what the model itself would have said. What is guessed
decides how many steps a text takes; it cannot change the text. `preset="auto"` guesses from two sources and needs no
second model, no training and no settings.

- **The n-gram memory.** Every node of every step, accepted or not, has asked the model what comes after a short run of
  tokens. The answers, its eight likeliest next tokens with their probabilities, are kept for the last one, two, three
  and four tokens of the run (`drafting/auto/ngram_memory.py`).
- **Context matches.** Where the last tokens occurred before in prompt or output, what followed them there may follow
  again (`drafting/auto/context_matches.py`).
- **One tree of both.** At the root, and then at each node that was added, both sources propose what may come next. A
  conditional logit turns what they say (log-probabilities of each context length, length and number of the matches)
  into one probability for each proposal. The continuation whose whole path is most probable is added next
  (`drafting/auto/search.py`).
- **Learned while decoding.** After the step each node tells which of its proposals the model would have named, and the
  weights of the logit take one AdaGrad step (`drafting/auto/scorer.py`). They begin with values that suited two small
  models, so the first steps are sensible as well.
- **Exploring.** When the sources have little to say, as at the beginning of a text, the nodes that are left try tokens
  that the model lately thought of: what it says after them fills the memory.
- **How many nodes.** With a `step_budget`, as many as it says; without, as many as pay by what steps cost on this
  machine (`core/budget.py`), possibly none.

With `memory="request"` a text begins with an empty memory; with `memory="process"` or a file it begins with what the
texts before it left there. The paper's window is not sent: nodes that try likely paths teach the memory at least as
much, and may be accepted besides; the tables below have both.

## How to read the tables

S is tokens per step over all prompts; greedy decoding in float32. In brackets: how much S changes against `all`, the
drafter as it is. *S before the first cycle* counts each output only up to its first repeated cycle, inside of which any
n-gram method guesses nearly everything. *Fewer and more steps* counts the prompts that took fewer or more steps than
with `all`, at the middle number of nodes: where both are many, the difference of S is chance.

- `no learning, priors only` keeps the weights that learning begins with. They were chosen on models like these two, so
  it loses little here. `equal weights` begin without that knowledge: every context length counts alike, and so does
  every match; what learning makes of them within one text, and what they are worth without it, are the two lines.
- `fixed order` weighs nothing: what follows the longest match comes first, then what the longest known context says.
- `no n-gram memory` does not learn or explore either, for it asks the model for no more than its likeliest token.
- Windows are of W=5 and N=3, in nodes that nothing else takes (without exploring, which takes all), or in nodes set
  aside for them.
- `memory kept across prompts` is `memory="process"`; all others begin each text with an empty memory.

These are two small models and few prompts; models of other sizes weigh their parts otherwise.
"""


class Ablation:
    """One results file: one model on one set of prompts."""

    def __init__(self, name: str, header: Row, rows: Sequence[Row]) -> None:
        self.name = name
        self.header = header
        self.rows = [row for row in rows if row["kind"] == "measurement"]
        self.references = [row for row in rows if row["kind"] == "reference"]
        self.variants = list(dict.fromkeys(row["config"]["variant"] for row in self.rows))
        self.nodes = sorted({row["config"]["nodes"] for row in self.rows})

    def of(self, variant: str, nodes: int) -> list[Row]:
        """The rows of a variant at a number of nodes, one for each prompt."""
        return [row for row in self.rows if (row["config"]["variant"], row["config"]["nodes"]) == (variant, nodes)]

    def summary(self, variant: str, nodes: int) -> Summary:
        """What they come to."""
        return summarise(self.of(variant, nodes))


def read_ablation(path: Path) -> Ablation | None:
    """One results file, or `None` when nothing has been measured in it yet."""
    rows = parse_rows(path.read_text(encoding="utf-8"), path.name)
    if not any(row["kind"] == "measurement" for row in rows):
        return None
    if rows[0].get("benchmark") != "ablation":
        raise ResultsError(f"{path.name} was not made by ablation.py")
    return Ablation(path.name, rows[0], rows[1:])


def compared(value: float | None, whole: float | None) -> str:
    """A figure, and how far it lies above that of the whole drafter."""
    if value is None:
        return "–"
    return f"{value:.2f}" + (f" ({100 * (value / whole - 1):+.0f} %)" if whole else "")


def variant_cells(part: Ablation, variant: str) -> list[str]:
    """One line of the table."""
    own = [part.summary(variant, nodes) for nodes in part.nodes]
    whole = [part.summary(WHOLE, nodes) if variant != WHOLE else None for nodes in part.nodes]
    cells = [compared(s.step_compression, w.step_compression if w else None) for s, w in zip(own, whole, strict=True)]
    cells += [
        compared(s.step_compression_before_cycles, w.step_compression_before_cycles if w else None)
        for s, w in zip(own, whole, strict=True)
    ]
    middle = part.nodes[len(part.nodes) // 2]
    steps = {row["id"]: row["steps"] for row in part.of(WHOLE, middle)}
    pairs = [(row["steps"], steps[row["id"]]) for row in part.of(variant, middle) if row["id"] in steps]
    counts = f"{sum(a < b for a, b in pairs)}, {sum(a > b for a, b in pairs)}"
    return [
        variant,
        *cells,
        "" if variant == WHOLE else counts,
        f"{own[-1].mean_nodes:.1f}",
        f"{sum(s.identical for s in own)} of {sum(s.prompts for s in own)}",
    ]


def ablation_section(part: Ablation) -> list[list[str]]:
    """All about one results file."""
    name, model = part.header["name"], part.header["model"]["name"]
    middle = part.nodes[len(part.nodes) // 2]
    head = ["drafter", *(f"S, {nodes} nodes" for nodes in part.nodes)]
    head += [f"S before the first cycle, {nodes} nodes" for nodes in part.nodes]
    head += [f"prompts with fewer, more steps ({middle} nodes)", f"nodes sent of {part.nodes[-1]}", "identical outputs"]
    sections = [[f"## Without each part in turn: {name}, {model}"]]
    if len({len(part.of(variant, nodes)) for variant in part.variants for nodes in part.nodes}) > 1:
        sections += [["**Unfinished:** not every drafter was measured on every prompt; do not compare."]]
    share = percent(weighted_share(part.references, "cycle_share"))
    sections += [table(head, [variant_cells(part, variant) for variant in part.variants])]
    sections += [[f"Of the output of plain `generate`, {share} lies in a repeated cycle."]]
    sections += [describe_settings(part.name, part.header, len(part.references)), *how_to_repeat(part.header)]
    return sections


def cost_section(name: str, rows: Sequence[Row], engine: Sequence[Row]) -> list[list[str]]:
    """The microseconds."""
    header, steps = rows[0], [row for row in rows if row["kind"] == "steps"]
    parts = list(steps[0]["parts"])
    head = ["microseconds of a step", *(f"{row['nodes']} nodes, {BUDGETS[row['budget']]}" for row in steps)]
    lines = [[f"{part}", *(f"{row['parts'][part]:.0f}" for row in steps)] for part in parts]
    times = [row["microseconds"] for row in steps]
    lines += [[f"{key}, all of it", *(f"{time[key]:.0f}" for time in times)] for key in ("propose", "observe")]
    lines += [["**drafting and observing**", *(f"**{time['whole']:.0f}**" for time in times)]]
    quartiles = ("{:.0f} to {:.0f}".format(*time["whole_quartiles"]) for time in times)
    lines += [["the middle half of the steps", *quartiles]]
    machine, versions = header["machine"], header["versions"]
    loops = "compiled by numba" if header["compiled"] else "not compiled"
    return [
        ["## What drafting takes"],
        [
            f"Medians over {steps[0]['steps']:,} steps of CPU time, vocabulary of {steps[0]['vocabulary']:,}, inner "
            f"loops {loops}. Parts are timed in texts of their own, since clocks take time, too. Where the nodes are "
            "chosen by cost, about twice as many are grown as are sent, and the budget is asked."
        ],
        table(head, lines),
        target_lines(steps, engine),
        prediction_lines(rows),
        [
            f"- Machine: {machine['device']}, CPU threads: {machine['threads']}; measured on {header['date']}",
            f"- Versions: {', '.join(f'{package} {version}' for package, version in versions.items())}",
            f"- Raw rows: `benchmarks/results/{name}`",
        ],
        *how_to_repeat(header),
    ]


def target_lines(steps: Sequence[Row], engine: Sequence[Row]) -> list[str]:
    """What is asked of drafting, and whether that is met."""
    lines = []
    for row in steps:
        whole, how = row["microseconds"]["whole"], BUDGETS[row["budget"]]
        if row["nodes"] == LONGEST_NODES:
            met = "met" if whole < LONGEST else "**not met**"
            lines.append(f"- At most {LONGEST:.0f} µs at {LONGEST_NODES} nodes, {how}: {whole:.0f} µs, {met}.")
        if row["nodes"] == SHARE_NODES:
            shares = [whole * 1e-6 / seconds for seconds in step_seconds(engine, SHARE_NODES)]
            if shares:
                met = "met" if max(shares) < LARGEST_SHARE else "**not met**"
                model = engine[0]["model"]
                lines.append(
                    f"- At most {percent(LARGEST_SHARE)} of a step of {SHARE_NODES} nodes, {how}: "
                    f"{100 * min(shares):.2f} to {100 * max(shares):.2f} % of the steps of a model of "
                    f"{model['parameters'] / 1e9:.2f} billion parameters in {engine[0]['dtype']} ([engine.md]"
                    f"(engine.md): packed weights or not, after 128 to 2,048 tokens), {met}."
                )
    return sorted(lines)


def step_seconds(engine: Sequence[Row], nodes: int) -> list[float]:
    """Seconds of the engine's steps of so many nodes, for each context and setting measured."""
    steps = [step for row in engine if row["kind"] == "measurement" for step in row["steps"]]
    return [step["seconds"] for step in steps if step["nodes"] == nodes]


def prediction_lines(rows: Sequence[Row]) -> list[str]:
    """What the engine does for the memory's sake."""
    found = [row for row in rows if row["kind"] == "predictions"]
    texts = [
        f"{row['microseconds']['top 8'] / 1000:.1f} ms at {row['nodes']} nodes (the likeliest alone "
        f"{row['microseconds']['likeliest'] / 1000:.1f} ms)"
        for row in found
    ]
    return [
        "Not part of drafting, but done for it: the engine lists the eight likeliest tokens of every node with their "
        f"probabilities. On one thread, float32 logits and the same vocabulary, that takes {' and '.join(texts)}; the "
        "softmax, which reads and writes all of them, is most of it. It grows with the vocabulary, as the product that "
        "made the logits does."
    ]


def memory_section(rows: Sequence[Row]) -> list[list[str]]:
    """The bytes."""
    requests = [row for row in rows if row["kind"] == "requests"]
    file = next(row for row in rows if row["kind"] == "file")
    head = ["requests served", "contexts known, of 1, 2, ... tokens", "memory, bytes", "one request besides, bytes"]
    head += ["process, MiB more than after the first"]
    lines = [
        [
            f"{row['requests']:,}",
            ", ".join(f"{entries:,}" for entries in row["entries"]),
            f"{row['memory_bytes']:,}",
            f"{row['request_bytes']:,}",
            resident_since(requests[0], row),
        ]
        for row in requests
    ]
    first, last = requests[0], requests[-1]
    constant = first["memory_bytes"] == last["memory_bytes"] and first["request_bytes"] == last["request_bytes"]
    same = "the same trees" if file["identical"] else "**other trees**"
    return [
        ["## What it keeps"],
        [
            f"- **The n-gram memory** has room for {last['capacity']:,} contexts of each length, 80 bytes each, from "
            "the beginning and for ever. A context belongs to one set of four places; one that comes again takes the "
            "new answer (one of a single token keeps 0.3 of the old one), and in a full set the one written longest "
            "ago makes room.",
            "- **The learned weights** are 2 × 5 × 16 numbers.",
            "- **The neighbours** take 132 bytes for each token of the vocabulary, once for a model: 17 MB for 128,000 "
            "tokens.",
            "- **The matches** keep the last 65,536 to 131,072 tokens of one text, 20 bytes each, and an index of "
            "393 kB; older tokens are forgotten. They end with the text, as do the arrays in which trees grow.",
            "- **Familiar tokens**: the last 512.",
        ],
        [
            f"One memory over {last['requests']:,} requests of {last['steps']} steps of {last['nodes']} nodes "
            f'(`memory="process"`): {"the arrays never grow." if constant else "**the arrays grew.**"}'
        ],
        table(head, lines),
        [
            f"Written to a file, 88 bytes for each context known, and read again, this memory drafted {same} over "
            f"{file['steps']} steps of a new text."
        ],
    ]


def resident_since(first: Row, row: Row) -> str:
    """How much the process has grown, pages that are filled for the first time included."""
    if first["resident_bytes"] is None or row["resident_bytes"] is None:
        return "–"
    return f"{(row['resident_bytes'] - first['resident_bytes']) / 2**20:.1f}"


def tables(results: Path) -> str:
    """All that goes between the marks.

    Raises:
        ResultsError: Nothing has been measured.
    """
    found = [read_ablation(path) for path in sorted(results.glob("ablation-*.jsonl"))]
    sections = [section for part in found if part is not None for section in ablation_section(part)]
    cost, engine = results / "drafting-cost.jsonl", results / "engine-random.jsonl"
    if cost.exists():
        rows = parse_rows(cost.read_text(encoding="utf-8"), cost.name)
        steps = parse_rows(engine.read_text(encoding="utf-8"), engine.name) if engine.exists() else []
        sections += cost_section(cost.name, rows, steps) + memory_section(rows)
    if not sections:
        raise ResultsError(f"no measurements in {results}; run ablation.py first")
    return "\n".join(join_parts(sections)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit status is 0 when it was written."""
    parser = argparse.ArgumentParser(description="Write docs/drafting.md from the rows of its two benchmarks.")
    add = parser.add_argument
    add("--results", type=Path, default=Path("benchmarks/results"), help="folder of the results files")
    add("--output", type=Path, default=Path("docs/drafting.md"), help="page to write")
    options = parser.parse_args(arguments)
    try:
        old = options.output.read_text(encoding="utf-8") if options.output.exists() else None
        text = marked_page(old, INTRODUCTION, SCRIPT, tables(options.results))
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_whole(options.output, text)
    print(f"{options.output}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
