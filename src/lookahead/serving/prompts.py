"""What rows begin with, what of it a cache holds already, and texts that are expected to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.backends.base import Prompts
from lookahead.backends.transformers.limits import TRANSFORMERS
from lookahead.config import LookaheadConfig
from lookahead.drafting import PredictedText
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.serving.arguments import (
    check_positions,
    check_values,
    counts_tokens,
    inputs_beside_tokens,
    prompt_tokens,
)


def read_prompts(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> Prompts:
    """The prompts of a call that transformers has prepared.

    Args:
        model: The model.
        input_ids: The prompts, `[batch, tokens]`.
        model_kwargs: What transformers would hand to the model.
        config: The configuration of the call.

    Raises:
        InvalidArgumentError: Prompts, mask and cache do not fit together.
        UnsupportedArgumentError: Positions that do not count the tokens.
    """
    mask = _whole_mask(input_ids, model_kwargs.get("attention_mask"), config)
    positions = model_kwargs.get("position_ids")
    own_prefill = bool(inputs_beside_tokens(model_kwargs)) or _follows_image(positions, mask)
    if not own_prefill:
        check_positions(positions, mask)
    tokens = prompt_tokens(model, input_ids, mask[:, -input_ids.shape[1] :])
    # transformers marks the cache that the caller passed, and makes an empty one where there is none
    cache: Cache | None = model_kwargs.get("past_key_values")
    cache = cache if getattr(cache, "_is_user_defined", False) else None
    _check_chunks(cache, config)
    inputs = model_kwargs if own_prefill else {}
    return Prompts(input_ids, mask, tokens, _tokens_before(cache, mask, input_ids), cache, inputs)


def _check_chunks(cache: Cache | None, config: GenerationConfig) -> None:
    """Refuse to read a prompt in chunks after cached text, which plain decoding reads wrongly before 5.23."""
    if TRANSFORMERS >= (5, 23) or config.prefill_chunk_size is None or cache is None or cache.get_seq_length() == 0:
        return
    raise UnsupportedArgumentError(
        f"prefill_chunk_size={config.prefill_chunk_size} is not supported with past_key_values that holds tokens: "
        "generate of transformers before 5.23 puts the chunks at the start of the text; leave one of them out"
    )


def _follows_image(positions: torch.Tensor | None, mask: torch.Tensor) -> bool:
    """Whether positions of several kinds say that an image came before the prompt."""
    return positions is not None and positions.dim() == 3 and not counts_tokens(positions, mask)


def _whole_mask(
    input_ids: torch.Tensor, mask: torch.Tensor | None, generation_config: GenerationConfig
) -> torch.Tensor:
    """Which tokens of the whole text count, `[batch, tokens]` bool: of what is cached and left out of the prompt, too.

    Raises:
        InvalidArgumentError: The mask is shorter than the prompt.
    """
    rows, tokens = input_ids.shape
    if mask is None:
        # transformers drops a mask of ones, and notes how long it was
        tokens = getattr(generation_config, "_mask_length", None) or tokens
        return torch.ones(rows, tokens, dtype=torch.bool, device=input_ids.device)
    if mask.shape[1] < input_ids.shape[1]:
        raise InvalidArgumentError(
            f"attention_mask of shape {tuple(mask.shape)} is shorter than input_ids of shape {tuple(input_ids.shape)}"
        )
    return mask.to(input_ids.device).bool()


def _tokens_before(cache: Cache | None, mask: torch.Tensor, input_ids: torch.Tensor) -> list[int]:
    """How many tokens that count come before each row's prompt: those of the cache, or none if the prompt repeats them.

    As in transformers, an attention mask that is longer than the prompt says that the prompt is new text alone.

    Args:
        cache: What the caller passed, if anything.
        mask: Which tokens of the whole text count, `[batch, columns]` bool.
        input_ids: The prompts with their padding.

    Raises:
        InvalidArgumentError: The cache does not fit the prompt.
    """
    held = 0 if cache is None else cache.get_seq_length()
    earlier = mask.shape[1] - input_ids.shape[1]
    if earlier:
        if earlier != held:
            raise InvalidArgumentError(
                f"attention_mask counts {earlier} tokens before input_ids, but past_key_values holds {held}; a mask is "
                "as long as input_ids, or as the cached text and input_ids together"
            )
        return [int(count) for count in mask[:, :earlier].sum(dim=1)]
    if held >= input_ids.shape[1]:
        raise InvalidArgumentError(
            f"past_key_values holds {held} tokens, but input_ids has {input_ids.shape[1]}: give the whole text with at "
            "least one new token, or new tokens alone with an attention_mask over the whole text"
        )
    return [0] * len(input_ids)


Prediction = torch.Tensor | Sequence[int] | Sequence[Sequence[int] | None]
"""Token ids of the text that is expected of the one row, or for each row its own, `None` where there is none."""


def token_ids(name: str, tokens: Any, vocabulary: int) -> list[int]:
    """Token ids of a text, given as a list or a tensor.

    Raises:
        InvalidArgumentError: They are none.
    """
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(1)
    check_values(name, ids)
    is_whole = ids.numel() == 0 or not (ids.is_floating_point() or ids.is_complex())
    if ids.numel() != (ids.shape[-1] if ids.dim() else 0) or not is_whole or ((ids < 0) | (ids >= vocabulary)).any():
        raise InvalidArgumentError(
            f"{name} must be the token ids of one text, whole numbers from 0 to {vocabulary - 1}"
        )
    return [int(token) for token in ids.flatten().tolist()]


def check_reads_predictions(config: LookaheadConfig) -> None:
    """Refuse a preset that does not draft from a text that is expected.

    Raises:
        UnsupportedArgumentError: It does not.
    """
    if config.preset != "auto":
        raise UnsupportedArgumentError(
            f"prediction is not supported by preset={config.preset!r}, which drafts from other texts; use preset='auto'"
        )


def predicted_texts(
    prediction: Prediction | None, config: LookaheadConfig, rows: int, vocabulary: int
) -> list[PredictedText | None]:
    """The predicted text of each row; `None` for an empty one.

    Raises:
        InvalidArgumentError: `prediction` is not one text for each row.
        UnsupportedArgumentError: The preset does not draft from it.
    """
    if prediction is None:
        return [None] * rows
    check_reads_predictions(config)
    given: Sequence[Any] = _rows(prediction)
    if len(given) != rows:
        raise InvalidArgumentError(
            f"prediction has {len(given)} texts for {rows} prompts; give a list with one for each, None where nothing "
            "is expected"
        )
    texts = [[] if item is None else token_ids("prediction", item, vocabulary) for item in given]
    return [PredictedText(text) if text else None for text in texts]


def _rows(prediction: Prediction) -> Sequence[Any]:
    """The text of each row, of which there may be one alone."""
    if isinstance(prediction, torch.Tensor):
        return list(prediction) if prediction.dim() == 2 else [prediction]
    is_nested = any(item is None or isinstance(item, (Sequence, torch.Tensor)) for item in prediction)
    return prediction if is_nested else [prediction]
