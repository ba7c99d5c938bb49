"""Answers that follow a grammar: which one, a processor that forbids, and a source of drafts that foresees.

An answer is text, or what `response_format` and `structured_outputs` ask for, or calls of functions; reasoning may come
before it. One grammar says so: `start` of the first part, in which `@body` is the form that is asked for.
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
from transformers import LogitsProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lookahead.core.results import StepResult
from lookahead.drafting.auto.sources import TokenPaths
from lookahead.errors import InvalidArgumentError
from lookahead.server.errors import refused
from lookahead.server.grammar_trial import LIMITS, described_tokenizer, failure
from lookahead.server.messages import FunctionTool, NamedTool, SomeTools
from lookahead.server.requests import ChatRequest, JsonObjectFormat, JsonSchemaFormat, StructuredOutputs, TextRequest
from lookahead.server.tools import TAGS, ReasoningFormat, Thinking, ToolFormat, call_rules, literal, up_to

_FORCED = 0.99
"""How likely a token is that has to follow one which is not certain."""

_FEW = 8
"""Most tokens to choose from for each to be drafted."""

_SECONDS = 1.0
_SECONDS_EACH = 0.02
"""CPU time to follow a grammar, once and for each token. Most take less than a millisecond."""

_NOT_ALLOWED = "satisfy the grammar"
"""In what a matcher says of a token that the grammar forbids."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}
"""Bytes by the characters that stand for them in byte-level vocabularies."""


def token_bytes(text: str, piece: str) -> bytes:
    """The bytes of a token.

    Args:
        text: The token, decoded by itself.
        piece: As the vocabulary has it.
    """
    if "\ufffd" not in text:
        return text.encode()
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    if all(character in _BYTE_LEVEL for character in piece):
        return bytes(_BYTE_LEVEL[character] for character in piece)
    return text.encode()


def grammar_tokenizer(tokenizer: Any, vocabulary: int, ends: Collection[int]) -> LLTokenizer:
    """The tokens of a model as grammars see them. Takes about a second for a large vocabulary.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: How many tokens the model knows.
        ends: Those that end an answer.
    """
    if not tokenizer.is_fast:  # of a GGUF file, say
        return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, vocabulary, ends)), n_vocab=vocabulary)
    return described_tokenizer(described_tokens(tokenizer, vocabulary, ends))


def described_tokens(tokenizer: Any, vocabulary: int, ends: Collection[int]) -> dict[str, Any]:
    """The tokens of a model as `described_tokenizer` reads them. The arguments are those of `grammar_tokenizer`."""
    described = {"size": vocabulary, "ends": sorted(ends)}
    if not tokenizer.is_fast:
        slow = _Tokens(tokenizer, vocabulary, ends)
        return described | {"bytes": [token.hex() for token in slow.tokens], "special": slow.special_token_ids}
    fast = copy(tokenizer.backend_tokenizer)
    fast.no_padding()
    fast.no_truncation()
    return described | {"fast": fast.to_str()}


class _Tokens:
    """What llguidance asks of a tokenizer that it does not know. See `grammar_tokenizer`; `ends` has one at least."""

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


