"""What a request asks of the engine: prompts, lengths, sampling, logits processors, how to draft."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from llguidance import LLMatcher
from transformers import LogitsProcessor, LogitsProcessorList

from lookahead.config import LookaheadConfig
from lookahead.server.errors import refused
from lookahead.server.grammar import GrammarProcessor, GrammarSource, callable_tools, grammar_of, read_grammar
from lookahead.server.guard import ServerSettings
from lookahead.server.messages import joined
from lookahead.server.requests import ChatRequest, ChoicesRequest, CompletionRequest, LookaheadOptions, TextRequest
from lookahead.server.served_model import Prompt, ServedModel, prompt_room
from lookahead.server.tools import TAGS, Thinking

_LEAST_TEMPERATURE = 0.01
"""Below it the likeliest token is as good as certain, and logits by the temperature may be no numbers any more."""

_NO_TOKEN = -1
"""As end-of-sequence token: there is none. Without one, transformers takes the model's."""


@dataclass(frozen=True)
class Plan:
    """One prompt of a request, checked.

    Attributes:
        prompt: Its token ids.
        arguments: Of `Engine.submit`, besides those that each answer has by itself.
        seed: Of the first answer; that of each further one is one larger.
        config: How to draft.
        ends: Tokens that end an answer.
        grammar: What matches answers to their grammar, at its beginning, if they follow one.
        dropped: Special tokens that are no part of the text, all of them if `None`.
    """

    request: ChoicesRequest
    prompt: list[int]
    arguments: dict[str, Any]
    seed: int
    config: LookaheadConfig
    ends: frozenset[int]
    grammar: LLMatcher | None
    dropped: frozenset[int] | None

    def steer(self) -> tuple[LogitsProcessorList, LookaheadConfig]:
        """Logits processors of one answer, and how it drafts."""
        processors, config, asked = LogitsProcessorList(), self.config, self.request
        if asked.presence_penalty or asked.frequency_penalty:
            processors.append(OccurrencePenalty(asked.presence_penalty, asked.frequency_penalty, len(self.prompt)))
        if self.grammar is not None:
            processors.append(GrammarProcessor(self.grammar.deep_copy(), len(self.prompt)))
        if self.grammar is not None and config.preset == "auto":
            drafted = self.grammar.deep_copy()
            config = replace(config, sources=(*config.sources, lambda: GrammarSource(drafted)))
        return processors, config


def make_plan(
    served: ServedModel,
    request: ChoicesRequest,
    prompt: Prompt,
    settings: ServerSettings,
    grammar: LLMatcher | None = None,
) -> Plan:
    """Check what a request asks for behind its prompt, or one of them.

    Args:
        settings: What it may ask for.
        grammar: Of another prompt of the request, where one has been prepared.

    Raises:
        ApiError, LookaheadError: It cannot be met.
    """
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    tokens = prompt.tokens
    room = prompt_room(served, tokens, settings.max_prompt_tokens, field)
    length = _length(request, room, settings)
    grammar = grammar or _grammar(served, request, tokens)
    served.check_tokens(request.stop_token_ids, "stop_token_ids")
    ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else served.end_tokens)
    config = _config(served.config, request.lookahead)
    arguments = {
        "attention_mask": torch.ones((1, len(tokens)), dtype=torch.long),
        "pad_token_id": next(iter(ends), 0),
        "max_new_tokens": length,
        "logprobs": _rivals(request),
        "prediction": _prediction(served, request, config),
        **prompt.inputs,
        **_sampling(served, request),
        **_endings(request, ends, length, grammar),
    }
    if request.logit_bias:
        arguments["sequence_bias"] = [[[token], value] for token, value in _bias(request, served.vocabulary)]
    if request.repetition_penalty is not None:
        arguments["repetition_penalty"] = request.repetition_penalty
    seed = secrets.randbits(62) if request.seed is None else request.seed
    return Plan(request, tokens, arguments, seed, config, ends, grammar, _dropped(served, request))


def _grammar(served: ServedModel, request: TextRequest, prompt: list[int]) -> LLMatcher | None:
    thinking, reasoning = Thinking.NEVER, TAGS
    if isinstance(request, ChatRequest):
        thinking, reasoning = served.thinking(prompt), served.reasoning
    asked = grammar_of(request, thinking, served.tool_format, served.special_tokens, reasoning)
    if asked is None:
        return None
    grammar, field = asked
    if not served.end_tokens:
        raise refused(field, f"{field} needs a model with an end-of-sequence token, which this one lacks")
    try:
        grammar = served.grammar_trials.compiled(grammar)
    except ValueError as error:
        raise refused(field, f"{field}: {error}") from error
    return read_grammar(grammar, served.grammar_tokenizer, field)


