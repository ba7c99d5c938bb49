"""Compares token trees with plain decoding, for each model and on this build of llama.cpp, before they are used."""

from __future__ import annotations

import numpy as np
import torch

from lookahead.backends.llama_cpp.model import LlamaModel
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.core.token_tree import TokenTree
from lookahead.errors import UnsupportedModelError

TOLERANCE = 0.25
"""How far logits of a tree may be from plain decoding's, in standard deviations of the logits. Rounding moves those of
weights with four bits by less than a tenth of this; a token that is seen or missed wrongly moves them by about one."""

_PROMPT, _STEPS, _DEPTH, _DECOYS = 6, 3, 3, 3


def check_trees(model: LlamaModel) -> None:
    """Make sure that token trees give what plain decoding gives, and that what is kept of them is right.

    Raises:
        UnsupportedModelError: They do not; the message says by how much they differ.
    """
    worst = largest_difference(model)
    if not worst <= TOLERANCE:
        raise UnsupportedModelError(
            f"path={str(model.path)!r}: the model does not give on token trees what it gives token by token, with this "
            f"build of llama.cpp: logits differ by {worst:.2g} standard deviations. Use llama.cpp's own decoding"
        )


def largest_difference(model: LlamaModel) -> float:
    """The largest difference between a logit of a tree and plain decoding's, in standard deviations of the logits.

    A text of random tokens is read token by token; then as the paths of trees that have other branches besides.
    """
    draws = np.random.default_rng(0)
    length = _PROMPT + _STEPS * (_DEPTH + 1)
    usable = np.setdiff1d(np.arange(len(model.vocabulary)), [*model.vocabulary.controls, *model.vocabulary.ends])
    text: list[int] = draws.choice(usable, length).tolist()
    context = model.acquire(2 * length + (_DECOYS + 1) * (_DEPTH + 1), _DECOYS + 1)
    runner = LlamaRunner(context, 1)
    expected = torch.cat([_read(runner, text[:end]) for end in range(_PROMPT, length + 1)])
    runner.rewind(0, 0)
    found = [_read(runner, text[:_PROMPT])[0]]
    for step in range(_STEPS):
        start = _PROMPT + step * (_DEPTH + 1)
        tree = runner.begin_tree(0, text[: start + 1])
        right = text[start + 1 : start + 1 + _DEPTH]
        decoys = draws.choice(usable, (_DECOYS, _DEPTH)).tolist()
        for shared, decoy in enumerate(decoys):  # they part from the right path one after another
            tree.add_candidates([*right[:shared], *decoy])
        path = tree.add_candidates(right)
        (result,) = runner.forward([tree])
        found += [result.logits_after(node)[0] for node in (tree.root, *path)]
        runner.commit([[*range(tree.root + 1), *path]])
    model.release(context)
    return float((torch.stack(found) - expected).abs().max() / expected.std())


def _read(runner: LlamaRunner, text: list[int]) -> torch.Tensor:
    """Logits after `text`, of which all but the last tokens were read before, `[1, vocabulary]`."""
    tree: TokenTree = runner.begin_tree(0, text)
    (result,) = runner.forward([tree])
    runner.commit([range(len(tree))])
    return result.logits_after(tree.root)