def read_grammar(grammar: str, tokenizer: LLTokenizer, field: str) -> LLMatcher:
    """What matches answers to a grammar, at its beginning.

    Raises:
        ApiError: It is no grammar, or asks for what is not supported; `field` named it.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refused(field, f"{field}: {failure(matcher)}")
    return matcher


def _go_on(matcher: LLMatcher, tokens: Sequence[int]) -> None:
    """Go on by tokens of the answer, up to where the grammar ends or fails."""
    for token in tokens:
        if not matcher.is_stopped():
            matcher.consume_token(token)


def _allowed(matcher: LLMatcher) -> NDArray[np.bool_]:
    """Which tokens may follow, `[vocabulary]`."""
    return np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8) > 0


def _forced(matcher: LLMatcher) -> list[int]:
    """The tokens that have to follow, without one that ends the answer."""
    return [] if matcher.is_stopped() else list(matcher.compute_ff_tokens())


class Effort:
    """CPU time that an answer may take to follow its grammar, in seconds: all other answers wait for it."""

    def __init__(self) -> None:
        self._left = _SECONDS

    def count(self, begin: float, tokens: int) -> None:
        """Count what was done since `begin`, by the thread's own time, for so many tokens.

        Raises:
            InvalidArgumentError: It is too much.
        """
        self._left += tokens * _SECONDS_EACH - (thread_time() - begin)
        if self._left < 0:
            raise InvalidArgumentError("the grammar takes too long to follow; make it less ambiguous")


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]
    """Forbids tokens that the grammar does not allow.

    Args:
        matcher: At the beginning of the grammar. Nobody else uses it: what drafts ask of a grammar may fail.
        prompt_length: Tokens before the answer.
    """

    def __init__(self, matcher: LLMatcher, prompt_length: int) -> None:
        self._matcher, self._seen = matcher, prompt_length
        self._effort = Effort()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits `[1, vocabulary]`, minus infinity where the grammar forbids a token.

        Raises:
            InvalidArgumentError: The grammar has failed, of which an answer would else end in the middle, or takes too
                long.
        """
        begin, new = thread_time(), input_ids[0, self._seen :].tolist()
        _go_on(self._matcher, new)
        self._seen = input_ids.shape[1]
        forbidden = ~torch.from_numpy(_allowed(self._matcher))
        self._effort.count(begin, len(new))
        if self._matcher.is_error():
            raise InvalidArgumentError(f"the grammar failed: {failure(self._matcher)}; make it simpler")
        forbidden = torch.nn.functional.pad(forbidden, (0, scores.shape[1] - len(forbidden)), value=True)
        return scores.masked_fill(forbidden.to(scores.device), -torch.inf)


class GrammarSource:
    """Drafts the tokens that the grammar forces, and keeps those that it forbids out of the tree.

    Args:
        matcher: At the beginning of the grammar; nobody else uses it.
    """

    name = "grammar"

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = self._ahead = matcher  # the second behind the certain tokens
        self._effort = Effort()

    def start(self, prompt: Sequence[int]) -> None:
        """See `lookahead.drafting.auto.sources.Source`."""

    def certain(self) -> list[int]:
        """See `Source`: the tokens that have to follow, as far as there is no choice."""
        begin = thread_time()
        self._ahead, chain = self._matcher, _forced(self._matcher)
        if chain:
            self._ahead = self._matcher.deep_copy()
            self._ahead.consume_tokens(chain)
        self._effort.count(begin, len(chain))
        return chain

    def propose(self) -> TokenPaths:
        """See `Source`: each of a few tokens that may follow the certain ones, with what has to follow it."""
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
        self._effort.count(begin, len(tokens))
        return TokenPaths(tokens, parents, probabilities)

    def permits(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """See `lookahead.drafting.auto.sources.permitted`.

        Raises:
            ValueError: The grammar fails at them, rather than forbid them.
        """
        paths: list[list[int]] = [[]]  # down to each node
        for node, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], node])
        may = [False] * len(tokens)
        for leaf in set(range(1, len(paths))).difference(parents):
            walker = self._ahead.deep_copy()  # `validate_tokens` keeps no limits, and one failure would be for good
            for node in paths[leaf]:
                begin, stopped = thread_time(), walker.is_stopped()
                if not walker.consume_token(tokens[node - 1]):
                    if not stopped and _NOT_ALLOWED not in (error := failure(walker)):
                        raise ValueError(f"the grammar failed at a draft: {error}")
                    break
                may[node - 1] = True
                self._effort.count(begin, 1)
        return may

    def observe(self, result: StepResult) -> None:
        """See `Source`."""
        _go_on(self._matcher, result.tokens)


