"""Measure what each part of `preset="auto"` brings: steps without one drafter, one rule or one memory in turn.

    python benchmarks/ablation.py --model PATH --prompts FILE.jsonl --name stories --max-new-tokens 200 \\
        --output benchmarks/results/ablation-stories.jsonl

For each prompt plain greedy `model.generate` runs once, then each variant of the drafter at each number of nodes; every
output is compared with the plain one, token for token. Each row is on the disk before the next one is measured, and
rows that the file already has are not measured again: an interrupted run goes on where it stopped. The exit status is
0 when all outputs were identical, 1 when some differ or an argument cannot work, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from common import (
    DTYPES,
    SETTINGS,
    Prompt,
    ResultsFile,
    add_options,
    command_line,
    describe_run,
    load_model,
    parse_positive,
    progress_bar,
    read_prompts,
    run_safely,
)
from lookahead.api.prompt_warm_up import MOST_READ
from lookahead.backends.transformers import ModelRunner, engine_model
from lookahead.backends.transformers.model_state import neighbours
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.core.decoder import Batch, decode
from lookahead.core.statistics import Statistics
from lookahead.drafting import AutoDrafter, ContextMatches, DraftMemory, EmbeddingNeighbours, JacobiWindow, NGramMemory
from lookahead.drafting.auto.scorer import OTHER_FEATURES, Acceptance
from paper_evaluation import Decoded, decode_plain, measurement_row, timed
from step_compression import reference_row
from write_results import Row, parse_rows, summarise

WINDOW_SIZE, WINDOW_NGRAM = 5, 3
"""W and N of the paper's window where a variant has one."""

WINDOW_NODES = (WINDOW_NGRAM - 1) * WINDOW_SIZE - 1
"""Nodes that such a window takes besides the root."""

_NEIGHBOURS = -3
"""Where the weight of what neighbours say is in a row of weights."""

_FIRST, _NEVER = 20.0, -20.0
_ANY_MATCH, _NOTHING = 2.0, -2.0


@dataclass(frozen=True)
class Variant:
    """A drafter like that of `preset="auto"`, but for what is said here.

    Attributes:
        matches: Draft from earlier occurrences in the text.
        orders: Longest context of the n-gram memory; 0 for no memory.
        merge: How proposals are weighed: by weights learned while decoding; by those that learning begins with
            (priors); by weights that are the same for every length of contexts and matches (equal), or learned from
            these on; or in a fixed order: what follows the longest match, then what the longest known context says.
        explores: Try recent predictions with the nodes that are left.
        window: The paper's window: none, in nodes that nothing else takes, or in nodes set aside for it.
        keeps: Keep the memory from prompt to prompt.
        neighbours: Draft from the neighbours of unknown tokens.
        continuations: Draft from what followed the tokens that stood in the root's place.
        warm_up: Most tokens of the prompt that are read.
        old_share: How far the prediction after a single token keeps what it was.
    """

    matches: bool = True
    orders: int = 4
    merge: Literal["learned", "priors", "fixed", "equal", "learned from equal"] = "learned"
    explores: bool = True
    window: Literal["", "left", "reserved"] = ""
    keeps: bool = False
    neighbours: bool = True
    continuations: bool = True
    warm_up: int = MOST_READ
    old_share: float = 0.3

    def memory(self) -> DraftMemory | None:
        """A new memory, if there is to be one."""
        if not self.orders:
            return None
        acceptance = Acceptance(self.orders, **({} if self.merge.startswith("learned") else {"rate": 0.0}))
        if self.merge == "fixed":
            fix_order(acceptance)
        if self.merge.endswith("equal"):
            weigh_equally(acceptance)
        return DraftMemory(NGramMemory(self.orders, old_share=self.old_share), acceptance)

    def drafter(self, nodes: int, memory: DraftMemory | None, neighbours: EmbeddingNeighbours | None) -> AutoDrafter:
        """A drafter for one text, with so many nodes a step; `neighbours` are those of the model."""
        return AutoDrafter(
            memory,
            ContextMatches() if self.matches else None,
            JacobiWindow(WINDOW_SIZE, WINDOW_NGRAM, 0) if self.window else None,
            ReservingBudget(nodes, WINDOW_NODES) if self.window == "reserved" else nodes,
            most=nodes,
            explore=self.explores,
            warm_up=self.warm_up if self.orders else 0,
            neighbours=neighbours if self.neighbours and self.orders else None,
            continuations=self.continuations,
        )


