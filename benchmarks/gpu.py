"""One GPU without a network: step times and kernels, requests at once, prompts, long texts, servers, and correctness.

    python benchmarks gpu --parts prices engine --output gpu.jsonl
    python benchmarks gpu --parts prompts ragged kernels serve --output gpu.jsonl
    python benchmarks gpu --parts right speed invariance --output gpu.jsonl

Each of the three calls takes a few minutes; the most valuable parts come first. Rows are written to disk unit
by unit; a unit that fails becomes a row with an error. The large model has the shapes of Llama 3.1 8B, and random
weights made on the device. It writes recorded texts (`scripted.py`), without a logits processor.

- **prices**: launches, copies and waits of the host; milliseconds of a step by nodes, eager and with graphs; calls of
  the driver and kernels in a step of 1, 16, 64 and 256 requests.
- **engine**: requests at once, with drafts and without: greedy, sampled, and written by a processor; transformers'
  `generate_batch` beside them.
- **prompts**: requests that join while others decode, and the time to their first tokens.
- **ragged**: one text of 8,000 or 32,000 tokens among 15 and 63 short ones.
- **kernels**: the kernels timed by replay, and their bits, beside torch's and the model's.
- **serve**: 32 clients that stream from a server in another process.
- **right**: 100 texts of the demo model, greedy and sampled, a batch, and 32 texts of engines, compared with
  `model.generate`.
- **speed**: wall time of one text at a time: transformers eager, its static cache with compilation, its prompt lookup,
  and this library.
- **invariance**: bits of logits with drafts and without, as in `python benchmarks same_bits`.

`--device cpu --tiny 1` tries the program without a GPU.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

import gpu_kernels
import lookahead
import same_bits
from cases import Case, encoder_of, forced, generate, lengthened, now, read_cases
from gpu_serving import stream_rows
from lookahead import Engine, LookaheadConfig
from lookahead.backends.session import open_session
from lookahead.bench.rows import Row
from lookahead.bench.tuning import StepBench, seconds_of
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError
from models import load_model, load_tokenizer
from probe import Probe, Unit, option
from scripted import ScriptedLlama, scripted, scripted_model

PARTS = ("prices", "engine", "prompts", "ragged", "kernels", "serve", "right", "speed", "invariance")

NODES = (1, 4, 8, 16, 32, 64, 128)

METHODS: dict[str, LookaheadConfig] = {
    "auto": LookaheadConfig(memory="request"),
    "auto, eager": LookaheadConfig(engine="dynamic", memory="request"),
    "auto, 32 nodes": LookaheadConfig(step_budget=32, memory="request"),
    "paper": LookaheadConfig(preset="paper"),
}
ENGINES: dict[str, LookaheadConfig] = {"no drafts": LookaheadConfig(preset="autoregressive"), "auto": LookaheadConfig()}
RIVALS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, prompt lookup": {"prompt_lookup_num_tokens": 10},
    "transformers, static, compiled": {"cache_implementation": "static"},
}
"""Methods of transformers, with their arguments of `generate`."""

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
SELECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature": {"do_sample": True, "temperature": 0.2, "top_k": 0},
    "top-k, top-p": {"do_sample": True, "temperature": 0.2, "top_k": 50, "top_p": 0.9},
    "forced": {"do_sample": False},
}
"""Arguments of requests. Only the recorded token can be sampled; a logits processor writes forced texts again."""

LOADS = (1, 16, 64, 4, 128)
LONG = (8000, 32000)
PROMPT = 256
"""Tokens of a prompt of the engines."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    parts: list[str] = option(list(PARTS), "parts to run", choices=PARTS)
    device: str = option("cuda", "device to run on")
    tiny: int = option(0, "1 for a tiny model and small loads")
    contexts: list[int] = option([512, 4096], "tokens of text before the timed steps")
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


@lru_cache(maxsize=1)
def large_weights(device: str, tiny: int) -> ScriptedLlama:
    """Large model in bfloat16, once for all units."""
    return scripted_model("tiny" if tiny else "8b", "bfloat16", device)


