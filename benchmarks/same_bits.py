"""Compare every logit of texts decoded with `invariant=True` with plain decoding, bit by bit.

Each prompt is decoded greedily with drafts of 1, 7, 16, 33 and 64 nodes, each from another preset; five prompts cover
every preset with every number. It is also sampled, continued from its answer as a prompt and as a cache, and every
fourth prompt is decoded in a batch of two to eight rows, greedy and sampled. Models with random weights read random
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

import lookahead
from cases import read_texts
from lookahead import LookaheadConfig
from lookahead.bench.rows import Row
from lookahead.errors import UnsupportedArgumentError
from models import RANDOM, load_model, load_tokenizer
from probe import Probe, Unit, option

BUDGETS = (1, 7, 16, 33, 64)
PRESETS = ("auto", "token_recycling", "context_matches", "paper", "jacobi")
PAPER = {1: (1, 2, 1), 7: (4, 2, 3), 16: (6, 3, 2), 33: (8, 4, 3), 64: (10, 5, 6)}
"""Window size, n-gram size and guess set size by maximum number of nodes; the smallest sizes, for 1, make 2 nodes."""
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}
PLAIN = LookaheadConfig(preset="autoregressive", invariant=True)

PROMPTS = {"demo": "humaneval.jsonl", "stories260k": "stories.jsonl"}
"""Prompt files of models with trained weights."""


def drafts_of(preset: str, budget: int) -> LookaheadConfig:
    """Configuration of a preset with at most `budget` nodes per step."""
    sizes: dict[str, int] = {"step_budget": budget}
    if preset == "paper":
        sizes = dict(zip(("window_size", "ngram_size", "guess_set_size"), PAPER[budget], strict=True))
    if preset == "jacobi":
        sizes = {"block_size": max(1, budget - 1)}
    return LookaheadConfig(preset=preset, invariant=True, **sizes)


@dataclass(frozen=True)
class Share:
    """Number of prompts of a model in each type, tokens of a prompt, and new tokens."""

    bfloat16: int
    float16: int
    tokens: int
    new_tokens: int


SHARES = {
    "qwen3": Share(16, 14, 24, 16),
    "gemma3": Share(16, 14, 24, 16),
    "mixtral": Share(14, 14, 24, 16),
    "stories260k": Share(50, 26, 24, 24),
    "demo": Share(16, 10, 24, 16),
    "random": Share(5, 5, 8, 6),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    data: str = option("../shared/data", "folder of the prompts")
    models: str = option("../shared/models", "folder that contains the story model")
    limit: int = option(50, "maximum number of prompts of each model in each type")
    device: str = option("cpu", "`cpu`, or `cuda` with static passes of one size")


@lru_cache(maxsize=2)
def load(name: str, dtype: str, models: str, device: str) -> tuple[Any, Any]:
    """Load a model, and its tokenizer if its weights are trained."""
    path = name if name == "demo" or name in RANDOM else str(Path(models) / name)
    return load_model(path, dtype, device, ends=False), None if name in RANDOM else load_tokenizer(path)


class Comparison:
    """Counter of logits that differ from plain decoding.

    Attributes:
        rows: Rows, one for each way of decoding.
    """

    def __init__(self, model: Any, ids: torch.Tensor, new_tokens: int) -> None:
        self._model, self._ids, self._new_tokens = model, ids, new_tokens
        self._plain: dict[bool, Any] = {}
        self.rows: list[Row] = []

    def decode(self, config: LookaheadConfig, ids: torch.Tensor, new_tokens: int, **kwargs: Any) -> Any:
        """Run one call of `generate` with a fixed seed."""
        kwargs = {"do_sample": False, "eos_token_id": None} | kwargs
        kwargs |= {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": new_tokens}
        torch.manual_seed(7)
        return lookahead.generate(
            self._model, ids, lookahead_config=config, attention_mask=torch.ones_like(ids), **kwargs
        )

    def plain(self, sampled: bool) -> Any:
        """Output of decoding without drafts, greedy or sampled."""
        if sampled not in self._plain:
            self._plain[sampled] = self.decode(PLAIN, self._ids, self._new_tokens, **(SAMPLED if sampled else {}))
        return self._plain[sampled]

    def add(self, way: str, output: Any, logits: Any, sampled: bool = False) -> None:
        """Compare the output of another way; its logits belong to the last tokens of plain decoding."""
        plain = self.plain(sampled)
        pairs = list(zip(logits, plain.logits[-len(logits) :], strict=True))
        self.rows.append(
            {
                "kind": "call",
                "way": way,
                "rows": len(output.sequences),
                "tokens": len(pairs) * len(output.sequences),
                "logits": sum(got.numel() for got, _ in pairs),
                "other_bits": sum(int((got != theirs).sum()) for got, theirs in pairs),
                "other_texts": int(not torch.equal(output.sequences, plain.sequences)),
                "steps": output.statistics.steps,
                "nodes": sum(output.statistics.nodes_per_step),
            }
        )

    def drafts(self, number: int, budgets: tuple[int, ...], sampled: bool) -> None:
        """Compare drafts of each number of nodes; the preset rotates with `number`."""
        for turn, budget in enumerate(budgets):
            preset = PRESETS[(number + turn) % len(PRESETS)]
            output = self.decode(drafts_of(preset, budget), self._ids, self._new_tokens, **(SAMPLED if sampled else {}))
            self.add(f"{'sampled' if sampled else 'greedy'}, {preset}, {budget}", output, output.logits, sampled)

    def splits(self) -> None:
        """Compare texts that continue the first half of the answer, given as a prompt and as a cache."""
        config, half = LookaheadConfig(step_budget=16, invariant=True), self._new_tokens // 2
        first = self.decode(config, self._ids, half)
        rest = self._new_tokens - half
        again = self.decode(config, first.sequences, rest)
        self.add("the answer as a prompt", again, again.logits)
        cached = self.decode(config, first.sequences, rest, past_key_values=first.past_key_values)
        self.add("the answer as a cache", cached, (*first.logits, *cached.logits))


def compare(name: str, dtype: str, number: int, options: Options) -> Iterator[Row]:
    """Yield rows of one prompt, and of a batch that begins with it; a refused model is an error row."""
    share, (model, tokenizer) = SHARES[name], load(name, dtype, options.models, options.device)
    if tokenizer is None:
        draws = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 200, (8, share.tokens), generator=draws)
    else:
        texts = read_texts(Path(options.data) / PROMPTS[name])
        texts = [texts[(number + row) % len(texts)] * 9 for row in range(8)]
        ids = torch.stack([tokenizer(text, return_tensors="pt").input_ids[0, : share.tokens] for text in texts])
    ids = ids.to(options.device)
    alone = Comparison(model, ids[:1], share.new_tokens)
    try:
        alone.plain(sampled=False)
    except UnsupportedArgumentError as error:
        yield {"kind": "refused", "model": name, "dtype": dtype, "prompt": number, "error": f"{name}, {dtype}: {error}"}
        return
    alone.drafts(number, BUDGETS, sampled=False)
    is_large = name == "random"
    if not is_large:
        alone.drafts(number, (BUDGETS[1 + number % 4],), sampled=True)
        alone.splits()
    batch = Comparison(model, ids[: 2 + number // 4 % 7], share.new_tokens)
    if number % 4 == 3 and not is_large:
        for sampled in (False, True):
            batch.drafts(number, (BUDGETS[1 + number // 4 % 4],), sampled)
    for row in (*alone.rows, *batch.rows):
        common: Row = {"model": name, "dtype": dtype, "prompt": number, **row}
        if row["other_bits"] or row["other_texts"]:
            common["error"] = f"{name}, {dtype}, prompt {number}: {row['way']} changed {row['other_bits']} logits"
        yield common


def probe(options: Options) -> Probe:
    """Make a unit for each prompt, model and type."""
    units = [
        Unit(f"{name}, {dtype}, {number}", partial(compare, name, dtype, number, options))
        for name, share in SHARES.items()
        for dtype in ("bfloat16", "float16")
        for number in range(min(getattr(share, dtype), options.limit))
    ]
    return Probe(units)
