"""Measure what rounding the weights to eight bits changes (`pack_weights="int8"`).

For each prompt the model continues the text greedily. After every token of that continuation its next-token
distribution is compared with that of the rounded model: the Kullback-Leibler divergence, and whether both find the
same token likeliest. Beside it, the same for bfloat16 where the model is in float32. Then the rounded model writes for
itself, with drafts and without, which must be the same text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lookahead import LookaheadConfig
from lookahead.backends.transformers.shared_clone import SharedClone
from lookahead.bench.comparison import first_difference
from lookahead.bench.prompts import Prompt
from lookahead.bench.rows import Row
from lookahead.config import INT8
from probe import Probe, Unit, generate, load_model, option, prompts_of, token_ids

PLAIN = LookaheadConfig(preset="autoregressive", pack_weights=INT8)
DRAFTS = LookaheadConfig(pack_weights=INT8)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, or the folder of a model")
    dtype: str = option("float32", "number type of the weights")
    limit: int = option(40, "take the first so many prompts")
    max_new_tokens: int = option(64, "tokens to generate at most")


class Bench:
    """One model, its rounded twin, and, in float32, the same in bfloat16."""

    def __init__(self, options: Options) -> None:
        self.loaded = load_model(options.model, options.dtype)
        self._length = options.max_new_tokens
        self._rounded = SharedClone(self.loaded.model, None, INT8)
        self._others: dict[str, Any] = {INT8: self._rounded.module}
        if options.dtype == "float32":
            self._others["bfloat16"] = load_model(options.model, "bfloat16").model

    def rows(self, prompt: Prompt) -> Iterator[Row]:
        """What each of the others makes of the model's own text, and the text of the rounded one."""
        model: Any = self.loaded.model
        ids = token_ids(self.loaded.tokenizer, model, prompt.text)
        text, _ = generate(model, ids, None, max_new_tokens=self._length)
        whole = torch.cat([ids, torch.tensor([text])], dim=1)
        own = _distributions(model, whole, len(text))
        for name, other in self._others.items():
            theirs = _distributions(other, whole, len(text))
            divergence = (own.exp() * (own - theirs)).sum(dim=-1)
            same = own.argmax(dim=-1) == theirs.argmax(dim=-1)
            yield {
                "kind": "distributions",
                "prompt": prompt.id,
                "method": name,
                "tokens": len(text),
                "divergence": round(float(divergence.mean()), 7),
                "same_token": round(float(same.double().mean()), 5),
            }
        plain, _ = generate(model, ids, PLAIN, max_new_tokens=self._length)
        drafted, output = generate(model, ids, DRAFTS, max_new_tokens=self._length)
        row = {"kind": "text", "prompt": prompt.id, "tokens": len(plain), "steps": output.statistics.steps}
        row |= {"differs": int(plain != text), "first_difference": first_difference(plain, text)}
        if drafted != plain:
            row["error"] = f"{prompt.id}: drafts changed the text of the rounded model"
        yield row


def _distributions(model: Any, text: torch.Tensor, last: int) -> torch.Tensor:
    """Logarithms of the next-token probabilities before each of the `last` tokens of a text, `[last, vocabulary]`."""
    with torch.no_grad():
        logits = model(text, use_cache=False).logits[0, -last - 1 : -1]
    return logits.double().log_softmax(dim=-1)  # type: ignore[no-any-return]


def probe(options: Options) -> Probe:
    """A unit for each prompt."""
    path = Path(options.prompts)
    bench = Bench(options)
    units = [Unit(prompt.id, partial(bench.rows, prompt)) for prompt in prompts_of(path, options.limit)]
    settings = {"model": bench.loaded.settings(), "prompts": path.name}
    return Probe(units, {**settings, "max_new_tokens": options.max_new_tokens})
