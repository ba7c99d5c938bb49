"""Plan of a request for the engine: prompt, length, sampling, logits processors, drafts."""

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
from lookahead.server.grammar import GrammarProcessor, GrammarSource, callable_tools, compile_grammar, grammar_of
from lookahead.server.guard import ServerSettings
from lookahead.server.requests import (
    ChatRequest,
    ChoicesRequest,
    CompletionRequest,
    LookaheadOptions,
    TextRequest,
    joined,
)
from lookahead.server.served_model import EncodedPrompt, ServedModel, remaining_tokens
from lookahead.server.tools import TAGS, Thinking

_MIN_TEMPERATURE = 0.01
"""Lower temperatures decode greedily: logits divided by them could overflow."""

_NO_TOKEN = -1
"""End-of-sequence token that no token matches; without any, transformers takes the model's."""


@dataclass(frozen=True)
class Plan:
    """Checked arguments for one prompt of a request.

    Attributes:
        request: The request.
        prompt: Token ids of the prompt.
        arguments: Arguments of `Engine.submit` that all answers share.
        seed: Seed of the first answer; each further answer adds 1.
        config: Configuration of drafts.
        ends: Tokens that end an answer.
        grammar: Matcher at the beginning of the grammar, if answers follow one.
        dropped: Special tokens to remove from the text; all of them if `None`.
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
        """Make the logits processors and the draft configuration of one answer."""
        request = self.request
        config = self.config
        processors = LogitsProcessorList()
        if request.presence_penalty or request.frequency_penalty:
            processors.append(OccurrencePenalty(request.presence_penalty, request.frequency_penalty, len(self.prompt)))
        if self.grammar is not None:
            processors.append(GrammarProcessor(self.grammar.deep_copy(), len(self.prompt)))
        if self.grammar is not None and config.preset == "auto":
            matcher = self.grammar.deep_copy()
            config = replace(config, sources=(*config.sources, lambda: GrammarSource(matcher)))
        return processors, config


def make_plan(
    served: ServedModel,
    request: ChoicesRequest,
    prompt: EncodedPrompt,
    settings: ServerSettings,
    grammar: LLMatcher | None = None,
) -> Plan:
    """Check a request for one of its prompts, and return the plan.

    Args:
        served: The model.
        request: The request.
        prompt: The prompt.
        settings: Limits of the server.
        grammar: Matcher of an earlier prompt of this request, to be reused.

    Raises:
        ApiError, LookaheadError: The request is invalid.
    """
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    tokens = prompt.tokens
    remaining = remaining_tokens(served, tokens, settings.max_prompt_tokens, field)
    length = _length(request, remaining, settings)
    grammar = grammar or _grammar(served, request, tokens)
    served.check_tokens(request.stop_token_ids, "stop_token_ids")
    ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else served.end_tokens)
    config = _config(served.config, request.lookahead)
    arguments = {
        "attention_mask": torch.ones((1, len(tokens)), dtype=torch.long),
        "pad_token_id": next(iter(ends), 0),
        "max_new_tokens": length,
        "logprobs": _alternatives(request),
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
    made = grammar_of(request, thinking, served.tool_format, served.special_tokens, reasoning)
    if made is None:
        return None
    grammar, field = made
    if not served.end_tokens:
        raise refused(field, f"{field} needs a model with an end-of-sequence token; leave it out")
    try:
        grammar = served.grammar_trials.compiled(grammar)
    except ValueError as error:
        raise refused(field, f"{field}: {error}") from error
    return compile_grammar(grammar, served.grammar_tokenizer, field)


def _endings(request: TextRequest, ends: frozenset[int], length: int, grammar: LLMatcher | None) -> dict[str, Any]:
    """Return the arguments of `generate` about the end of an answer."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name) and grammar is not None:
            raise refused(name, f"{name} cannot be combined with a grammar, which determines the end; leave one out")
    if request.min_tokens > length:
        raise refused("min_tokens", f"min_tokens={request.min_tokens} is more than the {length} tokens of the answer")
    arguments: dict[str, Any] = {"min_new_tokens": request.min_tokens} if request.min_tokens else {}
    if request.stop_token_ids or request.ignore_eos:
        arguments["eos_token_id"] = sorted(ends) or [_NO_TOKEN]
    return arguments