def grammar_of(
    request: TextRequest,
    thinking: Thinking,
    format_: ToolFormat | None,
    special: Mapping[str, int],
    reasoning: ReasoningFormat = TAGS,
) -> tuple[str, str] | None:
    """The grammar of the answers, and the field that asks for it; `None` for any text.

    Args:
        thinking: Whether the model may reason before its answer.
        format_, reasoning: How it writes calls, and reasoning.
        special: Its special tokens.

    Raises:
        ApiError: What is asked for cannot be read, or does not go together.
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
            raise refused("tools", f"tools: the parameters cannot be read: {error}") from error
    rules = ["%llguidance {}", *_thinking_rules(thinking, reasoning, rules, special), "TEXT: /(.|\\n)*/"]
    parts: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": "\n".join(rules)}]
    if body is not None:
        parts.append(body[0] | {"name": "body"})
    try:
        return json.dumps({"grammars": parts}), "tools" if body is None else body[1]
    except RecursionError as error:
        raise refused("tools" if body is None else body[1], "the schema is nested too deep") from error


def may_call_again(request: ChatRequest, format_: ToolFormat | None) -> bool:
    """Whether there may be a call behind another one."""
    may = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
    return may and format_ is not None and bool(format_.between or format_.closing)


def _has_to_call(request: ChatRequest) -> bool:
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
    """Rules of an answer that may be calls; `mark` stands before any other."""
    rules = call_rules(format_, tools, special, may_call_again(request, format_))
    trigger = literal(format_.trigger, special)
    if isinstance(request.tool_choice, NamedTool) or _has_to_call(request):
        return [f"start: {trigger} calls", *rules]
    if has_body and not (format_.after_text or mark):
        raise refused("tools", "tools of this model do not go with another form of answers: its calls begin like JSON")
    if has_body or mark:
        return [f"start: {trigger} calls | {mark} {'@body' if has_body else 'TEXT'}", *rules]
    if format_.after_text:
        return ["start: TEXT | trigger calls", up_to("trigger", format_.trigger, special), *rules]
    # What begins like a call is one; no other text begins with its first character.
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
    """The form of a text as a part of a grammar, and the field that asks for it."""
    asked, field = request.structured_outputs, "structured_outputs"
    format_ = request.response_format if isinstance(request, ChatRequest) else None
    if isinstance(format_, (JsonObjectFormat, JsonSchemaFormat)):
        if asked is not None:
            raise refused(field, "structured_outputs does not go with response_format; leave one out")
        schema = {"type": "object"} if isinstance(format_, JsonObjectFormat) else format_.json_schema.schema_
        asked, field = StructuredOutputs(json=schema), "response_format"
    try:
        return None if asked is None else (_structured(asked), field)
    except (ValueError, RecursionError) as error:
        raise refused(field, f"{field} cannot be read: {error}") from error


def _structured(asked: StructuredOutputs) -> dict[str, Any]:
    for kind in ("regex", "choice", "grammar"):
        if (value := getattr(asked, kind)) is not None:
            return {kind: value}
    schema = {"type": "object"} if asked.json_object else asked.json_
    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise ValueError("json is no JSON schema")
    # As `json.dumps` writes values. Free white space would let a model write nothing else.
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {"json_schema": schema | {"x-guidance": form}}


def asks_for_json(request: TextRequest) -> bool:
    """Whether all answers have to be JSON."""
    if isinstance(request, ChatRequest) and request.tools:
        return False
    if (asked := request.structured_outputs) is not None:
        return asked.json_ is not None or asked.json_object is not None
    format_ = request.response_format if isinstance(request, ChatRequest) else None
    return isinstance(format_, (JsonObjectFormat, JsonSchemaFormat))


def callable_tools(request: ChatRequest) -> Sequence[FunctionTool]:
    """The functions that an answer may call.

    Raises:
        ApiError: `tool_choice` does not go with `tools`.
    """
    choice = request.tool_choice
    if isinstance(choice, SomeTools):
        names = [named.function.name for named in choice.allowed_tools.tools]
    else:
        names = [choice.function.name] if isinstance(choice, NamedTool) else []
    if not request.tools and choice not in (None, "none", "auto"):
        raise refused("tool_choice", "tool_choice needs tools")
    if len({tool.function.name for tool in request.tools}) < len(request.tools):
        raise refused("tools", "tools has two functions of one name")
    if choice == "none":
        return []
    if not names:
        return request.tools
    chosen = {tool.function.name: tool for tool in request.tools if tool.function.name in names}
    if strange := [name for name in names if name not in chosen]:
        raise refused("tool_choice", f"tool_choice names {strange[0]!r}, which is none of the tools")
    return list(chosen.values())
