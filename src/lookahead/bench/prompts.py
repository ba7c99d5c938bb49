"""Prompts of a benchmark or a batch: JSON lines, and the tokens of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lookahead.bench.suite import TaskSpec
from lookahead.errors import InvalidArgumentError


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: What its file calls it; the place of its line where that says nothing.
        number: Its place in the file, from 0.
        text: The whole text.
        task: What its file says it belongs to, empty if nothing.
        fault: Why it has no text that a model could read, empty if it has.
    """

    id: str
    number: int
    text: str
    task: str = ""
    fault: str = ""


def read_prompts(task: TaskSpec, limit: int | None = None, *, faulty: bool = False) -> list[Prompt]:
    """The prompts of a task, in the order of the file.

    Args:
        task: The task.
        limit: Take only the first so many, whatever the task says.
        faulty: Give back prompts without a text, too, and say in `fault` what is wrong with them.

    Raises:
        InvalidArgumentError: The file holds something else; the message names the line.
    """
    try:
        lines = task.data.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(f"cannot read the prompts {task.data}: {reason}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _prompt(task, line, f"{task.data.name}, line {number}", len(prompts))
            if prompt.fault and not faulty:
                raise InvalidArgumentError(prompt.fault)
            prompts.append(prompt)
    if not prompts:
        raise InvalidArgumentError(
            f"{task.data} holds no prompts; write a JSON object with `id` and `prompt` on each line"
        )
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise InvalidArgumentError(f"{task.data} has the same `id` twice; make them different")
    if task.only is not None:
        prompts = [prompt for prompt in prompts if f"{prompt.task}/".startswith(f"{task.only}/")]
        if not prompts:
            raise InvalidArgumentError(f"task {task.name!r}: {task.data.name} holds no prompts of only={task.only!r}")
    return prompts[:: task.every][: task.prompts][:limit]


def _prompt(task: TaskSpec, line: str, where: str, number: int) -> Prompt:
    row, fault = _object(line, where)
    if fault:
        return Prompt(where, number, "", fault=fault)
    value: Any = row.get(task.field) if task.field else row.get("prompt", row.get("turns"))
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value:
        names = f"`{task.field}`, as task {task.name!r} says" if task.field else "`prompt` or `turns`"
        value, fault = "", f"{where} needs a text in {names}"
    elif any("\ud800" <= character <= "\udfff" for character in value):
        fault = f"{where} has half of a surrogate pair in its text, which is no character; write both or none"
    return Prompt(str(row["id"]), number, value, str(row.get("task", "")), fault)


def _object(line: str, where: str) -> tuple[dict[str, Any], str]:
    """The JSON object of a line, or what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return {}, f"{where} is no JSON ({error})"
    if not isinstance(row, dict) or "id" not in row:
        return {}, f"{where} needs an `id`"
    return row, ""


def encode(prompt: Prompt, task: TaskSpec, tokenizer: PreTrainedTokenizerBase, context: int | None) -> torch.Tensor:
    """The tokens of a prompt, cut so that what is generated has room as well. Shape [1, S], int64.

    Args:
        prompt: The prompt.
        task: Says how long it may be, and which part stays.
        tokenizer: The model's.
        context: Most tokens that the model can read, `None` for any number.

    Raises:
        InvalidArgumentError: The model has no room for a prompt, or there are no tokens in it.
    """
    room = task.max_prompt_tokens
    if context is not None:
        if task.max_new_tokens >= context:
            raise InvalidArgumentError(
                f"max_new_tokens={task.max_new_tokens} of task {task.name!r} leaves no room for a prompt: the model's "
                f"context is {context}"
            )
        room = min(room or context, context - task.max_new_tokens)
    ids: list[int] = tokenizer(prompt.text).input_ids
    if not ids:
        raise InvalidArgumentError(f"prompt {prompt.id!r} of task {task.name!r} has no tokens")
    return torch.tensor([_cut(ids, room, task.keep, tokenizer.bos_token_id)])


def _cut(ids: Sequence[int], room: int | None, keep: str, bos_token: int | None) -> list[int]:
    """At most `room` tokens from one end of a text; a token that begins every text stays."""
    if room is None or len(ids) <= room:
        return list(ids)
    if keep == "beginning":
        return list(ids[:room])
    first = [ids[0]] if ids[0] == bos_token and room > 1 else []
    return [*first, *ids[len(ids) - room + len(first) :]]
