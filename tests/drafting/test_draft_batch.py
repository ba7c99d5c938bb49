"""Drafts for many texts at once, against drafts for each text; and learning, against insertion row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lookahead.core.forest import Forest
from lookahead.core.results import JoinedOutputs, StepResult, StepResults, Walk, Walks
from lookahead.core.roots import Roots
from lookahead.core.shared_pace import UNRANKED, new_ranking
from lookahead.core.token_tree import TokenTree
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.learning import OUTCOME, Step
from lookahead.drafting.auto.search import LIMITS
from ngram_access import insert, lookup

VOCABULARY, ORDERS, TOP_K, LONGEST, STEPS, ROOM = 24, 3, 4, 6, 60, 9000

Predictions = tuple[np.ndarray, np.ndarray]
"""Predictions: likeliest tokens after a text and after each token of its draft, and their probabilities."""


def small_memory(capacity: int = 256) -> DraftMemory:
    return DraftMemory(ORDERS, capacity, TOP_K)


class Model:
    """A model: the last two tokens decide the probabilities, which are sharp after some tokens only."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        scores = random.normal(size=(VOCABULARY, VOCABULARY, VOCABULARY)) * random.uniform(1, 6, (VOCABULARY, 1, 1))
        shares = np.exp(scores)
        self._shares = shares / shares.sum(axis=2, keepdims=True)

    def after(self, path: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        shares = self._shares[path[-2], path[-1]]
        ids = np.argsort(-shares, kind="stable")[:TOP_K]
        return ids, shares[ids].astype(np.float32)

    def verify(self, text: Sequence[int], draft: Sequence[int]) -> tuple[list[int], Predictions]:
        """Return the selected tokens of a step, and the predictions at each position."""
        predictions = [self.after([*text, *draft[:count]]) for count in range(len(draft) + 1)]
        ids, shares = (np.array(part) for part in zip(*predictions, strict=True))
        tokens = [int(ids[0, 0])]
        while len(tokens) <= len(draft) and draft[len(tokens) - 1] == tokens[-1]:
            tokens.append(int(ids[len(tokens), 0]))
        return tokens, (ids, shares)


class Texts:
    """A batch of texts with single-path drafts; each text has a row and a place in memory."""

    def __init__(self, *texts: Sequence[int], memory: DraftMemory | None = None, **settings: int) -> None:
        self.batch = DraftBatch(memory or small_memory(), LONGEST, True, places=len(texts), **settings)
        self.places = np.arange(len(texts))
        self.texts = [list(text) for text in texts]
        for place, text in enumerate(texts):
            self.batch.begin(place, text)

    def propose(self, least: float = 0.0, room: int = ROOM) -> list[list[int]]:
        rows = [(place, LONGEST, room - len(text) - 1, least) for place, text in enumerate(self.texts)]
        self.batch.find(np.array(rows, dtype=LIMITS))
        counts = self.batch.state.counts.tolist()
        return [self.batch.state.trees["token"][place, 1 : 1 + count].tolist() for place, count in enumerate(counts)]

    def learn(self, selected: Sequence[Sequence[int]], predictions: Sequence[Predictions | None]) -> int:
        """Learn a step's predictions; for a text without predictions, learn the selected tokens."""
        counts = np.maximum(self.batch.state.counts, 0) + 1
        for text, new in zip(self.texts, selected, strict=True):
            text += new
        ids = np.full((counts.sum(), 1 if predictions[0] is None else TOP_K), -1)
        shares = np.zeros(ids.shape, dtype=np.float32)
        for end, count, each in zip(np.cumsum(counts), counts, predictions, strict=True):
            if each is not None:
                ids[end - count : end], shares[end - count : end] = each
        added, tokens = np.array([len(new) for new in selected]), np.array([token for new in selected for token in new])
        rows = np.zeros(len(counts), dtype=OUTCOME)
        rows["place"], rows["nodes"], rows["added"] = self.places, counts, added
        step = Step.in_order(rows, tokens, ids, shares)
        return self.batch.learn(step)

    def step(self, model: Model) -> int:
        """Draft, verify and learn; return the number of accepted tokens."""
        drafts = self.propose()
        results = [model.verify(text, draft) for text, draft in zip(self.texts, drafts, strict=True)]
        return self.learn([tokens for tokens, _ in results], [predictions for _, predictions in results])


@pytest.mark.parametrize(("seed", "reach"), [(0, 1000), (1, 1000), (2, 1000), (3, 16)])
def test_a_drafter_drafts_and_learns_as_its_batch_does(seed: int, reach: int) -> None:
    model, text = Model(seed), [1, 2, 3]
    paths, drafter = Texts(text), AutoDrafter(small_memory(), LONGEST + 1, chains=True)
    drafter.start(text)
    accepted = 0
    for _ in range(STEPS):
        (draft,) = paths.propose()
        tree = TokenTree([text[-1]], LONGEST)
        drafter.propose(tree)
        assert draft == tree.tokens[1:]
        tokens, (ids, shares) = model.verify(text, draft)
        accepted += paths.learn([tokens], [(ids, shares)])
        drafter.observe(StepResult(tree, ids[:, 0], list(range(1, len(tokens))), tokens, ids, shares))
        text += tokens
    assert paths.texts == [text]
    assert accepted == len(text) - 3 - STEPS
    assert accepted > STEPS / 8


def test_a_ranked_search_finds_the_likeliest_candidates_of_all_texts() -> None:
    model = Model(4)
    texts = Texts(*[[1, 2, 3 + place] for place in range(8)])
    for _ in range(STEPS // 4):
        texts.step(model)
    batch = DraftBatch(texts.batch.memory, 24, places=8)
    for place, text in enumerate(texts.texts):
        batch.begin(place, text)
    limits = np.array([(place, 24, 24, 0.01) for place in range(8)], dtype=LIMITS)

    def likeliest(ranking: np.ndarray) -> tuple[list[tuple[float, int, int]], int]:
        batch.find(limits, ranking=ranking)
        counts = batch.counts.tolist()
        nodes = [
            (-node["offered"], place, rank)
            for place, count in enumerate(counts)
            for rank, node in enumerate(batch.trees[place, 1 : count + 1])
        ]
        return sorted(nodes)[:capacity], sum(counts)

    for capacity in (1, 7, 20, 50):
        expected, searched = likeliest(UNRANKED)
        assert expected[-1][0] < -0.01  # likelier than the minimum, so that some are not needed
        found, fewer = likeliest(new_ranking(capacity))
        assert found == expected
        assert capacity <= fewer < searched


def step_results(trees: list[TokenTree], results: list[StepResult]) -> StepResults:
    forest = Forest(trees)
    walks = Walks(forest)
    for row, result in enumerate(results):
        walks.set(row, Walk([], result.tokens, False))
    return StepResults(forest, JoinedOutputs(results), walks)


def test_rows_that_draft_together_draft_as_they_do_apart() -> None:
    texts, model = [[1, 2, 3, 4, 1, 2], [5, 6, 5, 6, 5], [7, 8, 9, 7, 8]], Model(1)

    def drafters_of(memories: list[DraftMemory]) -> list[AutoDrafter]:
        made = [AutoDrafter(memory, 8) for memory in memories]
        for drafter, text in zip(made, texts, strict=True):
            drafter.start(text)
        return made

    def results_of(trees: list[TokenTree]) -> list[StepResult]:
        results = []
        for tree, text in zip(trees, texts, strict=True):
            predictions = [model.after([*text, token]) for token in tree.tokens]  # the model needs two tokens
            ids, shares = (np.array(part) for part in zip(*predictions, strict=True))
            results.append(StepResult(tree, ids[:, 0], [], [int(ids[0, 0])], ids, shares))
        return results

    memory = small_memory(4096)
    together, apart = drafters_of([memory] * 3), drafters_of([small_memory(4096) for _ in texts])
    for step in range(4):
        trees, alone = ([TokenTree([text[-1]]) for text in texts] for _ in range(2))
        if step == 0:  # the drafters have no places yet
            for drafter, tree in zip(together, trees, strict=True):
                drafter.propose(tree)
        else:
            batch, roots = together[0].together, Roots(trees)
            _, counts = batch.find_rows(together, range(3), roots)
            batch.send_rows(together, range(3), roots, counts)
        for drafter, tree in zip(apart, alone, strict=True):
            drafter.propose(tree)
        if step == 0:  # later, each text also uses the other texts' lessons
            assert [(tree.tokens, tree.parents) for tree in trees] == [(tree.tokens, tree.parents) for tree in alone]
        results = results_of(trees)
        together[0].together.observe_rows(together, range(3), step_results(trees, results))
        for drafter, result in zip(apart, results, strict=True):
            drafter.observe(result)
        for text, result in zip(texts, results, strict=True):
            text += result.tokens
    assert len({id(drafter.together) for drafter in together}) == 1
    assert memory.clock == 4, "one call for all rows"


def test_first_drafts_of_a_batch_equal_single_drafts() -> None:
    """The first drafts are equal; later ones differ, as texts of a batch share a memory."""
    texts = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6, 5], [7, 8, 9, 7, 8]]
    alone = [Texts(text).propose()[0] for text in texts]
    assert Texts(*texts).propose() == alone
    assert all(alone)


