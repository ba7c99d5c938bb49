"""The cache keeps what was accepted and nothing else, against a plain list of states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from lookahead.backends.transformers.tree_cache import TreeCache, TreeLayer
from lookahead.errors import InvalidArgumentError


def states(values: list[list[int]]) -> torch.Tensor:
    """`[batch, 2 heads, nodes, 3]` states that tell which token they belong to."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, 2, -1, 3)


@settings(max_examples=60)
@given(st.data())
def test_rows_hold_exactly_the_committed_states(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    cache, expected, counter = TreeCache(), [[] for _ in range(rows)], 0
    for _ in range(data.draw(st.integers(1, 6))):
        nodes = data.draw(st.integers(1, 9))
        fresh = [[counter + row * nodes + node for node in range(nodes)] for row in range(rows)]
        counter += rows * nodes
        with cache.scratch():
            for layer in range(2):
                keys, values = cache.update(states(fresh), -states(fresh), layer)
        scratch = max(map(len, expected))
        assert keys.shape[2] == values.shape[2] == scratch + nodes
        for row in range(rows):
            assert keys[row, 0, : len(expected[row]), 0].tolist() == expected[row]
            assert keys[row, 1, scratch:, 2].tolist() == fresh[row]
        slots = [sorted(data.draw(st.sets(st.integers(0, nodes - 1)))) for _ in range(rows)]
        cache.commit(slots)
        for row in range(rows):
            expected[row] += [fresh[row][slot] for slot in slots[row]]
        for layer in cache.layers:
            for row, tokens in enumerate(expected):
                assert layer.keys[row, 0, : len(tokens), 0].tolist() == tokens
                assert layer.values[row, 1, : len(tokens), 1].tolist() == [-token for token in tokens]
        assert cache.lengths(rows) == [len(tokens) for tokens in expected]
        assert cache.get_seq_length() == max(map(len, expected))


def scratch_layer() -> TreeLayer:
    layer = TreeLayer()
    layer.keeps_all = False
    return layer


def test_a_contiguous_path_is_not_copied() -> None:
    layer = scratch_layer()
    layer.update(states([[1, 2, 3, 4]]), states([[1, 2, 3, 4]]))
    before = layer.keys._version
    layer.commit([[0, 1, 2]])
    assert layer.keys._version == before
    assert layer.lengths == [3]
    layer.update(states([[5, 6, 7]]), states([[5, 6, 7]]))
    before = layer.keys._version
    layer.commit([[0, 2]])
    assert layer.keys._version == before + 1, "one copy, of the one state in the wrong place"


def test_memory_grows_seldom() -> None:
    layer, capacities = scratch_layer(), set()
    for token in range(3000):
        layer.update(states([[token]]), states([[token]]))
        layer.commit([[0]])
        capacities.add(layer.keys.shape[2])
    assert layer.keys[0, 0, :3000, 0].tolist() == list(range(3000))
    assert len(capacities) <= 12
    assert max(capacities) <= 3000 + 256


def test_forget_crop_and_reset() -> None:
    cache = TreeCache()
    with cache.scratch():
        cache.update(states([[1, 2], [3, 4]]), states([[1, 2], [3, 4]]), 0)
    cache.commit([[0, 1], [0]])
    cache.forget(0)
    assert cache.lengths(2) == [0, 1]
    with cache.scratch():
        cache.update(states([[5, 6], [7, 8]]), states([[5, 6], [7, 8]]), 0)
    cache.commit([[0, 1], [1]])
    assert cache.layers[0].keys[0, 0, :2, 0].tolist() == [5, 6]
    assert cache.layers[0].keys[1, 0, :2, 0].tolist() == [3, 8]
    cache.crop(-1)
    assert cache.lengths(2) == [1, 1]
    cache.reset()
    assert cache.lengths(2) == [0, 0]


@pytest.mark.parametrize("number", [-9, -2, 0, 1, 2, 3, 9])
def test_crop_keeps_what_transformers_caches_keep(number: int) -> None:
    """A positive number of tokens is kept, as many are removed of a negative one."""
    ours, theirs = TreeCache(), DynamicCache()
    for cache in (ours, theirs):
        cache.update(states([[5, 6, 7], [1, 2, 3]]), states([[5, 6, 7], [1, 2, 3]]), 0)
    ours.crop(number)
    try:
        theirs.crop(number)
    except ValueError:  # newer versions of transformers take negative numbers alone
        theirs.crop(min(number - 3, 0))
    assert ours.get_seq_length() == theirs.get_seq_length()
    for cache in (ours, theirs):
        keys, _ = cache.update(states([[8], [4]]), states([[8], [4]]), 0)
        cache.last = keys
    assert torch.equal(ours.last, theirs.last)


def test_crop_keeps_so_many_tokens_of_each_row() -> None:
    cache = TreeCache()
    with cache.scratch():
        cache.update(states([[1, 2, 3], [4, 5, 6]]), states([[1, 2, 3], [4, 5, 6]]), 0)
    cache.commit([[0, 1, 2], [0]])
    cache.crop(2)
    assert cache.lengths(2) == [2, 1]


def test_outside_of_trees_it_is_a_cache_like_any_other() -> None:
    cache = TreeCache()
    for start in (0, 2, 4):
        fresh = states([[start, start + 1], [10 + start, 11 + start]])
        keys, _ = cache.update(fresh, fresh, 0)
        assert keys.shape[2] == cache.get_seq_length() == start + 2
    assert keys[1, 0, :, 0].tolist() == [10, 11, 12, 13, 14, 15]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].keys[0, 0, :2, 0].tolist() == [10, 11]
    cache.batch_repeat_interleave(2)
    assert cache.lengths(4) == [6] * 4
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.layers[0].keys[0, 0, :6, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_of_different_lengths_are_for_trees_alone() -> None:
    cache = TreeCache()
    with cache.scratch():
        cache.update(states([[1, 2], [3, 4]]), states([[1, 2], [3, 4]]), 0)
    cache.commit([[0, 1], [0]])
    with pytest.raises(InvalidArgumentError, match="past_key_values"):
        cache.update(states([[1], [2]]), states([[1], [2]]), 0)
    assert cache.lengths(2) == [2, 1]
