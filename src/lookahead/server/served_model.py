"""The model that is served, and what its prompts are made of: texts, conversations, images."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from llguidance import LLTokenizer
from pydantic_core import to_json
from transformers import PreTrainedTokenizerFast

from lookahead.backends.base import vocabulary_size
from lookahead.backends.loading import LoadedModel
from lookahead.config import LookaheadConfig
from lookahead.server.errors import ApiError, refused
from lookahead.server.fields import text_fault
from lookahead.server.grammar import callable_tools, described_tokens, grammar_tokenizer, token_bytes
from lookahead.server.grammar_trial import GrammarTrials
from lookahead.server.images import decoded
from lookahead.server.messages import FunctionTool, ImagePart, Message, TextPart, ToolCall
from lookahead.server.requests import ChatRequest, ChoicesRequest, CompletionRequest
from lookahead.server.tools import ReasoningFormat, Thinking, ToolFormat, format_of, reasoning_of, thinking_of
from lookahead.serving import Engine
from lookahead.text import FastDecoder, Tokenizer, conversation_text

_SET_ELSEWHERE = {
    *("conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "add_generation_prompt"),
    *("continue_final_message", "messages"),
}
"""Arguments of `apply_chat_template` that are no arguments of the template, or are set otherwise."""

_TAIL = 8
"""Tokens at the end of a prompt that show whether it has begun to reason."""


@dataclass(frozen=True)
class Prompt:
    """What an answer begins with: token ids, and as `inputs` what else the model reads, such as pixels of images."""

    tokens: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServedModel(LoadedModel):
    """A model and its engine.

    Attributes:
        name: What clients call it.
        engine: Runs its requests; started by the server.
        config: How requests draft that say nothing about it.
        max_length: Most tokens of a text, prompt included; any number if `None`.
        created: When it was loaded, in seconds since 1970.
    """

    name: str
    engine: Engine
    config: LookaheadConfig
    max_length: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _decoding: Lock = field(default_factory=Lock)  # held with the pixels of a request, which are all that there are

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        eos = self.model.generation_config.eos_token_id
        return frozenset() if eos is None else frozenset(torch.as_tensor(eos).flatten().tolist())

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return vocabulary_size(self.model)

    def check_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Refuse token ids that the model does not know, which `field` of a request brought."""
        outside = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if outside is not None:
            raise refused(field, f"{field} holds the token id {outside}; the model knows {self.vocabulary} tokens")

    def check_length(self, tokens: Sequence[int], field: str) -> None:
        """Refuse more token ids than a text may have, which `field` of a request brought."""
        if self.max_length is not None and len(tokens) > self.max_length:
            said = f"{field} has {len(tokens)} tokens; the most is {self.max_length}"
            raise ApiError(400, said, field, "context_length_exceeded")

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """Its tokens as grammars see them."""
        return grammar_tokenizer(self.tokenizer, self.vocabulary, self.end_tokens)

    @cached_property
    def grammar_trials(self) -> GrammarTrials:
        """Where grammars are tried before they are used."""
        return GrammarTrials(lambda: described_tokens(self.tokenizer, self.vocabulary, self.end_tokens))

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        template = getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of functions; `None` if its chat template has no place for them."""
        return format_of(self.template)

    @property
    def reasoning(self) -> ReasoningFormat:
        """How the model writes reasoning."""
        return reasoning_of(self.template)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Token ids of the special tokens, which are no part of texts."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {str(token): number for number, token in added.items() if token.special}

    def thinking(self, prompt: Sequence[int]) -> Thinking:
        """Whether the model reasons at the beginning of its answer to a prompt."""
        end = self.tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
        return thinking_of(self.template, str(end))

    def marks(self, tools: bool) -> list[int]:
        """Special tokens that tell reasoning and, where functions may be called, calls from text."""
        format_ = self.tool_format if tools else None
        marks = self.reasoning.marks + ("" if format_ is None else format_.marks)
        return [number for token, number in self.special_tokens.items() if token in marks]

    @cached_property
    def decoder(self) -> Tokenizer:
        """Decodes tokens as the tokenizer does, for a third of its time."""
        kind: Any = type(self.tokenizer)
        base: Any = PreTrainedTokenizerFast
        is_plain = issubclass(kind, base) and kind.decode is base.decode and kind._decode is base._decode
        return FastDecoder(self.tokenizer.backend_tokenizer) if is_plain else self.tokenizer

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str, special: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of a text, which `field` of a request brought.

        Raises:
            ApiError: It is longer than any text that fits into the context.
        """
        self._check_length(text, field)
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _check_length(self, text: str, field: str) -> None:
        if self.max_length is not None and len(text) > self.max_length * self.longest_token:
            raise ApiError(
                400,
                f"{field} has {len(text)} characters, more than the {self.max_length} tokens of this model's "
                "context can have",
                field,
                code="context_length_exceeded",
            )

    def prompts(self, request: ChoicesRequest, images: Sequence[bytes]) -> list[Prompt]:
        """The prompts of a request; `images` are the files of those of its messages.

        Raises:
            ApiError: One cannot be encoded.
        """
        if isinstance(request, CompletionRequest):
            return [Prompt(self.encode(given) if isinstance(given, str) else given) for given in request.prompts]
        assert isinstance(request, ChatRequest)
        options: dict[str, Any] = dict(request.chat_template_kwargs)
        if taken := sorted(_SET_ELSEWHERE & set(options)):
            raise refused("chat_template_kwargs", f"chat_template_kwargs: {taken[0]} has a field of its own, or none")
        if request.reasoning_effort is not None:
            options["reasoning_effort"] = request.reasoning_effort
        options["add_generation_prompt"] = request.add_generation_prompt and not request.continue_final_message
        options["continue_final_message"] = request.continue_final_message
        return [self.encode_chat(request.messages, callable_tools(request), options, images)]

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[FunctionTool] = (),
        options: Mapping[str, Any] | None = None,
        images: Sequence[bytes] = (),
    ) -> Prompt:
        """A conversation, up to where the answer begins.

        By the tokenizer's chat template. Where there is none, every message begins on a new line.

        Args:
            messages, images: The conversation, and the files of the images of all messages.
            tools: Functions that may be called.
            options: Further arguments of `apply_chat_template`, those of the template among them.

        Raises:
            ApiError: The template refuses it, or has no place for tools or images.
        """
        if tools and self.tool_format is None:
            raise refused("tools", "the chat template of this model has no place for tools")
        if not self.template:
            text = conversation_text((message.role, message.text) for message in messages)
            return Prompt(self.encode(text, field="messages"))
        functions = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
        turns = [_turn(message, self.processor is not None) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                tools=functions or None,
                chat_template=getattr(self.processor, "chat_template", None),
                tokenize=False,
                **({"add_generation_prompt": True} | dict(options or {})),
            )
        except Exception as error:  # templates raise what they like, to refuse a system message for example
            raise ApiError(
                400, f"the chat template of this model fails: {error}", "messages", "invalid_value"
            ) from error
        if not images:
            return Prompt(self.encode(str(text), special=False, field="messages"))
        return self._with_images(str(text), images)

    def _with_images(self, text: str, images: Sequence[bytes]) -> Prompt:
        self._check_length(text, "messages")
        with self._decoding:
            pixels = decoded(images)
            try:
                read = self.processor(text=[text], images=[pixels], return_tensors="pt", add_special_tokens=False)
            except Exception as error:  # processors raise what they like, of a template without a place for images, say
                said = f"the processor of this model fails: {error}"
                raise ApiError(400, said, "messages", "invalid_value") from error
        inputs = {name: value for name, value in read.items() if name not in ("input_ids", "attention_mask")}
        return Prompt(read["input_ids"][0].tolist(), inputs)

    def text_of(self, token: int) -> str:
        """One token as text."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token."""
        return token_bytes(self.text_of(token), str(self.tokenizer.convert_ids_to_tokens(token) or ""))


