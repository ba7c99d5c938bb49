"""What the model predicts after each node: the likeliest tokens of a row of logits."""

from __future__ import annotations

import torch

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

    Args:
        logits: `[rows, vocabulary]` float32.
        count: How many; at most the vocabulary.

    Returns:
        Token ids `[rows, count]` int64 and probabilities `[rows, count]` float32 (softmax over the vocabulary).
    """
    rows, vocabulary = logits.shape
    chunks = vocabulary // _CHUNK
    if vocabulary < _CHUNKED_FROM or chunks < count or logits.is_cuda:
        ids = logits.topk(count, dim=-1).indices
    else:
        # The likeliest tokens lie in the chunks with the largest maxima; the rest of the vocabulary, less than a
        # chunk, is looked at as it is.
        whole = chunks * _CHUNK
        view = logits[:, :whole].view(rows, chunks, _CHUNK)
        best_chunks = view.amax(dim=-1).topk(count, dim=-1).indices  # [rows, count]
        offsets = torch.arange(_CHUNK, device=logits.device)
        places = (best_chunks[:, :, None] * _CHUNK + offsets).flatten(1)
        if whole < vocabulary:
            tail = torch.arange(whole, vocabulary, device=logits.device).expand(rows, -1)
            places = torch.cat([places, tail], dim=1)
        ids = places.gather(1, logits.gather(1, places).topk(count, dim=-1).indices)
    return ids, torch.softmax(logits, dim=-1).gather(1, ids)
