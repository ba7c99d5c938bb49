"""Models and prompts of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lookahead.backends.llama_cpp.model import load_gguf
from lookahead.backends.session import open_session
from lookahead.backends.transformers.findings import model_identity
from lookahead.bench.suite import MethodSpec, ModelSpec, TaskSpec
from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError, LookaheadError


@dataclass(frozen=True)
class BenchModel:
    """A model that was loaded.

    Attributes:
        spec: What the benchmark says of it.
        model: The model, which stays greedy: whatever it shipped for sampling is gone.
        tokenizer: Its tokenizer.
        identity: A name for its weights.
    """

    spec: ModelSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: str

    @property
    def context(self) -> int | None:
        """Most tokens of a text, `None` when the configuration names no limit."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    def settings(self) -> dict[str, Any]:
        """What the measured figures depend on."""
        return {
            **self.spec.settings(),
            "architecture": type(self.model).__name__,
            "parameters": open_session(self.model).parameters,
            "identity": self.identity,
        }


def load(spec: ModelSpec, device: torch.device) -> BenchModel:
    """Load a model, or make the one with random weights.

    Raises:
        InvalidArgumentError: It cannot be loaded; the message names the model.
    """
    path = spec.path
    try:
        if path is not None and Path(path).suffix.lower() == ".gguf":
            model = load_gguf(path)
            return BenchModel(spec, model, model.tokenizer, model_identity(model))
        tokenizer = AutoTokenizer.from_pretrained(_folder(spec.tokenizer or path or "demo"), local_files_only=True)
        model = _random(spec, tokenizer) if path is None else _load(path, getattr(torch, spec.dtype))
    except (LookaheadError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"models: {spec.name!r} cannot be loaded: {error}") from error
    model = model.to(device).eval()
    return BenchModel(spec, model, tokenizer, model_identity(model))


def load_assistant(method: MethodSpec, model: PreTrainedModel) -> PreTrainedModel | None:
    """The model that drafts for `model` in assisted generation, `None` where there is none.

    Raises:
        InvalidArgumentError: It cannot be loaded; the message names the method.
    """
    if method.assistant is None:
        return None
    try:
        assistant = _load(method.assistant, model.dtype)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"methods: the assistant of {method.name!r} cannot be loaded: {error}") from error
    return assistant.to(model.device).eval()


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model object without its weights, which both share; the copy starts with nothing learned."""
    return open_session(model).sharing_weights()


def _folder(path: Path | str) -> Path:
    return demo_model_path() if path == "demo" else Path(path)


def _load(path: Path | str, dtype: torch.dtype) -> PreTrainedModel:
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model, report = AutoModelForCausalLM.from_pretrained(_folder(path), dtype=dtype, output_loading_info=True, **local)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{path} lacks {len(missing)} weights ({missing[0]}); copy the model again")
    shipped = model.generation_config
    # Only which tokens end a text is taken over; tasks say how tokens are chosen.
    model.generation_config = GenerationConfig(
        bos_token_id=shipped.bos_token_id, eos_token_id=shipped.eos_token_id, pad_token_id=_pad_token(shipped)
    )
    return model


def _pad_token(config: GenerationConfig) -> int | None:
    """Without one every call of `generate` would warn about it."""
    eos = config.eos_token_id
    first: int | None = eos[0] if isinstance(eos, list) else eos
    return first if config.pad_token_id is None else int(config.pad_token_id)


def _random(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model with random weights, a Llama if not said otherwise, and no token that ends a text."""
    sizes = {"vocab_size": len(tokenizer), "model_type": "llama", **spec.random}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(sizes.pop("model_type"), **special | sizes)
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} tokens of the tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
    return model.to(getattr(torch, spec.dtype))


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
