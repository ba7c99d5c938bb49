"""Checks of a model of mlx-lm and of calls on it.

| question | check | refused |
| --- | --- | --- |
| Can it be loaded? | mlx-lm loads it: `model.load_mlx` | the folder |
| Do trees and single tokens give equal logits? | random text, trees with wrong branches: `check_model` | trees |
| Do chains? | the same along chains, some of them rejected in part: `check_model` | the model |
| Do the settings apply to MLX? | `check_settings` | `pack_weights`, `invariant`, `engine` |
| Can the caches of a call be run? | `check_caches` | quantised keys and values, several texts in a cache |
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, QuantizedKVCache, make_prompt_cache

from lookahead.backends.mlx.caches import Caches
from lookahead.backends.mlx.runner import MLXRunner, Way
from lookahead.backends.trials import among_decoys, chains, difference, follow, nothing
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

TOLERANCE = 1e-3
"""Maximum difference to the logits of plain decoding with weights in float32, in standard deviations of the logits."""

ROUNDED_TOLERANCE = 0.1
"""The same with weights in 16 bits, or quantised: rounding alone has made 0.03 on chains of Falcon H1."""

_PROMPT = 6
_LENGTH = 19
_DEPTH = 3
_DECOYS = 1


@dataclass(frozen=True)
class Findings:
    """Findings of trials of a model.

    Attributes:
        way: Kind of passes that it runs.
        difference: Largest difference of its logits to those of plain decoding, in standard deviations of the logits.
        vocabulary: Number of token ids.
        number_type: Names of the number types of its weights.
        parameters: Number of weights.
        fingerprint: Name of the weights.
    """

    way: Way
    difference: float
    vocabulary: int
    number_type: str
    parameters: int
    fingerprint: str


def check_model(module: Any) -> Findings:
    """Return how a model can be run, after trials.

    Raises:
        UnsupportedModelError: Logits differ from plain decoding on trees and on chains.
    """
    vocabulary = int(module(mx.zeros((1, 1), dtype=mx.int32)).shape[-1])
    plain = _logits(module, vocabulary, None)
    ways: list[Way] = ["chains"] if MLXRunner(module).chains else ["trees", "grouped trees", "chains"]
    types, parameters, fingerprint = _weights(module)
    tolerance = TOLERANCE if types == "float32" else ROUNDED_TOLERANCE
    reason = ""
    worst = float("nan")
    for way in ways:
        try:
            worst = difference([_logits(module, vocabulary, way)], [plain]) / float(plain.std())
        except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            reason = f": {type(error).__name__}: {error}"
            continue
        if worst <= tolerance:
            return Findings(way, worst, vocabulary, types, parameters, fingerprint)
        reason = f": they differ by {worst:.2g} standard deviations"
    raise UnsupportedModelError(
        f"{type(module).__module__.rpartition('.')[2]}: the model gives other logits on token trees and on chains of "
        f"tokens than token by token{reason}. Use mlx_lm.generate"
    )


def _logits(module: Any, vocabulary: int, way: Way | None) -> torch.Tensor:
    """Return the logits along a random text, on trees or chains; in plain decoding without a way."""
    text: list[int] = np.random.default_rng(0).integers(0, vocabulary, _LENGTH).tolist()
    draft = among_decoys(_DEPTH + 1, _DECOYS, range(vocabulary))
    if way in (None, "chains"):
        draft = chains(random.Random(0), _DEPTH) if way else nothing
    runner = MLXRunner(module, [make_prompt_cache(module)], way=way or "trees")
    runner.prefill([text[:_PROMPT]], None)
    return follow(runner, [text], _PROMPT, draft)[0]


def _weights(module: Any) -> tuple[str, int, str]:
    """Return number types, number and a name of the weights of a model."""
    weights = sorted(tree_flatten(module.parameters()))
    digest = hashlib.sha256()
    for name, weight in weights[:: max(1, len(weights) // 16)]:
        values = weight.reshape(-1)
        sample = values[:: max(1, values.size // 64)].astype(mx.float32).tolist()
        digest.update(f"{name} {weight.shape} {sample}".encode())
    types = sorted({str(weight.dtype).rpartition(".")[2] for _, weight in weights})
    return " ".join(types), sum(weight.size for _, weight in weights), digest.hexdigest()[:24]


def check_caches(caches: Caches) -> None:
    """Refuse caches of a caller that are not exact on chains.

    Raises:
        UnsupportedArgumentError: A cache holds quantised keys and values, or several texts.
    """
    for cache in caches:
        if isinstance(cache, (QuantizedKVCache, BatchKVCache, BatchRotatingKVCache)):
            raise UnsupportedArgumentError(
                f"prompt_cache has a {type(cache).__name__}, which lookahead decoding does not support; use the caches "
                "of mlx_lm.models.cache.make_prompt_cache"
            )
