"""How the turns of a conversation become the model's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from lookahead.cli.loading import LoadedModel, summary
from lookahead.cli.prompt import checked, read_text
from lookahead.cli.settings import ChatSettings
from lookahead.errors import InvalidArgumentError

Message = Mapping[str, str]
"""What one side said: `role` ("system", "user" or "assistant") and `content`."""


class TurnFormat(Protocol):
    """A way to write a conversation as one text."""

    def encode(self, messages: Sequence[Message]) -> torch.Tensor:
        """Tokens `[1, S]` of a conversation, up to where the model's next answer begins."""
        ...


class TemplatedTurns:
    """The chat template of a model.

    Args:
        tokenizer: The model's tokenizer.
        template: A Jinja template, `None` for the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, messages: Sequence[Message]) -> torch.Tensor:
        """Tokens `[1, S]` of the conversation with the template's generation prompt."""
        try:
            encoded = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=True,
                return_tensors="pt",
                return_dict=True,
                tokenizer_kwargs={"verbose": False},
            )
        except Exception as error:  # templates raise what they like, to refuse a system message for example
            raise InvalidArgumentError(f"the chat template fails: {summary(error)}") from error
        input_ids: torch.Tensor = encoded["input_ids"]
        return input_ids


class PlainTurns:
    """Plain text: every turn begins on a new line, and the model goes on right where it ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Message]) -> torch.Tensor:
        """Tokens `[1, S]` of all that was said."""
        text = ""
        for message in messages:
            if text and message["role"] != "assistant" and not text.endswith("\n"):
                text += "\n"
            text += message["content"]
        input_ids: torch.Tensor = self._tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
        return input_ids


def read_template(settings: ChatSettings) -> str | None:
    """The text of the template that the settings name, `None` if they name none."""
    if settings.template is None:
        return None
    if settings.raw:
        raise InvalidArgumentError(
            f"--raw uses no template, but --template {settings.template} names one; choose one of the two"
        )
    return read_text(settings.template, "the template", "--template")


def choose_format(settings: ChatSettings, template: str | None, loaded: LoadedModel, notes: Console) -> TurnFormat:
    """The format that the settings ask for, tried on a first turn."""
    turns = _format(settings, template, loaded, notes)
    question = {"role": "user", "content": "Hello"}
    if settings.system is None:
        turns.encode([question])
        return turns
    system = {"role": "system", "content": checked(settings.system, "the text of --system")}
    both = turns.encode([system, question])
    with suppress(InvalidArgumentError):  # a template may insist on a system message
        if settings.system and torch.equal(both, turns.encode([question])):
            notes.print("note: the chat template leaves out what --system says")
    return turns


def _format(settings: ChatSettings, template: str | None, loaded: LoadedModel, notes: Console) -> TurnFormat:
    raw = settings.raw
    if settings.model is None:
        notes.print(
            "note: no --model was given, so the demonstration model is used; it is a small model of Python code: it "
            "continues code, it does not answer questions"
        )
        raw = raw or template is None
    if raw:
        return PlainTurns(loaded.tokenizer)
    if template is None and not loaded.tokenizer.chat_template:
        raise InvalidArgumentError(
            f"--model {loaded.path}: the tokenizer has no chat template, so nothing says how this model takes a "
            "conversation; give a Jinja template with --template FILE, or take turns as plain text with --raw"
        )
    return TemplatedTurns(loaded.tokenizer, template)