class ReservingBudget:
    """Sends a fixed number of nodes, of which some are kept for the window."""

    backs_off = False

    def __init__(self, nodes: int, reserved: int) -> None:
        self._nodes = nodes
        self._reserved = reserved
        self.chosen = 0

    def offer(self, probabilities: NDArray[np.float64], context: int) -> bool:
        """Take all candidates that leave room for the window; see `StepBudget`."""
        most = max(self._nodes - 1 - self._reserved, 0)
        self.chosen = min(len(probabilities), most)
        return self.chosen < most

    @property
    def left(self) -> int:
        """See `StepBudget`."""
        return self._nodes - 1 - self.chosen

    def learn(self, drafted: bool, accepted: bool) -> None:
        """See `StepBudget`."""


VARIANTS: dict[str, Variant] = {
    "all": Variant(),
    "no context matches": Variant(matches=False),
    "no n-gram memory": Variant(orders=0, explores=False),
    "contexts of 1 token": Variant(orders=1),
    "contexts of 1 to 3 tokens": Variant(orders=3),
    "no learning, priors only": Variant(merge="priors"),
    "equal weights, learned from there": Variant(merge="learned from equal"),
    "equal weights, no learning": Variant(merge="equal"),
    "fixed order": Variant(merge="fixed"),
    "no exploring": Variant(explores=False),
    "no neighbours": Variant(neighbours=False),
    "no stand-ins": Variant(continuations=False),
    "prompt not read": Variant(warm_up=0),
    "newest prediction alone after one token": Variant(old_share=0.0),
    "none of these four": Variant(neighbours=False, continuations=False, warm_up=0, old_share=0.0),
    "window in what is left": Variant(explores=False, window="left"),
    "window in nodes of its own": Variant(window="reserved"),
    "memory kept across prompts": Variant(keeps=True),
}


def fix_order(acceptance: Acceptance) -> None:
    """Make it weigh by a fixed order: the longest match first, then the probabilities of the longest known context."""
    weights, orders = acceptance.weights, acceptance.orders
    weights[:] = 0.0
    for longest in range(1, orders + 1):
        weights[longest, longest - 1] = 1.0
    matches = weights[:, orders : -1 - OTHER_FEATURES]
    matches[:] = _FIRST + np.arange(matches.shape[1])
    weights[0, _NEIGHBOURS] = 1.0
    weights[:, -1] = _NEVER


def weigh_equally(acceptance: Acceptance) -> None:
    """Make it weigh all known contexts alike, and all matches."""
    weights, orders = acceptance.weights, acceptance.orders
    weights[:] = 0.0
    for longest in range(1, orders + 1):
        weights[longest, :longest] = 1 / longest
    weights[:, orders : -1 - OTHER_FEATURES] = _ANY_MATCH
    weights[0, _NEIGHBOURS] = 1.0
    weights[:, -1] = _NOTHING


def method_name(variant: str, nodes: int) -> str:
    """What rows call a variant at a number of nodes."""
    return f"{variant}, {nodes} nodes"


def describe(variant: str, nodes: int) -> Row:
    """The settings of a method, for its rows."""
    return {"variant": variant, "nodes": nodes, **asdict(VARIANTS[variant])}


def decode_with(drafter: AutoDrafter, model: Any, input_ids: torch.Tensor, max_new_tokens: int) -> Decoded:
    """The new tokens of greedy decoding with a drafter, and its steps; input_ids: [1, S]."""
    prompt = input_ids[0].tolist()
    ends = model.generation_config.eos_token_id
    eos = set(ends) if isinstance(ends, list) else {ends}
    longest = len(prompt) + max_new_tokens
    statistics = Statistics()

    def is_complete(text: TextSequence) -> bool:
        return text.tokens[-1] in eos or len(text.tokens) >= longest

    def run() -> list[int]:
        text = TextSequence(input_ids, prompt, drafter, TextSampler())
        with torch.no_grad():
            decode(ModelRunner(engine_model(model), 1), Batch([text], is_complete, statistics))
        return text.tokens[len(prompt) :]

    output, seconds = timed(run)
    return Decoded(output, statistics.accepted_lengths, statistics.nodes_per_step, seconds)


