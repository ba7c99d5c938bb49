"""The sketch for SGLang, as far as it goes without a GPU: masks as SGLang reads them, and the texts they lead to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from sglang_drafts import TreeDrafts

NODES, PERIOD = 8, 7


def after(text: list[int]) -> int:
    """The model."""
    return (text[-1] * 3 + text[-2] * text[-2]) % PERIOD


def plain(prompt: list[int], new: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + new:
        text.append(after(text))
    return text


def parents_of(mask: Any) -> list[int]:
    """By SGLang's rule: a token follows the last one before it that it sees."""
    return [max((other for other in range(node) if mask[node, other]), default=-1) for node in range(len(mask))]


def test_masks_are_of_trees() -> None:
    drafts, texts = TreeDrafts(NODES), [[1, 2, 3], [4, 1]]
    sizes = set()
    for _ in range(30):
        _, masks = drafts.batch_get(["a", "b"], texts)
        for mask in masks.reshape(2, NODES, NODES):
            parents = parents_of(mask)
            assert parents[0] == -1
            assert min(parents[1:]) >= 0
            for node in range(NODES):
                seen, at = set(), node
                while at >= 0:
                    seen.add(at)
                    at = parents[at]
                assert seen == set(np.flatnonzero(mask[node]).tolist())
            sizes.add(max(parents))
        texts = [[*text, after(text)] for text in texts]
    assert max(sizes) > 1


@pytest.mark.parametrize("rows", [1, 3])
def test_texts_are_the_models_own_in_fewer_steps(rows: int) -> None:
    drafts, new, steps = TreeDrafts(NODES), 60, 0
    prompts = [[1, 2 + row] for row in range(rows)]
    texts = {str(row): list(prompt) for row, prompt in enumerate(prompts)}
    while min(len(text) for text in texts.values()) < new:
        tokens, masks = drafts.batch_get(list(texts), list(texts.values()))
        steps += 1
        for row, text in enumerate(texts.values()):
            own = tokens.reshape(rows, NODES)[row]
            parents = parents_of(masks.reshape(rows, NODES, NODES)[row])
            assert own[0] == text[-1]
            node = 0
            while node >= 0:
                text.append(after(text))
                children = [child for child in range(NODES) if parents[child] == node and own[child] == text[-1]]
                node = children[0] if children else -1
    for prompt, text in zip(prompts, texts.values(), strict=True):
        assert text == plain(prompt, len(text) - len(prompt))
    assert steps < new / 2
