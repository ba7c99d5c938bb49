"""A served model, and the encoding of its prompts: texts, conversations, images."""

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
from lookahead.server.fields import json_error_message
from lookahead.server.grammar import callable_tools, describe_tokens, grammar_tokenizer, token_bytes
from lookahead.server.grammar_trial import GrammarTrials
from lookahead.server.images import decode_images
from lookahead.server.requests import (
    ChatRequest,
    ChoicesRequest,
    CompletionRequest,
    FunctionTool,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
)
from lookahead.server.tools import ReasoningFormat, Thinking, ToolFormat, format_of, reasoning_of, thinking_of
from lookahead.serving import Engine
from lookahead.text import FastDecoder, Tokenizer, conversation_text

_SET_ELSEWHERE = {
    *("conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "add_generation_prompt"),
    *("continue_final_message", "messages"),
}
"""Arguments of `apply_chat_template` that clients may not set: they are no variables of the template."""

_TAIL = 8
"""Last tokens of a prompt; they may contain the beginning of reasoning."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, and further `inputs` of the model, for example pixels of images."""

    tokens: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServedModel(LoadedModel):
    """A model and its engine.

    Attributes:
        name: Name for clients.
        engine: Engine that runs its requests; the server starts it.
        config: Default configuration of drafts.
        max_length: Largest number of tokens of a text, prompt included; unlimited if `None`.
        created: Time of loading, in seconds since 1970.
    """

    name: str
    engine: Engine
    config: LookaheadConfig
    max_length: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _decoding: Lock = field(default_factory=Lock)  # one request at a time has pixels in memory

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        eos = self.model.generation_config.eos_token_id
        return frozenset() if eos is None else frozenset(torch.as_tensor(eos).flatten().tolist())

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model."""
        return vocabulary_size(self.model)

    def check_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Refuse token ids outside the vocabulary; the error names `field`."""
        outside = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if outside is not None:
            raise refused(
                field, f"{field} has the token id {outside!s:.100}; ids of this model are 0 to {self.vocabulary - 1}"
            )

    def check_length(self, tokens: Sequence[int], field: str) -> None:
        """Refuse more token ids than the context has; the error names `field`."""
        if self.max_length is not None and len(tokens) > self.max_length:
            message = f"{field} has {len(tokens)} tokens; send at most {self.max_length}"
            raise ApiError(400, message, field, "context_length_exceeded")

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The vocabulary for grammars."""
        return grammar_tokenizer(self.tokenizer, self.vocabulary, self.end_tokens)

    @cached_property
    def grammar_trials(self) -> GrammarTrials:
        """Processes that try grammars before use."""
        return GrammarTrials(lambda: describe_tokens(self.tokenizer, self.vocabulary, self.end_tokens))

    @property
    def template(self) -> str:
        """The chat template; empty without one."""
        template = getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of the model's calls; `None` if its chat template does not support tools."""
        return format_of(self.template)

    @property
    def reasoning(self) -> ReasoningFormat:
        """Format of the model's reasoning."""
        return reasoning_of(self.template)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Token ids of the special tokens."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {str(token): number for number, token in added.items() if token.special}

    def thinking(self, prompt: Sequence[int]) -> Thinking:
        """Return whether the answer to a prompt begins with reasoning."""
        end = self.tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
        return thinking_of(self.template, str(end))

    def marks(self, tools: bool) -> list[int]:
        """Return the special tokens around reasoning and, if there are `tools`, around calls."""
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
        """Length of the longest token in characters."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str, special: bool = True, field: str = "prompt") -> list[int]:
        """Encode a text, with special tokens if `special`; errors name `field`.

        Raises:
            ApiError: The text is longer than any text that fits into the context.
        """
        self._check_length(text, field)
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _check_length(self, text: str, field: str) -> None:
        if self.max_length is not None and len(text) > self.max_length * self.longest_token:
            raise ApiError(
                400,
                f"{field} has {len(text)} characters and does not fit into the {self.max_length} tokens of this "
                "model's context; shorten it",
                field,
                code="context_length_exceeded",
            )

    def prompts(self, request: ChoicesRequest, images: Sequence[bytes]) -> list[EncodedPrompt]:
        """Encode the prompts of a request; `images` are the files of the images in its messages.

        Raises:
            ApiError: A prompt cannot be encoded.
        """
        if isinstance(request, CompletionRequest):
            return [
                EncodedPrompt(self.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in request.prompts
            ]
        assert isinstance(request, ChatRequest)
        options: dict[str, Any] = dict(request.chat_template_kwargs)
        if reserved := sorted(_SET_ELSEWHERE & set(options)):
            raise refused("chat_template_kwargs", f"chat_template_kwargs: {reserved[0]} cannot be set; leave it out")
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
    ) -> EncodedPrompt:
        """Encode a conversation by the tokenizer's chat template; without one, each message begins on a new line.

        Args:
            messages: The conversation.
            tools: Functions that may be called.
            options: Further arguments of `apply_chat_template`, and variables of the template.
            images: Files of the images in all messages.

        Raises:
            ApiError: The template fails, or does not support tools or images.
        """
        if tools and self.tool_format is None:
            raise refused("tools", "the chat template of this model does not support tools; leave them out")
        if not self.template:
            text = conversation_text((message.role, message.text) for message in messages)
            return EncodedPrompt(self.encode(text, field="messages"))
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
        except Exception as error:  # any type, for example to refuse a system message
            raise ApiError(
                400, f"the chat template of this model fails: {error}", "messages", "invalid_value"
            ) from error
        if not images:
            return EncodedPrompt(self.encode(str(text), special=False, field="messages"))
        return self._with_images(str(text), images)

    def _with_images(self, text: str, images: Sequence[bytes]) -> EncodedPrompt:
        self._check_length(text, "messages")
        with self._decoding:
            pixels = decode_images(images)
            try:
                batch = self.processor(text=[text], images=[pixels], return_tensors="pt", add_special_tokens=False)
            except Exception as error:  # any type, for example if the template does not support images
                message = f"the processor of this model fails: {error}"
                raise ApiError(400, message, "messages", "invalid_value") from error
        inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
        return EncodedPrompt(batch["input_ids"][0].tolist(), inputs)

    def text_of(self, token: int) -> str:
        """Decode one token to text."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def bytes_of(self, token: int) -> bytes:
        """Decode one token to bytes."""
        return token_bytes(self.text_of(token), str(self.tokenizer.convert_ids_to_tokens(token) or ""))


def _turn(message: Message, in_parts: bool) -> dict[str, Any]:
    """Convert a message for chat templates, which take a list of parts for models with images."""
    content: Any = message.text
    if in_parts:
        parts = [TextPart(type="text", text=message.text)] if isinstance(message.content, str) else message.content
        content = [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in parts
        ]
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    turn |= message.model_dump(include={"reasoning_content", "name", "tool_call_id"}, exclude_none=True)
    if message.reasoning_content is not None:
        turn["thinking"] = message.reasoning_content  # name in the template of GPT-OSS
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: ToolCall) -> dict[str, Any]:
    """Convert an earlier call for chat templates: its arguments are an object there, and JSON text in requests."""
    text = call.function.arguments
    fault = ""
    try:
        arguments = json.loads(text or "{}")
        to_json(arguments)
    except (ValueError, RecursionError) as error:
        arguments = None
        fault = f" ({json_error_message(error)})"
    if not isinstance(arguments, dict):
        subject = f"messages: tool_calls has the arguments {text[:100]!r} of {call.function.name!r}"
        raise refused("messages", f"{subject}, which are not a JSON object{fault}; send the arguments of the answer")
    return call.model_dump() | {"function": {"name": call.function.name, "arguments": arguments}}


def remaining_tokens(served: ServedModel, prompt: Sequence[int], max_prompt: int | None, field: str) -> int | None:
    """Return the number of tokens that fit into the context after `prompt`; `None` if it is unlimited.

    Raises:
        ApiError: The prompt is empty, too long, or has unknown tokens; the error names `field`.
    """
    limits = [limit for limit in (served.max_length, max_prompt and max_prompt + 1) if limit is not None]
    if not prompt:
        raise ApiError(400, f"{field} has no tokens; write more", field, "invalid_value")
    if limits and len(prompt) >= min(limits):
        raise ApiError(
            400, f"{field} has {len(prompt)} tokens; send at most {min(limits) - 1}", field, "context_length_exceeded"
        )
    served.check_tokens(prompt, field)
    return None if served.max_length is None else served.max_length - len(prompt)
