"""Context matches, against a search through the whole text."""

from __future__ import annotations

from itertools import pairwise

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.drafting import DraftMemory
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.search import NODE
from lookahead.drafting.auto.texts import BUCKETS, LONGEST, OCCURRENCE, RUNS, SEARCHED, find_matches


def search(text: list[int], context: list[int]) -> list[tuple[int, int]]:
    """Return all indices in `text` after the longest occurring suffix of `context`, with the suffix's length."""
    for run in RUNS:
        matches = []
        for place in range(len(text) - 1, run - 1, -1):
            length = 0
            while length < min(place, len(context), LONGEST) and text[place - 1 - length] == context[-1 - length]:
                length += 1
            if len(context) >= run and length >= run:
                matches.append((place, length))
        if matches:
            return sorted(matches[:SEARCHED], key=lambda match: -match[1])
    return []


class Text:
    """A batch of one text."""

    def __init__(self, tokens: list[int], reach: int = 2 * BUCKETS) -> None:
        self.batch = DraftBatch(DraftMemory(1, 4, 1), 1, reach=reach)
        self.batch.begin(0, tokens)

    def extend(self, tokens: list[int]) -> None:
        self.batch.extend(0, tokens)

    @property
    def kept(self) -> list[int]:
        texts = self.batch.state.texts
        return texts.tokens[0, : texts.lengths[0]].tolist()


@numba.njit
def compiled_find_matches(context, nodes, texts, occurrences):  # type: ignore[no-untyped-def]
    return find_matches(0, 0, context, len(context), nodes, texts, occurrences)


def found(text: Text, context: list[int]) -> list[tuple[int, int]]:
    """Return the occurrences of a context in the text, the longest first, then the newest."""
    occurrences = np.zeros((1, SEARCHED), dtype=OCCURRENCE)
    last = np.array(context[: -LONGEST - 1 : -1], dtype=np.int64)
    count = compiled_find_matches(last, np.zeros(1, dtype=NODE), text.batch.state.texts, occurrences)
    return sorted(occurrences[0, :count].tolist(), key=lambda match: -match[1])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    drafted=st.lists(st.integers(0, 2), max_size=6),
)
def test_matches_equal_a_brute_force_search(text: list[int], cuts: list[int], drafted: list[int]) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    matches = Text(text[: ends[0]])
    for begin, end in pairwise(ends):
        matches.extend(text[begin:end])
    context = text + drafted
    assert found(matches, context) == search(text, context)


def test_nothing_follows_the_end_of_the_text() -> None:
    matches = Text([1, 2, 3])
    assert found(matches, [1, 2, 3]) == []
    matches.extend([1, 2])
    assert found(matches, [1, 2, 3, 1, 2]) == [(2, 2)]


def test_a_new_text_forgets_the_old_one() -> None:
    matches = Text([1, 2, 3, 1, 2])
    matches.batch.begin(0, [5, 1, 2])
    assert found(matches, [5, 1, 2]) == []


def test_its_memory_is_bounded_and_it_goes_on_finding() -> None:
    rng, matches = np.random.default_rng(0), Text([], reach=64)
    text: list[int] = []
    for _ in range(300):
        new = rng.integers(0, 3, 7).tolist()
        text += new
        matches.extend(new)
        assert len(matches.kept) <= 128
        assert matches.batch.state.texts.tokens.shape[1] <= 129
        tail = matches.kept
        assert tail == text[len(text) - len(tail) :]
        assert len(tail) >= min(64, len(text))
        assert found(matches, tail[-40:]) == search(tail, tail[-40:])


def test_a_prompt_longer_than_the_memory_keeps_its_end() -> None:
    assert Text(list(range(1000)), reach=32).kept == list(range(968, 1000))