def measure(
    file: ResultsFile, prompts: Sequence[Prompt], methods: Mapping[str, Row], model: Any, tokenizer: Any
) -> Iterator[str]:
    """Measure what the file lacks; yields what every row that it then has is about.

    A memory that is kept is what all prompts made it: where a row of such a variant is missing, the prompts before it
    are decoded again.
    """
    length = file.rows[0]["max_new_tokens"]
    done = {prompt.id: file.methods_done(prompt) for prompt in prompts}
    kept: dict[str, DraftMemory | None] = {}
    for name, settings in methods.items():
        variant = VARIANTS[settings["variant"]]
        if variant.keeps and any(name not in done[prompt.id] for prompt in prompts):
            kept[name] = variant.memory()
    for prompt in prompts:
        input_ids = tokenizer(prompt.text, return_tensors="pt").input_ids.to(model.device)
        for name, settings in methods.items():
            if name not in done[prompt.id] or name in kept:
                variant = VARIANTS[settings["variant"]]
                memory = kept[name] if name in kept else variant.memory()
                drafter = variant.drafter(settings["nodes"], memory, neighbours(model))
                decoded = decode_with(drafter, model, input_ids, length)
                if name not in done[prompt.id]:
                    expected = reference(file, prompt, model, input_ids)
                    file.append(measurement_row(prompt, name, settings, decoded, expected))
            yield f"{prompt.id}, {name}"


def reference(file: ResultsFile, prompt: Prompt, model: Any, input_ids: torch.Tensor) -> list[int]:
    """What plain `generate` gives; measured once for each prompt."""
    row = file.reference(prompt)
    if row is None:
        output, seconds = decode_plain(model, input_ids, max_new_tokens=file.rows[0]["max_new_tokens"], do_sample=False)
        row = {**reference_row(prompt, output), "cpu_seconds": round(seconds, 4)}
        file.append(row)
    expected: list[int] = row["output"]
    return expected


def show_summary(path: Path, console: Console) -> bool:
    """Print what the file says now; returns whether all outputs in it are identical."""
    rows = [row for row in parse_rows(path.read_text(encoding="utf-8"), path.name) if row["kind"] == "measurement"]
    shown = Table(title=path.name)
    for title in ("variant", "nodes per step", "S", "S before cycles", "identical outputs"):
        shown.add_column(title, justify="left" if title == "variant" else "right")
    for method in dict.fromkeys(row["method"] for row in rows):
        summary = summarise(row for row in rows if row["method"] == method)
        before = summary.step_compression_before_cycles
        shown.add_row(
            method,
            f"{summary.mean_nodes:.1f}",
            f"{summary.step_compression:.3f}",
            "–" if before is None else f"{before:.3f}",
            f"{summary.identical} of {summary.prompts}",
        )
    console.print(shown)
    return all(row["identical"] for row in rows)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add = parser.add_argument
    add("--dtype", choices=list(DTYPES), default="float32", help="number format of the model (float32)")
    add("--nodes", type=parse_positive, nargs="+", default=[16, 32, 64], help="nodes of a step (16 32 64)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and show; returns the exit status."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prompts = read_prompts(options.prompts, options.limit)
    model, tokenizer = load_model(options.model, options.dtype, options.device)
    command = command_line("ablation.py", options, ["--nodes", *map(str, options.nodes)])
    header = {**describe_run(options, model, command), "benchmark": "ablation"}
    methods = {method_name(variant, nodes): describe(variant, nodes) for nodes in options.nodes for variant in VARIANTS}
    settings = ("benchmark", *SETTINGS)
    with (
        ResultsFile(options.output, header, methods, restart=options.restart, settings=settings) as file,
        progress_bar(console, auto_refresh=False) as progress,
    ):
        task = progress.add_task("ablation", total=len(prompts) * len(methods))
        for what in measure(file, prompts, methods, model, tokenizer):
            progress.update(task, advance=1, description=what, refresh=True)
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
