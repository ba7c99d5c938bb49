"""Which products of packed weights are faster than plain ones on this processor: a few of a model's, timed once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import process_time

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.findings import recall, remember
from lookahead.backends.transformers.packed_linear import SEVERAL_ROWS, can_pack, pack, packed_product

Layers = Mapping[tuple[int, ...], Sequence[torch.nn.Linear]]
"""Linear layers by the shape of their weights."""

_ROWS = (1, 2, 16)
"""Rows of the products: one of a plain step, more of a step with a draft."""

_SHAPES = 3
"""Shapes that are timed, those that most of the weights have."""

_MOST_BYTES = 1 << 24
"""Weights of each shape that are timed: few enough to take a fraction of a second."""

_MOST_ROUNDS, _LEAST_ROUNDS = 6, 2
_LONG_ENOUGH = 0.1
"""CPU seconds for each shape after which no further round begins."""

_WORTH = 0.97
"""Most time of packed products over that of plain ones: each call reads all packed weights once more."""

_log = logging.getLogger(__name__)


def fastest_packing(model: PreTrainedModel) -> bool | str:
    """How to pack the weights of `model` so that no step takes longer than with plain weights.

    Timed once for the shapes and types of a model's layers, and kept for the machine, the libraries and the number of
    threads (see `findings`).

    Returns:
        `True`: all products are of packed weights, as those of a model that has nothing to pack. `SEVERAL_ROWS`: those
        of more than one row. `False`: none.
    """
    layers = _layers_by_shape(model)
    if not layers:
        return True
    counts = sorted([*shape, len(found)] for shape, found in layers.items())
    about = {"kind": "packed products", "dtype": str(model.dtype), "layers": counts}
    packing = recall(about)
    if packing not in (True, False, SEVERAL_ROWS):
        seconds = product_seconds(layers)
        _log.debug("seconds of plain and of packed products, by rows: %s", seconds)
        single, *several = (packed <= _WORTH * plain for plain, packed in seconds.values())
        packing = (single or SEVERAL_ROWS) if all(several) else False
        remember(about, packing)
    _log.debug("pack_weights=True: %s decodes with packing=%r", type(model).__name__, packing)
    return packing  # type: ignore[no-any-return]


def _layers_by_shape(model: PreTrainedModel) -> dict[tuple[int, ...], list[torch.nn.Linear]]:
    """The layers that can be packed."""
    layers: dict[tuple[int, ...], list[torch.nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and can_pack(module):
            layers.setdefault(tuple(module.weight.shape), []).append(module)
    return layers


def product_seconds(layers: Layers) -> dict[int, tuple[float, float]]:
    """CPU seconds of the products of a step, as far as its largest layers go, plain and packed, by rows: 1, 2 and 16.

    Args:
        layers: The layers of a model.
    """
    largest = sorted(layers, key=lambda shape: -shape[0] * shape[1] * len(layers[shape]))[:_SHAPES]
    sums = dict.fromkeys(_ROWS, (0.0, 0.0))
    for shape in largest:
        weights = _sample(layers[shape])
        share = sum(map(torch.numel, weights)) / (shape[0] * shape[1] * len(layers[shape]))
        for rows, (plain, packed) in _least_seconds(weights).items():
            sums[rows] = sums[rows][0] + plain / share, sums[rows][1] + packed / share
    return sums


def _sample(layers: Sequence[torch.nn.Linear]) -> list[torch.Tensor]:
    """Weights of the first layers, or the first rows of one, up to `_MOST_BYTES`."""
    first = layers[0].weight
    if first.nbytes > _MOST_BYTES:
        return [first.detach()[: max(1, len(first) * _MOST_BYTES // first.nbytes)]]
    return [layer.weight.detach() for layer in layers[: _MOST_BYTES // first.nbytes]]


def _least_seconds(weights: Sequence[torch.Tensor]) -> dict[int, tuple[float, float]]:
    """The least of a few times for all the weights, plain and packed in turns, by rows: other programs only add."""
    multiply: tuple[Callable[..., torch.Tensor], ...] = torch.nn.functional.linear, packed_product
    used = weights, [pack(weight) for weight in weights]
    least = {(rows, kind): float("inf") for rows in _ROWS for kind in (0, 1)}
    begin = process_time()
    for finished in range(_MOST_ROUNDS):
        if finished >= _LEAST_ROUNDS and process_time() - begin > _LONG_ENOUGH:
            break
        for rows, kind in least:
            inputs = torch.ones(1, rows, weights[0].shape[1], dtype=weights[0].dtype)
            start = process_time()
            for weight in used[kind]:
                multiply[kind](inputs, weight)
            least[rows, kind] = min(least[rows, kind], process_time() - start)
    return {rows: (least[rows, 0], least[rows, 1]) for rows in _ROWS}