def large_model(options: Options, cases: Sequence[Case] = (Case("", [1, 2]),)) -> tuple[Any, list[Case]]:
    """Large model that writes some texts, and these in its tokens; it has learned no predictions and step times."""
    return scripted(large_weights(options.device, options.tiny), cases)


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
    device, (model, _) = options.device, large_model(options)
    begin = now(device)
    with torch.no_grad():
        bench = StepBench(model, context, engine=engine)
        for nodes in NODES:
            tree = bench.tree(nodes)

            def step(tree: TokenTree = tree) -> None:
                bench.step(tree)
                bench.undo()

            first, *times = [1000 * seconds_of(model.device, step) for _ in range(options.repeats + 1)]
            yield {
                "kind": "step",
                "engine": engine,
                "context": context,
                "nodes": nodes,
                "first_ms": first,
                "ms": median(times),
            }
    yield {"kind": "prepared", "engine": engine, "context": context, "seconds": now(device) - begin}


def recorded(options: Options, path: str, count: int, prompt: int, answer: int) -> list[Case]:
    """Read recorded texts of a file, repeated if it has fewer; shorter ones are lengthened by those after them."""
    cases = read_cases(Path(path), encoder_of(load_tokenizer("demo")))
    parts = range(1 + answer // 16)
    return [
        lengthened([cases[(number + part) % len(cases)] for part in parts], prompt, answer) for number in range(count)
    ]


def serve_cases(engine: Engine, cases: Sequence[Case], selection: str, every: int = 0) -> Row:
    """Decode recorded texts as requests, one of which joins in `every` steps, and return the figures.

    Steps end when their tokens are there, so no clock waits for the device.
    """
    handles: list[Any] = []
    submitted: dict[Any, float] = {}  # of requests without a token
    first: list[float] = []
    steps: list[tuple[float, bool]] = []  # milliseconds, and whether all rows decoded
    counts = engine.statistics
    nodes = counts.nodes
    begin = at = perf_counter()
    left = len(cases)
    while left or len(handles) < len(cases):
        while len(handles) < len(cases) and len(steps) >= every * len(handles):
            case = cases[len(handles)]
            how = forced(case) if selection == "forced" else {"max_new_tokens": len(case.answer)}
            handles.append(engine.submit(case.prompt, seed=len(handles), **{**SELECTIONS[selection], **how}))
            submitted[handles[-1]] = perf_counter()
        left = engine.step()
        before, at = at, perf_counter()
        steps.append((1000 * (at - before), not submitted and left == len(cases)))
        for handle in [one for one in submitted if one.tokens]:
            first.append(1000 * (at - submitted.pop(handle)))
    times = [time for time, _ in steps]
    return {
        "seconds": at - begin,
        "steps": len(steps),
        "nodes": counts.nodes - nodes,
        "tokens": sum(len(case.answer) for case in cases),
        "median_step_ms": median(times),
        "max_step_ms": max(times),
        "full_step_ms": median([time for time, full in steps if full] or times),
        "first_token_ms": median(first),
        "max_first_token_ms": max(first),
        "graphs": counts.graphs.count,
        "graph_seconds": counts.graphs.seconds,
        "graph_bytes": counts.graphs.bytes,
        "equal": all(handle.tokens == list(case.answer) for handle, case in zip(handles, cases, strict=True)),
    }


def load_rows(
    options: Options, kind: str, cases: Sequence[Case], name: str, rows: int, selection: str = "greedy", every: int = 0
) -> Iterator[Row]:
    """Yield figures of an engine for half of the texts, then for the others. With the first, `auto` learns prices."""
    model, cases = large_model(options, cases)
    engine = Engine(model, ENGINES[name], max_rows=rows, prefix_cache=False)
    half = len(cases) // 2
    for repeat in range(2):
        figures = serve_cases(engine, cases[repeat * half :][:half], selection, every)
        about: Row = {"rows": rows, "requests": half, "selection": selection, "every": every, "repeat": repeat}
        yield compared(kind, name, figures.pop("equal"), about | figures)


def engine_rows(options: Options, rows: int, name: str, selection: str) -> Iterator[Row]:
    """Yield figures of requests at once."""
    cases = recorded(options, options.edits, 2 * rows, PROMPT, min(options.new_tokens, 96))
    return load_rows(options, "engine", cases, name, rows, selection)


def prompt_rows(options: Options, name: str, rows: int, every: int) -> Iterator[Row]:
    """Yield figures of twice as many requests with longer prompts, which join one by one or at once."""
    cases = recorded(options, options.edits, 4 * rows, 64 if options.tiny else 1024, min(options.new_tokens, 96))
    return load_rows(options, "prompts", cases, name, rows, "greedy", every)


def ragged_rows(options: Options, name: str, rows: int, length: int) -> Iterator[Row]:
    """Yield figures of one long text among short ones."""
    new = min(options.new_tokens, 96)
    cases = recorded(options, options.edits, 2 * rows, PROMPT, new)
    cases[0], cases[rows] = recorded(options, options.traces, 2, length // (16 if options.tiny else 1), new)
    for row in load_rows(options, "ragged", cases, name, rows):
        yield row | {"longest": length}


def rival_rows(options: Options, rows: int) -> Iterator[Row]:
    """Yield figures of transformers' own requests at once, `generate_batch`, twice."""
    from transformers import ContinuousBatchingConfig  # later than 5.17

    cases = recorded(options, options.edits, rows, PROMPT, min(options.new_tokens, 96))
    model, cases = large_model(options, cases)
    how = GenerationConfig(max_new_tokens=len(cases[0].answer), do_sample=False, eos_token_id=-1, pad_token_id=0)
    for repeat in range(2):
        begin = perf_counter()
        outputs = model.generate_batch(
            [case.prompt for case in cases],
            generation_config=how,
            progress_bar=False,
            persistent_manager=True,
            warmup=options.device != "cpu",
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=64) if options.tiny else None,
        )
        seconds = perf_counter() - begin
        texts = [list(output.generated_tokens) for output in outputs.values()]
        about = {"rows": rows, "selection": "greedy", "repeat": repeat, "seconds": seconds}
        about["tokens"] = sum(map(len, texts))
        equal = sorted(texts) == sorted(list(case.answer) for case in cases)
        yield compared("engine", "transformers, generate_batch", equal, about, exact=False)


def table_rows(options: Options, rows: int) -> Iterator[Row]:
    """Yield calls of the driver and kernels in steps of an engine without drafts."""
    steps, part = 8, 2048
    before = steps + rows * PROMPT // part
    model, cases = large_model(options, recorded(options, options.edits, rows, PROMPT, before + 2 * steps))
    engine = Engine(model, ENGINES["no drafts"], max_rows=rows, prefix_cache=False, prompt_tokens=part)
    for case in cases:
        engine.submit(case.prompt, max_new_tokens=len(case.answer), do_sample=False)
    for _ in range(before):
        engine.step()
    work = lambda: [engine.step() for _ in range(steps)]  # noqa: E731
    yield from gpu_kernels.table_rows(work, steps, {"nodes": rows}, options.device)
    engine.close(cancel=True)


def text_rows(options: Options, name: str) -> Iterator[Row]:
    """Yield steps and wall time of one recorded text at a time."""
    for task, path in (("edits", options.edits), ("traces", options.traces)):
        cases = recorded(options, path, options.texts, 256 if options.tiny else 1536, options.new_tokens)
        model, cases = large_model(options, cases)
        run = partial(generate, model, config=METHODS.get(name), **RIVALS.get(name, {}))
        for number, case in enumerate(cases):
            written = replace(case, answer=())  # the model writes it, no processor
            for _ in range(2 if number == 0 else 0):  # warm up: graphs are captured once
                run(written, max_new_tokens=len(case.answer))
            counts, prefill = (run(written, max_new_tokens=count) for count in (len(case.answer), 1))
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
            yield compared("text of one", name, counts.tokens == list(case.answer), about)


def guarded(work: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows of a unit; an error becomes a row, so that later units still run."""
    gc.collect()  # engines of earlier units
    torch.cuda.empty_cache()  # servers are other processes
    try:
        yield from work()
    except Exception as error:
        message, trace = f"{type(error).__name__}: {error}"[:800], traceback.format_exc()[-4000:]
        yield {"kind": "failed", "error": message, "trace": trace}


Work = Callable[[], Iterable[Row]]


def units_of(options: Options) -> Iterator[tuple[str, str, Work]]:
    """Yield part, name and function of each unit, most valuable first within its part."""
    device, is_tiny = options.device, bool(options.tiny)
    for part, units in (
        ("prices", units_of_prices(options)),
        ("engine", units_of_engines(options)),
        ("prompts", units_of_prompts(options)),
        ("ragged", units_of_ragged(options)),
        ("kernels", units_of_kernels(device)),
        ("right", units_of_right(device)),
    ):
        yield from ((part, name, work) for name, work in units)
    for name, config in engines_of(options).items():
        cases = partial(recorded, options, options.edits, 4 if is_tiny else 32, PROMPT, min(options.new_tokens, 96))
        yield "serve", f"serve, {name}", partial(stream_rows, device, "tiny" if is_tiny else "8b", name, config, cases)
    for name in (*METHODS, *(rival for rival in RIVALS if device != "cpu" or "compiled" not in rival)):
        yield "speed", f"one text, {name}", partial(text_rows, options, name)
    bits = same_bits.Options(device=device)
    for dtype, number in (("bfloat16", 0), ("bfloat16", 3), ("float16", 0)):
        yield "invariance", f"bits, qwen3, {dtype}, {number}", partial(same_bits.compare, "qwen3", dtype, number, bits)


def engines_of(options: Options) -> dict[str, LookaheadConfig]:
    """Configurations of engines."""
    return {"auto": ENGINES["auto"]} if options.tiny else ENGINES


def units_of_prices(options: Options) -> Iterator[tuple[str, Work]]:
    """Yield name and function of units of this part."""
    yield "host", partial(gpu_kernels.host_rows, options.device)
    for context, engine in product(options.contexts, ("static", "dynamic")):
        yield f"steps, {engine}, {context}", partial(step_prices, options, engine, context)
    for rows in (4,) if options.tiny else (64, 1, 16, 256):
        yield f"kernels of {rows} nodes", partial(table_rows, options, rows)


def units_of_engines(options: Options) -> Iterator[tuple[str, Work]]:
    """Yield name and function of units of this part."""
    for rows, name in product((4,) if options.tiny else LOADS, engines_of(options)):
        yield f"engine, {rows} rows, {name}", partial(engine_rows, options, rows, name, "greedy")
    many = (4,) if options.tiny else (64, 16)
    for rows, name, selection in product(many, engines_of(options), list(SELECTIONS)[1:]):
        yield f"engine, {rows} rows, {name}, {selection}", partial(engine_rows, options, rows, name, selection)
    for rows in many:
        yield f"generate_batch, {rows} rows", partial(rival_rows, options, rows)


def units_of_prompts(options: Options) -> Iterator[tuple[str, Work]]:
    """Yield name and function of units of this part."""
    for rows, name, every in product((4,) if options.tiny else (64, 16), engines_of(options), (2, 0)):
        yield f"prompts, {rows} rows, {name}, {every}", partial(prompt_rows, options, name, rows, every)


def units_of_ragged(options: Options) -> Iterator[tuple[str, Work]]:
    """Yield name and function of units of this part."""
    for rows, name, length in product((4,) if options.tiny else (16, 64), engines_of(options), LONG):
        yield f"ragged, {rows} rows, {name}, {length}", partial(ragged_rows, options, name, rows, length)


def units_of_kernels(device: str) -> Iterator[tuple[str, Work]]:
    """Yield name and function of units of this part. A CPU has no kernels of Triton."""
    yield "likeliest", partial(gpu_kernels.likeliest_rows, device)
    if device != "cpu":
        yield "fused", partial(gpu_kernels.fused_rows, device)
        for heads, groups, size in gpu_kernels.HEADS:
            name = f"attention {heads} {groups} {size}"
            yield name, partial(gpu_kernels.attention_rows, device, heads, groups, size)


def units_of_right(device: str) -> Iterator[tuple[str, Work]]:
    """Yield name and function of units of this part."""
    for name, dtype in (("auto", "float32"), ("auto, eager", "float32"), ("paper", "float32"), ("auto", "bfloat16")):
        yield f"texts, {name}, {dtype}", partial(texts_of_generate, device, name, METHODS[name], dtype)
    for name in ("auto", "auto, eager"):
        yield f"texts of a batch, {name}", partial(texts_of_batch, device, name, METHODS[name])
        yield f"texts of an engine, {name}", partial(texts_of_engine, device, name, METHODS[name])


def probe(options: Options) -> Probe:
    """Make the units of the requested parts, in their order.

    Raises:
        InvalidArgumentError: There is no GPU.
    """
    if options.device != "cpu" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"--device {options.device}: torch finds no CUDA device here")
    found = units_of(options)
    units = [Unit(name, partial(guarded, work)) for part, name, work in found if part in options.parts]
    return Probe(units, {"model": "tiny" if options.tiny else "8b"})
