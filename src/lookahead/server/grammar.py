"""Answers that follow a grammar: the grammar of a request, a logits processor, and a source of drafts.

An answer is text, or has the format of `response_format` or `structured_outputs`, or is calls of functions. Reasoning
may precede it. The rule `start` of the grammar covers all of it, with `@body` for the requested format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from time import thread_time
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from pydantic_core import to_json
from transformers import LogitsProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lookahead.core.results import StepResult
from lookahead.drafting.auto.sources import TokenPaths
from lookahead.errors import InvalidArgumentError
from lookahead.server.errors import refused
from lookahead.server.fields import json_error_message
from lookahead.server.grammar_trial import LIMITS, error_message, tokenizer_from
from lookahead.server.requests import (
    ChatRequest,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    SomeTools,
    StructuredOutputs,
    TextRequest,
)
from lookahead.server.tools import JSON_LAYOUT, TAGS, ReasoningFormat, Thinking, ToolFormat, call_rules, literal, up_to

_FORCED = 0.99
"""Probability of a forced token after one that is not certain."""

_FEW = 8
"""Largest number of permitted tokens that are all drafted."""

_SECONDS = 1.0
_SECONDS_EACH = 0.02
"""CPU seconds for an answer to follow its grammar: a constant, and an allowance for each token (typically < 1 ms)."""

_NOT_ALLOWED = "satisfy the grammar"
"""Part of llguidance's message about a forbidden token."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}
"""Bytes by their characters in byte-level vocabularies."""


def token_bytes(text: str, piece: str) -> bytes:
    """Return the bytes of a token.

    Args:
        text: The decoded token.
        piece: Its entry in the vocabulary.
    """
    if "\ufffd" not in text:
        return text.encode()
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    if all(character in _BYTE_LEVEL for character in piece):
        return bytes(_BYTE_LEVEL[character] for character in piece)
    return text.encode()


def grammar_tokenizer(tokenizer: Any, vocabulary: int, ends: Collection[int]) -> LLTokenizer:
    """Return llguidance's tokenizer for a model. It takes about a second for a large vocabulary.

    Args:
        tokenizer: Tokenizer of the model.
        vocabulary: Number of tokens of the model.
        ends: Tokens that end an answer.
    """
    if not tokenizer.is_fast:  # for example of a GGUF file
        return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, vocabulary, ends)), n_vocab=vocabulary)
    return tokenizer_from(describe_tokens(tokenizer, vocabulary, ends))


def describe_tokens(tokenizer: Any, vocabulary: int, ends: Collection[int]) -> dict[str, Any]:
    """Return the vocabulary of a model as JSON for `tokenizer_from`; arguments as of `grammar_tokenizer`."""
    description = {"size": vocabulary, "ends": sorted(ends)}
    if not tokenizer.is_fast:
        slow = _Tokens(tokenizer, vocabulary, ends)
        return description | {"bytes": [token.hex() for token in slow.tokens], "special": slow.special_token_ids}
    fast = copy(tokenizer.backend_tokenizer)
    fast.no_padding()
    fast.no_truncation()
    return description | {"fast": fast.to_str()}


class _Tokens:
    """Adapter of a slow tokenizer for llguidance; `ends` must not be empty."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        names = tokenizer.convert_ids_to_tokens(list(range(vocabulary)))
        self.tokens = [token_bytes(tokenizer.decode([token]), name) for token, name in enumerate(names)]
        self.eos_token_id = min(ends)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *ends})

    def __call__(self, text: str | bytes) -> list[int]:
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer(decoded, add_special_tokens=False)["input_ids"]
        return ids


def compile_grammar(grammar: str, tokenizer: LLTokenizer, field: str) -> LLMatcher:
    """Return a matcher at the beginning of a grammar.

    Raises:
        ApiError: The grammar is invalid or unsupported; the error names `field`.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refused(field, f"{field}: {error_message(matcher)}")
    return matcher


def _advance(matcher: LLMatcher, tokens: Sequence[int]) -> None:
    """Consume tokens of the answer, until the grammar ends or fails."""
    for token in tokens:
        if not matcher.is_stopped():
            matcher.consume_token(token)


def _allowed(matcher: LLMatcher) -> NDArray[np.bool_]:
    """Return a mask of the tokens that may follow, `[vocabulary]`."""
    return np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8) > 0


def _forced(matcher: LLMatcher) -> list[int]:
    """Return the tokens that must follow, without the end token."""
    return [] if matcher.is_stopped() else list(matcher.compute_ff_tokens())