def context(path: list[int]) -> list[int]:
    """Return the last tokens, in reverse order, with -1 before the beginning."""
    return (path[::-1] + [-1] * ORDERS)[:ORDERS]


@pytest.mark.parametrize("texts", [3, 40])
def test_rows_are_written_as_one_by_one_with_real_text_last(texts: int) -> None:
    random, model = np.random.default_rng(0), Model(5)
    paths = Texts(*random.integers(0, VOCABULARY, (texts, 12)).tolist(), memory=small_memory(4096))
    expected = DraftMemory(ORDERS, 4096, TOP_K)
    for _ in range(8):
        drafts = paths.propose()
        results = [model.verify(text, draft) for text, draft in zip(paths.texts, drafts, strict=True)]
        lessons = []
        for text, draft, (tokens, (ids, shares)) in zip(paths.texts, drafts, results, strict=True):
            rows = [(context([*text, *draft[:row]]), ids[row], shares[row]) for row in range(len(ids))]
            lessons += [*rows[len(tokens) :], *rows[: len(tokens)]]
        paths.learn([tokens for tokens, _ in results], [predictions for _, predictions in results])
        for tokens, ids_of_row, shares_of_row in lessons:
            insert(expected, np.array([tokens]), ids_of_row[None], shares_of_row[None])
    contexts = random.integers(0, VOCABULARY, (300, ORDERS))
    pairs = zip(lookup(paths.batch.memory, contexts), lookup(expected, contexts), strict=True)
    for found_there, expected_there in pairs:
        np.testing.assert_allclose(found_there, expected_there, rtol=1e-5, atol=1e-7)


