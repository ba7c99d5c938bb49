"""Repeat the paper's evaluation with models and prompts at hand: Table 3, Fig. 4(a), accepted lengths, sampling.

    python benchmarks/paper_evaluation.py grid --model PATH --data FOLDER --prompts stories.jsonl --output FILE.jsonl
    python benchmarks/paper_evaluation.py tasks --model demo --data FOLDER --prompts humaneval.jsonl,gsm8k.jsonl ...
    python benchmarks/paper_evaluation.py sampling --model PATH --data FOLDER --prompts stories.jsonl ...

`grid` measures the rows of Table 3 and W, N and G of Fig. 4(a) on one set of prompts; `tasks` the rows of Table 3 on
a few prompts of each task; `sampling` checks for pairs of prompt and seed that sampling gives, token for token, what
transformers' own gives under that seed. All with the paper's method (`preset="paper"`); every output is compared
with plain `model.generate`. `--prompts` are the names of JSON lines files in the folder `--data`.

Each row is on the disk before the next one is measured, and rows that the file already has are not measured again: an
interrupted run goes on where it stopped when it is started once more. The exit status is 0 when all outputs were
identical, 1 when some differ or an argument cannot work, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

import lookahead
from common import (
    DTYPES,
    Prompt,
    ResultsFile,
    describe_model,
    device_name,
    first_difference,
    hash_files,
    inside,
    load_model,
    parse_positive,
    progress_bar,
    read_prompts,
    run_safely,
    short_name,
    versions,
)
from lookahead import LookaheadConfig
from lookahead.bench.forward_counter import ForwardCounter
from lookahead.bench.repetition import repeated_cycle_share, tokens_before_cycles
from step_compression import reference_row, steps_within
from write_results import ResultsError, Row, parse_rows, summarise

SETTINGS = ("part", "model", "dtype", "prompts", "max_new_tokens", "machine", "versions")

PROMPT_LOOKUP_TOKENS = 10
"""`prompt_lookup_num_tokens` of row 2 of Table 3."""

SQUARE_SIZES = [(n, b) for n in (2, 3, 5, 7) for b in (1, 3, 7, 15, 30)] + [(5, 60)]
"""N, and W = G, of Fig. 4(a) and the fit of Eq. 7."""

SIDES = (1, 4, 30)
"""W with G = 15, and G with W = 15, at N = 5: which of the two branches matters."""

T = TypeVar("T")


@dataclass(frozen=True)
class Paper:
    """Lookahead decoding as published. `text`: the pool also gets the n-grams of prompt and output, as the authors'
    evaluation has it for "prompt as reference"."""

    n: int
    w: int
    g: int
    text: bool = False

    @property
    def config(self) -> LookaheadConfig:
        """What to decode with."""
        return LookaheadConfig(
            preset="paper",
            ngram_size=self.n,
            window_size=self.w,
            guess_set_size=self.g,
            pool_from_prompt=self.text,
            pool_from_output=self.text,
        )

    def describe(self) -> Row:
        """What a row says about it."""
        config = self.config
        names = ("preset", "ngram_size", "window_size", "guess_set_size", "pool_from_prompt", "pool_from_output")
        return {name: getattr(config, name) for name in (*names, "seed")}


Method = Paper | None
"""`None` is transformers' own prompt lookup."""

ABLATION: dict[str, Method] = {
    "prompt lookup": None,
    "(10,1,3)+text": Paper(10, 1, 3, text=True),
    "(5,1,10)+text": Paper(5, 1, 10, text=True),
    "(5,1,30)": Paper(5, 1, 30),
    "(5,1,30)+text": Paper(5, 1, 30, text=True),
    "(5,30,1)": Paper(5, 30, 1),
    "(5,15,15)": Paper(5, 15, 15),
    "(5,15,15)+text": Paper(5, 15, 15, text=True),
}
"""Rows 2 to 9 of Table 3, as (N, W, G)."""


def _named(sizes: Sequence[tuple[int, int, int]]) -> dict[str, Method]:
    return {f"({n},{w},{g})": Paper(n, w, g) for n, w, g in sizes}


GRID: dict[str, Method] = (
    ABLATION
    | _named([(n, b, b) for n, b in SQUARE_SIZES])
    | _named([(5, size, 15) for size in SIDES])
    | _named([(5, 15, size) for size in SIDES])
)

