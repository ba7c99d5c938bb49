"""Measure how often a 16-bit model's greedy text differs from plain decoding.

In 16 bits a matrix product of many rows rounds differently from one of a single row, and where two tokens are
nearly equally likely the other one may be chosen. For each prompt plain `model.generate` runs once, which gives
the text to compare with and, for each of its tokens, the gap between the two largest logits. Compared with it are

- the same loop without drafts (`autoregressive`), which must give the same text, and with them (`lookahead`);
- both with `invariant=True`, whose texts must be the same;
- transformers' own `generate`, for scale: the same prompt in a batch of four copies, the prompt in a batch of
  four different ones (padded), and the same model in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import lookahead
from lookahead import LookaheadConfig
from lookahead.bench.comparison import first_difference
from lookahead.bench.prompts import Prompt
from lookahead.bench.rows import Row
from probe import Probe, Unit, load_model, option, prompts_of, token_ids

_PAPER: dict[str, Any] = {"preset": "paper", "window_size": 15, "ngram_size": 5, "guess_set_size": 15}
CONFIGS = {
    "autoregressive": LookaheadConfig(preset="autoregressive", invariant=False),
    "lookahead": LookaheadConfig(**_PAPER, invariant=False),
    "autoregressive, invariant": LookaheadConfig(preset="autoregressive", invariant=True),
    "lookahead, invariant": LookaheadConfig(**_PAPER, invariant=True),
}

BATCH = 4
"""Rows of the batches that plain decoding is compared with."""

PROBE_ROWS, PROBE_KEYS = 75, 256
"""Size of the probe of single operations: about the nodes of a step, and a text of middling length."""

Measured = tuple[list[int], Row]
"""The new tokens, and what else is known about how they came about."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, or the folder of a model")
    dtype: str = option("bfloat16", "number type of the weights")
    device: str = option("cpu", "where the model runs")
    limit: int = option(40, "take the first so many prompts")
    max_new_tokens: int = option(128, "tokens to generate at most")


