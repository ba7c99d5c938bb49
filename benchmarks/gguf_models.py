"""Measure GGUF models in llama.cpp: texts, steps and CPU time, beside what the binding itself offers.

The model is converted to each of `--types`. Each prompt is continued greedily, past the end of the text, by

- `llama_cpp.Llama`, once as the other methods compute (float32 keys and values, no flash attention), once as it does by
  default, and once with another `n_ubatch`, which changes nothing but how many tokens of the prompt go together;
- `Llama` with `LlamaPromptLookupDecoding`, the binding's own drafts;
- this library: without drafts, with as many nodes as pay, both with `fast_kv` as well, and with fixed numbers of nodes;
- for float32 files transformers in float32.

They take turns, prompt by prompt, in one process. `speed` is over `Llama` with keys and values of the same type, and
`differs` is about the first method. Sampled texts are compared with transformers' and with those without drafts, under
the same seed.
"""

from __future__ import annotations

import json
import shutil
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
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead import LookaheadConfig
from lookahead.bench.models import Prompt
from lookahead.bench.rows import Row
from lookahead.bench.summary import first_difference
from lookahead.demo import demo_model_path
from probe import Probe, Unit, generate, load_model, option, prompts_of, token_ids

EXACT = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
SMALL_BATCH = 16
RANDOM = "random"
RANDOM_SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
RANDOM_SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
_PLAIN = LookaheadConfig(preset="autoregressive")
_TOOL = Path(__file__).parent.parent / "tools" / "convert_to_gguf.py"

Measured = tuple[list[int], int]
"""The new tokens, and the steps that they took."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, `random` for a Llama of 91 million weights, or the folder of a Llama")
    types: tuple[str, ...] = option(("f32", "q8_0", "q4_k_m"), "number types of the weights")
    limit: int = option(10, "take the first so many prompts")
    max_new_tokens: int = option(128, "tokens to generate")
    nodes: tuple[int, ...] = option((8, 32), "fixed numbers of nodes")


class Bench:
    """One file, and every way of decoding with it.

    Args:
        options: What to measure.
        kind: Number type of its weights.
        folder: What it was made of.
        path: The file.
    """

    def __init__(self, options: Options, kind: str, folder: Path, path: Path) -> None:
        self._length, self._kind = options.max_new_tokens, kind
        self._model: Any = lookahead.load_gguf(path)
        self._fast: Any = lookahead.load_gguf(path, fast_kv=True)
        self._model.generation_config.eos_token_id = self._fast.generation_config.eos_token_id = None
        load = partial(llama_cpp.Llama, str(path), n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
        exact = partial(load, **EXACT)
        drafts = {"draft_model": LlamaPromptLookupDecoding(), "logits_all": True}
        self._methods: dict[str, Callable[[list[int]], Measured]] = {
            "llama.cpp": partial(self._plainly, exact()),
            "llama.cpp, its defaults": partial(self._plainly, load()),
            "llama.cpp, small batches": partial(self._plainly, exact(n_ubatch=SMALL_BATCH)),
            "llama.cpp, prompt lookup": partial(self._plainly, exact(**drafts)),
            "no drafts": partial(self._lookahead, self._model, _PLAIN),
            "lookahead": partial(self._lookahead, self._model, LookaheadConfig()),
            "no drafts, fast_kv": partial(self._lookahead, self._fast, _PLAIN),
            "lookahead, fast_kv": partial(self._lookahead, self._fast, LookaheadConfig()),
        }
        for nodes in options.nodes:
            config = LookaheadConfig(step_budget=nodes)
            self._methods[f"lookahead, {nodes} nodes"] = partial(self._lookahead, self._model, config)
        self._reference: Any = None
        if kind == "f32":
            self._reference = load_model(str(folder), "float32").model
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
        plain: dict[bool, float] = {}  # CPU time of llama.cpp's own decoding, with its default cache or not
        named = {"type": self._kind, "prompt": prompt.id}
        for name, method in self._methods.items():
            start = process_time()
            tokens, steps = method(ids)
            cpu = 1000 * (process_time() - start) / len(tokens)
            fast = name == "llama.cpp, its defaults" or name.endswith("fast_kv")
            plain.setdefault(fast, cpu)
            expected = expected or tokens
            row = {**named, "method": name, "cache": "float16" if fast else "float32", "tokens": len(tokens)}
            row |= {"steps": steps, "tokens_per_step": len(tokens) / steps, "cpu_ms": cpu, "speed": plain[fast] / cpu}
            yield {**row, **compared(tokens, expected)}
        configs = LookaheadConfig(), _PLAIN
        sampled, drawn = (self._sampled(self._model, ids, prompt.number, config) for config in configs)
        yield {**named, "method": "sampled, no drafts", **compared(sampled, drawn)}
        if self._reference is not None:
            reference = self._sampled(self._reference, ids, prompt.number, None)
            yield {**named, "method": "sampled", **compared(sampled, reference)}

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

    def _lookahead(self, model: Any, config: LookaheadConfig, ids: list[int]) -> Measured:
        tokens, output = generate(model, torch.tensor([ids]), config, max_new_tokens=self._length)
        return tokens, output.statistics.steps

    def _transformers(self, ids: list[int]) -> Measured:
        tokens, _ = generate(self._reference, torch.tensor([ids]), None, max_new_tokens=self._length)
        return tokens, len(tokens)

    def _sampled(self, model: Any, ids: list[int], seed: int, config: LookaheadConfig | None) -> list[int]:
        torch.manual_seed(seed)
        return generate(model, torch.tensor([ids]), config, max_new_tokens=self._length, **SAMPLING)[0]


def compared(tokens: list[int], expected: list[int]) -> Row:
    """Whether and where a text differs from another."""
    place = first_difference(tokens, expected)
    return {"first_difference": place, "differs": int(place is not None), "equal": int(place is None)}


def probe(options: Options) -> Probe:
    """The units: each prompt with each type."""
    path = Path(options.prompts)
    prompts = prompts_of(path, options.limit)
    folder = demo_model_path() if options.model in ("demo", RANDOM) else Path(options.model)
    benches: dict[str, Bench] = {}
    kept = tempfile.TemporaryDirectory()  # as long as the units are

    def measure(kind: str, prompt: Prompt) -> Iterator[Row]:
        if kind not in benches:
            benches.clear()
            made = _random_model(Path(kept.name)) if options.model == RANDOM else folder
            file = Path(kept.name) / f"{kind}.gguf"
            subprocess.run([sys.executable, _TOOL, made, file, "--type", kind], check=True, capture_output=True)
            benches[kind] = Bench(options, kind, made, file)
        yield from benches[kind].rows(prompt)

    units = [
        Unit(f"{kind} {prompt.id}", partial(measure, kind, prompt)) for kind in options.types for prompt in prompts
    ]
    settings = {
        "model": {"name": RANDOM if options.model == RANDOM else folder.name},
        "prompts": path.name,
        "max_new_tokens": options.max_new_tokens,
    }
    return Probe(units, {**settings, "llama_cpp": llama_cpp.__version__})


def _random_model(scratch: Path) -> Path:
    """A Llama with random weights and the demonstration model's tokens: large enough that its weights fill no cache."""
    folder = scratch / RANDOM
    if not folder.exists():
        torch.manual_seed(0)
        config = json.loads((demo_model_path() / "config.json").read_text())
        LlamaForCausalLM(LlamaConfig(**config | RANDOM_SIZES)).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model_path() / name, folder)
    return folder