def test_selected_tokens_replace_missing_predictions() -> None:
    memory = DraftMemory.of_texts()
    paths = Texts([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], memory=memory)
    (draft,) = paths.propose()
    assert draft == [4, 5, 6, 7, 8, 1]
    assert paths.learn([[*draft, 2]], [None]) == len(draft)
    assert Texts([9, 1, 2, 3], memory=memory).propose()[0][:3] == [4, 5, 6]


def test_a_foreign_draft_teaches_nothing() -> None:
    paths = Texts([1, 2, 3, 4, 1, 2])
    (draft,) = paths.propose()
    predictions = Model(0).verify([1, 2], draft)[1]
    assert paths.learn([[draft[0] + 1, 7]], [predictions]) == 0
    assert paths.batch.memory.statistics()["entries"] == [0] * ORDERS
    assert paths.texts == [[1, 2, 3, 4, 1, 2, draft[0] + 1, 7]]


def test_tokens_that_are_not_the_likeliest_are_believed_after_a_while() -> None:
    paths = Texts([1, 2])
    others = np.array([[5, 6, 7, 8]]), np.array([[0.9, 0.05, 0.02, 0.01]], dtype=np.float32)
    for token in [3, 1, 2] * 8:  # for example, selected by a grammar
        paths.learn([[token]], [others])
    assert paths.propose()[0][0] == 3


@pytest.mark.parametrize("room", [ROOM, 3, 2, 1])
def test_a_draft_fits_in_its_text(room: int) -> None:
    paths = Texts([4, 4])
    assert len(paths.propose(room=room)[0]) <= max(room - 3, 0)


def test_a_draft_ends_where_it_is_not_likely_enough() -> None:
    paths = Texts([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    (tokens,) = paths.propose()
    likely = paths.batch.state.trees["probability"][0, 1 : 1 + len(tokens)].copy()
    assert (np.diff(likely) <= 0).all()
    (fewer,) = paths.propose(least=float(likely[3]))
    assert fewer == tokens[: len(fewer)]
    assert len(fewer) == np.count_nonzero(likely >= likely[3])


def test_long_texts_are_searched_beside_short_ones() -> None:
    random = np.random.default_rng(1)
    long = random.integers(0, 10000, 7000).tolist()
    paths = Texts([1, 2, 3, 1, 2], [*long, *long[500:520]])
    short = Texts([1, 2, 3, 1, 2]).propose()[0]
    assert paths.propose() == [short, long[520 : 520 + LONGEST]]


def probabilities_of_a_match(comes_true: bool) -> list[float]:
    """Return the drafter's probability of a matched token, at each of its repetitions."""
    paths, likely = Texts([1, 2, 3, 1, 2]), []
    for time in range(12):
        draft = paths.propose()[0]
        likely.append(float(paths.batch.state.trees["probability"][0, 1]))
        paths.learn([[draft[0] if comes_true else 10 + time]], [None])
        paths.batch.extend(0, [50 + time, 1, 2])
        paths.texts[0] += [50 + time, 1, 2]
    return likely


def test_a_kind_of_evidence_counts_as_far_as_it_came_true_lately() -> None:
    right, wrong = probabilities_of_a_match(True), probabilities_of_a_match(False)
    assert right[0] == wrong[0]
    assert right[-1] > wrong[1] > wrong[-1]
    assert wrong[-1] < 0.75 * wrong[0]