def _dropped(served: ServedModel, request: TextRequest) -> frozenset[int] | None:
    """Return the special tokens to remove from the text; `AnswerReader` needs the others."""
    if not isinstance(request, ChatRequest):
        return None
    marks = served.marks(bool(callable_tools(request)))
    return frozenset(served.special_tokens.values()).difference(marks) if marks else None


def _alternatives(request: TextRequest) -> int | None:
    """Return the number of alternatives to each token; `None` without log-probabilities."""
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs=true")
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def _prediction(served: ServedModel, request: TextRequest, config: LookaheadConfig) -> list[int] | None:
    if not isinstance(request, ChatRequest) or request.prediction is None:
        return None
    if config.preset != "auto":
        raise refused("prediction", f"prediction needs preset='auto', not {config.preset!r}; leave one out")
    return served.encode(joined(request.prediction.content), special=False, field="prediction")


def _length(request: ChoicesRequest, remaining: int | None, settings: ServerSettings) -> int:
    names = ("max_tokens", "max_completion_tokens")
    values: dict[str, int] = {name: value for name in names if (value := getattr(request, name, None)) is not None}
    if len(set(values.values())) > 1:
        raise refused("max_tokens", f"{' and '.join(values)} are two names of the same limit; give one of them")
    for name, value in values.items():
        if remaining is not None and value > remaining:
            raise refused(name, f"{name}={value} is more than the {remaining} tokens that fit after the prompt")
        if value > settings.max_new_tokens:
            raise refused(name, f"{name}={value} is more than this server's limit of {settings.max_new_tokens} tokens")
        return value
    return min(limit for limit in (request.default_tokens, remaining, settings.max_new_tokens) if limit is not None)


_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
"""Sampling from the model's full distribution: OpenAI's defaults."""


def _sampling(served: ServedModel, request: TextRequest) -> dict[str, Any]:
    """Return the arguments of sampling: from the request, else the model's configuration, else neutral ones."""
    chosen: dict[str, Any] = _NEUTRAL | {name: value for name, value in served.sampling.items() if name in _NEUTRAL}
    chosen |= {name: value for name in _NEUTRAL if (value := getattr(request, name)) is not None}
    if chosen["temperature"] < _MIN_TEMPERATURE or chosen["top_p"] == 0:
        return {"do_sample": False}
    return {"do_sample": True, **chosen, "top_k": max(chosen["top_k"], 0), "min_p": chosen["min_p"] or None}


def _bias(request: TextRequest, vocabulary: int) -> Iterator[tuple[int, float]]:
    for token, value in request.logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise refused("logit_bias", f"logit_bias: {token[:100]!r} is not a token id from 0 to {vocabulary - 1}")
        yield int(token), value


def _config(config: LookaheadConfig, options: LookaheadOptions) -> LookaheadConfig:
    if not options.enabled:
        if options.preset is not None or options.step_budget is not None:
            message = "lookahead.enabled=false cannot be combined with preset or step_budget; leave them out"
            raise refused("lookahead", message)
        return LookaheadConfig(preset="autoregressive")
    if options.preset not in (None, config.preset):
        config = LookaheadConfig(preset=options.preset)
    return config if options.step_budget is None else replace(config, step_budget=options.step_budget)


class OccurrencePenalty(LogitsProcessor):  # type: ignore[misc]
    """`presence_penalty` and `frequency_penalty` of OpenAI's API.

    Args:
        presence: Penalty of each token in the answer so far, subtracted from its logit.
        frequency: Penalty for each occurrence in the answer so far.
        prompt_length: Number of tokens before the answer.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Subtract the penalties from logits `[1, vocabulary]`."""
        answer = input_ids[0, self._prompt_length :]
        counts = torch.zeros_like(scores[0]).index_add_(0, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
