"""The first half hour on one GPU without a network: is it right, what does a step cost, what does it bring?

    python benchmarks gpu --parts right --output gpu.jsonl
    python benchmarks gpu --parts prices --output gpu.jsonl
    python benchmarks gpu --parts speed invariance --output gpu.jsonl

Three calls of under nine minutes each; rows are on the disk unit by unit, and a unit that fails becomes a row with an
error while the others go on. The large model has the shapes of Llama 3.1 8B and random weights made on the device.

- **right**: the attention kernel against its definition; 100 texts of the demo model, greedy and sampled, and 32
  of engines, against those of `model.generate`.
- **prices**: milliseconds of a step by nodes, eager and with graphs, transformers' own step beside them; launches of
  one step; what captures take; the kernel beside `scaled_dot_product_attention`.
- **speed**: recorded texts, forced upon the large model, in wall time: transformers eager, its static cache with
  compilation, its prompt lookup, and this library; then engines of several rows.
- **invariance**: bits of logits with drafts and without, as `python benchmarks same_bits`.

`--device cpu --tiny 1` tries the program where there is no GPU, and says nothing of one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

import forced_text
import lookahead
import same_bits
from lookahead import Engine, LookaheadConfig
from lookahead.bench.models import BenchModel, load, sharing_weights
from lookahead.bench.rows import Row
from lookahead.bench.suite import ModelSpec
from lookahead.bench.tuning import StepBench
from lookahead.errors import InvalidArgumentError
from probe import Probe, Unit, option

PARTS = ("right", "prices", "speed", "invariance")

LARGE: dict[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
NODES = (1, 4, 8, 16, 32, 64, 128)
HEADS = ((32, 8, 128), (16, 8, 256), (32, 32, 96), (40, 8, 80), (8, 8, 64))
"""Heads of queries, of keys, and their size, for which the kernel is tried."""

METHODS: dict[str, LookaheadConfig] = {
    "auto": LookaheadConfig(),
    "auto, eager": LookaheadConfig(engine="dynamic"),
    "auto, 32 nodes": LookaheadConfig(step_budget=32),
    "paper": LookaheadConfig(preset="paper"),
}
LOADS = (1, 4, 16, 64)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    parts: tuple[str, ...] = option(PARTS, f"of {', '.join(PARTS)}")
    device: str = option("cuda", "where it runs")
    tiny: int = option(0, "1 for a tiny model in place of the large one")
    contexts: tuple[int, ...] = option((512, 4096), "tokens of text before the steps that are timed")
    edits: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction`, `input` and `output`")
    traces: str = option("../shared/data/agent_traces.jsonl", "JSON lines with `id`, `prompt` and `output`")
    texts: int = option(6, "recorded texts of each file")
    new_tokens: int = option(192, "tokens of a recorded text")
    repeats: int = option(7, "timings of each step; medians count")


class Device:
    """The device, and a clock that waits for it.

    Args:
        name: As torch calls it.

    Raises:
        InvalidArgumentError: It is a GPU, and torch finds none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = name.startswith("cuda")
        if self.is_cuda and not torch.cuda.is_available():
            raise InvalidArgumentError(f"--device {name}: torch finds no CUDA device here")

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.name)

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall time of some work, from one idle moment of the device to the next."""
        self.wait()
        begin = perf_counter()
        work()
        self.wait()
        return perf_counter() - begin

    def median_ms(self, work: Callable[[], object], repeats: int) -> float:
        """The median of several times, after one that does not count, in milliseconds."""
        return 1000 * median([self.seconds(work) for _ in range(repeats + 1)][1:])


@lru_cache(maxsize=1)
def large_model(device: str, tiny: int) -> LlamaForCausalLM:
    """Random weights in bfloat16, made where they stay."""
    positions = {"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    special = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}
    config = LlamaConfig(**(TINY if tiny else LARGE), **positions, **special)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    return model.to(torch.bfloat16).eval()  # type: ignore[no-any-return]


@lru_cache(maxsize=2)
def demo_model(device: str, dtype: str) -> BenchModel:
    """The demo model."""
    return load(ModelSpec("demo", "demo", dtype=dtype), torch.device(device))


def kernel_rows(device: Device, heads: int, groups: int, size: int) -> Iterator[Row]:
    """The kernel on random trees, against its definition and beside torch's masked attention."""
    from triton.testing import do_bench

    from lookahead.backends.transformers.tree_attention.interface import dense_attention
    from lookahead.backends.transformers.tree_attention.kernel import tree_attention
    from lookahead.backends.transformers.tree_attention.packed_mask import pack, unpack

    for context in (512, 4096, 32768):
        for nodes in (1, 16, 64):
            torch.manual_seed(context + nodes)
            shapes = ((heads, nodes), (groups, context + nodes), (groups, context + nodes))
            query, key, value = (
                torch.randn(1, count, length, size, device=device.name, dtype=torch.bfloat16)
                for count, length in shapes
            )
            positions = context + np.arange(nodes)[None]
            mask = pack(np.tri(nodes, dtype=bool)[None], [context], positions).to(device.name)
            seen = unpack(mask, context + nodes)
            found = tree_attention(query, key, value, mask, size**-0.5).float()
            wanted = dense_attention(query, key, value, seen, size**-0.5).float()
            error = float((found - wanted).norm() / wanted.norm())
            row: Row = {"kind": "kernel", "heads": heads, "groups": groups, "size": size}
            row |= {"context": context, "nodes": nodes, "relative_error": error}
            bias = torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
            repeated = [states.repeat_interleave(heads // groups, 1) for states in (key, value)]
            attend = partial(torch.nn.functional.scaled_dot_product_attention, query, *repeated, bias)
            row["kernel_us"] = 1000 * do_bench(partial(tree_attention, query, key, value, mask, size**-0.5))
            row["sdpa_us"] = 1000 * do_bench(attend)
            if not error < 0.01:
                row["error"] = f"the kernel is wrong by {error:.3f} at {row}"
            yield row


def texts_of_generate(device: Device, name: str, config: LookaheadConfig, dtype: str) -> Iterator[Row]:
    """Texts of the demo model against transformers' own: greedy prompts, sampled ones, and a batch; 25 in all."""
    loaded = demo_model(device.name, dtype)
    model = sharing_weights(loaded.model)
    words = loaded.tokenizer("def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n")
    ids = torch.tensor([words.input_ids], device=device.name)
    for case in range(25):
        prompt = ids[:, : 4 + case % (ids.shape[1] - 4)]
        prompt = prompt.repeat(3, 1) if case % 8 == 7 else prompt
        sampled = case % 3 == 2
        if sampled and len(prompt) > 1:
            continue  # rows of a batch draw at other times
        how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": sampled, "attention_mask": torch.ones_like(prompt)}
        how |= {"temperature": 0.8, "top_p": 0.9} if sampled else {}
        torch.manual_seed(case)
        wanted = model.generate(prompt, **how)
        torch.manual_seed(case)
        found = lookahead.generate(model, prompt, lookahead_config=config, return_dict_in_generate=True, **how)
        nodes = found.statistics.nodes_per_step
        row: Row = {"kind": "text", "method": name, "dtype": dtype, "case": case, "sampled": sampled}
        row |= {"steps": len(nodes), "drafted_steps": sum(count > 1 for count in nodes)}
        row["equal"] = bool(torch.equal(found.sequences, wanted))
        if not row["equal"] and dtype == "float32":
            row["error"] = f"{name}, case {case}: another text than that of generate"
        yield row


def texts_of_engine(device: Device, engine: str) -> Iterator[Row]:
    """The same of requests that share an engine, half of them sampled, and come one after another."""
    loaded = demo_model(device.name, "float32")
    model = sharing_weights(loaded.model)
    words = loaded.tokenizer("def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n")
    ids = torch.tensor([words.input_ids], device=device.name)
    serving = Engine(model, LookaheadConfig(engine=engine), max_rows=6)
    handles: list[Any] = []
    for case in range(16):
        prompt = ids[:, : 4 + case % (ids.shape[1] - 4)]
        how: dict[str, Any] = {"max_new_tokens": 20 + 3 * case, "do_sample": case % 2 == 1}
        how |= {"temperature": 0.8, "top_p": 0.9} if case % 2 else {}
        handles.append((case, prompt, how, serving.submit(prompt, seed=case, **how)))
        serving.step()
    serving.run()
    for case, prompt, how, handle in handles:
        torch.manual_seed(case)
        wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        row: Row = {"kind": "text of an engine", "engine": handle.statistics.engine, "case": case}
        row |= {"sampled": how["do_sample"], "equal": bool(torch.equal(handle.result(), wanted))}
        if not row["equal"]:
            row["error"] = f"an engine, {engine}, case {case}: another text than that of generate"
        yield row


def step_prices(device: Device, options: Options, engine: str, context: int) -> Iterator[Row]:
    """Milliseconds of a step by nodes, and what making it ready took."""
    model = sharing_weights(large_model(device.name, options.tiny))
    with torch.no_grad():
        begin = perf_counter()
        bench = StepBench(model, context, engine=engine)
        for nodes in NODES:

            def step(nodes: int = nodes) -> None:
                bench.step(bench.tree(nodes))
                bench.undo()

            first = 1000 * device.seconds(step)
            row: Row = {"kind": "step", "engine": engine, "context": context, "nodes": nodes, "first_ms": first}
            yield row | {"ms": device.median_ms(step, options.repeats), "calls": launches(device, step)}
        yield {"kind": "prepared", "engine": engine, "context": context, "seconds": perf_counter() - begin}


def launches(device: Device, work: Callable[[], object]) -> dict[str, int]:
    """How often some work calls the driver: launches, copies, waits."""
    from torch.profiler import ProfilerActivity, profile

    if not device.is_cuda:
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        device.seconds(work)
    return {event.key: event.count for event in seen.key_averages() if event.key.startswith("cuda")}


def transformers_prices(device: Device, options: Options, name: str) -> Iterator[Row]:
    """A token of transformers' own `generate`: the difference of 68 and 4 new tokens."""
    model = sharing_weights(large_model(device.name, options.tiny))
    more: dict[str, Any] = {"cache_implementation": "static"} if name == "static, compiled" else {}
    for context in options.contexts:
        ids = torch.arange(context, device=device.name)[None] % 1000 + 5
        times = []
        for _ in range(3):
            short, long = (
                device.seconds(partial(model.generate, ids, max_new_tokens=count, do_sample=False, **more))
                for count in (4, 68)
            )
            times.append(1000 * (long - short) / 64)
        yield {"kind": "transformers", "how": name, "context": context, "ms": times[-1], "all_ms": times}


def forced_rows(device: Device, options: Options, name: str) -> Iterator[Row]:
    """Recorded texts that a processor forces upon the large model: steps and wall time of a call."""
    model = sharing_weights(large_model(device.name, options.tiny))
    tokenizer = demo_model(device.name, "float32").tokenizer
    limits = forced_text.Options(max_new_tokens=options.new_tokens, max_prompt_tokens=256 if options.tiny else 1536)
    more: dict[str, Any] = {}
    if name == "transformers, static, compiled":
        more["cache_implementation"] = "static"
    if name == "transformers, prompt lookup":
        more["prompt_lookup_num_tokens"] = 10
    call = partial(lookahead.generate, model, lookahead_config=METHODS[name]) if name in METHODS else model.generate
    for task, path in (("edits", options.edits), ("traces", options.traces)):
        for number, case in enumerate(forced_text.read_cases(task, Path(path), tokenizer, options.texts, limits)):
            ids = torch.tensor([case.prompt], device=device.name)
            run = partial(call, ids, attention_mask=ids.new_ones(ids.shape), do_sample=False, **more)

            def generate(tokens: int, case: Any = case, run: Any = run) -> Any:
                forced = LogitsProcessorList([forced_text.Forced(case, len(case.prompt))])
                return run(max_new_tokens=tokens, logits_processor=forced, return_dict_in_generate=True)

            for _ in range(2 if number == 0 else 0):  # what is captured and compiled once is not measured
                generate(len(case.answer))
            outputs: list[Any] = []
            seconds = device.seconds(lambda: outputs.append(generate(len(case.answer))))  # noqa: B023
            prefill = device.seconds(lambda: generate(1))
            text = outputs[0].sequences[0, ids.shape[1] :].tolist()
            row: Row = {"kind": "forced", "task": task, "id": case.id, "method": name, "tokens": len(text)}
            row |= {"seconds": seconds, "prefill_seconds": prefill, "equal": text == case.answer}
            if name in METHODS:
                statistics = outputs[0].statistics
                row |= {"steps": statistics.steps, "nodes": sum(statistics.nodes_per_step)}
            if not row["equal"]:
                row["error"] = f"{name} on {case.id}: another text than the recorded one"
            yield row


def engine_rows(device: Device, options: Options, rows: int, preset: str) -> Iterator[Row]:
    """Wall time of an engine whose requests are recorded texts, with drafts and without."""
    model = sharing_weights(large_model(device.name, options.tiny))
    tokenizer = demo_model(device.name, "float32").tokenizer
    limits = forced_text.Options(max_new_tokens=min(96, options.new_tokens), max_prompt_tokens=256)
    cases = forced_text.read_cases("edits", Path(options.edits), tokenizer, min(rows, 16), limits)
    engine = Engine(model, LookaheadConfig(preset=preset), max_rows=rows)
    for repeat in range(2):
        handles = []
        for place in range(rows):
            case = cases[place % len(cases)]
            forced = LogitsProcessorList([forced_text.Forced(case, len(case.prompt))])
            handles.append(engine.submit(case.prompt, max_new_tokens=len(case.answer), logits_processor=forced))
        steps: list[float] = []
        while not all(handle.done for handle in handles):
            steps.append(device.seconds(engine.step))
        texts = [handle.result()[0].tolist() for handle in handles]
        wanted = [cases[place % len(cases)] for place in range(rows)]
        equal = [text[len(case.prompt) :] == case.answer for text, case in zip(texts, wanted, strict=True)]
        row: Row = {"kind": "engine", "rows": rows, "preset": preset, "repeat": repeat, "steps": len(steps)}
        row |= {"seconds": sum(steps), "median_step_ms": 1000 * median(steps), "equal": sum(equal)}
        row["tokens"] = sum(len(case.answer) for case in wanted)
        graphs = engine.statistics.graphs
        row |= {"graphs": graphs.count, "graph_seconds": graphs.seconds, "graph_bytes": graphs.bytes}
        if not all(equal):
            row["error"] = f"{rows - equal.count(True)} texts of {rows} rows with {preset} are not the recorded ones"
        yield row


def guarded(work: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of some work; what it raises becomes a row, so that the rest of the half hour is not lost."""
    try:
        yield from work()
    except Exception as error:
        yield {
            "kind": "failed",
            "error": f"{type(error).__name__}: {error}"[:800],
            "trace": traceback.format_exc()[-4000:],
        }


def units_of(options: Options, device: Device) -> Iterator[tuple[str, str, Callable[[], Iterable[Row]]]]:
    """The part, the name and the work of each unit."""
    for heads, groups, size in HEADS if device.is_cuda else ():
        yield "right", f"kernel {heads} {groups} {size}", partial(kernel_rows, device, heads, groups, size)
    for dtype in ("float32", "bfloat16"):
        for name in ("auto", "auto, eager", "paper") if dtype == "float32" else ("auto",):
            yield "right", f"texts, {name}, {dtype}", partial(texts_of_generate, device, name, METHODS[name], dtype)
    for engine in ("auto", "dynamic"):
        yield "right", f"texts of an engine, {engine}", partial(texts_of_engine, device, engine)
    for context in options.contexts:
        for engine in ("dynamic", "static"):
            yield "prices", f"steps, {engine}, {context}", partial(step_prices, device, options, engine, context)
    for name in ("eager", "static, compiled") if device.is_cuda else ("eager",):
        yield "prices", f"transformers, {name}", partial(transformers_prices, device, options, name)
    rivals = ("transformers", "transformers, prompt lookup")
    for name in (*rivals, *(("transformers, static, compiled",) if device.is_cuda else ()), *METHODS):
        yield "speed", f"forced, {name}", partial(forced_rows, device, options, name)
    for rows in LOADS[:2] if options.tiny else LOADS:
        for preset in ("autoregressive", "auto"):
            yield "speed", f"engine, {rows} rows, {preset}", partial(engine_rows, device, options, rows, preset)
    bits = same_bits.Options(device=options.device)
    for dtype, number in (("bfloat16", 0), ("bfloat16", 3), ("float16", 0)):
        yield "invariance", f"bits, qwen3, {dtype}, {number}", partial(same_bits.compare, "qwen3", dtype, number, bits)


def probe(options: Options) -> Probe:
    """The units of the parts that are asked for.

    Raises:
        InvalidArgumentError: There is no such part, or no GPU.
    """
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        raise InvalidArgumentError(f"--parts {unknown[0]!r} is none of {', '.join(PARTS)}")
    device = Device(options.device)
    units = [
        Unit(name, partial(guarded, work)) for part, name, work in units_of(options, device) if part in options.parts
    ]
    return Probe(units, {"model": TINY if options.tiny else LARGE})
