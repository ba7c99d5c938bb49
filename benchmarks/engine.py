"""Measure what a step costs: its time against the nodes it sends, beside transformers' own step and the memory limit.

    python benchmarks/engine.py --model random --dtype bfloat16 --threads 1 \\
        --output benchmarks/results/engine-random.jsonl

For each context length these take turns, so that a machine that becomes slower meets all of them; medians count:

- a step of each size through the engine: layout, mask, forward pass, predictions, commit;
- transformers' own one-token step: its forward pass with a `DynamicCache` and the choice of the likeliest token;
- transformers' `generate`, per token: the difference between eight more tokens and none, over eight;
- reading as much memory as the weights take (`WeightReader` of `backends/transformers/tuning.py`): a bound for steps.

On a CPU times are CPU times of the process. `--model random` is a Llama of half a billion random weights made on the
spot, `--model demo` the model that comes with the package. Variants of the engine take turns as well. At last the
paper's configuration decodes a few tokens after the shortest context, to see what the parts of a step take.

Rows are on the disk one by one; an interrupted run goes on where it stopped when it is started once more. The exit
status is 0 when all was measured, 1 when an argument cannot work, 130 when interrupted. `benchmarks/write_engine.py`
makes the tables of docs/engine.md from the rows.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import lookahead
from common import (
    DTYPES,
    PAPER,
    ResultsFile,
    describe_model,
    device_name,
    inside,
    instruction_sets,
    model_source,
    parse_positive,
    progress_bar,
    run_safely,
    short_name,
    versions,
)
from lookahead.backends.transformers.tuning import CONTEXTS, NODE_COUNTS, StepBench, Stopwatch, WeightReader, bytes_read
from write_results import Row

RANDOM = "random"
RANDOM_SEED = 0
RANDOM_CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""A Llama of 461 million parameters, 923 MB in bfloat16."""

VARIANTS: dict[str, Row] = {
    "default": {"pack_weights": False},
    "packed": {"pack_weights": True},
    "static": {"pack_weights": False, "engine": "static"},
    "compiled": {"pack_weights": False, "engine": "compiled"},
}
"""Engines to measure, each with what `LookaheadConfig` calls its options."""

USUAL_VARIANTS = ("default", "packed")
"""Those that are measured if nothing is said: the others are meant for GPUs, which have no packed weights."""

SETTINGS = ("model", "dtype", "machine", "versions", "nodes")
"""What the rows of one file must have in common."""

PER_GENERATE = 8
"""Tokens that the time per token of `generate` is taken over."""

TOKENS_OF_PARTS = 24
"""New tokens that are decoded to see what the parts of a step take."""


Advance = Callable[[str, int], None]
"""Told what goes on, and how many rounds are done since it was told last."""


class PlainSteps:
    """Transformers' own one-token steps after a text of a fixed length."""

    def __init__(self, model: Any, text: Sequence[int]) -> None:
        """Fill a `DynamicCache` with all of the text but its last token, which every step begins with."""
        self._model = model
        self._ids = torch.tensor([text], device=model.device)  # [1, context + 1]
        self._cache = DynamicCache(config=model.config)
        model(input_ids=self._ids[:, :-1], past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def forward(self) -> None:
        """The forward pass of one token, and the likeliest next one."""
        output = self._model(input_ids=self._ids[:, -1:], past_key_values=self._cache, use_cache=True)
        output.logits[:, -1].float().argmax(dim=-1).cpu()

    def generate(self, tokens: int) -> None:
        """`model.generate` of so many tokens; each takes one forward pass of one token."""
        self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            past_key_values=self._cache,
            max_new_tokens=tokens,
            do_sample=False,
        )

    def undo(self) -> None:
        """Forget all tokens after the text."""
        self._cache.crop(self._ids.shape[1] - 1 - self._cache.get_seq_length())


