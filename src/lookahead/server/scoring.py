"""Log-probabilities of prompts, as evaluations need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from lookahead.backends.transformers.cache_names import CACHE, cache_name
from lookahead.server.errors import refused
from lookahead.server.served_model import ServedModel
from lookahead.serving.handle import TokenEvent

_PART = 256
"""Tokens of a pass: bounds the memory for logits."""


@torch.inference_mode()
def score_prompt(served: ServedModel, tokens: Sequence[int], alternatives: int) -> list[TokenEvent]:
    """Return the tokens of a prompt with their log-probabilities; the first token has none.

    It runs the model directly, beside the engine.

    Args:
        served: The model.
        tokens: The prompt.
        alternatives: Number of likeliest tokens to return at each index.

    Raises:
        ApiError: The model is none of transformers.
    """
    if not served.is_transformers:
        raise refused("echo", "echo with logprobs is supported for models of transformers only; leave one of them out")
    model: Any = served.model
    in_parts = not getattr(model, "_is_stateful", False) and cache_name(model) == CACHE
    options: dict[str, Any] = {"use_cache": False}
    if in_parts:
        options = {"use_cache": True, CACHE: DynamicCache(config=model.config.get_text_config())}
    events, size = [TokenEvent(tokens[0])], _PART if in_parts else len(tokens)
    for start in range(0, len(tokens), size):
        part = torch.tensor([tokens[start : start + size]], device=model.device)
        logits = model(part, **options).logits[0]
        following = tokens[len(events) : len(events) + len(logits)]  # the last logits have no token
        logprobs = logits[: len(following)].float().log_softmax(-1)
        values, ids = (each.tolist() for each in logprobs.topk(alternatives))
        for index, token in enumerate(following):
            top = tuple(zip(ids[index], values[index], strict=True))
            events.append(TokenEvent(token, float(logprobs[index, token]), top))
    return events
