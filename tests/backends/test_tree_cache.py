"""The cache stores exactly the accepted states, compared with plain lists."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lookahead.backends.transformers import row_pool
from lookahead.backends.transformers.row_pool import LayerShape, RowPool
from lookahead.backends.transformers.rows import PaddedCache
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.tree_cache import Row, TreeCache, TreeLayer
from lookahead.core.token_tree import TokenTree
from model_zoo import build


def states(values: list[list[int]]) -> torch.Tensor:
    """Return states, `[batch, 2 heads, nodes, 3]`, filled with their token's value."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, 2, -1, 3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_holds_exactly_the_committed_states(data: st.DataObject) -> None:
    """Rows of a padded batch, and single ones."""
    rows = [Row() for _ in range(data.draw(st.integers(1, 3)))]
    expected: list[list[int]] = [[] for _ in rows]
    counter = 0
    for _ in range(data.draw(st.integers(1, 6))):
        counts = [data.draw(st.integers(1, 9)) for _ in rows]
        fresh = [[counter + 9 * row + node for node in range(max(counts))] for row in range(len(rows))]
        counter += 9 * len(rows)
        longest = max(map(len, expected))
        cache = PaddedCache(rows, counts) if len(rows) > 1 else rows[0].cache
        for layer in range(2):
            keys, values = cache.update(states(fresh), -states(fresh), layer)
        assert keys.shape[2] == values.shape[2] == longest + max(counts)
        for row, (cached, new) in enumerate(zip(expected, fresh, strict=True)):
            assert keys[row, 0, :longest, 0].tolist() == [*cached, *[0] * (longest - len(cached))]
            assert keys[row, 0, longest:, 0].tolist() == new
            assert values[row, 1, longest:, 2].tolist() == [-token for token in new]
        for row, count, cached, new in zip(rows, counts, expected, fresh, strict=True):
            slots = sorted(data.draw(st.sets(st.integers(0, count - 1))))
            keep(row.cache, slots)
            cached += [new[slot] for slot in slots]
            for layer in row.cache.layers:
                assert layer.keys[0, 0, : len(cached), 0].tolist() == cached
                assert layer.values[0, 1, : len(cached), 1].tolist() == [-token for token in cached]
            assert row.length == row.cache.get_seq_length() == len(cached)


def keep(cache: TreeCache, slots: list[int]) -> None:
    """Keep some slots of the scratch, ascending."""
    moved = np.array([(slot, target) for target, slot in enumerate(slots) if slot != target]).reshape(-1, 2)
    if len(moved):
        cache.move(*moved.T)
    cache.set_length(cache.length + len(slots))


def test_a_contiguous_path_is_not_copied() -> None:
    model = build("llama")
    runner = ModelRunner(model, 1)
    for candidates, path, copies in (([[1, 2]], [1, 2], 0), ([[3], [4]], [2], 1)):
        tree = TokenTree([5])
        for candidate in candidates:
            tree.add_candidates(candidate)
        runner.forward([tree])
        keys = runner.rows[0].cache.layers[0].keys
        before = keys._version
        runner.commit([[0, *path]])
        assert keys._version == before + copies, "of the one state in the wrong place"
    assert runner.rows[0].length == 5


def test_memory_grows_seldom() -> None:
    cache, capacities = TreeCache(), set()
    for token in range(3000):
        keys, _ = cache.update(states([[token, -1]]), states([[token, -1]]), 0)
        cache.set_length(cache.length + 1)
        capacities.add(cache.allocated)
    assert keys[0, 0, :, 0].tolist() == [*range(3000), -1]
    assert len(capacities) <= 13, "the first two tokens have no room beside them"
    assert max(capacities) <= 3001 + 256


def test_a_short_text_without_drafts_has_no_room_for_them() -> None:
    cache = TreeCache()
    cache.update(states([[1, 2, 3]]), -states([[1, 2, 3]]), 0)
    cache.set_length(cache.length + 3)
    keys, values = cache.update(states([[4]]), -states([[4]]), 0)
    cache.set_length(cache.length + 1)
    assert cache.allocated == 4
    assert keys[0, 1, :, 2].tolist() == [1, 2, 3, 4]
    assert values[0, 1, :, 2].tolist() == [-1, -2, -3, -4]
    cache.update(states([[5, 6]]), -states([[5, 6]]), 0)
    assert cache.allocated > 200, "other steps may follow that have drafts"
    cache.set_length(2)
    keys, _ = cache.update(states([[7]]), -states([[7]]), 0)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 7]


