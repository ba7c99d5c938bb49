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
import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import lookahead
from lookahead import LookaheadConfig, LookaheadError
from lookahead.repetition import final_cycle_share, repeated_cycle_share, tokens_before_cycles
from write_results import ResultsError, Row, describe_method, parse_rows, read_results, summarise

# The sizes of the paper's evaluation; each row says in full where the pool is filled from.
PAPER = LookaheadConfig(preset="paper", window_size=15, ngram_size=5, guess_set_size=15)

METHODS: dict[str, LookaheadConfig] = {
    "autoregressive": LookaheadConfig(preset="autoregressive"),
    "jacobi": LookaheadConfig(preset="jacobi"),
    "paper": replace(PAPER, pool_from_prompt=False, pool_from_output=False),
    "paper+prompt": replace(PAPER, pool_from_prompt=True, pool_from_output=False),
    "paper+prompt+output": replace(PAPER, pool_from_prompt=True, pool_from_output=True),
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What the rows of one file must have in common; date and command may change when a run is taken up again.
SETTINGS = ("name", "model", "dtype", "prompts", "max_new_tokens", "machine", "versions")


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt file."""

    id: str
    task: str
    text: str


class ResultsFile:
    """The rows of one results file, on the disk and in memory."""

    def __init__(self, path: Path, header: Row, *, restart: bool = False) -> None:
        """Open a file to go on with it, or begin it.

        Raises:
            ResultsError: The file holds rows that were measured in another way.
        """
        self.path = path
        old = parse_rows(path.read_text(encoding="utf-8"), path.name) if path.exists() and not restart else []
        if old:
            self._check_same_settings(old, header)
            header = {**header, "date": old[0]["date"]}
        self.rows: list[Row] = [header, *old[1:]]
        self._rewrite()
        self._file: TextIO = path.open("a", encoding="utf-8")

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, row: Row) -> None:
        """Add a row, on the disk first."""
        self._file.write(to_line(row))
        self._file.flush()
        self.rows.append(row)

    def reference(self, prompt: Prompt) -> Row | None:
        """What plain `generate` gave for this prompt, if it has run."""
        return next((row for row in self.rows if row["kind"] == "reference" and row["id"] == prompt.id), None)

    def methods_done(self, prompt: Prompt) -> set[str]:
        """The methods already measured on this prompt."""
        return {row["method"] for row in self.rows if row["kind"] == "measurement" and row["id"] == prompt.id}

    def _check_same_settings(self, old: list[Row], header: Row) -> None:
        advice = "choose another --output, or begin this file anew with --restart"
        for key in SETTINGS:
            if old[0].get(key) != header[key]:
                difference = f"{key}={old[0].get(key)!r}, this run has {header[key]!r}"
                raise ResultsError(f"{self.path.name} was measured with {difference}; {advice}")
        for row in old[1:]:
            method = row.get("method")
            if method in METHODS and not same_settings(row["config"], METHODS[method]):
                raise ResultsError(f"{self.path.name} measured {method!r} with other settings than now; {advice}")

    def _rewrite(self) -> None:
        """Write header and rows anew, so that a line cut off by a crash is gone before rows are added."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.write_text("".join(map(to_line, self.rows)), encoding="utf-8")
        os.replace(unfinished, self.path)


def same_settings(recorded: Row, config: LookaheadConfig) -> bool:
    """Whether a row was measured with this configuration; it may lack fields that were added to the class since."""
    return recorded.items() <= asdict(config).items()


def to_line(row: Row) -> str:
    """A row as one line of the file."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_prompts(path: Path, limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of a file, or all of them."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ResultsError(f"{path.name}, line {number} is no JSON ({error})") from error
        if "id" not in row or not ("prompt" in row or row.get("turns")):
            raise ResultsError(f"{path.name}, line {number} needs an `id`, and a `prompt` or `turns`")
        text = row["prompt"] if "prompt" in row else row["turns"][0]
        prompts.append(Prompt(str(row["id"]), str(row.get("task", "")), text))
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise ResultsError(f"{path.name} has the same `id` twice; rows could not be told apart")
    return prompts[:limit]


def load_model(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Model and tokenizer, ready to generate."""
    source = model_source(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype]).to(device).eval()
    if model.generation_config.pad_token_id is None:  # else every call of `generate` warns about it
        eos = model.generation_config.eos_token_id
        model.generation_config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    return model, tokenizer


def model_source(name: str) -> str:
    """What to load for `--model`: the packaged model, a folder, or an id on the hub."""
    if name == "demo":
        from lookahead.demo import demo_model_path

        return str(demo_model_path())
    return name


def generate_plain(model: Any, input_ids: torch.Tensor, max_new_tokens: int) -> list[int]:
    """The new tokens of plain greedy `model.generate`; input_ids: [1, S]."""
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return output[0, input_ids.shape[1] :].tolist()


