"""Trials of checks: a runner reads given texts, and its logits along them are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lookahead.core.protocols import Backend
from lookahead.core.token_tree import TokenTree

Draft = Callable[[TokenTree, Sequence[int]], list[int]]
"""Given a tree and the tokens that follow its root, adds some of these, and wrong ones; returns the path of the right
ones."""


def follow(runner: Backend, texts: Sequence[Sequence[int]], prompt: int, draft: Draft) -> list[torch.Tensor]:
    """Logits along each text, read as steps read them: right tokens are kept, wrong ones forgotten.

    Args:
        runner: Empty, with a row for each text.
        texts: Token ids. The last token of each is not read; a text that is through sends idle trees.
        prompt: Tokens of each text that the first pass sends as decided.
        draft: What is drafted onto the trees.

    Returns:
        `[tokens - prompt, vocabulary]` float32 for each text: after its prompt's last token, and each that follows.
    """
    decided = [min(prompt, len(text) - 1) for text in texts]
    by_text: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(count < len(text) for count, text in zip(decided, texts, strict=True)):
        trees = [runner.idle_tree() for _ in texts]
        paths = dict[int, list[int]]()
        for row, text in enumerate(texts):
            if decided[row] < len(text):
                trees[row] = tree = runner.begin_tree(row, text[: decided[row]])
                paths[row] = draft(tree, text[decided[row] : -1]) if runner.wants_draft(tree) else []
        results: Any = runner.forward(trees)
        accepted: list[list[int]] = [[] for _ in texts]
        for row, path in paths.items():
            root = trees[row].root
            accepted[row] = [*range(root + 1), *path]
            by_text[row] += [results[row].logits_after(node) for node in (root, *path)]
            decided[row] += 1 + len(path)
        runner.commit(accepted)
    return [torch.cat(logits).float() for logits in by_text]


def nothing(tree: TokenTree, following: Sequence[int]) -> list[int]:
    """A `Draft` of no tokens: plain decoding."""
    return []


def among_decoys(size: int, decoys: int, tokens: Sequence[int]) -> Draft:
    """Drafts right tokens up to `size` nodes of text, and before each of them branches of two tokens that are wrong.

    Args:
        size: Nodes of right tokens, the pending ones included.
        decoys: Wrong branches beside each.
        tokens: Those that wrong branches begin with.
    """

    def draft(tree: TokenTree, following: Sequence[int]) -> list[int]:
        path: list[int] = []
        for token in following[: max(size - tree.root - 1, 0)]:
            parent = path[-1] if path else tree.root
            for number in range(decoys):
                tree.add_candidates([tokens[(token + number + 1) % len(tokens)], token], parent)
            path += tree.add_candidates([token], parent)
        return path

    return draft


def chains(draws: random.Random, max_tokens: int = 3) -> Draft:
    """Drafts chains of up to `max_tokens` right tokens; a wrong one follows half of them."""

    def draft(tree: TokenTree, following: Sequence[int]) -> list[int]:
        right = list(following[: draws.randrange(max_tokens + 1)])
        wrong = [tree.tokens[0]] if draws.random() < 0.5 else []
        return tree.add_candidates([*right, *wrong])[: len(right)]

    return draft


LENGTH = 19
"""Tokens of the longest text of `drafted_difference`."""

LEAVES = 4
"""Maximum number of leaves of its trees."""

NODES = 16
"""Maximum number of nodes of its trees, and their paths."""

_PROMPT = 6


def drafted_difference(
    empty_runner: Callable[[bool], Backend], tokens: Sequence[int], on_chains: bool, rows: int = 1
) -> float:
    """Return the largest difference between logits with drafts and in plain decoding, along random texts.

    Args:
        empty_runner: Returns a runner of as many empty rows, given whether it will run drafts.
        tokens: Token ids of the texts.
        on_chains: Whether drafts are chains, some of them rejected in part; else trees with wrong branches.
        rows: Number of texts, of different lengths.

    Returns:
        The difference in standard deviations of the logits; not a number if logits are none.
    """
    draws = np.random.default_rng(0)
    texts = [draws.choice(tokens, LENGTH - 8 * row).tolist() for row in range(rows)]
    draft = chains(random.Random(0), LEAVES - 1) if on_chains else among_decoys(LEAVES, 1, tokens)
    results = []
    for drafts in (nothing, draft):
        runner: Any = empty_runner(drafts is not nothing)
        runner.prefill([text[:_PROMPT] for text in texts], None)
        results.append(follow(runner, texts, _PROMPT, drafts))
    plain, drafted = results
    return difference(drafted, plain) / float(torch.cat(plain).std())


def difference(logits: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference between logits; not a number if some are none."""
    pairs = zip(logits, expected, strict=True)
    return float(torch.stack([(mine.float() - theirs.float()).abs().max() for mine, theirs in pairs]).max())


def tolerance(expected: Sequence[torch.Tensor], dtype: torch.dtype) -> float:
    """What logits of `dtype` along texts may differ by that were computed in another order, near-ties between experts
    included. A wrong mask or position makes them differ by about as much as another token does, far more than this."""
    change = max(float(logits.diff(dim=0).abs().max()) for logits in expected)
    return 0.1 * change + 8 * torch.finfo(dtype).eps * _largest(expected)


def rounding(expected: Sequence[torch.Tensor], dtype: torch.dtype) -> float:
    """As `tolerance`, for numbers that no tie decides."""
    return min(64 * torch.finfo(dtype).eps * _largest(expected), tolerance(expected, dtype))


def _largest(logits: Sequence[torch.Tensor]) -> float:
    return max(float(rows.abs().max()) for rows in logits)
