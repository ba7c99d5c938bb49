"""What the measuring scripts share: prompts in, models, rows on the disk, and what a header says about a run."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import lookahead
from lookahead import LookaheadConfig, LookaheadError
from lookahead.backends.transformers import cost_store
from write_results import ResultsError, Row, parse_rows, write_whole

# The sizes of the paper's evaluation; each row says in full where the pool is filled from.
PAPER = LookaheadConfig(preset="paper", window_size=15, ngram_size=5, guess_set_size=15)

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

    def __init__(
        self,
        path: Path,
        header: Row,
        configs: Mapping[str, Row],
        *,
        restart: bool = False,
        settings: Sequence[str] = SETTINGS,
    ) -> None:
        """Open a file to go on with it, or begin it.

        Args:
            path: Where it is.
            header: The header row of this run.
            configs: The settings that each method has now.
            restart: Throw the rows of an existing file away.
            settings: What the header must have in common with that of an existing file.

        Raises:
            ResultsError: The file holds rows that were measured in another way.
        """
        self.path = path
        self._configs = configs
        self._settings = settings
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
        for key in self._settings:
            if old[0].get(key) != header[key]:
                difference = f"{key}={old[0].get(key)!r}, this run has {header[key]!r}"
                raise ResultsError(f"{self.path.name} was measured with {difference}; {advice}")
        for row in old[1:]:
            method = row.get("method")
            # a row may lack settings that did not exist when it was measured
            if method in self._configs and not row["config"].items() <= self._configs[method].items():
                raise ResultsError(f"{self.path.name} measured {method!r} with other settings than now; {advice}")

    def _rewrite(self) -> None:
        """Write header and rows anew, so that a line cut off by a crash is gone before rows are added."""
        write_whole(self.path, "".join(map(to_line, self.rows)))


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


def first_difference(output: list[int], expected: list[int]) -> int | None:
    """Index of the first new token that differs; `None` for identical outputs."""
    if output == expected:
        return None
    pairs = zip(output, expected, strict=False)  # one may be the beginning of the other
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(expected)))


def describe_run(options: argparse.Namespace, model: Any, command: str) -> Row:
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
        "command": command,
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
    return cost_store.device_name(torch.device(device))


FAST_PRODUCTS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
"""Instruction sets that decide how fast a CPU multiplies matrices, as the system names them."""


def instruction_sets() -> list[str]:
    """Those of `FAST_PRODUCTS` that this CPU has; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split(":", 1)[1].split()}
    return [name for name in FAST_PRODUCTS if name in flags]


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


def command_line(script: str, options: argparse.Namespace, own: Sequence[str] = ()) -> str:
    """The command that repeats this run, files by their names only; `own` are the arguments of this script alone."""
    words = ["python", f"benchmarks/{script}", "--model", short_name(options.model)]
    words += ["--prompts", options.prompts.name, "--name", options.name]
    words += ["--max-new-tokens", str(options.max_new_tokens)]
    words += ["--limit", str(options.limit)] if options.limit is not None else []
    words += own
    words += ["--dtype", options.dtype]
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--threads", str(options.threads)] if options.threads is not None else []
    words += ["--output", str(inside(Path.cwd(), options.output))]
    return shlex.join(words)


def inside(folder: Path, path: Path) -> Path:
    """The path as seen from the folder, or only its name when it lies elsewhere."""
    path = path.resolve()
    return path.relative_to(folder.resolve()) if path.is_relative_to(folder.resolve()) else Path(path.name)


def parse_positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments that all measuring scripts have, but for `--dtype`, whose choices differ."""
    add = parser.add_argument
    add("--model", required=True, help="folder of a transformers model, an id on the hub, or `demo`")
    add("--prompts", required=True, type=Path, help="JSON lines with `id`, and `prompt` or `turns`")
    add("--name", required=True, help="what to call the prompts in the tables")
    add("--output", required=True, type=Path, help="results file (.jsonl); an unfinished one is gone on with")
    add("--max-new-tokens", type=parse_positive, default=128, help="tokens to generate at most (128)")
    add("--limit", type=parse_positive, default=None, help="take only the first so many prompts")
    add("--device", default="cpu", help="where the model runs (cpu)")
    add("--threads", type=parse_positive, default=None, help="CPU threads (as many as torch takes by itself)")
    add("--restart", action="store_true", help="throw the rows of an existing results file away")


def progress_bar(console: Console, *, auto_refresh: bool = True) -> Progress:
    """A bar that says what is measured and how much is left.

    Args:
        console: Where it is drawn.
        auto_refresh: Redraw it all the time, in a thread whose CPU time would count where such time is measured.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=auto_refresh)


def run_safely(work: Callable[[], int], output: Path, console: Console) -> int:
    """The exit status of `work`; errors that a user can mend become one line, an interruption says how to go on."""
    transformers.utils.logging.disable_progress_bar()
    try:
        return work()
    except KeyboardInterrupt:
        console.print(f"Interrupted; {output} has all rows so far, the same command goes on.")
        return 130
    except (ResultsError, LookaheadError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
