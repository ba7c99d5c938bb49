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
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessorList

import lookahead
import same_bits
from cases import Case, Forced, encoder_of, generate, now, read_cases
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
RIVALS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, prompt lookup": {"prompt_lookup_num_tokens": 10},
    "transformers, static, compiled": {"cache_implementation": "static"},
}
"""Ways of transformers itself, with what `generate` calls them."""

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
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


def seconds_of(device: str, work: Callable[[], object]) -> float:
    """Wall time of some work on a GPU, from one idle moment of the device to the next; on a CPU its CPU time."""
    begin = now(device)
    work()
    return now(device) - begin


@lru_cache(maxsize=1)
def large_model(device: str, tiny: int) -> Any:
    """Random weights in bfloat16, made where they stay."""
    positions = {"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    special = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}
    config = LlamaConfig(**(TINY if tiny else LARGE), **positions, **special)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.pad_token_id = 0
    return model.eval()


@lru_cache(maxsize=2)
def demo_model(device: str, dtype: str) -> BenchModel:
    """The demo model."""
    return load(ModelSpec("demo", "demo", dtype=dtype), torch.device(device))


def kernel_rows(device: str, heads: int, groups: int, size: int) -> Iterator[Row]:
    """The kernel on random trees, against its definition and beside torch's masked attention."""
    from triton.testing import do_bench

    from lookahead.backends.transformers.attention import dense_attention
    from lookahead.backends.transformers.tree_attention.kernel import tree_attention
    from lookahead.backends.transformers.tree_attention.packed_mask import pack, unpack

    for context in (512, 4096, 32768):
        for nodes in (1, 16, 64):
            torch.manual_seed(context + nodes)
            shapes = ((heads, nodes), (groups, context + nodes), (groups, context + nodes))
            query, key, value = (
                torch.randn(1, count, length, size, device=device, dtype=torch.bfloat16) for count, length in shapes
            )
            positions = context + np.arange(nodes)[None]
            mask = pack(np.tri(nodes, dtype=bool)[None], [context], positions).to(device)
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


def prompts_of(device: str) -> tuple[Any, list[Case]]:
    """The demo model in float32 and 25 prompts of 4 tokens and more."""
    loaded = demo_model(device, "float32")
    ids = loaded.tokenizer(
        "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n"
    ).input_ids
    return sharing_weights(loaded.model), [Case(str(case), ids[: 4 + case % (len(ids) - 4)]) for case in range(25)]


def texts_of_generate(device: str, name: str, config: LookaheadConfig, dtype: str) -> Iterator[Row]:
    """Texts of the demo model against transformers' own: greedy prompts, and every third one sampled."""
    model = sharing_weights(demo_model(device, dtype).model)
    for seed, case in enumerate(prompts_of(device)[1]):
        how = {"max_new_tokens": 40, **(SAMPLED if seed % 3 == 2 else {})}
        torch.manual_seed(seed)
        wanted = generate(model, case, None, **how)
        torch.manual_seed(seed)
        found = generate(model, case, config, **how)
        row: Row = {"kind": "text", "method": name, "dtype": dtype, "case": seed, "sampled": "top_p" in how}
        row |= {"steps": found.steps, "nodes": found.nodes, "equal": found.tokens == wanted.tokens}
        if not row["equal"] and dtype == "float32":
            row["error"] = f"{name}, case {seed}: another text than that of generate"
        yield row


def texts_of_batch(device: str, name: str, config: LookaheadConfig) -> Iterator[Row]:
    """A greedy batch of three rows against transformers' own."""
    model, cases = prompts_of(device)
    ids = torch.tensor([cases[15].prompt] * 3, device=device)
    how = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    equal = torch.equal(lookahead.generate(model, ids, lookahead_config=config, **how), model.generate(ids, **how))
    row: Row = {"kind": "text of a batch", "method": name, "equal": equal}
    yield row | ({} if equal else {"error": f"{name}: other texts of a batch than those of generate"})


def texts_of_engine(device: str, engine: str) -> Iterator[Row]:
    """The same of requests that share an engine, half of them sampled, and come one after another."""
    model, cases = prompts_of(device)
    serving, handles = Engine(model, LookaheadConfig(engine=engine), max_rows=6), []
    for seed, case in enumerate(cases[:16]):
        how = {"max_new_tokens": 20 + 3 * seed, **(SAMPLED if seed % 2 else {"do_sample": False})}
        handles.append((case, how, serving.submit(case.prompt, seed=seed, **how)))
        serving.step()
    serving.run()
    for seed, (case, how, handle) in enumerate(handles):
        torch.manual_seed(seed)
        equal = handle.tokens == generate(model, case, None, **how).tokens
        row: Row = {"kind": "text of an engine", "engine": handle.statistics.engine, "case": seed, "equal": equal}
        yield row | (
            {} if equal else {"error": f"an engine, {engine}, case {seed}: another text than that of generate"}
        )


def step_prices(device: str, options: Options, engine: str, context: int) -> Iterator[Row]:
    """Milliseconds of a step by nodes, and what making it ready took."""
    model = sharing_weights(large_model(device, options.tiny))
    begin = now(device)
    with torch.no_grad():
        bench = StepBench(model, context, engine=engine)
        for nodes in NODES:

            def step(nodes: int = nodes) -> None:
                bench.step(bench.tree(nodes))
                bench.undo()

            first, *times = [1000 * seconds_of(device, step) for _ in range(options.repeats + 1)]
            row: Row = {"kind": "step", "engine": engine, "context": context, "nodes": nodes, "first_ms": first}
            yield row | {"ms": median(times), "calls": launches(device, step)}
    yield {"kind": "prepared", "engine": engine, "context": context, "seconds": now(device) - begin}


def launches(device: str, work: Callable[[], object]) -> dict[str, int]:
    """How often some work calls the driver: launches, copies, waits."""
    from torch.profiler import ProfilerActivity, profile

    if device == "cpu":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        seconds_of(device, work)
    return {event.key: event.count for event in seen.key_averages() if event.key.startswith("cuda")}


def transformers_prices(device: str, options: Options, name: str) -> Iterator[Row]:
    """A token of transformers' own `generate`: the difference of 68 and 4 new tokens."""
    model = sharing_weights(large_model(device, options.tiny))
    for context in options.contexts:
        case, times = Case("", [5 + place % 1000 for place in range(context)]), []
        for _ in range(3):
            short, long = (generate(model, case, None, max_new_tokens=count, **RIVALS[name]) for count in (4, 68))
            times.append(1000 * (long.seconds - short.seconds) / 64)
        yield {"kind": "transformers", "how": name, "context": context, "ms": times[-1], "all_ms": times}


def forced_rows(device: str, options: Options, name: str) -> Iterator[Row]:
    """Recorded texts that a processor forces upon the large model: steps and wall time of a call."""
    model = sharing_weights(large_model(device, options.tiny))
    encode = encoder_of(demo_model(device, "float32").tokenizer)
    run = partial(generate, model, config=METHODS.get(name), **RIVALS.get(name, {}))
    for task, path in (("edits", options.edits), ("traces", options.traces)):
        lengths = {"prompt": 256 if options.tiny else 1536, "answer": options.new_tokens}
        for number, case in enumerate(read_cases(Path(path), encode, options.texts, **lengths)):
            for _ in range(2 if number == 0 else 0):  # what is captured and compiled once is not measured
                run(case)
            counts, prefill = run(case), run(case, max_new_tokens=1)
            row: Row = {"kind": "forced", "task": task, "id": case.id, "method": name, "tokens": len(counts.tokens)}
            row |= {"steps": counts.steps, "nodes": counts.nodes, "seconds": counts.seconds}
            row |= {"prefill_seconds": prefill.seconds, "equal": counts.tokens == case.answer}
            yield row | ({} if row["equal"] else {"error": f"{name} on {case.id}: another text than the recorded one"})


def engine_rows(device: str, options: Options, rows: int, preset: str) -> Iterator[Row]:
    """Wall time of an engine whose requests are recorded texts, with drafts and without."""
    model = sharing_weights(large_model(device, options.tiny))
    encode = encoder_of(demo_model(device, "float32").tokenizer)
    found = read_cases(Path(options.edits), encode, min(rows, 16), prompt=256, answer=min(96, options.new_tokens))
    cases = [found[place % len(found)] for place in range(rows)]
    engine = Engine(model, LookaheadConfig(preset=preset), max_rows=rows)
    for repeat in range(2):
        handles = [
            engine.submit(
                case.prompt, max_new_tokens=len(case.answer), logits_processor=LogitsProcessorList([Forced(case)])
            )
            for case in cases
        ]
        steps: list[float] = []
        while not all(handle.done for handle in handles):
            steps.append(seconds_of(device, engine.step))
        equal = sum(handle.tokens == case.answer for handle, case in zip(handles, cases, strict=True))
        row: Row = {"kind": "engine", "rows": rows, "preset": preset, "repeat": repeat, "steps": len(steps)}
        row |= {"seconds": sum(steps), "median_step_ms": 1000 * median(steps), "equal": equal}
        graphs = engine.statistics.graphs
        row |= {"graphs": graphs.count, "graph_seconds": graphs.seconds, "graph_bytes": graphs.bytes}
        row["tokens"] = sum(len(case.answer) for case in cases)
        wrong = {"error": f"{rows - equal} texts of {rows} rows with {preset} are not the recorded ones"}
        yield row | (wrong if equal < rows else {})


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


def units_of(options: Options, device: str) -> Iterator[tuple[str, str, Callable[[], Iterable[Row]]]]:
    """The part, the name and the work of each unit."""
    rivals = [name for name in RIVALS if device != "cpu" or "compiled" not in name]
    for heads, groups, size in HEADS if device != "cpu" else ():
        yield "right", f"kernel {heads} {groups} {size}", partial(kernel_rows, device, heads, groups, size)
    for name, dtype in (("auto", "float32"), ("auto, eager", "float32"), ("paper", "float32"), ("auto", "bfloat16")):
        yield "right", f"texts, {name}, {dtype}", partial(texts_of_generate, device, name, METHODS[name], dtype)
    for name, engine in (("auto", "auto"), ("auto, eager", "dynamic")):
        yield "right", f"texts of a batch, {name}", partial(texts_of_batch, device, name, METHODS[name])
        yield "right", f"texts of an engine, {engine}", partial(texts_of_engine, device, engine)
    for context, engine in product(options.contexts, ("dynamic", "static")):
        yield "prices", f"steps, {engine}, {context}", partial(step_prices, device, options, engine, context)
    for name in (rival for rival in rivals if "lookup" not in rival):
        yield "prices", f"{name}, steps", partial(transformers_prices, device, options, name)
    for name in (*rivals, *METHODS):
        yield "speed", f"forced, {name}", partial(forced_rows, device, options, name)
    for rows, preset in product(LOADS[:2] if options.tiny else LOADS, ("autoregressive", "auto")):
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
    if options.device != "cpu" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"--device {options.device}: torch finds no CUDA device here")
    found = units_of(options, options.device)
    units = [Unit(name, partial(guarded, work)) for part, name, work in found if part in options.parts]
    return Probe(units, {"model": TINY if options.tiny else LARGE})
