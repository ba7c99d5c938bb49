"""Replay recorded answers with drafts: S on texts of models that are too large for this machine.

No model runs: each recorded token replaces the model's choice, without logits. So the drafts are the same as in
engines that return no logits. Recordings are JSON lines with `id`, `output`, and `prompt` or `instruction` and `input`;
an input is the predicted output. Each method drafts chains and trees of several sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from cases import Case, read_cases, tokenizer_of
from lookahead.bench.rows import Row
from lookahead.bench.summary import repeated_cycle_share
from lookahead.config import LookaheadConfig
from lookahead.drafting import AutoDrafter, DraftMemory, PredictedText, build_drafter
from probe import Probe, Unit, option

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from playback import play_text

MakeDrafter = Callable[[Case], Any]

SIZES = {f"chain of {tokens}": (tokens + 1, False) for tokens in (4, 8, 16)}
SIZES |= {f"tree of {nodes}": (nodes, True) for nodes in (16, 32, 64)}
"""Number of nodes with the root, and whether they may branch, by name of the size."""

METHODS = {"context matches": (False, False), "auto, text only": (True, False), "auto, predicted text": (True, True)}
"""Whether a method can draft from earlier requests of the file, and whether it has a predicted output."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    recordings: list[str] = option([], "files of recorded answers")
    tokenizer: str = option("", "tekken file, or folder of a tokenizer; by default mistral-common's file")
    limit: int = option(1000, "maximum number of recordings of each file")


def drafters_of(name: str, nodes: int, branches: bool, across: bool) -> MakeDrafter:
    """Function that makes the drafter of each request, called in the order of the file."""
    if name == "context matches":
        config = LookaheadConfig(preset="context_matches", step_budget=nodes)
        return lambda case: build_drafter(config, chains=not branches)
    shared, expects = DraftMemory.of_texts() if across else None, METHODS[name][1]

    def make(case: Case) -> AutoDrafter:
        predicted = PredictedText(list(case.expected)) if expects else None
        return AutoDrafter(shared or DraftMemory.of_texts(), nodes, predicted=predicted, chains=not branches)

    return make


def replayed(task: str, cases: Sequence[Case], name: str, across: bool) -> Iterator[Row]:
    """Yield a row for each size of draft and recording."""
    for size, (nodes, branches) in SIZES.items():
        make = drafters_of(name, nodes, branches, across)
        for number, case in enumerate(cases):
            nodes_per_step = play_text(case.prompt, case.answer, make(case)).nodes_per_step
            yield {
                "kind": "replay",
                "task": task,
                "id": case.id,
                "part": number % 2,
                "method": name,
                "across": across,
                "size": size,
                "tokens": len(case.answer),
                "steps": len(nodes_per_step),
                "drafted": sum(nodes_per_step) - len(nodes_per_step),
            }


def texts(task: str, cases: Sequence[Case]) -> Iterator[Row]:
    """Yield a row for each recording: lengths, and the share of the answer in repeated cycles."""
    for case in cases:
        tokens, share = len(case.answer), round(repeated_cycle_share(case.answer), 3)
        yield {
            "kind": "text",
            "task": task,
            "id": case.id,
            "prompt_tokens": len(case.prompt),
            "tokens": tokens,
            "cycle_share": share,
            "cycle_tokens": round(tokens * share, 3),
        }


def probe(options: Options) -> Probe:
    """Make a unit for each method and file."""
    name, encode = tokenizer_of(Path(options.tokenizer) if options.tokenizer else None)
    units, files = list[Unit](), {}
    for path in map(Path, options.recordings):
        cases = read_cases(path, encode, options.limit)
        files[path.stem] = sha256(path.read_bytes()).hexdigest()[:16]
        units.append(Unit(f"{path.stem}, texts", partial(texts, path.stem, cases)))
        for method, (remembers, expects) in METHODS.items():
            if not expects or all(case.expected for case in cases):
                for across in (False, True) if remembers else (False,):
                    of_unit = f"{path.stem}, {method}, {'file' if across else 'request'}"
                    units.append(Unit(of_unit, partial(replayed, path.stem, cases, method, across)))
    return Probe(units, {"tokenizer": name, "files": files})