class TimeBudget:
    """CPU time of an answer for its grammar. It is bounded because all other answers wait meanwhile."""

    def __init__(self) -> None:
        self._seconds = _SECONDS

    def spend(self, begin: float, tokens: int) -> None:
        """Subtract the thread's CPU time since `begin`, and add the allowance of `tokens` tokens.

        Raises:
            InvalidArgumentError: The budget is exhausted.
        """
        self._seconds += tokens * _SECONDS_EACH - (thread_time() - begin)
        if self._seconds < 0:
            raise InvalidArgumentError("the grammar takes too long to follow; make it less ambiguous")


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that masks the tokens that the grammar forbids.

    Args:
        matcher: Matcher at the beginning of the grammar. It must not be shared with drafts, which may fail.
        prompt_length: Number of tokens before the answer.
    """

    def __init__(self, matcher: LLMatcher, prompt_length: int) -> None:
        self._matcher = matcher
        self._length = prompt_length  # of the matched text
        self._budget = TimeBudget()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits `[1, vocabulary]`, minus infinity for forbidden tokens.

        Raises:
            InvalidArgumentError: The grammar failed, or takes too long.
        """
        begin = thread_time()
        tokens = input_ids[0, self._length :].tolist()
        _advance(self._matcher, tokens)
        self._length = input_ids.shape[1]
        forbidden = ~torch.from_numpy(_allowed(self._matcher))
        self._budget.spend(begin, len(tokens))
        if self._matcher.is_error():
            raise InvalidArgumentError(f"the grammar failed: {error_message(self._matcher)}; make it simpler")
        forbidden = torch.nn.functional.pad(forbidden, (0, scores.shape[1] - len(forbidden)), value=True)
        return scores.masked_fill(forbidden.to(scores.device), -torch.inf)


