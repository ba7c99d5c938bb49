"""What the model predicts after each node: the likeliest tokens of a row of logits."""

from __future__ import annotations

import numpy as np
import torch

from lookahead.core.compiled import IS_COMPILED
from lookahead.drafting.likeliest import BLOCK, list_likeliest, list_likeliest_bits

_CHUNK = 128
_CHUNKED_FROM = 4096


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Likeliest token of each row, the first one of equals, as `torch.argmax` and so transformers choose it.

    In two stages, maxima of chunks first: `torch.argmax` does not vectorise on CPUs, `amax` does.

    Args:
        logits: `[rows, vocabulary]` floating point.

    Returns:
        Token ids `[rows]` int64.
    """
    rows, vocabulary = logits.shape
    whole = vocabulary // _CHUNK * _CHUNK
    if rows <= 1 or vocabulary < _CHUNKED_FROM or logits.is_cuda:
        return logits.argmax(dim=-1)
    chunks = logits[:, :whole].view(rows, -1, _CHUNK)
    best_chunk = chunks.amax(dim=-1).argmax(dim=-1)  # [rows]
    row = torch.arange(rows, device=logits.device)
    best = best_chunk * _CHUNK + chunks[row, best_chunk].argmax(dim=-1)
    if whole == vocabulary:
        return best
    tail = whole + logits[:, whole:].argmax(dim=-1)
    # Not a number counts as the largest, and the first one wins.
    at_best, at_tail = logits[row, best], logits[row, tail]
    return torch.where((at_tail > at_best) | (at_tail.isnan() & ~at_best.isnan()), tail, best)


def top_predictions(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row and their probabilities, likeliest first.

    On CPUs a compiled loop reads each row once, without a softmax of all of it.

    Args:
        logits: `[rows, vocabulary]`, float32 or bfloat16.
        count: How many; at most the vocabulary.

    Returns:
        Token ids `[rows, count]` int64 and probabilities `[rows, count]` float32 (softmax over the vocabulary). On CPUs
        those of large vocabularies are exact to three digits: drafts need no more.
    """
    vocabulary = logits.shape[1]
    is_listed = IS_COMPILED and logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)
    if is_listed and vocabulary >= max(_CHUNKED_FROM, count * BLOCK) and not torch.compiler.is_compiling():
        return _listed(logits, count)
    ids = logits.topk(count, dim=-1).indices
    return ids, torch.softmax(logits.float(), dim=-1).gather(1, ids)


def _listed(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    ids, probabilities = np.empty((rows, count), dtype=np.int64), np.empty((rows, count), dtype=np.float32)
    maxima, values = (np.empty(size, dtype=np.float32) for size in (vocabulary // BLOCK, count))
    room = maxima, np.empty(count, dtype=np.int64), values, ids, probabilities
    logits = logits.detach().contiguous()
    if logits.dtype == torch.float32:
        list_likeliest(logits.numpy(), *room)
    else:
        list_likeliest_bits(logits.view(torch.int16).numpy(), np.empty(vocabulary, dtype=np.float32), *room)
    return torch.from_numpy(ids), torch.from_numpy(probabilities)
