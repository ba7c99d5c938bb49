"""Measure GGUF models in llama.cpp: texts, steps and CPU time, compared with the methods of llama-cpp-python.

The model is converted to each of `--types`. Each prompt is continued greedily, past the end of the text, by

- `llama_cpp.Llama` with the settings of the other methods (float32 keys and values, no flash attention), and with its
  defaults;
- `Llama` with `LlamaPromptLookupDecoding`, the drafts of llama-cpp-python;
- this library: without drafts and with the default number of nodes, both also with `fast_kv`, and with fixed numbers;
- transformers in float32, for float32 files.

Methods alternate, prompt by prompt, in one process. `speed` is relative to `Llama` with keys and values of the same
type, and `equal` compares with the first method. Sampled texts are compared with transformers and with texts without
drafts, with the same seed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import llama_cpp
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import lookahead
from cases import Case, Counts, encoder_of, generate, now, read_cases
from lookahead import LookaheadConfig
from lookahead.bench.rows import Row
from lookahead.bench.summary import first_difference
from models import RANDOM, load_model, load_tokenizer, model_folder, save_random
from probe import Probe, Turns, Unit, Way, option

EXACT = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
PLAIN = LookaheadConfig(preset="autoregressive")
FRESH = LookaheadConfig(memory="request")
TOOL = Path(__file__).parent.parent / "tools" / "convert_to_gguf.py"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, `91m` for a random Llama of 91 million weights, or the folder of a Llama")
    types: list[str] = option(["f32", "q8_0", "q4_k_m"], "number types of the weights")
    limit: int = option(10, "number of prompts")
    max_new_tokens: int = option(128, "tokens to generate")
    nodes: list[int] = option([8, 32], "fixed numbers of nodes")


class Bench:
    """One GGUF file, with all methods to decode with it.

    Args:
        options: Options of the probe.
        kind: Number type of the weights.
        folder: Folder of the model before conversion.
        path: Path of the GGUF file.
    """

    def __init__(self, options: Options, kind: str, folder: Path, path: Path) -> None:
        self._length, self._kind = options.max_new_tokens, kind
        self._model: Any = lookahead.load_gguf(path)
        fast: Any = lookahead.load_gguf(path, fast_kv=True)
        self._reference: Any = load_model(str(folder), ends=False) if kind == "f32" else None
        for model in (self._model, fast, self._reference):
            if model is not None:
                model.generation_config.eos_token_id = None
        load = partial(llama_cpp.Llama, str(path), n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
        ways: dict[str, Way] = {
            "llama.cpp": self._binding(load(**EXACT)),
            "llama.cpp, its defaults": self._binding(load()),
            "llama.cpp, prompt lookup": self._binding(
                load(**EXACT, draft_model=LlamaPromptLookupDecoding(), logits_all=True)
            ),
            "no drafts": self._generate(self._model, PLAIN),
            "lookahead": self._generate(self._model, FRESH),
            "no drafts, fast_kv": self._generate(fast, PLAIN),
            "lookahead, fast_kv": self._generate(fast, FRESH),
        }
        for nodes in options.nodes:
            ways[f"lookahead, {nodes} nodes"] = self._generate(self._model, replace(FRESH, step_budget=nodes))
        if self._reference is not None:
            ways["transformers"] = self._generate(self._reference, None)
        self._turns = Turns(ways, exact=False)

    def rows(self, case: Case, seed: int) -> Iterator[Row]:
        """Yield a row of each method for a prompt, and rows of sampled texts."""
        plain: dict[bool, float] = {}  # CPU time of llama.cpp's own decoding, by use of the default cache
        for row in self._turns.rows(case):
            name, cpu = row["method"], 1000 * row["cpu_seconds"] / row["tokens"]
            is_fast = name == "llama.cpp, its defaults" or name.endswith("fast_kv")
            plain.setdefault(is_fast, cpu)
            row |= {"cache": "float16" if is_fast else "float32", "tokens_per_step": row["tokens"] / row["steps"]}
            row |= {"cpu_ms": cpu, "speed": plain[is_fast] / cpu, "equal": int(row["equal"])}
            yield {"type": self._kind, **row}

        def sampled(model: Any, config: LookaheadConfig | None) -> Any:
            torch.manual_seed(seed)
            return generate(model, case, config, max_new_tokens=self._length, **SAMPLING).tokens

        drafted = sampled(self._model, FRESH)
        ways = {"sampled, no drafts": (self._model, PLAIN), "sampled": (self._reference, None)}
        for name, (model, config) in ways.items():
            if model is not None:
                place = first_difference(drafted, sampled(model, config))
                row = {"type": self._kind, "id": case.id, "method": name, "first_difference": place}
                yield row | {"equal": int(place is None)}

    def _generate(self, model: Any, config: LookaheadConfig | None) -> Way:
        return lambda case, _: generate(model, case, config, max_new_tokens=self._length)

    def _binding(self, llama: Any) -> Way:
        """Method of llama-cpp-python; a step is a call of `eval`."""

        def run(case: Case, _: int) -> Counts:
            passes: list[int] = []
            evaluate = type(llama).eval
            llama.eval = lambda new: (passes.append(len(new)), evaluate(llama, new))  # on this object only
            llama.reset()
            begin, tokens = now("cpu"), []
            for token in llama.generate(case.prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
                tokens.append(int(token))
                if len(tokens) == self._length:
                    break
            return Counts(tokens, len(passes), sum(passes), now("cpu") - begin)

        return run


def probe(options: Options) -> Probe:
    """Make a unit for each prompt and type."""
    folder_of_files = tempfile.TemporaryDirectory()  # removed with the units

    @lru_cache(maxsize=1)
    def bench(kind: str) -> Bench:
        file, folder = Path(folder_of_files.name) / f"{kind}.gguf", model_folder(options.model)
        if options.model in RANDOM:
            folder = save_random(options.model, Path(folder_of_files.name) / options.model)
        subprocess.run([sys.executable, TOOL, folder, file, "--type", kind], check=True, capture_output=True)
        return Bench(options, kind, folder, file)

    path = Path(options.prompts)
    cases = read_cases(path, encoder_of(load_tokenizer(options.model)), options.limit)
    units = [
        Unit(f"{kind} {case.id}", lambda kind=kind, case=case, seed=seed: bench(kind).rows(case, seed))  # type: ignore[misc]
        for kind in options.types
        for seed, case in enumerate(cases)
    ]
    settings = {"model": {"name": Path(options.model).name}, "prompts": path.name}
    return Probe(units, settings | {"max_new_tokens": options.max_new_tokens, "llama_cpp": llama_cpp.__version__})
