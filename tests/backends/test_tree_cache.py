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
def test_it_holds_exactly_the_committed_states(data: st.DataObject) -> None:
    cache, expected, counter = TreeCache(), [], 0
    for _ in range(data.draw(st.integers(1, 6))):
        nodes = data.draw(st.integers(1, 9))
        fresh = [counter + node for node in range(nodes)]
        counter += nodes
        for layer in range(2):
            keys, values = cache.update(states([fresh]), -states([fresh]), layer)
        assert keys.shape[2] == values.shape[2] == len(expected) + nodes
        assert keys[0, 0, :, 0].tolist() == expected + fresh
        assert values[0, 1, :, 2].tolist() == [-token for token in expected + fresh]
        slots = sorted(data.draw(st.sets(st.integers(0, nodes - 1))))
        cache.commit(slots)
        expected += [fresh[slot] for slot in slots]
        for layer in cache.layers:
            assert layer.keys[0, 0, : len(expected), 0].tolist() == expected
            assert layer.values[0, 1, : len(expected), 1].tolist() == [-token for token in expected]
        assert cache.length == cache.get_seq_length() == len(expected)


def test_a_contiguous_path_is_not_copied() -> None:
    layer = TreeLayer()
    layer.update(states([[1, 2, 3, 4]]), states([[1, 2, 3, 4]]))
    before = layer.keys._version
    layer.commit([0, 1, 2])
    assert layer.keys._version == before
    assert layer.length == 3
    layer.update(states([[5, 6, 7]]), states([[5, 6, 7]]))
    before = layer.keys._version
    layer.commit([0, 2])
    assert layer.keys._version == before + 1, "one copy, of the one state in the wrong place"


def test_memory_grows_seldom() -> None:
    layer, capacities = TreeLayer(), set()
    for token in range(3000):
        layer.update(states([[token]]), states([[token]]))
        layer.commit([0])
        capacities.add(layer.keys.shape[2])
    assert layer.keys[0, 0, :3000, 0].tolist() == list(range(3000))
    assert len(capacities) <= 12
    assert max(capacities) <= 3000 + 256


def test_a_start_is_copied_and_an_end_cropped() -> None:
    first, second = TreeCache(), TreeCache(block=8)
    first.update(states([[1, 2, 3]]), states([[1, 2, 3]]), 0)
    first.commit([0, 2])
    second.copy_start(first, 2)
    assert second.length == 2
    assert second.allocated == 8
    second.update(states([[9]]), states([[9]]), 0)
    assert second.layers[0].keys[0, 0, :3, 0].tolist() == [1, 3, 9]
    assert first.layers[0].keys[0, 0, :2, 0].tolist() == [1, 3]
    second.crop(1)
    assert second.length == 1
    second.crop(4)
    assert second.length == 1


def test_what_it_holds_is_not_written_into() -> None:
    held = states([[1, 2, 3]])
    layer = TreeLayer.holding(held, held, 5)
    assert (layer.length, layer.dropped) == (5, 2)
    layer.update(states([[7, 8]]), states([[7, 8]]))
    layer.commit([1])
    assert layer.keys[0, 0, :4, 0].tolist() == [1, 2, 3, 8]
    assert torch.equal(held, states([[1, 2, 3]]))
