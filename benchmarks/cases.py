"""Prompts and recorded answers in tokens, and one call of `generate` on them, counted and timed.

`worth.py` measures commits of the library with this file, so it asks for nothing that they lack.
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
    """A prompt and, where the text is recorded, its answer and what could be expected beforehand, in tokens."""

    id: str
    prompt: list[int]
    answer: Sequence[int] = ()
    expected: Sequence[int] = ()


@dataclass(frozen=True)
class Counts:
    """What decoding came to: the new tokens, steps, nodes sent, and seconds of CPU time (on a GPU, of wall time)."""

    tokens: Sequence[int]
    steps: int
    nodes: int
    seconds: float


class Forced(LogitsProcessor):
    """Leaves only the recorded token at each place after the prompt."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """See transformers; input_ids: `[1, S]`, scores: `[1, vocabulary]`."""
        place = input_ids.shape[1] - len(self._case.prompt)
        if place >= len(self._case.answer):  # prompt lookup asks for more than it may send
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._case.answer[place]] = 0
        return forced


def forced(case: Case) -> dict[str, Any]:
    """Arguments with which a model writes the answer of a case; none for a case without one."""
    if not case.answer:
        return {}
    return {"max_new_tokens": len(case.answer), "logits_processor": LogitsProcessorList([Forced(case)])}


def generate(model: Any, case: Case, config: LookaheadConfig | None, **more: Any) -> Counts:
    """Continue a case: forced if it has an answer, else greedily unless `more` says otherwise.

    Args:
        model: The model.
        case: The case.
        config: How to draft; `None` for transformers' own `generate`, whose steps are taken to bring one token each.
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
    """Seconds of CPU time of this process; on a GPU wall time, after all that was launched is done."""
    if torch.device(device).type != "cuda":
        return process_time()
    torch.cuda.synchronize(device)
    return perf_counter()


def read_cases(
    path: Path, encode: Encode, limit: int | None = None, *, prompt: int | None = None, answer: int | None = None
) -> list[Case]:
    """The cases of a file of JSON lines with `id`, and `prompt`, `turns`, or for an edit `instruction` and `input`.

    Args:
        path: The file. An `output` is the recorded answer; the `input` of an edit is what is expected.
        encode: Makes tokens of a text.
        limit: Take only the first so many.
        prompt: Take only so many tokens of the end of a prompt.
        answer: Take only so many tokens of the beginning of an answer.

    Raises:
        InvalidArgumentError: The file cannot be read, or a line holds something else.
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
            raise InvalidArgumentError(f"{path}, line {number}: a prompt needs at least a token")
    return cases


def read_texts(path: Path) -> list[str]:
    """The prompts of a file as they are."""
    return [prompt_of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_of(row: dict[str, Any]) -> str:
    """The prompt of a line."""
    if "instruction" in row:
        return f"{row['instruction']}\n\n{row['input']}\n\n"
    return str(row.get("prompt") or row["turns"][0])


def encoder_of(tokenizer: Any, **arguments: Any) -> Encode:
    """What makes tokens of a text with a tokenizer of transformers."""
    return lambda text: list(tokenizer(text, **arguments).input_ids) if text else []


def tokenizer_of(path: Path | None) -> tuple[str, Encode]:
    """A tokenizer's name, and what makes tokens of a text, without special ones.

    Args:
        path: A tekken file, or the folder of a tokenizer of transformers; the tekken file that mistral-common ships if
            not given.

    Raises:
        InvalidArgumentError: There is none.
    """
    if path is not None and path.is_dir():
        return path.name, encoder_of(AutoTokenizer.from_pretrained(path), add_special_tokens=False)
    try:
        tekken = import_module("mistral_common.tokens.tokenizers.tekken")
        file = path or Path(import_module("mistral_common").__file__ or "").parent / "data" / TEKKEN
        tokenizer = tekken.Tekkenizer.from_file(file)
    except ImportError as error:
        raise InvalidArgumentError(
            "mistral-common is not installed, which ships and reads the tokenizer; install the extra `bench`, or name "
            "the folder of a tokenizer with --tokenizer"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{path} is no tekken file ({error}), nor the folder of a tokenizer") from error
    return file.name, partial(tokenizer.encode, bos=False, eos=False)
