"""Responses of mlx-lm's `stream_generate`, and the caches of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from lookahead.backends.mlx.checks import check_caches
from lookahead.backends.mlx.model import MLXModel
from lookahead.backends.mlx.runner import MLXRunner
from lookahead.backends.mlx.sampler import MLXSelector, Processor, random_state, set_random_state
from lookahead.backends.mlx.session import MLXSession
from lookahead.errors import InvalidArgumentError
from lookahead.values import require


class Stream(MLXSelector):
    """Prompt, runner, selected tokens and responses of a call with mlx-lm's arguments.

    Args:
        model: The model.
        tokenizer: Tokenizer of mlx-lm or transformers.
        prompt: Text or token ids.
        options: `sampler`, `logits_processors`, `prompt_cache` and `max_kv_size` of `mlx_lm.stream_generate`.

    Attributes:
        tokens: Token ids of the prompt.
        runner: Runner of the only row.
        ends: Token ids that complete a text.
    """

    def __init__(self, model: MLXModel, tokenizer: Any, prompt: Any, options: dict[str, Any]) -> None:
        processors = options.get("logits_processors") or ()
        super().__init__(options.get("sampler"), [_of_text(processor) for processor in processors])
        require(hasattr(tokenizer, "encode"), "tokenizer", tokenizer, "is no tokenizer; pass model.mlx_tokenizer")
        wrapper = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self.tokens = _token_ids(wrapper, prompt, model.vocabulary)
        self.ends = frozenset(wrapper.eos_token_ids)
        self._keeps = options.get("prompt_cache") is not None
        cache = options["prompt_cache"] if self._keeps else make_prompt_cache(model.mlx, options.get("max_kv_size"))
        check_caches(cache, len(make_prompt_cache(model.mlx)))
        self.runner: MLXRunner = MLXSession(model).runner_of([cache])
        self._detokenizer = wrapper.detokenizer
        self._selected: list[tuple[int, Any, Any]] = []  # tokens of a step, log-probabilities, random states
        self._start = perf_counter()
        self._speed = 0.0
        self._count = 0

    def select(self, sequence: Any, outputs: Any, node: int) -> int:
        """Select the token after `node` of the text `sequence`."""
        token = super().select(sequence, outputs, node)
        self._selected.append((token, self.logprobs, None if self._sampler is None else random_state()))
        return token

    def responses(self, finished: bool) -> Iterator[GenerationResponse]:
        """Yield the responses of the tokens of a step; the last one was not drafted.

        Args:
            finished: Whether the step completed the text.
        """
        while self._selected:
            token, logprobs, _ = self._selected.pop(0)
            more = bool(self._selected)
            yield self._response(token, logprobs, more, finished and not more)

    def _response(self, token: int, logprobs: Any, drafted: bool, last: bool) -> GenerationResponse:
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
        """Leave the prompt and the tokens that were yielded in the caller's cache, and the random state of mlx-lm.

        mlx-lm samples one token more than it yields.
        """
        if self._keeps:
            self.runner.leave(text[: len(self.tokens) + self._count])
        if self._sampler is None or self.logprobs is None:
            return
        if self._selected:
            set_random_state(self._selected[0][2])
        else:
            mx.eval(self._sampler(self.logprobs[None]))


def _of_text(processor: Callable[[Any, Any], Any]) -> Processor:
    """Return a logits processor of mlx-lm, which takes token ids, as a function of a text."""
    return lambda text, logits: processor(mx.array(text.tokens), logits)


def _token_ids(tokenizer: Any, prompt: Any, vocabulary: int) -> list[int]:
    if isinstance(prompt, str):
        begins = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=begins)
    tokens = prompt.tolist() if isinstance(prompt, (mx.array, torch.Tensor, np.ndarray)) else prompt
    is_text = isinstance(tokens, (list, tuple)) and bool(tokens) and all(type(token) is int for token in tokens)
    require(is_text, "prompt", prompt, "must be a text, or token ids of one text: at least one whole number")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise InvalidArgumentError(
            f"prompt has token ids from {min(tokens)} to {max(tokens)}, but the model knows 0 to {vocabulary - 1}; use "
            "its own tokenizer"
        )
    return list(tokens)
