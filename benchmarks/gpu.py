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
from torch.nn.functional import scaled_dot_product_attention

import lookahead
import same_bits
from cases import Case, encoder_of, forced, generate, now, read_cases
from lookahead import Engine, LookaheadConfig
from lookahead.backends.session import open_session
from lookahead.bench.rows import Row
from lookahead.bench.tuning import StepBench, seconds_of
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError
from models import load_model, load_tokenizer
from probe import Probe, Unit, option

PARTS = ("right", "prices", "speed", "invariance")

NODES = (1, 4, 8, 16, 32, 64, 128)
HEADS = ((32, 8, 128), (16, 8, 256), (32, 32, 96), (40, 8, 80), (8, 8, 64))
"""Heads of queries, of keys, and their size, for which the kernel is tried."""

METHODS: dict[str, LookaheadConfig] = {
    "auto": LookaheadConfig(),
    "auto, eager": LookaheadConfig(engine="dynamic"),
    "auto, 32 nodes": LookaheadConfig(step_budget=32),
    "paper": LookaheadConfig(preset="paper"),
}
ENGINES: dict[str, LookaheadConfig] = {
    "autoregressive": LookaheadConfig(preset="autoregressive"),
    "auto": LookaheadConfig(),
    "auto, one memory": LookaheadConfig(memory="process"),
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


@lru_cache(maxsize=3)
def model_of(name: str, dtype: str, device: str) -> Any:
    """A model that is loaded once."""
    return load_model(name, dtype, device)


def demo_model(device: str, dtype: str = "float32") -> Any:
    """The demo model, with nothing learned."""
    return open_session(model_of("demo", dtype, device)).sharing_weights()


def large_model(options: Options) -> Any:
    """Random weights in bfloat16, made where they stay, with nothing learned."""
    return open_session(model_of("tiny" if options.tiny else "8b", "bfloat16", options.device)).sharing_weights()


def kernel_rows(device: str, heads: int, groups: int, size: int) -> Iterator[Row]:
    """The kernel on random trees, against its definition and beside torch's masked attention."""
    from triton.testing import do_bench

    from lookahead.backends.transformers.tree_attention.kernel import tree_attention
    from lookahead.backends.transformers.tree_attention.packed_mask import sight, unpack

    for context in (512, 4096, 32768):
        for nodes in (1, 16, 64):
            torch.manual_seed(context + nodes)
            shapes = ((heads, nodes), (groups, context + nodes), (groups, context + nodes))
            query, key, value = (
                torch.randn(1, count, length, size, device=device, dtype=torch.bfloat16) for count, length in shapes
            )
            positions = context + np.arange(nodes)[None]
            mask = torch.from_numpy(sight(np.tri(nodes, dtype=bool)[None], [context], positions).packed()).to(device)
            seen = unpack(mask, context + nodes)
            found = tree_attention(query, key, value, mask, size**-0.5).float()
            states = [states.float() for states in (query, key, value)]
            exact = scaled_dot_product_attention(*states, seen, enable_gqa=True).transpose(1, 2)
            error = float((found - exact).norm() / exact.norm())
            bias = torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
            repeated = [states.repeat_interleave(heads // groups, 1) for states in (key, value)]
            attend = partial(scaled_dot_product_attention, query, *repeated, bias)
            row: Row = {
                "kind": "kernel",
                "heads": heads,
                "groups": groups,
                "size": size,
                "context": context,
                "nodes": nodes,
                "relative_error": error,
                "kernel_us": 1000 * do_bench(partial(tree_attention, query, key, value, mask, size**-0.5)),
                "sdpa_us": 1000 * do_bench(attend),
            }
            if not error < 0.01:
                row["error"] = f"the kernel is wrong by {error:.3f} at {row}"
            yield row


def prompts() -> list[Case]:
    """25 prompts of the demo model, of 4 tokens and more."""
    text = "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n"
    ids = load_tokenizer("demo")(text).input_ids
    return [Case(str(case), ids[: 4 + case % (len(ids) - 4)]) for case in range(25)]


def compared(kind: str, name: str, equal: bool, about: Row, exact: bool = True) -> Row:
    """A row that says whether a text is that of `generate`; where it has to be, another one is an error."""
    row: Row = {"kind": kind, "method": name, **about, "equal": equal}
    return row | ({"error": f"{name}, {about}: another text than that of generate"} if exact and not equal else {})


def texts_of_generate(device: str, name: str, config: LookaheadConfig, dtype: str) -> Iterator[Row]:
    """Texts of the demo model against transformers' own: greedy prompts, and every third one sampled."""
    model = demo_model(device, dtype)
    for seed, case in enumerate(prompts()):
        how = {"max_new_tokens": 40, **(SAMPLED if seed % 3 == 2 else {})}
        counts = []
        for way in (None, config):
            torch.manual_seed(seed)
            counts.append(generate(model, case, way, **how))
        wanted, found = counts
        about = {"dtype": dtype, "case": seed, "sampled": "top_p" in how, "steps": found.steps, "nodes": found.nodes}
        yield compared("text", name, found.tokens == wanted.tokens, about, dtype == "float32")


def texts_of_batch(device: str, name: str, config: LookaheadConfig) -> Iterator[Row]:
    """A greedy batch of three rows against transformers' own."""
    model, ids = demo_model(device), torch.tensor([prompts()[15].prompt] * 3, device=device)
    how = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    equal = torch.equal(lookahead.generate(model, ids, lookahead_config=config, **how), model.generate(ids, **how))
    yield compared("text of a batch", name, equal, {})


def texts_of_engine(device: str, name: str, config: LookaheadConfig) -> Iterator[Row]:
    """The same of requests that share an engine, half of them sampled, and come one after another."""
    model, handles = demo_model(device), []
    engine = Engine(model, config, max_rows=6)
    for seed, case in enumerate(prompts()[:16]):
        how = {"max_new_tokens": 20 + 3 * seed, **(SAMPLED if seed % 2 else {"do_sample": False})}
        handles.append((case, how, engine.submit(case.prompt, seed=seed, **how)))
        engine.step()
    engine.run()
    for seed, (case, how, handle) in enumerate(handles):
        torch.manual_seed(seed)
        equal = handle.tokens == generate(model, case, None, **how).tokens
        yield compared("text of an engine", name, equal, {"engine": handle.statistics.engine, "case": seed})


def step_prices(options: Options, engine: str, context: int) -> Iterator[Row]:
    """Milliseconds of a step by nodes, and what making it ready took."""
    device, model = options.device, large_model(options)
    begin = now(device)
    with torch.no_grad():
        bench = StepBench(model, context, engine=engine)
        for nodes in NODES:
            tree = bench.tree(nodes)

            def step(tree: TokenTree = tree) -> None:
                bench.step(tree)
                bench.undo()

            first, *times = [1000 * seconds_of(model.device, step) for _ in range(options.repeats + 1)]
            row: Row = {"kind": "step", "engine": engine, "context": context, "nodes": nodes, "first_ms": first}
            yield row | {"ms": median(times), "calls": launches(model.device, step)}
    yield {"kind": "prepared", "engine": engine, "context": context, "seconds": now(device) - begin}


def launches(device: torch.device, work: Callable[[], object]) -> dict[str, int]:
    """How often some work calls the driver: launches, copies, waits."""
    from torch.profiler import ProfilerActivity, profile

    if device.type == "cpu":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        seconds_of(device, work)
    return {event.key: event.count for event in seen.key_averages() if event.key.startswith("cuda")}


def transformers_prices(options: Options, name: str) -> Iterator[Row]:
    """A token of transformers' own `generate`: the difference of 68 and 4 new tokens."""
    model = large_model(options)
    for context in options.contexts:
        case, times = Case("", [5 + place % 1000 for place in range(context)]), []
        for _ in range(3):
            short, long = (generate(model, case, None, max_new_tokens=count, **RIVALS[name]) for count in (4, 68))
            times.append(1000 * (long.seconds - short.seconds) / 64)
        yield {"kind": "transformers", "how": name, "context": context, "ms": times[-1], "all_ms": times}


def recorded(options: Options, path: str, count: int, prompt: int, answer: int) -> list[Case]:
    """Recorded texts of a file, for the large model."""
    encode = encoder_of(load_tokenizer("demo"))
    return read_cases(Path(path), encode, count, prompt=prompt, answer=min(answer, options.new_tokens))


def forced_rows(options: Options, name: str) -> Iterator[Row]:
    """Recorded texts that a processor forces upon the large model: steps and wall time of a call."""
    run = partial(generate, large_model(options), config=METHODS.get(name), **RIVALS.get(name, {}))
    for task, path in (("edits", options.edits), ("traces", options.traces)):
        cases = recorded(options, path, options.texts, 256 if options.tiny else 1536, options.new_tokens)
        for number, case in enumerate(cases):
            for _ in range(2 if number == 0 else 0):  # what is captured and compiled once is not measured
                run(case)
            counts, prefill = run(case), run(case, max_new_tokens=1)
            about = {
                "task": task,
                "id": case.id,
                "tokens": len(counts.tokens),
                "steps": counts.steps,
                "nodes": counts.nodes,
                "seconds": counts.seconds,
                "prefill_seconds": prefill.seconds,
                "token_ms": 1000 * (counts.seconds - prefill.seconds) / len(counts.tokens),
            }
            yield compared("forced", name, counts.tokens == case.answer, about)


def engine_rows(options: Options, rows: int, name: str) -> Iterator[Row]:
    """Wall time of an engine whose requests are recorded texts, with drafts and without."""
    found = recorded(options, options.edits, min(rows, 16), 256, 96)
    cases = [found[place % len(found)] for place in range(rows)]
    engine = Engine(large_model(options), ENGINES[name], max_rows=rows)
    for repeat in range(2):
        handles = [engine.submit(case.prompt, **forced(case)) for case in cases]
        steps: list[float] = []
        while not all(handle.done for handle in handles):
            steps.append(seconds_of(torch.device(options.device), engine.step))
        graphs = engine.statistics.graphs
        about = {
            "rows": rows,
            "repeat": repeat,
            "steps": len(steps),
            "tokens": sum(len(case.answer) for case in cases),
            "seconds": sum(steps),
            "median_step_ms": 1000 * median(steps),
            "graphs": graphs.count,
            "graph_seconds": graphs.seconds,
            "graph_bytes": graphs.bytes,
        }
        equal = all(handle.tokens == case.answer for handle, case in zip(handles, cases, strict=True))
        yield compared("engine", name, equal, about)


def guarded(work: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of some work; what it raises becomes a row, so that the rest of the half hour is not lost."""
    try:
        yield from work()
    except Exception as error:
        message, trace = f"{type(error).__name__}: {error}"[:800], traceback.format_exc()[-4000:]
        yield {"kind": "failed", "error": message, "trace": trace}


def units_of(options: Options) -> Iterator[tuple[str, str, Callable[[], Iterable[Row]]]]:
    """The part, the name and the work of each unit."""
    device = options.device
    rivals = [name for name in RIVALS if device != "cpu" or "compiled" not in name]
    for heads, groups, size in HEADS if device != "cpu" else ():
        yield "right", f"kernel {heads} {groups} {size}", partial(kernel_rows, device, heads, groups, size)
    for name, dtype in (("auto", "float32"), ("auto, eager", "float32"), ("paper", "float32"), ("auto", "bfloat16")):
        yield "right", f"texts, {name}, {dtype}", partial(texts_of_generate, device, name, METHODS[name], dtype)
    for name in ("auto", "auto, eager"):
        yield "right", f"texts of a batch, {name}", partial(texts_of_batch, device, name, METHODS[name])
        yield "right", f"texts of an engine, {name}", partial(texts_of_engine, device, name, METHODS[name])
    for context, engine in product(options.contexts, ("dynamic", "static")):
        yield "prices", f"steps, {engine}, {context}", partial(step_prices, options, engine, context)
    for name in (rival for rival in rivals if "lookup" not in rival):
        yield "prices", f"{name}, steps", partial(transformers_prices, options, name)
    for name in (*rivals, *METHODS):
        yield "speed", f"forced, {name}", partial(forced_rows, options, name)
    for rows, name in product(LOADS[:2] if options.tiny else LOADS, ENGINES):
        yield "speed", f"engine, {rows} rows, {name}", partial(engine_rows, options, rows, name)
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
    found = units_of(options)
    units = [Unit(name, partial(guarded, work)) for part, name, work in found if part in options.parts]
    return Probe(units, {"model": "tiny" if options.tiny else "8b"})
