"""The cache keeps what was accepted and nothing else, against a plain list of states."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.backends.transformers.tree_cache import TreeCache, TreeLayer


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


def test_a_contiguous_path_is_not_copied() -> None:
    layer = TreeLayer()
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
    layer, capacities = TreeLayer(), set()
    for token in range(3000):
        layer.update(states([[token]]), states([[token]]))
        layer.commit([[0]])
        capacities.add(layer.keys.shape[2])
    assert layer.keys[0, 0, :3000, 0].tolist() == list(range(3000))
    assert len(capacities) <= 12
    assert max(capacities) <= 3000 + 256


def test_forget_and_crop() -> None:
    cache = TreeCache()
    cache.update(states([[1, 2], [3, 4]]), states([[1, 2], [3, 4]]), 0)
    cache.commit([[0, 1], [0]])
    cache.forget(0)
    assert cache.lengths(2) == [0, 1]
    cache.update(states([[5, 6], [7, 8]]), states([[5, 6], [7, 8]]), 0)
    cache.commit([[0, 1], [1]])
    assert cache.layers[0].keys[0, 0, :2, 0].tolist() == [5, 6]
    assert cache.layers[0].keys[1, 0, :2, 0].tolist() == [3, 8]
    cache.crop([1, 4])
    assert cache.lengths(2) == [1, 2]


def test_a_start_is_copied() -> None:
    first, second = TreeCache(), TreeCache(block=8)
    first.update(states([[1, 2, 3]]), states([[1, 2, 3]]), 0)
    first.commit([[0, 2]])
    second.copy_start(first, 2)
    assert second.lengths(1) == [2]
    assert second.allocated == 8
    second.update(states([[9]]), states([[9]]), 0)
    assert second.layers[0].keys[0, 0, :3, 0].tolist() == [1, 3, 9]
    assert first.layers[0].keys[0, 0, :2, 0].tolist() == [1, 3]