class Bench:
    """One model, and every way of decoding with it that is compared.

    Args:
        options: What to measure.
        prompts: All prompts of the file, from which batches are put together.
    """

    def __init__(self, options: Options, prompts: Sequence[Prompt]) -> None:
        self._options = options
        self._prompts = prompts
        self._batches: dict[str, list[int]] = {}
        self.loaded = load_model(options.model, options.dtype)
        self.model: Any = self.loaded.model.to(options.device)
        self._methods: dict[str, Callable[[Prompt], Measured]] = {
            **{name: partial(self._with_lookahead, config) for name, config in CONFIGS.items()},
            "copies": lambda prompt: (self._in_copies(prompt), {}),
            "batch": lambda prompt: (self._in_batch(prompt), {}),
            "float32": lambda prompt: (self._in_float32(prompt), {}),
        }

    def rows(self, prompt: Prompt) -> Iterator[Row]:
        """Plain `generate`, with the gap between the two largest logits at each token; then all that is compared."""
        output: Any = self._generate(
            self.model.generate, self._ids(prompt), return_dict_in_generate=True, output_logits=True
        )
        expected = self._new(output.sequences, prompt)
        best = torch.cat(output.logits).float().topk(2, dim=-1).values  # [tokens, 2]
        gaps = [round(gap, 6) for gap in (best[:, 0] - best[:, 1]).tolist()]
        row = {"prompt": prompt.id, "tokens": len(expected)}
        yield {"kind": "reference", **row, "output": expected, "gaps": gaps}
        found: dict[str, list[int]] = {}
        for name, method in self._methods.items():
            tokens, more = method(prompt)
            found[name] = tokens
            place = first_difference(tokens, expected)
            row = {"kind": "measurement", "prompt": prompt.id, "method": name, "tokens": len(tokens), **more}
            row |= {"first_difference": place, "differs": int(place is not None)}
            row["gap"] = gaps[place] if place is not None and place < len(gaps) else None
            row["compared"] = len(tokens) if place is None else place + 1
            if name == "autoregressive" and place is not None:
                row["error"] = f"{prompt.id}: steps without a draft gave another text"
            if name == "lookahead, invariant" and tokens != found["autoregressive, invariant"]:
                row["error"] = f"{prompt.id}: drafts changed the text although passes were invariant"
            yield row

    def _with_lookahead(self, config: LookaheadConfig, prompt: Prompt) -> Measured:
        settings = {"lookahead_config": config, "return_dict_in_generate": True}
        output = self._generate(partial(lookahead.generate, self.model), self._ids(prompt), **settings)
        nodes = output.statistics.nodes_per_step
        more = {"steps": len(nodes), "nodes": sum(nodes), "config": asdict(config)}
        return self._new(output.sequences, prompt), more

    def _in_copies(self, prompt: Prompt) -> list[int]:
        """The prompt several times over: nothing but the number of rows is another."""
        return self._rows(self._ids(prompt).repeat(BATCH, 1))[0]

    def _in_batch(self, prompt: Prompt) -> list[int]:
        """The prompt among its neighbours in the file, padded to the same length."""
        if prompt.id not in self._batches:
            start = prompt.number - prompt.number % BATCH
            batch = [self._prompts[(start + row) % len(self._prompts)] for row in range(BATCH)]
            ids = [self._ids(member)[0] for member in batch]
            longest = max(len(row) for row in ids)
            mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in ids]).long()
            pad = self.model.generation_config.pad_token_id or 0
            padded = [torch.nn.functional.pad(row, (longest - len(row), 0), value=pad) for row in ids]
            texts = self._rows(torch.stack(padded), mask.to(self.model.device))
            self._batches.update({member.id: text for member, text in zip(batch, texts, strict=True)})
        return self._batches[prompt.id]

    def _in_float32(self, prompt: Prompt) -> list[int]:
        return self._new(self._generate(self._float32_model.generate, self._ids(prompt)), prompt)

    @cached_property
    def _float32_model(self) -> Any:
        return load_model(self._options.model, "float32").model.to(self._options.device)

    def _rows(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[list[int]]:
        """The new tokens of each row of a batch, up to its end-of-sequence token; ids: [B, S]."""
        output = self._generate(self.model.generate, ids, mask)
        eos = self.model.generation_config.eos_token_id
        stops = set(eos if isinstance(eos, list) else [eos])
        return [until(row, stops) for row in output[:, ids.shape[1] :].tolist()]

    def _generate(self, call: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **arguments: Any) -> Any:
        mask = torch.ones_like(ids) if mask is None else mask
        length = self._options.max_new_tokens
        return call(ids, attention_mask=mask, max_new_tokens=length, do_sample=False, **arguments)

    def _new(self, sequences: torch.Tensor, prompt: Prompt) -> list[int]:
        found: list[int] = sequences[0, self._ids(prompt).shape[1] :].tolist()
        return found

    def _ids(self, prompt: Prompt) -> torch.Tensor:
        return token_ids(self.loaded.tokenizer, self.model, prompt.text)


def until(tokens: list[int], stops: set[int | None]) -> list[int]:
    """The tokens up to the first one that ends a text; a batch goes on with padding behind it."""
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]


def operations(model: Any) -> Iterator[Row]:
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
    yield {"kind": "probe", "rows": PROBE_ROWS, "linear": share(linear), "attention": share([attention])}


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


def probe(options: Options) -> Probe:
    """The units: single operations, then each prompt."""
    path = Path(options.prompts)
    prompts = prompts_of(path)
    bench = Bench(options, prompts)
    units = [Unit("probe", partial(operations, bench.model))]
    units += [Unit(prompt.id, partial(bench.rows, prompt)) for prompt in prompts[: options.limit]]
    settings = {"model": bench.loaded.settings(), "prompts": path.name}
    return Probe(units, {**settings, "max_new_tokens": options.max_new_tokens})
