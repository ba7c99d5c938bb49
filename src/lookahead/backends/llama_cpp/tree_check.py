"""Compares token trees with plain decoding, for each model and on this build of llama.cpp, before they are used."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.llama_cpp.chain_runner import LlamaChainRunner
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

    Of a model with running states: that chains do.

    Raises:
        UnsupportedModelError: They do not; the message says by how much they differ.
    """
    what, worst = (
        ("chains of tokens", difference_of_chains(model))
        if model.has_states
        else ("token trees", largest_difference(model))
    )
    if not worst <= TOLERANCE:
        raise UnsupportedModelError(
            f"path={str(model.path)!r}: the model does not give on {what} what it gives token by token, with this "
            f"build of llama.cpp: logits differ by {worst:.2g} standard deviations. Use llama.cpp's own decoding"
        )


def difference_of_chains(model: LlamaModel) -> float:
    """As `largest_difference`, of a text that is read in chains, of which every other one is rejected in part."""
    draws = np.random.default_rng(0)
    length = _PROMPT + _STEPS * (_DEPTH + 1)
    text: list[int] = draws.choice(_usable(model), length).tolist()
    context = model.acquire(2 * length, 2)
    runner = LlamaChainRunner(context)
    expected = torch.cat([_read(runner, text[:end]) for end in range(1, length + 1)])
    context.clear()
    runner = LlamaChainRunner(context)
    found, end, rejects = {_PROMPT: _read(runner, text[:_PROMPT])[0]}, _PROMPT + 1, False
    while end < length:
        tree = runner.begin_tree(0, text[:end])
        draft = text[end : end + _DEPTH]
        right = 1 if rejects else len(draft)
        path = tree.add_candidates([*draft[:right], *draws.choice(_usable(model), _DEPTH - right).tolist()])[:_DEPTH]
        (result,) = runner.forward([tree])
        for place, node in enumerate([tree.root, *path[:right]]):
            found[end + place] = result.logits_after(node)[0]
        runner.commit([[*range(tree.root + 1), *path[:right]]])
        end, rejects = end + right + 1, not rejects
    model.release(context)
    pairs = [(logits, expected[end - 1]) for end, logits in found.items()]
    return float(max((left - right).abs().max() for left, right in pairs) / expected.std())


def largest_difference(model: LlamaModel) -> float:
    """The largest difference between a logit of a tree and plain decoding's, in standard deviations of the logits.

    A text of random tokens is read token by token; then as the paths of trees that have other branches besides.
    """
    draws = np.random.default_rng(0)
    length = _PROMPT + _STEPS * (_DEPTH + 1)
    usable = _usable(model)
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


def _usable(model: LlamaModel) -> NDArray[np.int64]:
    """Tokens that are text."""
    return np.setdiff1d(np.arange(len(model.vocabulary)), [*model.vocabulary.controls, *model.vocabulary.ends])


def _read(runner: LlamaRunner, text: list[int]) -> torch.Tensor:
    """Logits after `text`, of which all but the last tokens were read before, `[1, vocabulary]`."""
    tree: TokenTree = runner.begin_tree(0, text)
    (result,) = runner.forward([tree])
    runner.commit([range(len(tree))])
    return result.logits_after(tree.root)
