"""The n-gram memory: comparison with a dictionary, bounds, saving and loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lookahead.drafting import DraftMemory
from lookahead.drafting.auto.ngrams import WAYS
from lookahead.drafting.memory_file import load_memory, save_memory
from lookahead.errors import InvalidArgumentError
from ngram_access import insert, lookup

ORDERS = 3
TOP_K = 4


def predictions(
    rng: np.random.Generator, count: int, width: int = TOP_K
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return random predictions for `count` nodes: distinct ids and falling probabilities."""
    ids = np.stack([rng.permutation(50)[:width] for _ in range(count)]) if count else np.zeros((0, width), np.int64)
    shares = -np.sort(-rng.random((count, width)), axis=1)
    return ids, (0.9 * shares / np.maximum(shares.sum(axis=1, keepdims=True), 1e-9)).astype(np.float32)


class Dictionary:
    """Reference for the memory, while nothing is evicted."""

    def __init__(self, old_share: float) -> None:
        self._old_share = old_share
        self.known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def insert(self, contexts: NDArray[np.int64], ids: NDArray[np.int64], probabilities: NDArray[np.float32]) -> None:
        for context, row, shares in zip(contexts.tolist(), ids.tolist(), probabilities.tolist(), strict=True):
            for length in range(1, ORDERS + 1):
                if -1 not in context[:length]:
                    key = tuple(context[:length])
                    mixes = length == 1 and key in self.known
                    self.known[key] = self._mixed(self.known[key], row, shares) if mixes else (row, shares)

    def _mixed(
        self, old: tuple[list[int], list[float]], ids: list[int], shares: list[float]
    ) -> tuple[list[int], list[float]]:
        mixed = {token: (1 - self._old_share) * share for token, share in zip(ids, shares, strict=True)}
        if self._old_share:
            for token, share in zip(*old, strict=True):
                mixed[token] = mixed.get(token, 0.0) + self._old_share * share
        best = sorted(mixed, key=lambda token: -mixed[token])[:TOP_K]
        return best, [mixed[token] for token in best]


def check_equal(memory: DraftMemory, reference: Dictionary, contexts: NDArray[np.int64]) -> None:
    known, ids, probabilities = lookup(memory, contexts)
    for row, context in enumerate(contexts.tolist()):
        for length in range(1, ORDERS + 1):
            expected = None if -1 in context[:length] else reference.known.get(tuple(context[:length]))
            assert known[row, length - 1] == (expected is not None)
            if expected is not None:
                assert ids[row, length - 1].tolist() == expected[0]
                assert probabilities[row, length - 1] == pytest.approx(expected[1], rel=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    batches=st.lists(st.lists(st.tuples(*[st.integers(0, 4)] * ORDERS), max_size=12), max_size=6),
    seed=st.integers(0, 99),
    old_share=st.sampled_from([0.0, 0.3]),
)
def test_the_memory_agrees_with_a_dictionary(batches: list[list[tuple[int, ...]]], seed: int, old_share: float) -> None:
    rng, memory = np.random.default_rng(seed), DraftMemory(ORDERS, 4096, TOP_K, old_share)
    reference = Dictionary(old_share)
    for batch in batches:
        contexts = np.array(batch, dtype=np.int64).reshape(-1, ORDERS)
        contexts[::3, -1] = -1  # some contexts are at the beginning of a text
        lesson = predictions(rng, len(contexts))
        insert(memory, contexts, *lesson)
        reference.insert(contexts, *lesson)
    everything = np.stack(np.meshgrid(*[np.arange(6)] * ORDERS), axis=-1).reshape(-1, ORDERS)
    check_equal(memory, reference, everything)


