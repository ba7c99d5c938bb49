"""Measure how often a 16-bit model's greedy text differs from plain decoding, and what `tie_margin` brings.

    python benchmarks/precision.py --model demo --prompts FILE.jsonl --name humaneval \\
        --dtype bfloat16 --output benchmarks/results/precision-bfloat16.jsonl

In 16 bits a matrix product of many rows rounds differently from one of a single row, and where two tokens are
nearly equally likely the other one may be chosen. For each prompt plain `model.generate` runs once, which gives
the text to compare with and, for each of its tokens, the gap between the two largest logits. Compared with it are

- lookahead decoding with each `tie_margin` of `--margins`;
- the same loop without drafts (`autoregressive`), which must give the same text;
- transformers' own `generate`, for scale: the same prompt in a batch of four copies, the prompt in a batch of
  four different ones (padded), and the same model in float32.

Rows are on the disk one by one; an interrupted run goes on where it stopped when it is started once more. The
exit status is 0 when all was measured, 1 when `autoregressive` differed or an argument cannot work, 130 when
interrupted. `benchmarks/write_precision.py` makes docs/precision.md of the rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import Console

from common import (
    PAPER,
    Prompt,
    ResultsFile,
    add_options,
    command_line,
    describe_run,
    first_difference,
    generate_plain,
    generate_with,
    load_model,
    progress_bar,
    read_prompts,
    run_safely,
)
from lookahead import LookaheadConfig
from write_results import Row

MARGINS = (0.0, 0.0625, 0.125, 0.25, 0.5, 1.0)

BATCH = 4
"""Rows of the batches that plain decoding is compared with."""

PROBE_ROWS, PROBE_KEYS = 75, 256
"""Size of the probe: about the nodes of a step, and a text of middling length."""

Measured = tuple[list[int], Row]
"""The new tokens, and what else is known about how they came about."""


class Bench:
    """One model, and every way of decoding with it that is compared.

    Args:
        options: The command line.
        prompts: All prompts of the file, from which batches are put together.
    """

    def __init__(self, options: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
        self._options = options
        self._prompts = prompts
        self._batches: dict[str, list[int]] = {}
        self.model, self._tokenizer = load_model(options.model, options.dtype, options.device)
        self.methods: dict[str, Callable[[Prompt], Measured]] = {}
        self.configs: dict[str, Row] = {}
        self._add_lookahead("autoregressive", LookaheadConfig(preset="autoregressive"))
        for margin in options.margins:
            self._add_lookahead(f"margin {margin:g}", replace(PAPER, tie_margin=margin))
        self._add_plain("copies", {"rows": BATCH}, self._in_copies)
        self._add_plain("batch", {"rows": BATCH}, self._in_batch)
        self._add_plain("float32", {"dtype": "float32"}, self._in_float32)

    def reference_row(self, prompt: Prompt) -> Row:
        """Plain `generate`: its tokens, and the gap between the two largest logits at each of them."""
        ids = self._ids(prompt)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._options.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, ids.shape[1] :].tolist()
        best = torch.cat(output.logits).float().topk(2, dim=-1).values  # [tokens, 2]
        gaps = (best[:, 0] - best[:, 1]).tolist()
        row = {"kind": "reference", "id": prompt.id, "task": prompt.task, "tokens": len(tokens), "output": tokens}
        return row | {"gaps": [round(gap, 6) for gap in gaps]}

    def measurement_row(self, prompt: Prompt, method: str, reference: Row) -> Row:
        """One method on one prompt, compared with plain `generate`."""
        output, more = self.methods[method](prompt)
        expected, gaps = reference["output"], reference["gaps"]
        place = first_difference(output, expected)
        return {
            "kind": "measurement",
            "id": prompt.id,
            "task": prompt.task,
            "method": method,
            "tokens": len(output),
            **more,
            "identical": output == expected,
            "first_difference": place,
            "gap": gaps[place] if place is not None and place < len(gaps) else None,
            "config": self.configs[method],
        }

    def _add_lookahead(self, name: str, config: LookaheadConfig) -> None:
        def measured(prompt: Prompt) -> Measured:
            output, statistics = generate_with(config, self.model, self._ids(prompt), self._options.max_new_tokens)
            nodes = statistics.nodes_per_step
            # after the first step, nothing but a decision that was put off keeps this method from drafting
            return output, {"steps": statistics.steps, "nodes": sum(nodes), "undrafted": nodes[1:].count(1)}

        self.methods[name], self.configs[name] = measured, asdict(config)

    def _add_plain(self, name: str, config: Row, decode: Callable[[Prompt], list[int]]) -> None:
        self.methods[name], self.configs[name] = (lambda prompt: (decode(prompt), {})), config

    def _in_copies(self, prompt: Prompt) -> list[int]:
        """The prompt several times over: nothing but the number of rows is another."""
        return self._rows(self.model, self._ids(prompt).repeat(BATCH, 1))[0]

    def _in_batch(self, prompt: Prompt) -> list[int]:
        """The prompt among its neighbours in the file, padded to the same length."""
        if prompt.id not in self._batches:
            place = self._prompts.index(prompt)
            start = place - place % BATCH
            batch = [self._prompts[(start + row) % len(self._prompts)] for row in range(BATCH)]
            ids = [self._ids(member)[0] for member in batch]
            longest = max(len(row) for row in ids)
            mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in ids]).long()
            pad = self.model.generation_config.pad_token_id or 0
            padded = [torch.nn.functional.pad(row, (longest - len(row), 0), value=pad) for row in ids]
            texts = self._rows(self.model, torch.stack(padded), mask.to(self.model.device))
            self._batches.update({member.id: text for member, text in zip(batch, texts, strict=True)})
        return self._batches[prompt.id]

    def _in_float32(self, prompt: Prompt) -> list[int]:
        return generate_plain(self._float32_model, self._ids(prompt), self._options.max_new_tokens)

    @cached_property
    def _float32_model(self) -> Any:
        return load_model(self._options.model, "float32", self._options.device)[0]

    def _rows(self, model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[list[int]]:
        """The new tokens of each row of a batch, up to its end-of-sequence token; ids: [B, S]."""
        mask = torch.ones_like(ids) if mask is None else mask
        output = model.generate(ids, attention_mask=mask, max_new_tokens=self._options.max_new_tokens, do_sample=False)
        eos = model.generation_config.eos_token_id
        stops = set(eos if isinstance(eos, list) else [eos])
        return [until(row, stops) for row in output[:, ids.shape[1] :].tolist()]

    def _ids(self, prompt: Prompt) -> torch.Tensor:
        ids: torch.Tensor = self._tokenizer(prompt.text, return_tensors="pt").input_ids
        return ids.to(self.model.device)


def until(tokens: list[int], stops: set[int | None]) -> list[int]:
    """The tokens up to the first one that ends a text; a batch goes on with padding behind it."""
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]


def probe_row(model: Any) -> Row:
    """Which single operations round differently when many tokens are sent at once: shares of elements that change."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(model.device, model.dtype)

    with torch.no_grad():
        layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        linear = [linear_changes(layer, draw(PROBE_ROWS, layer.in_features)) for layer in layers]
        config = model.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        states = [draw(1, config.num_attention_heads, count, size) for count in (PROBE_ROWS, *[PROBE_KEYS] * 2)]
        hidden = draw(1, config.num_attention_heads, PROBE_ROWS, size)
        attention = attention_changes(*states, hidden)
    return {"kind": "probe", "rows": PROBE_ROWS, "linear": share(linear), "attention": share([attention])}