SAMPLING: dict[str, Row] = {
    "greedy": {"do_sample": False},
    "temperature 0.8": {"temperature": 0.8, "top_k": 0},
    "temperature 1.0": {"temperature": 1.0, "top_k": 0},
    "temperature 1.0, top-p 0.9": {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    "temperature 0.8, top-k 40": {"temperature": 0.8, "top_k": 40},
    "temperature 0.8, top-p 0.95, repetition penalty 1.1": {
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    },
}
"""Arguments of `generate` beside `do_sample`. Greedy is Table 2's temperature of 0."""

SAMPLED_WITH = Paper(5, 15, 15)


@dataclass(frozen=True)
class Decoded:
    """What one call gave: new tokens, tokens and nodes of each step, seconds of CPU time."""

    output: list[int]
    lengths: list[int]
    nodes: list[int]
    seconds: float


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What `call` returns, and the CPU time of the process: on a shared machine, wall time counts others as well."""
    start = time.process_time()
    value = call()
    return value, time.process_time() - start


def decode_plain(model: Any, input_ids: torch.Tensor, **arguments: Any) -> tuple[list[int], float]:
    """The new tokens of `model.generate`, and CPU seconds; input_ids: [1, S]."""
    output, seconds = timed(lambda: model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments))
    return output[0, input_ids.shape[1] :].tolist(), seconds


def decode_with(method: Method, model: Any, input_ids: torch.Tensor, **arguments: Any) -> Decoded:
    """The same with a method; input_ids: [1, S]."""
    prompt = input_ids.shape[1]
    if method is None:
        with ForwardCounter(model, prompt) as counter:
            found, seconds = decode_plain(model, input_ids, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS, **arguments)
        nodes, lengths = counter.steps(len(found))
        return Decoded(found, lengths, nodes, seconds)
    output, seconds = timed(
        lambda: lookahead.generate(
            model,
            input_ids,
            lookahead_config=method.config,
            attention_mask=torch.ones_like(input_ids),
            return_dict_in_generate=True,
            **arguments,
        )
    )
    statistics = output.statistics
    tokens = output.sequences[0, prompt:].tolist()
    return Decoded(tokens, statistics.accepted_lengths, statistics.nodes_per_step, seconds)


def measurement_row(prompt: Prompt, name: str, config: Row, decoded: Decoded, expected: list[int]) -> Row:
    """What the file keeps of one method on one prompt."""
    output, lengths = decoded.output, Counter(decoded.lengths)
    if sum(decoded.lengths) != len(output):
        raise RuntimeError(f"{name} on {prompt.id}: steps of {sum(decoded.lengths)} tokens gave {len(output)}")
    early = steps_within(decoded.lengths, tokens_before_cycles(output))
    return {
        "kind": "measurement",
        "id": prompt.id,
        "task": prompt.task,
        "method": name,
        "tokens": len(output),
        "steps": len(decoded.lengths),
        "nodes": sum(decoded.nodes),
        "accepted_lengths": {str(length): lengths[length] for length in sorted(lengths)},
        "identical": output == expected,
        "first_difference": first_difference(output, expected),
        "cycle_share": round(repeated_cycle_share(output), 4),
        "tokens_before_cycles": sum(early),
        "steps_before_cycles": len(early),
        "cpu_seconds": round(decoded.seconds, 4),
        "config": config,
    }


def describe(method: Method) -> Row:
    """The settings of a method, for its rows."""
    return {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if method is None else method.describe()


def measure_greedy(
    file: ResultsFile, prompts: Sequence[Prompt], methods: Mapping[str, Method], model: Any, tokenizer: Any
) -> Iterator[str]:
    """Measure what the file lacks; yields what every row that it then has is about."""
    arguments = {"max_new_tokens": file.rows[0]["max_new_tokens"], "do_sample": False}
    for prompt in prompts:
        done = file.methods_done(prompt)
        input_ids = tokenizer(prompt.text, return_tensors="pt").input_ids.to(model.device)
        for name, method in methods.items():
            if name not in done:
                reference = file.reference(prompt)
                if reference is None:
                    output, seconds = decode_plain(model, input_ids, **arguments)
                    reference = {**reference_row(prompt, output), "cpu_seconds": round(seconds, 4)}
                    file.append(reference)
                decoded = decode_with(method, model, input_ids, **arguments)
                file.append(measurement_row(prompt, name, describe(method), decoded, reference["output"]))
            yield f"{prompt.id} {name}"


def measure_sampling(
    file: ResultsFile, prompts: Sequence[Prompt], seeds: int, model: Any, tokenizer: Any
) -> Iterator[str]:
    """The same for pairs of prompt and seed; the greedy row has one seed, as it draws nothing."""
    length = file.rows[0]["max_new_tokens"]
    for prompt in prompts:
        input_ids = tokenizer(prompt.text, return_tensors="pt").input_ids.to(model.device)
        for seed in range(seeds):
            pair = Prompt(f"{prompt.id} seed {seed}", prompt.task, prompt.text)
            done = file.methods_done(pair)
            for name, setting in SAMPLING.items():
                if name == "greedy" and seed:
                    continue
                if name not in done:
                    arguments = {"do_sample": True, "max_new_tokens": length, **setting}
                    torch.manual_seed(seed)
                    expected, _ = decode_plain(model, input_ids, **arguments)
                    torch.manual_seed(seed)
                    decoded = decode_with(SAMPLED_WITH, model, input_ids, **arguments)
                    config = {**SAMPLED_WITH.describe(), "generate": setting}
                    file.append(measurement_row(pair, name, config, decoded, expected))
                yield f"{pair.id} {name}"


def choose_prompts(files: Sequence[Path], per_task: int | None) -> list[Prompt]:
    """The first prompts of each task, tasks as they are named before a slash, their parts taking turns."""
    parts: dict[str, list[Prompt]] = defaultdict(list)
    for path in files:
        for prompt in read_prompts(path, None):
            parts[prompt.task].append(prompt)
    tasks: dict[str, list[list[Prompt]]] = defaultdict(list)
    for task, prompts in parts.items():
        tasks[task.partition("/")[0]].append(prompts)
    chosen = []
    for groups in tasks.values():
        in_turn = [prompt for turn in zip_longest(*groups) for prompt in turn if prompt is not None]
        chosen += in_turn[:per_task]
    return chosen


def describe_run(options: argparse.Namespace, files: Sequence[Path], model: Any) -> Row:
    """The header row: all that someone needs to repeat the run, and no path of this machine."""
    names = [{"file": path.name, "sha256": hash_files([path])} for path in files]
    return {
        "kind": "header",
        "benchmark": "paper",
        "part": options.part,
        "model": describe_model(options.model, model),
        "dtype": options.dtype,
        "prompts": names,
        "max_new_tokens": options.max_new_tokens,
        "machine": {"device": device_name(options.device), "threads": torch.get_num_threads()},
        "versions": versions(),
        "date": date.today().isoformat(),
        "command": command_line(options),
    }


def command_line(options: argparse.Namespace) -> str:
    """The command that repeats this run, with the model's name for its folder, and DATA for that of the prompts."""
    words = ["python", "benchmarks/paper_evaluation.py", options.part, "--model", short_name(options.model)]
    words += ["--data", "DATA", "--prompts", ",".join(options.prompts)]
    words += ["--per-task", str(options.per_task)] if options.per_task is not None else []
    words += ["--seeds", str(options.seeds)] if options.part == "sampling" else []
    words += ["--max-new-tokens", str(options.max_new_tokens), "--dtype", options.dtype]
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--threads", str(options.threads)] if options.threads is not None else []
    return shlex.join([*words, "--output", str(inside(Path.cwd(), options.output))])


def show_summary(path: Path, console: Console) -> bool:
    """Print what the file says now; returns whether all outputs in it are identical."""
    rows = [row for row in parse_rows(path.read_text(encoding="utf-8"), path.name) if row["kind"] == "measurement"]
    shown = Table(title=path.name)
    for title in ("method", "nodes per step", "S", "S before cycles", "identical outputs", "CPU s"):
        shown.add_column(title, justify="left" if title == "method" else "right")
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        summary = summarise(own)
        before = summary.step_compression_before_cycles
        shown.add_row(
            method,
            f"{summary.mean_nodes:.1f}",
            f"{summary.step_compression:.3f}",
            "–" if before is None else f"{before:.3f}",
            f"{summary.identical} of {summary.prompts}",
            f"{sum(row['cpu_seconds'] for row in own):.1f}",
        )
    console.print(shown)
    return all(row["identical"] for row in rows)


def parse_names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=["grid", "tasks", "sampling"], help="what to repeat")
    add("--model", required=True, help="folder of a transformers model, an id on the hub, or `demo`")
    add("--data", required=True, type=Path, help="folder of the prompt files")
    add("--prompts", type=parse_names, required=True, help="files in it, comma-separated")
    add("--output", required=True, type=Path, help="results file (.jsonl); an unfinished one is gone on with")
    add("--per-task", type=parse_positive, default=None, help="take the first so many prompts of each task (all)")
    add("--seeds", type=parse_positive, default=3, help="sampling: seeds for each prompt (3)")
    add("--max-new-tokens", type=parse_positive, default=200, help="tokens to generate at most (200)")
    add("--dtype", choices=list(DTYPES), default="float32", help="number format of the model (float32)")
    add("--device", default="cpu", help="where the model runs (cpu)")
    add("--threads", type=parse_positive, default=None, help="CPU threads (as many as torch takes by itself)")
    add("--restart", action="store_true", help="throw the rows of an existing results file away")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and show; returns the exit status."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    files = [options.data / name for name in options.prompts]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ResultsError(f"{', '.join(missing)}: no such file in the folder that --data names")
    prompts = choose_prompts(files, options.per_task)
    model, tokenizer = load_model(options.model, options.dtype, options.device)
    header = describe_run(options, files, model)
    if options.part == "sampling":
        configs = {name: {**SAMPLED_WITH.describe(), "generate": setting} for name, setting in SAMPLING.items()}
        total = len(prompts) * (options.seeds * (len(SAMPLING) - 1) + 1)
    else:
        methods = GRID if options.part == "grid" else ABLATION
        configs = {name: describe(method) for name, method in methods.items()}
        total = len(prompts) * len(methods)
    with (
        ResultsFile(options.output, header, configs, restart=options.restart, settings=SETTINGS) as file,
        # Redrawn by hand: a thread that draws would count in the CPU time.
        progress_bar(console, auto_refresh=False) as progress,
    ):
        task = progress.add_task(options.part, total=total)
        if options.part == "sampling":
            rows = measure_sampling(file, prompts, options.seeds, model, tokenizer)
        else:
            rows = measure_greedy(file, prompts, methods, model, tokenizer)
        for what in rows:
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
