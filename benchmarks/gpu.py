"""First checks on one GPU without a network: correctness, step times, speed and invariance.

    python benchmarks gpu --parts right --output gpu.jsonl
    python benchmarks gpu --parts prices --output gpu.jsonl
    python benchmarks gpu --parts speed invariance --output gpu.jsonl

Each of the three calls takes less than nine minutes. Rows are written to disk unit by unit; a unit that fails becomes a
row with an error. The large model has the shapes of Llama 3.1 8B, and random weights made on the device.

- **right**: compares the attention kernel with its definition, and 100 texts of the demo model, greedy and sampled, and
  32 of engines with `model.generate`.
- **prices**: milliseconds of a step by nodes, eager and with graphs, and of a step of transformers; launches of one
  step; time of captures; the kernel beside `scaled_dot_product_attention`.
- **speed**: wall time of recorded texts, forced on the large model: transformers eager, its static cache with
  compilation, its prompt lookup, and this library; then engines of several rows.
- **invariance**: bits of logits with drafts and without, as in `python benchmarks same_bits`.

`--device cpu --tiny 1` tries the program without a GPU.
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
"""Numbers of query heads and key heads, and head size, for the tests of the kernel."""

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
"""Methods of transformers, with their arguments of `generate`."""

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
LOADS = (1, 4, 16, 64)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    parts: tuple[str, ...] = option(PARTS, f"parts to run, of {', '.join(PARTS)}")
    device: str = option("cuda", "device to run on")
    tiny: int = option(0, "1 for a tiny model in place of the large one")
    contexts: tuple[int, ...] = option((512, 4096), "tokens of text before the timed steps")
    edits: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction`, `input` and `output`")
    traces: str = option("../shared/data/agent_traces.jsonl", "JSON lines with `id`, `prompt` and `output`")
    texts: int = option(6, "number of recorded texts of each file")
    new_tokens: int = option(192, "tokens of a recorded text")
    repeats: int = option(7, "timings of each step; the median is used")


@lru_cache(maxsize=3)
def model_of(name: str, dtype: str, device: str) -> Any:
    """Load a model, once for all units."""
    return load_model(name, dtype, device)


def demo_model(device: str, dtype: str = "float32") -> Any:
    """Demo model, without learned predictions and step times."""
    return open_session(model_of("demo", dtype, device)).sharing_weights()


def large_model(options: Options) -> Any:
    """Large model with random weights in bfloat16, made on the device, without learned predictions and step times."""
    return open_session(model_of("tiny" if options.tiny else "8b", "bfloat16", options.device)).sharing_weights()


def kernel_rows(device: str, heads: int, groups: int, size: int) -> Iterator[Row]:
    """Yield errors of the kernel on random trees, and its time beside torch's masked attention."""
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
            output = tree_attention(query, key, value, mask, size**-0.5).float()
            states = [states.float() for states in (query, key, value)]
            exact = scaled_dot_product_attention(*states, seen, enable_gqa=True).transpose(1, 2)
            error = float((output - exact).norm() / exact.norm())
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
    """Make 25 prompts for the demo model, of 4 tokens and more."""
    text = "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n"
    ids = load_tokenizer("demo")(text).input_ids
    return [Case(str(case), ids[: 4 + case % (len(ids) - 4)]) for case in range(25)]


def compared(kind: str, name: str, equal: bool, about: Row, exact: bool = True) -> Row:
    """Row for a text that is `equal` to the text of `generate` or not; with `exact`, a difference is an error."""
    row: Row = {"kind": kind, "method": name, **about, "equal": equal}
    return row | ({"error": f"{name}, {about}: another text than that of generate"} if exact and not equal else {})


