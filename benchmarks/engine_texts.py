"""Measure how often an engine's texts in 16 bits differ from those of `generate`, and what makes them differ.

Each prompt is continued greedily and once more sampled with a seed of its own, by `model.generate` alone and by an
`Engine`:

- `alone, no drafts`: one request at a time: passes have the tokens that those of `generate` have, but other code runs;
- `alone, drafts`: trees change how many tokens share a pass;
- `together, no drafts`: other requests do;
- `together, drafts`: both, and requests begin with the keys and values of others, as an engine comes;
- `batches`: for scale, `model.generate` with as many prompts a call, padded; greedy alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from lookahead import Engine, LookaheadConfig
from lookahead.bench.comparison import first_difference
from lookahead.bench.rows import Row
from probe import Probe, Unit, generate, load_model, option, prompts_of, token_ids

PLAIN, DRAFTS = LookaheadConfig(preset="autoregressive"), LookaheadConfig(memory="process")
METHODS = {
    "alone, no drafts": (PLAIN, False),
    "alone, drafts": (DRAFTS, False),
    "together, no drafts": (PLAIN, True),
    "together, drafts": (DRAFTS, True),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, or the folder of a model")
    dtype: str = option("bfloat16", "number type of the weights")
    limit: int = option(100, "take the first so many prompts")
    max_new_tokens: int = option(48, "tokens to generate at most")
    rows: int = option(16, "requests at once")


class Bench:
    """One model, its prompts, and the texts that `generate` gives."""

    def __init__(self, options: Options) -> None:
        self._options = options
        loaded = load_model(options.model, options.dtype)
        self._model: Any = loaded.model
        prompts = prompts_of(Path(options.prompts), options.limit)
        self._ids = [token_ids(loaded.tokenizer, self._model, prompt.text)[0] for prompt in prompts]

    def of_engine(self, method: str) -> Iterator[Row]:
        """A row for greedy texts and one for sampled ones."""
        config, together = METHODS[method]
        rows = self._options.rows if together else 1
        for sample in (False, True):
            engine = Engine(self._model, config, max_rows=rows, prefix_cache=together and config is DRAFTS)
            handles = [
                engine.submit(ids, seed=number, **self._arguments(sample)) for number, ids in enumerate(self._ids)
            ]
            engine.run()
            yield self._row(method, sample, [handle.tokens for handle in handles])

    def of_batches(self) -> Iterator[Row]:
        """A row for greedy texts in padded batches of transformers' own."""
        texts: list[list[int]] = []
        ends = self._model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        for begin in range(0, len(self._ids), self._options.rows):
            part = self._ids[begin : begin + self._options.rows]
            longest = max(map(len, part))
            mask = torch.stack([torch.arange(longest) >= longest - len(ids) for ids in part]).long()
            padded = torch.stack([torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in part])
            output = self._model.generate(padded, attention_mask=mask, **self._arguments(False))
            for row in output[:, longest:].tolist():
                end = next((place for place, token in enumerate(row) if token in stops), len(row))
                texts.append(row[: end + 1])
        yield self._row("batches", False, texts)

    def _row(self, method: str, sample: bool, texts: Sequence[Sequence[int]]) -> Row:
        expected = self._expected[sample]
        places = [first_difference(own, other) for own, other in zip(texts, expected, strict=True)]
        compared = sum(len(own) if place is None else place + 1 for own, place in zip(texts, places, strict=True))
        found = [place for place in places if place is not None]
        row = {"kind": "texts", "method": method, "sampling": "seeded" if sample else "greedy", "texts": len(texts)}
        return row | {"differ": len(found), "compared": compared, "first_differences": found}

    @cached_property
    def _expected(self) -> dict[bool, list[list[int]]]:
        """The texts of `generate`, greedy ones and sampled ones."""
        found: dict[bool, list[list[int]]] = {}
        for sample in (False, True):
            found[sample] = []
            for number, ids in enumerate(self._ids):
                torch.manual_seed(number)
                found[sample].append(generate(self._model, ids[None], None, **self._arguments(sample))[0])
        return found

    def _arguments(self, sample: bool) -> dict[str, Any]:
        return {"max_new_tokens": self._options.max_new_tokens, "do_sample": sample}


def probe(options: Options) -> Probe:
    """A unit for each method."""
    bench = Bench(options)
    units = [Unit(method, partial(bench.of_engine, method)) for method in METHODS]
    units.append(Unit("batches", bench.of_batches))
    return Probe(
        units, {"model": Path(options.model).name, "dtype": options.dtype, "prompts": Path(options.prompts).name}
    )