def generate_with(
    config: LookaheadConfig, model: Any, input_ids: torch.Tensor, max_new_tokens: int
) -> tuple[list[int], Any]:
    """The new tokens of one method and its statistics; input_ids: [1, S]."""
    output = lookahead.generate(
        model,
        input_ids,
        lookahead_config=config,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return output.sequences[0, input_ids.shape[1] :].tolist(), output.statistics


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


def first_difference(output: list[int], expected: list[int]) -> int | None:
    """Index of the first new token that differs; `None` for identical outputs."""
    if output == expected:
        return None
    pairs = zip(output, expected, strict=False)  # one may be the beginning of the other
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(expected)))


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


def describe_run(options: argparse.Namespace, model: Any) -> Row:
    """The header row: all that someone needs to repeat the run, and no path of this machine."""
    return {
        "kind": "header",
        "name": options.name,
        "model": describe_model(options.model, model),
        "dtype": options.dtype,
        "prompts": {
            "file": options.prompts.name,
            "sha256": hash_files([options.prompts]),
            "count": len(read_prompts(options.prompts, None)),
        },
        "max_new_tokens": options.max_new_tokens,
        "machine": {"device": device_name(options.device), "threads": torch.get_num_threads()},
        "versions": versions(),
        "date": date.today().isoformat(),
        "command": command_line(options),
    }


def describe_model(name: str, model: Any) -> Row:
    """Name, size and fingerprint of the model."""
    folder = Path(model_source(name))
    weights = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    commit = getattr(model.config, "_commit_hash", None)
    return {
        "name": short_name(name),
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": model.config.get_text_config().vocab_size,
        "weights": f"sha256 {hash_files(weights)}" if weights else f"revision {commit}",
    }


def short_name(model: str) -> str:
    """A folder's own name; ids on the hub and `demo` stay as they are."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def hash_files(paths: Sequence[Path]) -> str:
    """The first 16 digits of the SHA-256 of the files' contents, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def device_name(device: str) -> str:
    """The name of the processor that does the work."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def own_version() -> str:
    """Version of this package, or of the sources around this script when they were not installed."""
    try:
        return metadata.version("lookahead-decoding")
    except metadata.PackageNotFoundError:
        project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        found = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
        return found[1] if found else "unknown"


def versions() -> dict[str, str]:
    """Versions of all that the figures may depend on."""
    return {
        "lookahead-decoding": own_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
    }


def command_line(options: argparse.Namespace) -> str:
    """The command that repeats this run, files by their names only."""
    words = ["python", "benchmarks/step_compression.py", "--model", short_name(options.model)]
    words += ["--prompts", options.prompts.name, "--name", options.name]
    words += ["--max-new-tokens", str(options.max_new_tokens)]
    words += ["--limit", str(options.limit)] if options.limit is not None else []
    words += ["--methods", ",".join(options.methods)] if options.methods != list(METHODS) else []
    words += ["--dtype", options.dtype]
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--threads", str(options.threads)] if options.threads is not None else []
    words += ["--output", str(inside(Path.cwd(), options.output))]
    return shlex.join(words)


def inside(folder: Path, path: Path) -> Path:
    """The path as seen from the folder, or only its name when it lies elsewhere."""
    path = path.resolve()
    return path.relative_to(folder.resolve()) if path.is_relative_to(folder.resolve()) else Path(path.name)


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


def parse_positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of a transformers model, an id on the hub, or `demo`")
    add("--prompts", required=True, type=Path, help="JSON lines with `id`, and `prompt` or `turns`")
    add("--name", required=True, help="what to call the prompts in the tables")
    add("--output", required=True, type=Path, help="results file (.jsonl); an unfinished one is gone on with")
    add("--max-new-tokens", type=parse_positive, default=128, help="tokens to generate at most (128)")
    add("--limit", type=parse_positive, default=None, help="take only the first so many prompts")
    add("--methods", type=parse_methods, default=list(METHODS), help=f"comma-separated ({','.join(METHODS)})")
    add("--dtype", choices=list(DTYPES), default="float32", help="number format of the model (float32)")
    add("--device", default="cpu", help="where the model runs (cpu)")
    add("--threads", type=parse_positive, default=None, help="CPU threads (as many as torch takes by itself)")
    add("--restart", action="store_true", help="throw the rows of an existing results file away")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> bool:
    """Measure and show; returns whether all outputs were identical."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prompts = read_prompts(options.prompts, options.limit)
    model, tokenizer = load_model(options.model, options.dtype, options.device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        ResultsFile(options.output, describe_run(options, model), restart=options.restart) as file,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task(options.name, total=len(prompts) * len(options.methods))
        for prompt, method in measure(file, prompts, options.methods, model, tokenizer):
            progress.update(task, advance=1, description=f"{prompt.id} {method}")
    return show_summary(options.output, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse_options(arguments)
    console = Console(stderr=True)
    transformers.utils.logging.disable_progress_bar()
    try:
        identical = run(options, console)
    except KeyboardInterrupt:
        console.print(f"Interrupted; {options.output} has all rows so far, the same command goes on.")
        return 130
    except (ResultsError, LookaheadError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    if not identical:
        console.print("Some outputs differ from plain `generate`: see `first_difference`.", style="red")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
