"""Measure what short calls cost beside `model.generate`: fixed costs of a call, the passes of the model, and the rest.

Calls with the same prompt and seed take turns, `model.generate` first; CPU time of the process counts, since wall time
counts the work of others on a shared machine. Forward hooks time the passes, so what remains is the time around them:
for calls of one new token nearly all of it is fixed, for longer ones it is what each step takes. Drafts are random
tokens' for `--model tiny`, a Llama of two million random weights: the hardest case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch

import lookahead
from lookahead import LookaheadConfig
from lookahead.bench.models import load
from lookahead.bench.rows import Row
from lookahead.bench.suite import ModelSpec
from probe import Probe, Unit, load_model, option

TINY = "tiny"
TINY_CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
METHODS = {
    "generate": None,
    "plain engine": LookaheadConfig(preset="autoregressive"),
    "auto": LookaheadConfig(preset="auto"),
}
"""What takes turns; `model.generate` without a configuration."""

PROMPT_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option(TINY, "`tiny`, `random`, `demo`, or the folder of a model")
    dtype: str = option("float32", "number type of the weights")
    new_tokens: tuple[int, ...] = option((1, 16, 64), "tokens that a call adds")
    calls: int = option(40, "calls of each length and method, after a tenth as many that do not count")


class PassClock:
    """CPU seconds of the forward passes of a model, and of clones that share its hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds = 0.0
        self.passes = 0
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._start = process_time()

    def _end(self, *_: Any) -> None:
        self.seconds += process_time() - self._start
        self.passes += 1

    def forget(self) -> None:
        """Begin anew."""
        self.seconds, self.passes = 0.0, 0


def measure(model: Any, clock: PassClock, sample: bool, tokens: int, calls: int) -> Iterator[Row]:
    """A row for each method: medians over calls with other prompts; differences and ratios are of neighbours."""
    vocabulary = model.get_input_embeddings().num_embeddings
    draws = torch.Generator().manual_seed(0)
    taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in METHODS}
    settings = {"max_new_tokens": tokens, "do_sample": sample, "eos_token_id": None, "pad_token_id": 0}
    warm_up = max(2, calls // 10)
    for call in range(warm_up + calls):
        prompt = torch.randint(vocabulary, (1, PROMPT_TOKENS), generator=draws)
        for name, config in METHODS.items():
            clock.forget()
            torch.manual_seed(call)
            start = process_time()
            if config is None:
                model.generate(prompt, **settings)
            else:
                lookahead.generate(model, prompt, lookahead_config=config, **settings)
            taken[name].append((process_time() - start, clock.seconds, clock.passes))
    plain = [whole for whole, _, _ in taken["generate"][warm_up:]]
    for name, values in taken.items():
        whole, passes, steps = zip(*values[warm_up:], strict=True)
        yield {
            "kind": "call",
            "method": name,
            "decoding": "sampled" if sample else "greedy",
            "new_tokens": tokens,
            "calls": calls,
            "steps": round(sum(steps) / calls, 3),
            "seconds": round(median(whole), 9),
            "passes": round(median(passes), 9),
            "around": round(median(one - other for one, other in zip(whole, passes, strict=True)), 9),
            "beyond_generate": round(median(one - other for one, other in zip(whole, plain, strict=True)), 9),
            "speed": round(median(other / one for one, other in zip(whole, plain, strict=True)), 4),
        }


def probe(options: Options) -> Probe:
    """The units: each number of new tokens, greedy and sampled."""
    if options.model == TINY:
        spec = ModelSpec("tiny random Llama", None, random=TINY_CONFIG, dtype=options.dtype)
        loaded = load(spec, torch.device("cpu"))
    else:
        loaded = load_model(options.model, options.dtype)
    clock = PassClock(loaded.model)
    units = [
        Unit(f"{name}, {tokens}", partial(measure, loaded.model, clock, sample, tokens, options.calls))
        for name, sample in (("greedy", False), ("sampled", True))
        for tokens in options.new_tokens
    ]
    return Probe(units, {"model": loaded.settings()})
