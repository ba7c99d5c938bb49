"""What texts of a batch learn together, against inserting their rows one by one."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.ngram_memory import NGramMemory
from lookahead.drafting.auto.path_drafter import PathDrafter, PathSearch
from lookahead.drafting.auto.path_notes import PathNotes

ORDERS, TOP_K, VOCABULARY = 3, 4, 12


def context(path: list[int]) -> list[int]:
    """The last tokens, the very last first; -1 before the beginning."""
    return (path[::-1] + [-1] * ORDERS)[:ORDERS]


@pytest.mark.parametrize("texts", [5, 150])
def test_rows_are_written_as_one_by_one_with_real_text_last(texts: int) -> None:
    random = np.random.default_rng(0)
    together, alone = DraftMemory(NGramMemory(ORDERS, 4096, TOP_K)), NGramMemory(ORDERS, 4096, TOP_K)
    for _ in range(20 if texts < 10 else 2):
        notes, rejected, selected = PathNotes(ORDERS), [], []
        for _ in range(texts):
            end, draft = (random.integers(0, VOCABULARY, random.integers(1, 6)) for _ in range(2))
            known = int(random.integers(1, len(draft) + 2))
            ids = np.array([random.permutation(VOCABULARY)[:TOP_K] for _ in range(len(draft) + 1)])
            shares = np.sort(random.dirichlet(np.ones(TOP_K + 1), len(ids)))[:, :0:-1].astype(np.float32)
            notes.add(end, draft, known, ids, shares)
            path = [*end.tolist(), *draft.tolist()]
            rows = [(context(path[: len(end) + row]), ids[row], shares[row]) for row in range(len(ids))]
            selected += rows[:known]
            rejected += rows[known:]
        notes.write(together)
        for tokens, ids_of_row, shares_of_row in rejected + selected:
            alone.insert(np.array([tokens]), ids_of_row[None], shares_of_row[None])
    asked = random.integers(0, VOCABULARY, (300, ORDERS))
    for found, expected in zip(together.ngrams.lookup(asked), alone.lookup(asked), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_notes_are_written_once() -> None:
    memory, notes = DraftMemory(NGramMemory(ORDERS, 64, TOP_K)), PathNotes(ORDERS)
    notes.add(np.array([1, 2]), np.array([], dtype=np.int64), 1, np.array([[3]]), np.array([[0.9]], dtype=np.float32))
    notes.write(memory)
    notes.write(memory)
    assert memory.ngrams.clock == 1


def test_texts_that_share_a_search_draft_as_they_do_alone() -> None:
    """Unless one learns what the other one does not know."""
    texts = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6, 5], [7, 8, 9, 7, 8]]
    shared = PathSearch(DraftMemory(NGramMemory(ORDERS, 64, TOP_K)), 4)
    together = [PathDrafter(shared) for _ in texts]
    for drafter, text in zip(together, texts, strict=True):
        drafter.start(np.array(text))
    for drafter, text in zip(together, texts, strict=True):
        alone = PathDrafter(PathSearch(DraftMemory(NGramMemory(ORDERS, 64, TOP_K)), 4))
        alone.start(np.array(text))
        for found, expected in zip(drafter.propose(4), alone.propose(4), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_draft_ends_where_it_is_not_likely_enough() -> None:
    drafter = PathDrafter(PathSearch(DraftMemory(NGramMemory(ORDERS, 64, TOP_K)), 8))
    drafter.start(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]))
    tokens, likely = drafter.propose(8)
    least = float(likely[3])
    fewer, of_these = drafter.propose(8, least)
    assert fewer.tolist() == tokens[: len(fewer)].tolist()
    assert len(fewer) == np.count_nonzero(likely >= least)
    assert (of_these >= least).all()
