"""Chains along a text that is known in advance, whose logits tell whether a model goes on from its states rightly."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.chain_cache import ChainCache
from lookahead.backends.transformers.chain_runner import ChainRunner
from lookahead.core.token_tree import TokenTree

_MOST_DRAFTED = 4

_TEXT = (5, 11, 7, 3, 13, 2, 17, 19, 23, 29, 31, 37, 41, 43)
_PROMPT = 6
_TEXTS = 3
"""A difference counts if it shows with each of so many texts: near-ties between experts are rounding's."""
_LEAST_TOLERANCE = 1e-3
"""Of the largest logit. Wrong states make for far more, and what is finer the miniature shows."""


def goes_on_rightly(model: PreTrainedModel, engine: PreTrainedModel) -> bool:
    """Whether `engine` reads chains as `model` reads one token at a time."""
    return any(_agrees(model, engine, text) for text in range(_TEXTS))


def _agrees(model: PreTrainedModel, engine: PreTrainedModel, text: int) -> bool:
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = [(token + text) % vocabulary for token in _TEXT]
    expected = stepwise_logits(model, tokens[:-1], _PROMPT)
    logits = chain_logits(engine, tokens, _PROMPT, random.Random(text))
    tolerance = max(_LEAST_TOLERANCE, 64 * torch.finfo(model.dtype).eps) * float(expected.abs().max())
    return float((logits - expected).abs().max()) <= tolerance  # not if they are no numbers


def chain_logits(model: PreTrainedModel, text: Sequence[int], prompt: int, draws: random.Random) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` float32 along `text` after its prompt, read from chains that hold it, and more.

    Some drafts are right to their end; after the others states are put back, and pending tokens sent again.
    """
    runner = ChainRunner(model)
    found = []
    decided = prompt
    while decided < len(text):
        tree = runner.begin_tree(0, text[:decided])
        following = list(text[decided : decided + draws.randrange(_MOST_DRAFTED)])
        following = following[: max(len(text) - decided - 1, 0)]
        wrong = [text[0]] if draws.random() < 0.5 else []
        path = tree.add_candidates([*following, *wrong])[: len(following)]
        (result,) = runner.forward([tree])
        found += [result.logits_after(node) for node in (tree.root, *path)]
        runner.commit([[*range(tree.root + 1), *path]])
        decided += 1 + len(path)
    return torch.cat(found).float()


def stepwise_logits(model: PreTrainedModel, text: Sequence[int], prompt: int) -> torch.Tensor:
    """The same as plain decoding reads it, a token at a time."""
    runner = ChainRunner(model, ChainCache(model))
    found = []
    for chunk in (text[:prompt], *([token] for token in text[prompt:])):
        tree = TokenTree(chunk)
        (result,) = runner.forward([tree])
        runner.commit([range(len(tree))])
        found.append(result.logits_after(tree.root))
    return torch.cat(found).float()