def _endings(request: TextRequest, ends: frozenset[int], length: int, grammar: LLMatcher | None) -> dict[str, Any]:
    """Arguments of `generate` for what ends an answer."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name) and grammar is not None:
            raise refused(name, f"{name} does not go with a grammar, which says where the answer ends")
    if request.min_tokens > length:
        raise refused("min_tokens", f"min_tokens={request.min_tokens} is more than the {length} tokens of the answer")
    arguments: dict[str, Any] = {"min_new_tokens": request.min_tokens} if request.min_tokens else {}
    if request.stop_token_ids or request.ignore_eos:
        arguments["eos_token_id"] = sorted(ends) or [_NO_TOKEN]
    return arguments


def _dropped(served: ServedModel, request: TextRequest) -> frozenset[int] | None:
    """Special tokens that are no part of the text, where some are that tell reasoning and calls from it."""
    if not isinstance(request, ChatRequest):
        return None
    marks = served.marks(bool(callable_tools(request)))
    return frozenset(served.special_tokens.values()).difference(marks) if marks else None


def _rivals(request: TextRequest) -> int | None:
    """How many of the likeliest tokens to tell beside each token, `None` for no log-probabilities."""
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs=true")
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def _prediction(served: ServedModel, request: TextRequest, config: LookaheadConfig) -> list[int] | None:
    if not isinstance(request, ChatRequest) or request.prediction is None:
        return None
    if config.preset != "auto":
        raise refused("prediction", f"prediction is drafted from by preset='auto' alone, not by {config.preset!r}")
    return served.encode(joined(request.prediction.content), special=False, field="prediction")


def _length(request: ChoicesRequest, room: int | None, settings: ServerSettings) -> int:
    names = ("max_tokens", "max_completion_tokens")
    given: dict[str, int] = {name: value for name in names if (value := getattr(request, name, None)) is not None}
    if len(set(given.values())) > 1:
        raise refused("max_tokens", f"{' and '.join(given)} are two names of the same limit; give one of them")
    for name, value in given.items():
        if room is not None and value > room:
            raise refused(name, f"{name}={value} is more than the {room} tokens that fit behind the prompt")
        if value > settings.max_new_tokens:
            raise refused(
                name, f"{name}={value} is more than the {settings.max_new_tokens} tokens that this server gives"
            )
        return value
    return min(limit for limit in (request.default_tokens, room, settings.max_new_tokens) if limit is not None)


_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
"""What samples from all that the model says, as OpenAI does by default."""


def _sampling(served: ServedModel, request: TextRequest) -> dict[str, Any]:
    """As the request says, then as the model's own configuration does."""
    chosen: dict[str, Any] = _NEUTRAL | {name: value for name, value in served.sampling.items() if name in _NEUTRAL}
    chosen |= {name: value for name in _NEUTRAL if (value := getattr(request, name)) is not None}
    if chosen["temperature"] < _LEAST_TEMPERATURE or chosen["top_p"] == 0:
        return {"do_sample": False}
    return {"do_sample": True, **chosen, "top_k": max(chosen["top_k"], 0), "min_p": chosen["min_p"] or None}


def _bias(request: TextRequest, vocabulary: int) -> Iterator[tuple[int, float]]:
    """What is added to the logits of tokens."""
    for token, value in request.logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise refused("logit_bias", f"logit_bias: {token!r} is no token id; the model knows {vocabulary} tokens")
        yield int(token), value


def _config(config: LookaheadConfig, options: LookaheadOptions) -> LookaheadConfig:
    if not options.enabled:
        if options.preset is not None or options.step_budget is not None:
            raise refused(
                "lookahead", "lookahead.enabled=false leaves nothing to preset and step_budget; leave them out"
            )
        return LookaheadConfig(preset="autoregressive")
    if options.preset not in (None, config.preset):
        config = LookaheadConfig(preset=options.preset)
    return config if options.step_budget is None else replace(config, step_budget=options.step_budget)


class OccurrencePenalty(LogitsProcessor):  # type: ignore[misc]
    """`presence_penalty` and `frequency_penalty` of OpenAI's API, by the tokens of the answer so far.

    Args:
        presence: Subtracted from the logit of each token that is in the answer.
        frequency: Subtracted for each time that it is.
        prompt_length: Tokens before the answer.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits `[1, vocabulary]` less the penalties of tokens that the answer has."""
        answer = input_ids[0, self._prompt_length :]
        counts = torch.zeros_like(scores[0]).index_add_(0, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