def linear_changes(layer: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Which results of a layer change when its rows are multiplied at once instead of one by one; rows: [R, in]."""
    return layer(rows) != torch.cat([layer(row[None]) for row in rows])


def attention_changes(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Which results of attention change when queries go together and a mask hides further keys, instead of one by
    one without those keys; [1, heads, ..., size] each."""
    attend = torch.nn.functional.scaled_dot_product_attention
    alone = torch.cat([attend(queries[:, :, row, None], keys, values) for row in range(queries.shape[2])], dim=2)
    mask = queries.new_zeros(queries.shape[2], keys.shape[2] + hidden.shape[2])
    mask[:, keys.shape[2] :] = torch.finfo(mask.dtype).min
    together = attend(queries, torch.cat([keys, hidden], dim=2), torch.cat([values, hidden], dim=2), attn_mask=mask)
    return alone != together


def share(changes: Sequence[torch.Tensor]) -> float:
    """The share of elements that changed."""
    return round(sum(int(change.sum()) for change in changes) / sum(change.numel() for change in changes), 6)


def measure(file: ResultsFile, prompts: Sequence[Prompt], bench: Bench) -> Iterator[tuple[Prompt, str]]:
    """Measure what the file lacks; yields the prompt and the method of every row that it then has."""
    for prompt in prompts:
        done = file.methods_done(prompt)
        for method in bench.methods:
            if method not in done:
                reference = file.reference(prompt)
                if reference is None:
                    reference = bench.reference_row(prompt)
                    file.append(reference)
                file.append(bench.measurement_row(prompt, method, reference))
            yield prompt, method


def parse_margins(text: str) -> list[float]:
    """The numbers of `--margins`, ascending."""
    try:
        margins = sorted({float(word) for word in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them") from error
    if margins[0] < 0:
        raise argparse.ArgumentTypeError(f"{margins[0]:g} must be at least 0, a difference of logits")
    return margins


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add = parser.add_argument
    margins = ",".join(f"{margin:g}" for margin in MARGINS)
    add("--margins", type=parse_margins, default=list(MARGINS), help=f"values of tie_margin ({margins})")
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="number format (bfloat16)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and show; returns the exit status."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    prompts = read_prompts(options.prompts, None)
    bench = Bench(options, prompts)
    margins = ",".join(f"{margin:g}" for margin in options.margins)
    own = ["--margins", margins] if options.margins != list(MARGINS) else []
    header = describe_run(options, bench.model, command_line("precision.py", options, own))
    header = {"kind": header["kind"], "benchmark": "precision"} | header
    chosen = prompts[: options.limit]
    with (
        ResultsFile(options.output, header, bench.configs, restart=options.restart) as file,
        progress_bar(console) as progress,
    ):
        if not any(row["kind"] == "probe" for row in file.rows):
            file.append(probe_row(bench.model))
        task = progress.add_task(options.name, total=len(chosen) * len(bench.methods))
        for prompt, method in measure(file, chosen, bench):
            progress.update(task, advance=1, description=f"{prompt.id} {method}")
        rows = [row for row in file.rows if row["kind"] == "measurement"]
    for method in bench.methods:
        same = [row["identical"] for row in rows if row["method"] == method]
        console.print(f"{method}: {len(same) - sum(same)} of {len(same)} differ", highlight=False)
    if all(row["identical"] for row in rows if row["method"] == "autoregressive"):
        return 0
    console.print("Steps without a draft must round as plain decoding does, and did not: this is a bug.", style="red")
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse_options(arguments)
    console = Console(stderr=True)
    return run_safely(lambda: run(options, console), options.output, console)


if __name__ == "__main__":
    sys.exit(main())
