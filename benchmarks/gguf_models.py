"""Measure GGUF models in llama.cpp: texts, steps and CPU time, beside what the binding itself offers.

The model is converted to each of `--types`. Each prompt is continued greedily, past the end of the text, by

- `llama_cpp.Llama`, once as the other methods compute (float32 keys and values, no flash attention), once as it does by
  default, and once with another `n_ubatch`, which changes nothing but how many tokens of the prompt go together;
- `Llama` with `LlamaPromptLookupDecoding`, the binding's own drafts;
- this library: without drafts, with as many nodes as pay, and with fixed numbers of nodes;
- for float32 files transformers in float32.

They take turns, prompt by prompt, in one process. `differs` is about the first of them, except for transformers' own
sampled text, which is compared with this library's under the same seed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import llama_cpp
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import lookahead
from lookahead import LookaheadConfig
from lookahead.bench.comparison import first_difference
from lookahead.bench.prompts import Prompt
from lookahead.bench.rows import Row
from lookahead.demo import demo_model_path
from probe import Probe, Unit, generate, load_model, option, prompts_of, token_ids

EXACT = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
SMALL_BATCH = 16
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
_TOOL = Path(__file__).parent.parent / "tools" / "convert_to_gguf.py"

Measured = tuple[list[int], int]
"""The new tokens, and the steps that they took."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, or the folder of a Llama")
    types: tuple[str, ...] = option(("f32", "q8_0", "q4_k_m"), "number types of the weights")
    limit: int = option(10, "take the first so many prompts")
    max_new_tokens: int = option(128, "tokens to generate")
    nodes: tuple[int, ...] = option((8, 32), "fixed numbers of nodes")


class Bench:
    """One file, and every way of decoding with it.

    Args:
        options: What to measure.
        kind: Number type of its weights.
        path: The file.
    """

    def __init__(self, options: Options, kind: str, path: Path) -> None:
        self._length, self._kind = options.max_new_tokens, kind
        self._model: Any = lookahead.load_gguf(path)
        self._model.generation_config.eos_token_id = None
        load = partial(llama_cpp.Llama, str(path), n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
        exact = partial(load, **EXACT)
        drafts = {"draft_model": LlamaPromptLookupDecoding(), "logits_all": True}
        self._methods: dict[str, Callable[[list[int]], Measured]] = {
            "llama.cpp": partial(self._plainly, exact()),
            "llama.cpp, its defaults": partial(self._plainly, load()),
            "llama.cpp, small batches": partial(self._plainly, exact(n_ubatch=SMALL_BATCH)),
            "llama.cpp, prompt lookup": partial(self._plainly, exact(**drafts)),
            "no drafts": partial(self._lookahead, LookaheadConfig(preset="autoregressive")),
            "lookahead": partial(self._lookahead, LookaheadConfig()),
        }
        for nodes in options.nodes:
            config = LookaheadConfig(step_budget=nodes)
            self._methods[f"lookahead, {nodes} nodes"] = partial(self._lookahead, config)
        self._reference: Any = None
        if kind == "f32":
            self._reference = load_model(options.model, "float32").model
            self._reference.generation_config.eos_token_id = None
            self._methods["transformers"] = self._transformers
        for method in self._methods.values():  # once untimed: memory is touched, loops are compiled
            method(self.tokens("def"))

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = token_ids(self._model.tokenizer, self._model, text)[0].tolist()
        return ids

    def rows(self, prompt: Prompt) -> Iterator[Row]:
        """What each method gave for a prompt, and took."""
        ids = self.tokens(prompt.text)
        expected: list[int] = []
        for name, method in self._methods.items():
            start = process_time()
            tokens, steps = method(ids)
            row = {"type": self._kind, "prompt": prompt.id, "method": name, "tokens": len(tokens), "steps": steps}
            row |= {"tokens_per_step": len(tokens) / steps, "cpu_ms": 1000 * (process_time() - start) / len(tokens)}
            expected = expected or tokens
            yield {**row, **compared(tokens, expected)}
        if self._reference is not None:
            texts = [self._sampled(model, ids, prompt.number) for model in (self._reference, self._model)]
            yield {"type": self._kind, "prompt": prompt.id, "method": "sampled", **compared(texts[1], texts[0])}

    def _plainly(self, llama: Any, ids: list[int]) -> Measured:
        """By the binding; a step is a call of its `eval`."""
        steps, tokens = 0, []
        whole = type(llama).eval

        def counted(new: list[int]) -> None:
            nonlocal steps
            steps += 1
            whole(llama, new)

        llama.eval = counted  # of this one object
        llama.reset()
        for token in llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(int(token))
            if len(tokens) == self._length:
                break
        return tokens, steps

    def _lookahead(self, config: LookaheadConfig, ids: list[int]) -> Measured:
        tokens, output = generate(self._model, torch.tensor([ids]), config, max_new_tokens=self._length)
        return tokens, output.statistics.steps

    def _transformers(self, ids: list[int]) -> Measured:
        tokens, _ = generate(self._reference, torch.tensor([ids]), None, max_new_tokens=self._length)
        return tokens, len(tokens)

    def _sampled(self, model: Any, ids: list[int], seed: int) -> list[int]:
        torch.manual_seed(seed)
        config = None if model is self._reference else LookaheadConfig()
        return generate(model, torch.tensor([ids]), config, max_new_tokens=self._length, **SAMPLING)[0]


def compared(tokens: list[int], expected: list[int]) -> Row:
    """Whether and where a text differs from another."""
    place = first_difference(tokens, expected)
    return {"first_difference": place, "differs": int(place is not None), "equal": int(place is None)}


def probe(options: Options) -> Probe:
    """The units: each prompt with each type."""
    path = Path(options.prompts)
    prompts = prompts_of(path, options.limit)
    folder = demo_model_path() if options.model == "demo" else Path(options.model)
    benches: dict[str, Bench] = {}

    def measure(kind: str, prompt: Prompt) -> Iterator[Row]:
        if kind not in benches:
            benches.clear()
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(scratch) / f"{kind}.gguf"
                subprocess.run([sys.executable, _TOOL, folder, file, "--type", kind], check=True)
                benches[kind] = Bench(options, kind, file)
        yield from benches[kind].rows(prompt)

    units = [
        Unit(f"{kind} {prompt.id}", partial(measure, kind, prompt)) for kind in options.types for prompt in prompts
    ]
    settings = {"model": {"name": folder.name}, "prompts": path.name, "max_new_tokens": options.max_new_tokens}
    return Probe(units, {**settings, "llama_cpp": llama_cpp.__version__})
