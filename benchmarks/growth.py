"""Measure how CPU time per token and resident memory grow with the length of the text.

A small Llama with random weights and a large context continues a short prompt; nothing ends the text early. Each method
runs in a process of its own, so that its memory is its own, and methods take turns. Marks are set at the lengths: a row
holds the CPU time per token since the mark before it, and the resident memory there.

Random weights under sampling are the hardest case for a drafting method, for hardly anything can be foreseen; greedily
(`--temperatures 0`) the text of such a model soon repeats itself, and nearly all can.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from time import process_time
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from lookahead import LookaheadConfig
from lookahead.bench.machine import resident_bytes
from lookahead.bench.rows import Row
from probe import Probe, Unit, generate, option

METHODS: dict[str, LookaheadConfig | None] = {
    "transformers": None,
    "plain engine": LookaheadConfig(preset="autoregressive"),
    "auto": LookaheadConfig(preset="auto"),
}
PROMPT_TOKENS = 32
WARM_UP_TOKENS = 16
VOCABULARY = 4096


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    lengths: tuple[int, ...] = option((256, 1024, 4096), "marks, in new tokens")
    temperatures: tuple[float, ...] = option((1.0,), "of the draws, 0 for greedy decoding")
    repeats: int = option(3, "runs of each method")


@dataclass
class Marks:
    """What was used when the text had grown to certain lengths.

    Attributes:
        lengths: The lengths to note, in new tokens.
        reached: For each of them: new tokens there, CPU seconds since the beginning, resident bytes.
    """

    lengths: Sequence[int]
    reached: list[tuple[int, float, int | None]] = field(default_factory=list)
    start: float = field(default_factory=process_time)

    def note(self, tokens: int) -> None:
        """The text has so many new tokens now."""
        while len(self.reached) < len(self.lengths) and tokens >= self.lengths[len(self.reached)]:
            self.reached.append((tokens, process_time() - self.start, resident_bytes()))


class MarkingCriterion(StoppingCriteria):
    """Never stops, and tells the marks of every token."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._marks.note(input_ids.shape[1] - PROMPT_TOKENS)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def build_model(longest: int) -> LlamaForCausalLM:
    """The model: 6 million parameters, room for the longest text, no token that ends one."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=longest + PROMPT_TOKENS + 1024, **sizes, **none)).eval()


def measure(method: str, lengths: Sequence[int], temperature: float, seed: int) -> list[Row]:
    """One run in this process; a row for each mark."""
    model = build_model(lengths[-1])
    prompt = torch.randint(VOCABULARY, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    arguments = {"do_sample": temperature > 0, **sampling}
    torch.manual_seed(seed)
    generate(model, prompt, METHODS[method], max_new_tokens=WARM_UP_TOKENS, **arguments)
    before = resident_bytes()
    marks = Marks(lengths)
    arguments |= {"max_new_tokens": lengths[-1], "stopping_criteria": [MarkingCriterion(marks)]}
    torch.manual_seed(seed)
    output, whole = generate(model, prompt, METHODS[method], **arguments)
    steps = len(output) if METHODS[method] is None else whole.statistics.steps
    digest = hashlib.sha256(json.dumps(output).encode()).hexdigest()[:16]
    rows: list[Row] = []
    start, last_tokens, last_seconds = 0, 0, 0.0
    for length, (tokens, seconds, memory) in zip(lengths, marks.reached, strict=True):
        row = {"kind": "mark", "temperature": temperature, "repeat": seed, "method": method}
        row |= {"S": round(len(output) / steps, 4), "from": start + 1, "to": length, "tokens": tokens}
        row |= {"cpu_seconds": round(seconds, 6), "resident_bytes": memory, "output": digest}
        row["ms_per_token"] = 1000 * (seconds - last_seconds) / max(1, tokens - last_tokens)
        row["mib"] = None if memory is None or before is None else (memory - before) / 2**20
        rows.append(row)
        start, last_tokens, last_seconds = length, tokens, seconds
    return rows


def quiet() -> None:
    """Make a fresh process ready: it has one thread, and warns of nothing."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()


def in_own_process(*asked: Any) -> list[Row]:
    """`measure`, in a fresh process that ends afterwards."""
    with get_context("spawn").Pool(1, quiet) as pool:
        return pool.apply(measure, asked)


def compared(lengths: Sequence[int], temperature: float, repeat: int) -> Iterator[Row]:
    """All methods, and whether their outputs are those of transformers."""
    plain = ""
    for method in METHODS:
        for row in in_own_process(method, lengths, temperature, repeat):
            plain = plain or row["output"]
            row["identical"] = row["output"] == plain
            error = {} if row["identical"] else {"error": f"{method}, temperature {temperature:g}: another text"}
            yield {**row, **error}


def probe(options: Options) -> Probe:
    """The units: all methods at one temperature, under one seed."""
    lengths = sorted(set(options.lengths))
    units = [
        Unit(f"temperature {temperature:g}, repeat {repeat}", partial(compared, lengths, temperature, repeat))
        for temperature in options.temperatures
        for repeat in range(options.repeats)
    ]
    return Probe(units)