def test_a_start_is_copied_and_an_end_cropped() -> None:
    first, second = Row(), Row(block=8)
    first.cache.update(states([[1, 2, 3]]), states([[1, 2, 3]]), 0)
    keep(first.cache, [0, 2])
    second.copy_start(first, 2)
    assert second.length == 2
    assert second.capacity == 8
    second.cache.update(states([[9]]), states([[9]]), 0)
    assert second.cache.layers[0].keys[0, 0, :3, 0].tolist() == [1, 3, 9]
    assert first.cache.layers[0].keys[0, 0, :2, 0].tolist() == [1, 3]
    second.crop(1)
    assert second.length == 1
    second.crop(4)
    assert second.length == 1


def test_adopted_states_are_not_overwritten() -> None:
    held = states([[1, 2, 3]])
    layer, cache = TreeLayer.holding(held, held, 5), TreeCache()
    cache.layers, cache.length = [layer], 5
    assert (layer.length, layer.dropped) == (5, 2)
    cache.update(states([[7, 8]]), states([[7, 8]]), 0)
    keep(cache, [1])
    assert layer.keys[0, 0, :4, 0].tolist() == [1, 2, 3, 8]
    assert torch.equal(held, states([[1, 2, 3]]))


def test_a_dropped_beginning_is_adopted_as_zeros() -> None:
    source, row = Row(), Row()
    source.cache.layers = [TreeLayer(), TreeLayer.holding(states([[8, 9]]), -states([[8, 9]]), 4)]
    source.cache.length = 4
    row.adopt(source)
    assert row.length == 4
    assert not row.cache.layers[0].is_initialized
    keys, values = row.cache.update(states([[7]]), states([[7]]), 1)
    assert keys[0, 1, :, 0].tolist() == [0, 0, 8, 9, 7]
    assert values[0, 1, :4, 0].tolist() == [0, 0, -8, -9]


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all buffers at once, up to a limit; `most` is the largest number."""

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self._made: list[tuple[int, StorageWeakRef]] = []
        self.most = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **kwargs or {})
        if operation is torch.ops.aten.zeros.default:
            storage = result.untyped_storage()
            gone = [made for made in self._made if made[1].expired()]  # type: ignore[no-untyped-call]
            self._made = [made for made in self._made if made not in gone]
            total = storage.nbytes() + sum(size for size, _ in self._made)
            if total > self.limit:
                raise torch.cuda.OutOfMemoryError("no memory")
            self._made.append((storage.nbytes(), StorageWeakRef(storage)))  # type: ignore[no-untyped-call]
            self.most = max(self.most, total)
        return result


def test_static_buffers_grow_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight pieces is there twice at most; without memory the capacity stays, and what moved stays right."""
    shape = LayerShape(2, 3, 3, torch.float32)
    token = 2 * 3 * 4  # bytes of keys of a layer
    total = 8 * token  # of 4 layers
    monkeypatch.setattr(row_pool, "PIECE", 20 * token)
    with _Allocations(limit=200 * total) as allocations:
        cache = RowPool([shape] * 4, 12, 4, torch.device("cpu"))
        for layer in range(4):
            with cache.written_at(torch.arange(2)):
                cache.update(states([[layer, 7]]), -states([[layer, 7]]), layer)
        for capacity, limit in ((32, 200), (64, 50), (48, 200), (64, 70)):
            allocations.limit = limit * total
            moves, before = cache.moves, cache.capacity
            allocations.most = 0
            try:
                cache.grow(capacity)
            except torch.cuda.OutOfMemoryError:
                assert limit == 50
                capacity = before
            else:
                assert limit > 50
                assert allocations.most <= max(capacity, 64) * total * 9 / 8
            assert cache.moves > moves or capacity == 48
            assert cache.capacity == capacity
            assert sum(map(len, cache.buffers)) == 8
            for index, layer in enumerate(cache.layers):
                assert layer.keys.shape[2] == layer.values.shape[2] == capacity
                assert layer.keys[0, 0, :2, 0].tolist() == [index, 7]
                assert layer.values[0, 1, :2, 2].tolist() == [-index, -7]