class Bench:
    """One model, and what is measured of it."""

    def __init__(self, model: Any, nodes: Sequence[int], repeats: int) -> None:
        self.model, self.nodes, self.repeats = model, nodes, repeats
        self.reader = WeightReader(model.device, bytes_read(model))

    def measurement_rows(self, context: int, variants: Sequence[str], advance: Advance) -> Iterator[Row]:
        """Measure the variants after a text of `context` tokens; a row for each."""
        advance(f"context {context}, prefill", 0)
        with torch.no_grad():
            benches = {name: StepBench(self.model, context, **VARIANTS[name]) for name in variants}
            plain = PlainSteps(self.model, benches[variants[0]].text)
            watch = Stopwatch(self.model.device)
            for repeat in range(self.repeats + 1):
                if repeat == 1:
                    watch.forget()  # the warm-up
                self._round(watch, benches, plain)
                advance(f"context {context}", 1)
        per_token = self._differences(watch, f"generate {1 + PER_GENERATE}", "generate 1")
        for name in variants:
            yield {
                "kind": "measurement",
                "id": f"context {context}",
                "method": name,
                "config": VARIANTS[name],
                "context": context,
                "repeats": self.repeats,
                "clock": watch.clock,
                "steps": [{"nodes": nodes, **self._times(watch, f"{name} {nodes}")} for nodes in self.nodes],
                "transformers_forward": self._times(watch, "forward"),
                "transformers_generate": per_token,
                "memory_limit": round(self.reader.seconds(watch.seconds("limit")), 9),
            }

    def _round(self, watch: Stopwatch, benches: dict[str, StepBench], plain: PlainSteps) -> None:
        """Time everything once."""
        watch.time("limit", self.reader.read)
        works: list[tuple[str, Callable[[], None]]] = [("forward", plain.forward)]
        works += [
            (f"generate {tokens}", lambda tokens=tokens: plain.generate(tokens)) for tokens in (1, 1 + PER_GENERATE)
        ]
        for name, work in works:
            watch.time(name, work)
            plain.undo()
        for nodes in self.nodes:
            for name, bench in benches.items():
                tree = bench.tree(nodes)
                watch.time(f"{name} {nodes}", lambda bench=bench, tree=tree: bench.step(tree))
                bench.undo()

    def _times(self, watch: Stopwatch, name: str) -> Row:
        median = watch.median(name)
        return {"seconds": round(watch.seconds(name), 9), "wall": round(median.wall, 9), "cpu": round(median.cpu, 9)}

    def _differences(self, watch: Stopwatch, longer: str, shorter: str) -> Row:
        """Time per token of `generate`, without what it takes to begin."""
        long, short = self._times(watch, longer), self._times(watch, shorter)
        return {key: round((long[key] - short[key]) / PER_GENERATE, 9) for key in long}

    def parts_row(self, variant: str, context: int) -> Row:
        """Wall time of the parts of a step, the first one (the prompt's) left out, in the paper's configuration."""
        generator = torch.Generator().manual_seed(RANDOM_SEED)
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (1, context), generator=generator).to(self.model.device)
        config = lookahead.LookaheadConfig.from_dict(asdict(PAPER) | VARIANTS[variant])
        self._decode(ids, config, TOKENS_OF_PARTS)  # the warm-up: what is captured or compiled, is then
        runs = [self._decode(ids, config, tokens) for tokens in (1, TOKENS_OF_PARTS)]
        steps = runs[1].steps - runs[0].steps
        first, whole = (asdict(run.seconds) for run in runs)
        nodes = sum(runs[1].nodes_per_step[runs[0].steps :])
        return {
            "kind": "parts",
            "method": variant,
            "config": VARIANTS[variant],
            "context": context,
            "steps": steps,
            "mean_nodes": round(nodes / max(1, steps), 2),
            "seconds": {part: round((whole[part] - first[part]) / max(1, steps), 9) for part in whole},
        }

    def _decode(self, ids: torch.Tensor, config: lookahead.LookaheadConfig, tokens: int) -> Any:
        output = lookahead.generate(
            self.model,
            ids,
            lookahead_config=config,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        return output.statistics


def random_model(dtype: str, device: str) -> Any:
    """A Llama with `RANDOM_CONFIG` and weights drawn from `RANDOM_SEED`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**RANDOM_CONFIG), dtype=DTYPES[dtype])
    return model.to(device).eval()


def load(name: str, dtype: str, device: str) -> Any:
    """The model to measure, without anything that could end a text early."""
    if name == RANDOM:
        model = random_model(dtype, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_source(name), dtype=DTYPES[dtype]).to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def describe(options: argparse.Namespace, model: Any) -> Row:
    """The header row: all that someone needs to repeat the run, and no path of this machine."""
    described = describe_model(options.model, model)
    if options.model == RANDOM:
        described |= {"name": "random Llama", "weights": f"random, seed {RANDOM_SEED}"}
    on_cpu = options.device == "cpu"
    machine = {"device": device_name(options.device), "instructions": instruction_sets() if on_cpu else []}
    return {
        "kind": "header",
        "benchmark": "engine",
        "model": described | {"weight_bytes": bytes_read(model)},
        "dtype": options.dtype,
        "nodes": options.nodes,
        "machine": machine | {"threads": torch.get_num_threads()},
        "versions": versions(),
        "date": date.today().isoformat(),
        "command": command_line(options),
    }


def command_line(options: argparse.Namespace) -> str:
    """The command that repeats this run, files by their names only."""
    words = ["python", "benchmarks/engine.py", "--model", short_name(options.model), "--dtype", options.dtype]
    for name, default in (("contexts", CONTEXTS), ("nodes", NODE_COUNTS), ("variants", USUAL_VARIANTS)):
        values = getattr(options, name)
        words += [f"--{name}", ",".join(map(str, values))] if tuple(values) != tuple(default) else []
    words += ["--repeats", str(options.repeats)]
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--threads", str(options.threads)] if options.threads is not None else []
    words += ["--output", str(inside(Path.cwd(), options.output))]
    return shlex.join(words)


def measure(
    file: ResultsFile, bench: Bench, contexts: Sequence[int], variants: Sequence[str], advance: Advance
) -> None:
    """Measure what the file lacks."""
    for context in contexts:
        done = {row["method"] for row in file.rows if row["kind"] == "measurement" and row["context"] == context}
        missing = [name for name in variants if name not in done]
        if missing:
            for row in bench.measurement_rows(context, missing, advance):
                file.append(row)
        else:
            advance(f"context {context}", bench.repeats + 1)
    for name in variants:
        advance(f"parts of a step, {name}", 0)
        if not any(row["kind"] == "parts" and row["method"] == name for row in file.rows):
            file.append(bench.parts_row(name, contexts[0]))
        advance(f"parts of a step, {name}", 1)


def parse_sizes(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between them, ascending."""
    return sorted({parse_positive(word.strip()) for word in text.split(",")})


def parse_nodes(text: str) -> list[int]:
    """As `parse_sizes`; a step of one node is always among them, since the others are compared with it."""
    return sorted({1, *parse_sizes(text)})


def parse_variants(text: str) -> list[str]:
    """The variants named in `--variants`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is no variant; choose from {', '.join(VARIANTS)}")
    return names


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="`random`, `demo`, or the folder of a transformers model")
    add("--output", required=True, type=Path, help="results file (.jsonl); an unfinished one is gone on with")
    add("--dtype", choices=list(DTYPES), default="bfloat16", help="number format of the model (bfloat16)")
    add("--contexts", type=parse_sizes, default=list(CONTEXTS), help="tokens of text before a step (128,512,2048)")
    add("--nodes", type=parse_nodes, default=list(NODE_COUNTS), help="nodes of a step (1,2,4,8,16,32,64,128)")
    engines = f"engines to measure, of {', '.join(VARIANTS)} ({','.join(USUAL_VARIANTS)})"
    add("--variants", type=parse_variants, default=list(USUAL_VARIANTS), help=engines)
    add("--repeats", type=parse_positive, default=9, help="timings of each, after one that does not count (9)")
    add("--device", default="cpu", help="where the model runs (cpu)")
    add("--threads", type=parse_positive, default=None, help="CPU threads (as many as torch takes by itself)")
    add("--restart", action="store_true", help="throw the rows of an existing results file away")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and show; returns the exit status."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()  # texts longer than the demo model was made for, on purpose
    model = load(options.model, options.dtype, options.device)
    bench = Bench(model, options.nodes, options.repeats)
    header = describe(options, model)
    with (
        ResultsFile(options.output, header, VARIANTS, restart=options.restart, settings=SETTINGS) as file,
        progress_bar(console, auto_refresh=False) as progress,
    ):
        total = len(options.contexts) * (options.repeats + 1) + len(options.variants)
        task = progress.add_task(header["model"]["name"], total=total)

        def advance(what: str, rounds: int) -> None:
            progress.update(task, advance=rounds, description=what, refresh=True)

        measure(file, bench, options.contexts, options.variants, advance)
    for row in file.rows:
        if row["kind"] == "measurement":
            console.print(summary(row), highlight=False, soft_wrap=True)
    return 0


def summary(row: Row) -> str:
    """A row in one line."""
    single = row["steps"][0]["seconds"]
    sizes = ", ".join(f"{step['nodes']}: {step['seconds'] / single:.2f}" for step in row["steps"])
    own = single / row["transformers_forward"]["seconds"]
    return (
        f"{row['id']}, {row['method']}: one token {1000 * single:.2f} ms, {own:.2f} of transformers' own, "
        f"{single / row['memory_limit']:.2f} of the memory limit; steps over one token: {sizes}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse_options(arguments)
    console = Console(stderr=True)
    return run_safely(lambda: run(options, console), options.output, console)


if __name__ == "__main__":
    sys.exit(main())
