"""Checks of a model of mlx-lm and of calls on it.

| question | check | refused |
| --- | --- | --- |
| Can it be loaded? | mlx-lm loads it: `model.load_mlx` | the folder |
| Do trees and single tokens give equal logits? | random texts, trees with wrong branches: `check_model` | trees |
| Do chains? | the same along chains, some of them rejected in part: `check_model` | the model |
| Do the settings apply to MLX? | `check_settings` | `pack_weights`, `invariant`, `engine` |
| Can the caches of a call be run? | `check_caches` | quantised keys and values, several texts in a cache |
"""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, QuantizedKVCache, make_prompt_cache

from lookahead.backends.mlx.caches import Caches
from lookahead.backends.mlx.runner import MLXRunner, Way
from lookahead.backends.trials import drafted_difference
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError
from lookahead.values import require

TOLERANCE = 1e-3
"""Maximum difference to the logits of plain decoding with weights in float32, in standard deviations of the logits."""

ROUNDED_TOLERANCE = 0.1
"""The same with weights in 16 bits, or quantised: rounding alone has made 0.03 on chains of Falcon H1."""


def check_model(module: Any, vocabulary: int, number_type: str) -> tuple[Way, float]:
    """Return the kind of passes that a model runs exactly, after trials.

    Args:
        module: Model of mlx-lm.
        vocabulary: Number of token ids.
        number_type: Names of the number types of its weights.

    Returns:
        The kind, and the largest difference to logits of plain decoding, in standard deviations of the logits.

    Raises:
        UnsupportedModelError: Logits differ from plain decoding on trees and on chains.
    """
    ways: list[Way] = ["chains"] if MLXRunner(module, []).chains else ["trees", "grouped trees", "chains"]
    tolerance = TOLERANCE if number_type == "float32" else ROUNDED_TOLERANCE
    reason = ""
    for way in ways:
        rows = 1 if way == "chains" else 2

        def empty_runner(drafts: bool, way: Way = way, rows: int = rows) -> MLXRunner:
            return MLXRunner(module, [make_prompt_cache(module) for _ in range(rows)], way=way, joins=drafts)

        try:
            worst = drafted_difference(empty_runner, range(vocabulary), way == "chains", rows)
        except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            reason = f": {type(error).__name__}: {error}"
            continue
        if worst <= tolerance:
            return way, worst
        reason = f": they differ by {worst:.2g} standard deviations"
    raise UnsupportedModelError(
        f"{type(module).__module__.rpartition('.')[2]}: the model gives other logits on token trees and on chains of "
        f"tokens than token by token{reason}. Use mlx_lm.generate"
    )


def describe_weights(module: Any) -> tuple[int, str, int, str]:
    """Return a model's number of token ids, and the number types, number and hash of its weights."""
    weights = sorted(tree_flatten(module.parameters()))
    digest = hashlib.sha256()
    for name, weight in weights[:: max(1, len(weights) // 16)]:
        values = weight.reshape(-1)
        sample = values[:: max(1, values.size // 64)].astype(mx.float32).tolist()
        digest.update(f"{name} {weight.shape} {sample}".encode())
    types = sorted({str(weight.dtype).rpartition(".")[2] for _, weight in weights})
    vocabulary = int(module(mx.zeros((1, 1), dtype=mx.int32)).shape[-1])
    return vocabulary, " ".join(types), sum(weight.size for _, weight in weights), digest.hexdigest()[:24]


def check_caches(caches: Caches, layers: int) -> None:
    """Refuse caches of a caller that are not exact on chains, or belong to another model.

    Raises:
        InvalidArgumentError: The caches are not a list of one for each of the model's layers.
        UnsupportedArgumentError: A cache holds quantised keys and values, or several texts.
    """
    fits = isinstance(caches, (list, tuple)) and len(caches) == layers
    require(
        fits, "prompt_cache", caches, f"must be a list of {layers} caches, as make_prompt_cache(model.mlx) makes it"
    )
    for cache in caches:
        if isinstance(cache, (QuantizedKVCache, BatchKVCache, BatchRotatingKVCache)):
            raise UnsupportedArgumentError(
                f"prompt_cache has a {type(cache).__name__}, which lookahead decoding does not support; use the caches "
                "of mlx_lm.models.cache.make_prompt_cache"
            )