def _turn(message: Message, sees: bool) -> dict[str, Any]:
    """A message as chat templates take it: in parts, for a model that sees images."""
    content: Any = message.text
    if sees:
        parts = [TextPart(type="text", text=message.text)] if isinstance(message.content, str) else message.content
        content = [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in parts
        ]
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    turn |= message.model_dump(include={"reasoning_content", "name", "tool_call_id"}, exclude_none=True)
    if message.reasoning_content is not None:
        turn["thinking"] = message.reasoning_content  # as GPT-OSS's template calls it
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: ToolCall) -> dict[str, Any]:
    """An earlier call as chat templates take it: with its arguments as an object, which clients send as JSON."""
    name, written, fault = call.function.name, call.function.arguments, ""
    try:
        arguments = json.loads(written or "{}")
        to_json(arguments)
    except (ValueError, RecursionError) as error:
        arguments, fault = None, f" ({text_fault(error)})"
    if not isinstance(arguments, dict):
        said = f"messages: tool_calls has the arguments {written[:100]!r} of {name!r}, which are no JSON object{fault}"
        raise refused("messages", f"{said}; send them as they were answered")
    return call.model_dump() | {"function": {"name": call.function.name, "arguments": arguments}}


def prompt_room(served: ServedModel, prompt: Sequence[int], most: int | None, field: str) -> int | None:
    """Tokens that may follow `prompt`, which `field` of a request brought; any number if `None`.

    Raises:
        ApiError: The prompt is too long.
    """
    limits = [limit for limit in (served.max_length, most and most + 1) if limit is not None]
    if not prompt:
        raise ApiError(400, f"{field} has no tokens; write more", field, "invalid_value")
    if limits and len(prompt) >= min(limits):
        raise ApiError(
            400, f"{field} has {len(prompt)} tokens; the most is {min(limits) - 1}", field, "context_length_exceeded"
        )
    served.check_tokens(prompt, field)
    return None if served.max_length is None else served.max_length - len(prompt)