def test_the_newest_prediction_counts_and_the_last_of_a_batch() -> None:
    memory = DraftMemory(1, 64, 2, old_share=0.0)
    context = np.array([[7], [7]])
    insert(memory, context, np.array([[1, 2], [3, 4]]), np.array([[0.5, 0.2], [0.6, 0.1]], dtype=np.float32))
    assert lookup(memory, context[:1])[1][0, 0].tolist() == [3, 4]
    insert(memory, context[:1], np.array([[5, 6]]), np.array([[0.5, 0.2]], dtype=np.float32))
    assert lookup(memory, context[:1])[1][0, 0].tolist() == [5, 6]
    assert memory.statistics()["entries"] == [1]


def test_predictions_after_a_single_token_keep_a_share_of_older_ones() -> None:
    memory = DraftMemory(2, 64, 2, old_share=0.25)
    for ids, shares in (([1, 2], [0.8, 0.1]), ([3, 4], [0.6, 0.1])):
        insert(memory, np.array([[7, 9]]), np.array([ids]), np.array([shares], dtype=np.float32))
    _, known, probabilities = lookup(memory, np.array([[7, 9]]))
    assert known[0].tolist() == [[3, 1], [3, 4]], "longer contexts take the new prediction as it is"
    assert probabilities[0, 0].tolist() == pytest.approx([0.75 * 0.6, 0.25 * 0.8])


@pytest.mark.parametrize("old_share", [-0.1, 1.0])
def test_a_share_out_of_range_is_refused(old_share: float) -> None:
    with pytest.raises(InvalidArgumentError, match="old_share"):
        DraftMemory(old_share=old_share)


def test_a_full_set_forgets_its_oldest_context() -> None:
    memory = DraftMemory(1, WAYS, 1)  # one set
    probability = np.array([[0.5]], dtype=np.float32)
    for token in range(WAYS):
        insert(memory, np.array([[token]]), np.array([[token + 100]]), probability)
    insert(memory, np.array([[0]]), np.array([[200]]), probability)  # seen again, so now the newest
    insert(memory, np.array([[50]]), np.array([[150]]), probability)
    assert lookup(memory, np.array([[0], [1], [2], [50]]))[0][:, 0].tolist() == [True, False, True, True]


def test_a_long_stream_takes_no_more_room() -> None:
    rng, memory = np.random.default_rng(0), DraftMemory(ORDERS, 256, TOP_K)
    size = memory.statistics()["bytes"]
    for _ in range(200):
        insert(memory, rng.integers(0, 10**6, (64, ORDERS)), *predictions(rng, 64))
    statistics = memory.statistics()
    assert statistics["bytes"] == size == ORDERS * 256 * (16 + 8 * TOP_K)
    assert all(200 < entries <= 256 for entries in statistics["entries"])


def test_fewer_predictions_than_it_keeps_leave_gaps() -> None:
    memory = DraftMemory(1, 64, 4)
    insert(memory, np.array([[1]]), np.array([[9, 8]]), np.array([[0.7, 0.2]], dtype=np.float32))
    _, ids, probabilities = lookup(memory, np.array([[1]]))
    assert ids[0, 0].tolist() == [9, 8, -1, -1]
    assert probabilities[0, 0].tolist() == pytest.approx([0.7, 0.2, 0, 0])


@pytest.mark.parametrize("sizes", [(0, 64, 8), (2, 0, 8), (2, 64, 0)])
def test_sizes_out_of_range_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        DraftMemory(*sizes)


def test_a_saved_memory_is_the_same_memory(tmp_path: Path) -> None:
    rng, original = np.random.default_rng(1), DraftMemory(ORDERS, 64, TOP_K)
    contexts = rng.integers(0, 30, (100, ORDERS))
    insert(original, contexts, *predictions(rng, 100))
    path = tmp_path / "memory.npz"
    save_memory(original, path, "a model")
    loaded = load_memory(path, "a model")
    more = rng.integers(0, 30, (50, ORDERS))
    lesson = predictions(rng, 50)
    for memory in (original, loaded):
        insert(memory, more, *lesson)  # evictions are equal too
    for one, other in zip(lookup(original, contexts), lookup(loaded, contexts), strict=True):
        assert np.array_equal(one, other)


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_memory(tmp_path / "nothing", "a model")