def texts_of_generate(device: str, name: str, config: LookaheadConfig, dtype: str) -> Iterator[Row]:
    """Compare texts of the demo model with transformers: greedy, and every third one sampled."""
    model = demo_model(device, dtype)
    for seed, case in enumerate(prompts()):
        how = {"max_new_tokens": 40, **(SAMPLED if seed % 3 == 2 else {})}
        counts = []
        for way in (None, config):
            torch.manual_seed(seed)
            counts.append(generate(model, case, way, **how))
        plain, drafted = counts
        about = {
            "dtype": dtype,
            "case": seed,
            "sampled": "top_p" in how,
            "steps": drafted.steps,
            "nodes": drafted.nodes,
        }
        yield compared("text", name, drafted.tokens == plain.tokens, about, dtype == "float32")


def texts_of_batch(device: str, name: str, config: LookaheadConfig) -> Iterator[Row]:
    """Compare a greedy batch of three rows with transformers."""
    model, ids = demo_model(device), torch.tensor([prompts()[15].prompt] * 3, device=device)
    how = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    equal = torch.equal(lookahead.generate(model, ids, lookahead_config=config, **how), model.generate(ids, **how))
    yield compared("text of a batch", name, equal, {})


def texts_of_engine(device: str, name: str, config: LookaheadConfig) -> Iterator[Row]:
    """Compare texts of an engine's requests with transformers; half of them are sampled, and one joins per step."""
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
    """Yield milliseconds of a step by nodes, and the total time with preparation."""
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
    """Number of calls of the driver by name: launches, copies, waits."""
    from torch.profiler import ProfilerActivity, profile

    if device.type == "cpu":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        seconds_of(device, work)
    return {event.key: event.count for event in seen.key_averages() if event.key.startswith("cuda")}


def transformers_prices(options: Options, name: str) -> Iterator[Row]:
    """Yield the time of a token in transformers' own `generate`: the difference of 68 and 4 new tokens."""
    model = large_model(options)
    for context in options.contexts:
        case, times = Case("", [5 + place % 1000 for place in range(context)]), []
        for _ in range(3):
            short, long = (generate(model, case, None, max_new_tokens=count, **RIVALS[name]) for count in (4, 68))
            times.append(1000 * (long.seconds - short.seconds) / 64)
        yield {"kind": "transformers", "how": name, "context": context, "ms": times[-1], "all_ms": times}


def recorded(options: Options, path: str, count: int, prompt: int, answer: int) -> list[Case]:
    """Read recorded texts of a file, for the large model."""
    encode = encoder_of(load_tokenizer("demo"))
    return read_cases(Path(path), encode, count, prompt=prompt, answer=min(answer, options.new_tokens))


def forced_rows(options: Options, name: str) -> Iterator[Row]:
    """Yield steps and wall time of recorded texts that a processor forces on the large model."""
    run = partial(generate, large_model(options), config=METHODS.get(name), **RIVALS.get(name, {}))
    for task, path in (("edits", options.edits), ("traces", options.traces)):
        cases = recorded(options, path, options.texts, 256 if options.tiny else 1536, options.new_tokens)
        for number, case in enumerate(cases):
            for _ in range(2 if number == 0 else 0):  # warm up: graphs are captured once
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
    """Yield wall time of an engine with recorded texts as requests, with drafts and without."""
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
    """Yield the rows of a unit; an error becomes a row, so that later units still run."""
    try:
        yield from work()
    except Exception as error:
        message, trace = f"{type(error).__name__}: {error}"[:800], traceback.format_exc()[-4000:]
        yield {"kind": "failed", "error": message, "trace": trace}


def units_of(options: Options) -> Iterator[tuple[str, str, Callable[[], Iterable[Row]]]]:
    """Yield part, name and function of each unit."""
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
    """Make the units of the requested parts.

    Raises:
        InvalidArgumentError: A part is unknown, or there is no GPU.
    """
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        raise InvalidArgumentError(f"--parts {unknown[0]!r} is not one of {', '.join(PARTS)}")
    if options.device != "cpu" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"--device {options.device}: torch finds no CUDA device here")
    found = units_of(options)
    units = [Unit(name, partial(guarded, work)) for part, name, work in found if part in options.parts]
    return Probe(units, {"model": "tiny" if options.tiny else "8b"})
