"""Responses of mlx-lm's `stream_generate`, and the caches of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from lookahead.backends.base import check_settings
from lookahead.backends.mlx.checks import check_caches
from lookahead.backends.mlx.model import MLXModel
from lookahead.backends.mlx.runner import MLXRunner
from lookahead.backends.mlx.sampler import MLXSampler, Processor
from lookahead.backends.mlx.session import MLXSession
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError


class Stream:
    """Prompt, runner and responses of a call with mlx-lm's arguments.

    Args:
        model: The model.
        tokenizer: Tokenizer of mlx-lm or transformers.
        prompt: Text or token ids.
        sampler, logits_processors: Arguments of `mlx_lm.stream_generate`.
        caches: `prompt_cache` and `max_kv_size`.
        config: Drafting options.

    Attributes:
        tokens: Token ids of the prompt.
        runner: Runner of the only row.
        sampler: Sampler of the tokens.
        ends: Token ids that complete a text.
    """

    def __init__(
        self,
        model: MLXModel,
        tokenizer: Any,
        prompt: Any,
        sampler: Callable[[Any], Any] | None,
        logits_processors: Sequence[Processor] | None,
        caches: tuple[Any, int | None],
        config: LookaheadConfig,
    ) -> None:
        check_settings(config, "a model of MLX")
        wrapper = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        prompt_cache, max_kv_size = caches
        self.tokens = _token_ids(wrapper, prompt, model.findings.vocabulary)
        self.ends = frozenset(wrapper.eos_token_ids)
        self.sampler = MLXSampler(sampler, logits_processors or ())
        self._keeps = prompt_cache is not None
        if prompt_cache is None:
            prompt_cache = make_prompt_cache(model.mlx, max_kv_size)
        check_caches(prompt_cache)
        self.runner: MLXRunner = MLXSession(model).runner_of([prompt_cache])
        self._detokenizer = wrapper.detokenizer
        self._start = perf_counter()
        self._speed = 0.0
        self._count = 0

    def response(self, token: int, logprobs: Any, drafted: bool, last: bool) -> GenerationResponse:
        """Return the response of the next token."""
        now = perf_counter()
        if not self._count:
            self._speed = len(self.tokens) / (now - self._start)
            self._start = now
        self._count += 1
        if token not in self.ends:
            self._detokenizer.add_token(token)
        if last:
            self._detokenizer.finalize()
        return GenerationResponse(
            text=self._detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=drafted,
            prompt_tokens=len(self.tokens),
            prompt_tps=self._speed,
            generation_tokens=self._count,
            generation_tps=self._count / max(perf_counter() - self._start, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=("stop" if token in self.ends else "length") if last else None,
        )

    def close(self, text: Sequence[int]) -> None:
        """Leave the prompt and the tokens that were yielded in the caller's cache, and the random state of mlx-lm."""
        yielded = text[: len(self.tokens) + self._count]
        if self._keeps:
            self.runner.leave(yielded)
        self.sampler.close(len(text) - len(yielded))


def _token_ids(tokenizer: Any, prompt: Any, vocabulary: int) -> list[int]:
    if isinstance(prompt, str):
        begins = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=begins)
    tokens = [int(token) for token in (prompt.tolist() if isinstance(prompt, mx.array) else prompt)]
    if not tokens:
        raise InvalidArgumentError("prompt is empty; give at least one token")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise InvalidArgumentError(
            f"prompt has token ids from {min(tokens)} to {max(tokens)}, but the model knows 0 to {vocabulary - 1}; use "
            "its own tokenizer"
        )
    return tokens
