"""Measure edits of code whose file is given as the `prediction` of the request, and without it.

The edits are forced: a logits processor leaves only the recorded token (see `forced_text`), as no model that fits this
machine writes them. So S says what matching in the file brings, and nothing of a model's own predictions. The prompt of
an edit holds its instruction, and the file or not: where it does, drafts find the file there, too. Requests run on an
`Engine`, one after another, with the nodes of a step fixed. Tokens of the prediction that came count as accepted, the
others as rejected, as in `usage.completion_tokens_details` of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from forced_text import Case, Forced
from lookahead import Engine, LookaheadConfig
from lookahead.bench.models import load
from lookahead.bench.rows import Row
from lookahead.bench.suite import ModelSpec
from probe import RANDOM_CONFIG, Probe, Unit, option


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    edits: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction`, `input` and `output`")
    edit_count: int = option(20, "take the first so many edits")
    layers: int = option(1, "layers of the model, which has random weights")
    hidden_size: int = option(64, "its hidden size")
    nodes: tuple[int, ...] = option((16,), "nodes of a step")


class Bench:
    """One engine, and the edits with what is predicted for each."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def rows(self, case: Case, shown: bool, file: list[int], nodes: int) -> Iterator[Row]:
        """A row without the prediction, and one with it; `shown` says whether the prompt holds the file."""
        for prediction in (None, file):
            with Engine(self._model, LookaheadConfig(step_budget=nodes)) as engine:
                handle = engine.submit(
                    torch.tensor([case.prompt]),
                    prediction=prediction,
                    max_new_tokens=len(case.answer),
                    do_sample=False,
                    attention_mask=torch.ones((1, len(case.prompt)), dtype=torch.long),
                    logits_processor=LogitsProcessorList([Forced(case)]),
                    pad_token_id=0,
                )
                output = handle.result()
            told = handle.statistics
            row: Row = {
                "kind": "run",
                "id": case.id,
                "nodes": nodes,
                "shown": shown,
                "prediction": prediction is not None,
            }
            row |= {"tokens": len(case.answer), "steps": told.steps, "S": len(case.answer) / told.steps}
            if prediction is not None:
                accepted = min(told.predicted_tokens, len(file))
                row |= {"predicted": len(file), "accepted": accepted, "rejected": len(file) - accepted}
            if output[0, len(case.prompt) :].tolist() != case.answer:
                row["error"] = f"{case.id}: another text than the recorded one"
            yield row


def probe(options: Options) -> Probe:
    """The units: each edit with each number of nodes."""
    sizes = {"num_hidden_layers": options.layers, "hidden_size": options.hidden_size}
    spec = ModelSpec("random Llama", None, random={**RANDOM_CONFIG, **sizes})
    loaded = load(spec, torch.device("cpu"))
    bench, path = Bench(loaded.model), Path(options.edits)
    units = []
    for shown in (True, False):
        for case, file in read_edits(path, loaded.tokenizer, options.edit_count, shown):
            for nodes in options.nodes:
                name = f"{case.id}, {nodes} nodes, file {'in the prompt' if shown else 'predicted alone'}"
                units.append(Unit(name, partial(bench.rows, case, shown, file, nodes)))
    return Probe(units, {"model": loaded.settings(), "nodes": list(options.nodes)})


def read_edits(path: Path, tokenizer: Any, count: int, shown: bool) -> Iterator[tuple[Case, list[int]]]:
    """The first edits of a file, each with the tokens of the file that is edited."""
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        prompt = f"{row['instruction']}\n\n" + (f"{row['input']}\n\n" if shown else "")
        prompt_tokens, answer, file = (tokenizer(text).input_ids for text in (prompt, row["output"], row["input"]))
        yield Case(str(row["id"]), prompt_tokens, answer), file