class GrammarSource:
    """Source that drafts forced tokens, and keeps forbidden ones out of the tree.

    Args:
        matcher: Matcher at the beginning of the grammar, not shared.
    """

    name = "grammar"

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._ahead = matcher  # after the certain tokens
        self._budget = TimeBudget()

    def start(self, prompt: Sequence[int]) -> None:
        """Do nothing: the grammar begins after the prompt."""

    def certain(self) -> list[int]:
        """Return the forced tokens."""
        begin = thread_time()
        self._ahead, chain = self._matcher, _forced(self._matcher)
        if chain:
            self._ahead = self._matcher.deep_copy()
            self._ahead.consume_tokens(chain)
        self._budget.spend(begin, len(chain))
        return chain

    def propose(self) -> TokenPaths:
        """Return the permitted tokens after the certain ones, if they are few, each with its forced tokens."""
        begin = thread_time()
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        choices = [] if self._ahead.is_stopped() else np.flatnonzero(_allowed(self._ahead)).tolist()
        for choice in choices if len(choices) <= _FEW else ():
            after = self._ahead.deep_copy()
            after.consume_token(choice)
            branch = [choice, *_forced(after)]
            parents += [-1, *range(len(tokens), len(tokens) + len(branch) - 1)]
            tokens += branch
            probabilities += [1 / len(choices), *[_FORCED] * (len(branch) - 1)]
        self._budget.spend(begin, len(tokens))
        return TokenPaths(tokens, parents, probabilities)

    def permits(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return for each node whether the grammar permits it.

        Raises:
            ValueError: The grammar failed.
        """
        paths: list[list[int]] = [[]]  # of each node
        for node, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], node])
        may = [False] * len(tokens)
        for leaf in set(range(1, len(paths))).difference(parents):
            walker = self._ahead.deep_copy()  # `validate_tokens` ignores limits, and its failure would be permanent
            for node in paths[leaf]:
                begin, stopped = thread_time(), walker.is_stopped()
                if not walker.consume_token(tokens[node - 1]):
                    if not stopped and _NOT_ALLOWED not in (error := error_message(walker)):
                        raise ValueError(f"the grammar failed at a draft: {error}")
                    break
                may[node - 1] = True
                self._budget.spend(begin, 1)
        return may

    def observe(self, result: StepResult) -> None:
        """Advance by the new tokens."""
        _advance(self._matcher, result.tokens)


def grammar_of(
    request: TextRequest,
    thinking: Thinking,
    format_: ToolFormat | None,
    special: Mapping[str, int],
    reasoning: ReasoningFormat = TAGS,
) -> tuple[str, str] | None:
    """Return the grammar of the answers and the request's field for it; `None` for free text.

    Args:
        request: The request.
        thinking: Reasoning at the beginning of the answer.
        format_: Format of calls.
        special: Special tokens of the model, with their ids.
        reasoning: Format of reasoning.

    Raises:
        ApiError: A schema or grammar is invalid, or fields contradict each other.
    """
    body = _body(request)
    tools = callable_tools(request) if isinstance(request, ChatRequest) else []
    mark = literal(reasoning.answer, special)
    if not tools or format_ is None:
        if body is None:
            return None
        rules = [f"start: {mark} @body"]
    else:
        assert isinstance(request, ChatRequest)
        try:
            rules = _answer_rules(request, tools, format_, special, mark, body is not None)
        except (ValueError, TypeError, RecursionError) as error:
            raise refused("tools", f"tools: the parameters are invalid: {error}") from error
    rules = ["%llguidance {}", *_thinking_rules(thinking, reasoning, rules, special), "TEXT: /(.|\\n)*/"]
    parts: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": "\n".join(rules)}]
    if body is not None:
        parts.append(body[0] | {"name": "body"})
    try:
        return json.dumps({"grammars": parts}), "tools" if body is None else body[1]
    except RecursionError as error:
        raise refused("tools" if body is None else body[1], "the schema is nested too deep") from error


def may_call_again(request: ChatRequest, format_: ToolFormat | None) -> bool:
    """Return whether an answer may have several calls."""
    may = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
    return may and format_ is not None and bool(format_.between or format_.closing)


def _must_call(request: ChatRequest) -> bool:
    choice = request.tool_choice
    return choice == "required" or (isinstance(choice, SomeTools) and choice.allowed_tools.mode == "required")


def _answer_rules(
    request: ChatRequest,
    tools: Sequence[FunctionTool],
    format_: ToolFormat,
    special: Mapping[str, int],
    mark: str,
    has_body: bool,
) -> list[str]:
    """Return the rules of an answer that may be calls; `mark` precedes all other answers."""
    rules = call_rules(format_, tools, special, may_call_again(request, format_))
    trigger = literal(format_.trigger, special)
    if isinstance(request.tool_choice, NamedTool) or _must_call(request):
        return [f"start: {trigger} calls", *rules]
    if has_body and not (format_.after_text or mark):
        message = (
            "tools cannot be combined with response_format or structured_outputs for this model: its calls are JSON"
        )
        raise refused("tools", f"{message}; leave one out")
    if has_body or mark:
        return [f"start: {trigger} calls | {mark} {'@body' if has_body else 'TEXT'}", *rules]
    if format_.after_text:
        return ["start: TEXT | trigger calls", up_to("trigger", format_.trigger, special), *rules]
    # Text must not begin with the first character of a call.
    return [f"start: {trigger} calls | /([^{format_.trigger[0]}](.|\\n)*)?/", *rules]


def _thinking_rules(
    thinking: Thinking, reasoning: ReasoningFormat, rules: list[str], special: Mapping[str, int]
) -> list[str]:
    if thinking is Thinking.NEVER:
        return rules
    answer = rules[0].replace("start:", "answer:", 1)
    thought, gap = up_to("thought", reasoning.end, special), "gap: /\\n{0,2}/"
    start = "thought gap answer"
    if thinking is Thinking.MAY:
        start = f"({literal(reasoning.begin, special)} thought gap)? answer"
    return [f"start: {start}", thought, gap, answer, *rules[1:]]


def _body(request: TextRequest) -> tuple[dict[str, Any], str] | None:
    """Return the grammar part for the requested format, and the field of the request."""
    outputs = request.structured_outputs
    field = "structured_outputs"
    format_ = request.response_format if isinstance(request, ChatRequest) else None
    if isinstance(format_, (JsonObjectFormat, JsonSchemaFormat)):
        if outputs is not None:
            raise refused(field, "structured_outputs cannot be combined with response_format; leave one out")
        schema = {"type": "object"} if isinstance(format_, JsonObjectFormat) else format_.json_schema.schema_
        outputs = StructuredOutputs(json=schema)
        field = "response_format"
    try:
        return None if outputs is None else (_structured(outputs), field)
    except (ValueError, RecursionError) as error:
        raise refused(field, f"{field} is invalid: {json_error_message(error)}") from error


def _structured(outputs: StructuredOutputs) -> dict[str, Any]:
    for kind in ("regex", "choice", "grammar"):
        if (value := getattr(outputs, kind)) is not None:
            return {kind: value}
    schema = {"type": "object"} if outputs.json_object else outputs.json_
    if isinstance(schema, str):
        schema = json.loads(schema)
        to_json(schema)  # refuses halves of surrogate pairs, as in bodies
    if not isinstance(schema, dict):
        raise ValueError("json is not a JSON schema")
    return {"json_schema": schema | {"x-guidance": JSON_LAYOUT}}


def requires_json(request: TextRequest) -> bool:
    """Return whether all answers must be JSON."""
    if isinstance(request, ChatRequest) and request.tools:
        return False
    if (outputs := request.structured_outputs) is not None:
        return outputs.json_ is not None or outputs.json_object is not None
    format_ = request.response_format if isinstance(request, ChatRequest) else None
    return isinstance(format_, (JsonObjectFormat, JsonSchemaFormat))


def callable_tools(request: ChatRequest) -> Sequence[FunctionTool]:
    """Return the functions that an answer may call.

    Raises:
        ApiError: `tool_choice` contradicts `tools`.
    """
    choice = request.tool_choice
    if isinstance(choice, SomeTools):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
    else:
        names = [choice.function.name] if isinstance(choice, NamedTool) else []
    if not request.tools and choice not in (None, "none", "auto"):
        raise refused("tool_choice", "tool_choice needs tools")
    if len({tool.function.name for tool in request.tools}) < len(request.tools):
        raise refused("tools", "tools has two functions of the same name; rename one")
    if choice == "none":
        return []
    if not names:
        return request.tools
    tools = {tool.function.name: tool for tool in request.tools if tool.function.name in names}
    if unknown := [name for name in names if name not in tools]:
        raise refused("tool_choice", f"tool_choice names {unknown[0]!r}, which is not in tools")
    return list(tools.values())
