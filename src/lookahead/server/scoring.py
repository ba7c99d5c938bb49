"""Log-probabilities of prompts, which evaluations compare choices by."""

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
"""Tokens whose logits are held at once."""


@torch.inference_mode()
def scored(served: ServedModel, tokens: Sequence[int], rivals: int) -> list[TokenEvent]:
    """The tokens of a prompt with their log-probabilities, of which the first has none.

    By forward passes of the model itself, beside the engine's.

    Args:
        rivals: How many of the likeliest tokens to tell in each place.

    Raises:
        ApiError: The model cannot be asked for them.
    """
    if served.is_gguf:
        raise refused("echo", "echo does not go with logprobs for a GGUF model: its prompts have no log-probabilities")
    model: Any = served.model
    in_parts = not getattr(model, "_is_stateful", False) and cache_name(model) == CACHE
    options: dict[str, Any] = {"use_cache": False}
    if in_parts:
        options = {"use_cache": True, CACHE: DynamicCache(config=model.config.get_text_config())}
    events, size = [TokenEvent(tokens[0])], _PART if in_parts else len(tokens)
    for start in range(0, len(tokens), size):
        part = torch.tensor([tokens[start : start + size]], device=model.device)
        logits = model(part, **options).logits[0]
        following = tokens[len(events) : len(events) + len(logits)]  # one less than there are logits, at the end
        logprobs = logits[: len(following)].float().log_softmax(-1)
        found, ids = (each.tolist() for each in logprobs.topk(rivals))
        for place, token in enumerate(following):
            top = tuple(zip(ids[place], found[place], strict=True))
            events.append(TokenEvent(token, float(logprobs[place, token]), top))
    return events
