"""A few steps whose logits show whether two ways of running a model are equivalent."""

from __future__ import annotations

import torch

from lookahead.backends.transformers.model_runner import ModelRunner
from lookahead.core.token_tree import TokenTree

_TEXT = (5, 11, 7, 3, 13)
CHECK_LENGTH = 24
"""Tokens, nodes included, that a check pass may put into a cache."""


def check_logits(runner: ModelRunner) -> torch.Tensor:
    """Logits `[reads, vocabulary]` of three steps of at most 8 nodes, of an empty runner of one row.

    The second and the third go by what the steps before them kept, the third without a draft. Static steps of 8 nodes
    record the first one, and replay for the second what they recorded.
    """
    vocabulary = runner.model.get_input_embeddings().num_embeddings
    *prompt, last = (token % vocabulary for token in _TEXT)
    logits = []
    for pending in (prompt, [last]):
        tree = TokenTree(pending)
        path = tree.add_candidates(prompt[:2])
        other = tree.add_candidates(prompt[2:4])
        result = runner.forward([tree])[0]
        logits += [result.logits_after(node) for node in (tree.root, *path, *other)]
        runner.commit([[*range(tree.root + 1), *other]])
    single = TokenTree([last])
    logits.append(runner.forward([single])[0].logits_after(single.root))
    return torch.cat(logits)


def agree(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits are the same but for rounding in `dtype`; a wrong mask makes them differ far more."""
    tolerance = 64 * torch.finfo(dtype).eps * float(expected.abs().max())
    return float((logits.float() - expected.float()).abs().max()) <= tolerance
