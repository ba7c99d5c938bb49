"""Layers that select the keys they attend to: the cache stores and moves their indexers' keys like other keys."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import Engine, LookaheadConfig, UnsupportedArgumentError
from lookahead.backends.transformers.checks import runs_on_chains
from lookahead.backends.transformers.tree_cache import TreeCache
from quick import quickly
from tiny.families import INDEXED, build
from tiny.variant import Variant

PICKED = 40
"""Number of keys that a layer selects; texts have 72 tokens."""


def tiny(family: str = "deepseek_v32", picked: int = PICKED) -> PreTrainedModel:
    return build(family, Variant(window=picked), "sdpa")


def prompt(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(seed)).repeat(1, 2)


@pytest.mark.parametrize("family", quickly(INDEXED, INDEXED[:1]))
def test_texts_past_the_keys_that_are_picked(family: str) -> None:
    """Drafts end once layers select keys, as the choice among equal scores depends on the number of keys."""
    model = tiny(family)
    assert not runs_on_chains(model)
    options: dict[str, Any] = {"max_new_tokens": 48, "return_dict_in_generate": True, "output_scores": True}
    for sampled in (False, True):
        torch.manual_seed(1)
        expected = model.generate(prompt(), do_sample=sampled, **options)
        torch.manual_seed(1)
        output = lookahead.generate(
            model, prompt(), lookahead_config=LookaheadConfig(step_budget=16), do_sample=sampled, **options
        )
        assert torch.equal(output.sequences, expected.sequences)
        for mine, theirs in zip(output.scores, expected.scores, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    after = PICKED - prompt().shape[1]
    assert max(output.statistics.nodes_per_step) > 1
    assert output.statistics.nodes_per_step[-(48 - after - 1) :] == [1] * (48 - after - 1)


@pytest.mark.parametrize("family", quickly(INDEXED, INDEXED[1:2]))
def test_rows_side_by_side(family: str) -> None:
    model = tiny(family, picked=64)
    rows = torch.cat([prompt(), prompt(1)])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(lookahead.generate(model, rows, **options), model.generate(rows, **options))
    with Engine(model, LookaheadConfig(step_budget=24)) as engine:
        handles = [engine.submit(row[start:], **options) for start, row in enumerate(rows)]
        for start, handle in enumerate(handles):
            assert torch.equal(handle.result(), model.generate(rows[start : start + 1, start:], **options))
    # Beyond the selected number of keys, rows of a batch would select other keys than single rows.
    with pytest.raises(UnsupportedArgumentError, match="64"):
        lookahead.generate(model, rows, max_new_tokens=60)


def test_caches_can_be_returned_and_continued() -> None:
    model = tiny(picked=64)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    whole = model.generate(prompt(), **{**options, "max_new_tokens": 16}).sequences
    ours = lookahead.generate(model, prompt(), lookahead_config=LookaheadConfig(step_budget=8), **options)
    assert torch.equal(ours.sequences, whole[:, :32])
    theirs = model.generate(prompt(), **options)
    # From our cache to transformers, and from transformers' cache to us.
    cache = copy.deepcopy(ours.past_key_values)
    assert torch.equal(model.generate(whole[:, :32], past_key_values=cache, **options).sequences, whole)
    back = lookahead.generate(model, whole[:, :32], past_key_values=theirs.past_key_values, **options)
    assert torch.equal(back.sequences, whole)
    expected = model.generate(prompt(), **{**options, "max_new_tokens": 16}).past_key_values
    for mine, plain in zip(back.past_key_values.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.keys, plain.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(mine.indexer_keys, plain.indexer_keys, atol=1e-4, rtol=1e-3)


def test_indexers_move_with_a_path() -> None:
    """Commit and crop move indexers' keys like other keys."""
    cache = TreeCache()
    keys = torch.arange(12.0).reshape(1, 1, 4, 3)
    cache.update(keys, -keys, 0)
    cache.update_indexer(keys[:, 0] + 100, 0)
    cache.move(np.array([1, 3]), np.array([0, 1]))
    cache.set_length(cache.length + 2)
    layer = cache.layers[0]
    assert layer.indexer.length == layer.length == 2
    assert torch.equal(layer.keys[:, :, :2], keys[:, :, [1, 3]])
    assert torch.equal(layer.indexer.keys[:, :, :2], keys[:, :, [1, 3]] + 100)
    cache.set_length(1)
    assert layer.indexer.length == layer.length == 1


@pytest.mark.parametrize("window", [PICKED, 5])
def test_keys_computed_anew_are_refused(window: int) -> None:
    """Without a cache, plain decoding would select keys again for the whole text."""
    model = build("axk2", Variant(window=window, seed=1, spread=8.0), "eager")
    assert not runs_on_chains(model)
    with pytest.raises(UnsupportedArgumentError, match="use_cache=False"):
        lookahead.generate(model, prompt(), max_new_tokens=30, use_cache=False)
