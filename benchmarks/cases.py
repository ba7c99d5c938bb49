"""Prompts and recorded answers in tokens, and one call of `generate` on them, counted and timed.

`worth.py` measures older commits of the library with this file, so it uses only functions that they have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import InvalidArgumentError

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

    Raises:
        InvalidArgumentError: The file cannot be read, or a line is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the cases {path}: {error}") from error
    cases = []
    for number, line in enumerate(lines[:limit], start=1):
        try:
            row = json.loads(line)
            expected, output = encode(row.get("input", "")), encode(row.get("output", ""))
            ids = encode(prompt_of(row))[-prompt if prompt else None :]
            cases.append(Case(str(row["id"]), ids, output[:answer], expected))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(
                f"{path}, line {number}: a case is an object with `id`, and `prompt`, `turns`, or `instruction` and "
                f"`input` ({type(error).__name__}: {error})"
            ) from error
        if not ids:
            raise InvalidArgumentError(f"{path}, line {number}: a prompt needs at least one token")
    return cases


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

    Raises:
        InvalidArgumentError: The tokenizer cannot be read, or mistral-common is not installed.
    """
    if path is not None and path.is_dir():
        return path.name, encoder_of(AutoTokenizer.from_pretrained(path), add_special_tokens=False)
    try:
        tekken = import_module("mistral_common.tokens.tokenizers.tekken")
        file = path or Path(import_module("mistral_common").__file__ or "").parent / "data" / TEKKEN
        tokenizer = tekken.Tekkenizer.from_file(file)
    except ImportError as error:
        raise InvalidArgumentError(
            "mistral-common, which ships the tokenizer, is not installed; install the extra `bench`, or give the "
            "folder of a tokenizer with --tokenizer"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path} is neither a tekken file ({error}) nor the folder of a tokenizer"
        ) from error
    return file.name, partial(tokenizer.encode, bos=False, eos=False)
