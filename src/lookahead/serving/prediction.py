"""Texts that a call expects, such as a file that is to be edited: drafted from, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lookahead.config import LookaheadConfig
from lookahead.drafting import PredictedText
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.serving.arguments import check_values

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
    whole = ids.numel() == 0 or not (ids.is_floating_point() or ids.is_complex())
    if ids.numel() != (ids.shape[-1] if ids.dim() else 0) or not whole or ((ids < 0) | (ids >= vocabulary)).any():
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
    """What is expected of each row; those of an empty text are `None`.

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
    texts = [[] if each is None else token_ids("prediction", each, vocabulary) for each in given]
    return [PredictedText(text) if text else None for text in texts]


def _rows(prediction: Prediction) -> Sequence[Any]:
    """The text of each row, of which there may be one alone."""
    if isinstance(prediction, torch.Tensor):
        return list(prediction) if prediction.dim() == 2 else [prediction]
    is_nested = any(each is None or isinstance(each, (Sequence, torch.Tensor)) for each in prediction)
    return prediction if is_nested else [prediction]
