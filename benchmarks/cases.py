"""Prompts and recorded answers in tokens, and one call of `generate` on them, counted and timed.

`worth.py` measures older commits of the library with this file, so it uses only functions that they have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

import lookahead
from lookahead import LookaheadConfig

Encode = Callable[[str], list[int]]

TEKKEN = "tekken_240911.json"


@dataclass(frozen=True)
class Case:
    """Prompt in tokens and, for recorded texts, the answer and the predicted output (`expected`)."""

    id: str
    prompt: list[int]
    answer: Sequence[int] = ()
    expected: Sequence[int] = ()


@dataclass(frozen=True)
class Counts:
    """Result of decoding: new tokens, numbers of steps and nodes, and CPU time in seconds (on a GPU wall time)."""

    tokens: Sequence[int]
    steps: int
    nodes: int
    seconds: float


class Forced(LogitsProcessor):
    """Logits processor that allows only the recorded token at each position after the prompt."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Mask all scores but the recorded token's; input_ids: `[1, S]`, scores: `[1, vocabulary]`."""
        place = input_ids.shape[1] - len(self._case.prompt)
        if place >= len(self._case.answer):  # prompt lookup drafts past the end
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._case.answer[place]] = 0
        return forced


def forced(case: Case) -> dict[str, Any]:
    """Arguments that force a model to write the answer of a case; none for a case without one."""
    if not case.answer:
        return {}
    return {"max_new_tokens": len(case.answer), "logits_processor": LogitsProcessorList([Forced(case)])}


def generate(model: Any, case: Case, config: LookaheadConfig | None, **more: Any) -> Counts:
    """Continue a case: forced if it has an answer, else greedily unless `more` says otherwise.

    Args:
        model: Model to run.
        case: Case to continue.
        config: Configuration of drafting; `None` for transformers' own `generate`, counted as one token per step.
        **more: Further arguments of `generate`.
    """
    ids = torch.tensor([case.prompt], device=model.device)
    arguments = {"do_sample": False, "attention_mask": torch.ones_like(ids)} | forced(case) | more
    call = model.generate if config is None else partial(lookahead.generate, model, lookahead_config=config)
    begin = now(model.device)
    output = call(ids, return_dict_in_generate=True, **arguments)
    seconds = now(model.device) - begin
    tokens = output.sequences[0, ids.shape[1] :].tolist()
    nodes = [1] * len(tokens) if config is None else output.statistics.nodes_per_step
    return Counts(tokens, len(nodes), sum(nodes), seconds)


def now(device: Any) -> float:
    """CPU time of this process in seconds; on a GPU wall time, after synchronisation."""
    if torch.device(device).type != "cuda":
        return process_time()
    torch.cuda.synchronize(device)
    return perf_counter()


def read_cases(
    path: Path, encode: Encode, limit: int | None = None, *, prompt: int | None = None, answer: int | None = None
) -> list[Case]:
    """Read cases from JSON lines with `id`, and `prompt`, `turns`, or for an edit `instruction` and `input`.

    Args:
        path: Path of the file. An `output` is the recorded answer; the `input` of an edit is the predicted output.
        encode: Function that encodes a text.
        limit: Maximum number of cases.
        prompt: Maximum number of tokens of a prompt, counted from its end.
        answer: Maximum number of tokens of an answer, counted from its start.
    """
    cases = []
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()[:limit]):
        ids = encode(prompt_of(row))[-prompt if prompt else None :]
        cases.append(Case(str(row["id"]), ids, encode(row.get("output", ""))[:answer], encode(row.get("input", ""))))
    return cases


def lengthened(cases: Sequence[Case], prompt: int, answer: int) -> Case:
    """Return the first case with its prompt repeated and the answers of all joined, cut to these numbers of tokens."""
    first = cases[0]
    repeated = first.prompt * -(-prompt // len(first.prompt))
    joined = [token for case in cases for token in case.answer]
    return Case(first.id, repeated[-prompt:], joined[:answer])


def read_texts(path: Path) -> list[str]:
    """Read the prompts of a file as texts."""
    return [prompt_of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_of(row: dict[str, Any]) -> str:
    """Prompt of a JSON line."""
    if "instruction" in row:
        return f"{row['instruction']}\n\n{row['input']}\n\n"
    return str(row.get("prompt") or row["turns"][0])


def encoder_of(tokenizer: Any, **arguments: Any) -> Encode:
    """Function that encodes a text with a tokenizer of transformers."""
    return lambda text: list(tokenizer(text, **arguments).input_ids) if text else []


def tokenizer_of(path: Path | None) -> tuple[str, Encode]:
    """Name of a tokenizer, and a function that encodes a text without special tokens.

    Args:
        path: Tekken file, or folder of a transformers tokenizer; by default the tekken file of mistral-common.
    """
    if path is not None and path.is_dir():
        return path.name, encoder_of(AutoTokenizer.from_pretrained(path), add_special_tokens=False)
    import mistral_common  # late, as it is an extra
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    file = path or Path(mistral_common.__file__).parent / "data" / TEKKEN
    return file.name, partial(Tekkenizer.from_file(file).encode, bos=False, eos=False)
