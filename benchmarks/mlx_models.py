"""Measure a model of MLX on this machine: equal texts, speed beside mlx-lm, and times of passes by nodes.

Meant for Macs, where this project has not measured yet; it takes a few minutes with a model of 4 bits. Each prompt is
continued greedily and at temperature 0.8, past the end of the text, by `mlx_lm.stream_generate` and by this library. On
a GPU seconds are wall time, on a CPU time of the processor. Rows of a Mac are welcome in an issue.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import lookahead
from cases import Case, encoder_of, read_cases
from lookahead.backends.session import open_session
from lookahead.bench.rows import Row
from lookahead.bench.summary import first_difference
from lookahead.core.statistics import Statistics
from lookahead.core.token_tree import TokenTree
from lookahead.integrations.mlx import stream_generate
from models import model_folder
from probe import Probe, Unit, option

REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    prompts: str = option("benchmarks/prompts/story_beginnings.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    model: str = option("demo", "`demo`, the folder of a model, or its name on the Hub")
    limit: int = option(8, "number of prompts")
    max_new_tokens: int = option(128, "tokens to generate")
    nodes: list[int] = option([1, 2, 4, 8, 16, 32], "numbers of nodes of a pass")
    contexts: list[int] = option([128, 1024], "lengths of the text before a pass")


def probe(options: Options) -> Probe:
    """Make a unit for each prompt and each context."""
    model = lookahead.load_mlx(model_folder(options.model) if options.model == "demo" else options.model)
    device = mx.device_info().get("device_name", "") if mx.default_device() == mx.gpu else "CPU"
    settings = {
        "model": {"name": Path(options.model).name, "number_type": model.number_type},
        "passes": model.way,
        "difference": model.difference,
        "mlx": {"version": mx.__version__, "mlx_lm": mlx_lm.__version__, "device": device},
    }
    cases = read_cases(Path(options.prompts), encoder_of(model.tokenizer), options.limit)
    texts = [Unit(case.id, partial(_texts, model, case, options.max_new_tokens)) for case in cases]
    prices = [Unit(f"prices {size}", partial(_prices, model, size, options.nodes)) for size in options.contexts]
    return Probe([*prices, *texts], settings)


def _clock() -> float:
    return process_time() if mx.default_device() == mx.cpu else perf_counter()


def _texts(model: Any, case: Case, length: int) -> Iterator[Row]:
    """Yield rows of one prompt, greedy and sampled: tokens, steps and seconds of both ways."""
    mlx_tokenizer = model.mlx_tokenizer
    for sampling, sampler in (("greedy", None), ("sampled", make_sampler(0.8, top_p=0.95))):
        found: dict[str, list[int]] = {}
        for method, way, target in (
            ("mlx-lm", mlx_lm.stream_generate, model.mlx),
            ("lookahead", stream_generate, model),
        ):
            statistics = Statistics()
            more = {"statistics": statistics} if method == "lookahead" else {}
            mx.random.seed(0)
            begin = _clock()
            answers = way(target, mlx_tokenizer, case.prompt, max_tokens=length, sampler=sampler, **more)
            found[method] = [answer.token for answer in answers]
            seconds = _clock() - begin
            place = first_difference(found["mlx-lm"], found[method])
            row: Row = {"kind": "text", "method": method, "sampling": sampling, "seconds": seconds}
            row |= {"tokens": len(found[method]), "steps": statistics.steps or len(found[method])}
            yield row | {"first_difference": place, "equal": int(place is None)}


def _prices(model: Any, context: int, nodes: tuple[int, ...]) -> Iterator[Row]:
    """Yield the time of a pass for each number of nodes: chains, and trees of two branches."""
    draws = random.Random(context)
    text = [draws.randrange(model.vocabulary) for _ in range(context + 1)]
    session: Any = open_session(model)
    runner = session.runner_of([make_prompt_cache(model.mlx)])
    runner.prefill([text], None)
    for count in nodes:
        seconds = []
        for _ in range(REPEATS + 1):
            tree: TokenTree = runner.begin_tree(0, text)
            half = (count - 1) // 2 if not runner.chains else 0
            tree.add_candidates(text[1 : 1 + half])
            tree.add_candidates([(text[1] + 1) % model.vocabulary, *text[2 : count - half]][: count - 1 - half])
            begin = _clock()
            runner.forward([tree])
            seconds.append(_clock() - begin)
            runner.commit([[]])
        yield {"kind": "price", "context": context, "nodes": count, "seconds": median(seconds[1:])}
