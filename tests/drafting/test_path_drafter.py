"""Paths drafted without trees, against the chains that `ChainDrafter` takes out of the same search."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting.auto.context_matches import ContextMatches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.auto.ngram_memory import NGramMemory
from lookahead.drafting.auto.path_drafter import PathDrafter, PathSearch
from lookahead.drafting.chain import ChainDrafter

VOCABULARY, TOP_K, LONGEST, STEPS = 24, 4, 6, 60


def small_memory() -> DraftMemory:
    return DraftMemory(NGramMemory(3, 256, TOP_K))


class Model:
    """Probabilities that the last two tokens decide; of some it is nearly sure, of others not."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        scores = random.normal(size=(VOCABULARY, VOCABULARY, VOCABULARY)) * random.uniform(1, 6, (VOCABULARY, 1, 1))
        shares = np.exp(scores)
        self._shares = shares / shares.sum(axis=2, keepdims=True)

    def after(self, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
        shares = self._shares[path[-2], path[-1]]
        ids = np.argsort(-shares, kind="stable")[:TOP_K]
        return ids, shares[ids].astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_it_drafts_what_a_chain_of_the_search_is(seed: int) -> None:
    model, text = Model(seed), [1, 2, 3]
    shared = PathSearch(small_memory(), LONGEST)
    drafter = PathDrafter(shared)
    drafter.start(np.array(text))
    memory = small_memory()
    search = AutoDrafter(memory, ContextMatches(), None, 2, explore=False, chain=LONGEST)
    chains = ChainDrafter(search, LONGEST + 1)
    chains.start(text)
    accepted = 0
    for _ in range(STEPS):
        draft, likely = drafter.propose(LONGEST)
        tree = TokenTree([text[-1]], LONGEST)
        chains.propose(tree)
        assert draft.tolist() == tree.tokens[1:]
        assert (np.diff(likely) <= 0).all()
        told = [model.after(text + draft[:count].tolist()) for count in range(len(draft) + 1)]
        ids, shares = (np.array(part) for part in zip(*told, strict=True))
        tokens = [int(ids[0, 0])]
        while len(tokens) <= len(draft) and draft[len(tokens) - 1] == tokens[-1]:
            tokens.append(int(ids[len(tokens), 0]))
        accepted += len(tokens) - 1
        drafter.learn(tokens, ids, shares)
        shared.write()
        drafter.extend(tokens)
        path = list(range(1, len(tokens)))
        chains.observe(StepResult(tree, ids[:, 0], path, tokens, ids, shares))
        text += tokens
    assert accepted > STEPS / 2
    for learned in ("weights", "squares"):
        found, expected = (getattr(one.acceptance, learned) for one in (shared.memory, memory))
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_all_texts_of_a_batch_teach_what_proposals_are_worth() -> None:
    model, learned = Model(0), []
    for taught in ([0, 1], [0], [1]):
        shared = PathSearch(small_memory(), LONGEST)
        drafters, texts = [PathDrafter(shared) for _ in range(2)], [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5]]
        for drafter, text in zip(drafters, texts, strict=True):
            drafter.start(np.array(text))
            drafter.propose(LONGEST)
        before = shared.memory.acceptance.squares.copy()
        for number in taught:
            ids, shares = model.after(texts[number])
            drafters[number].learn([int(ids[0])], ids[None], shares[None])
        learned.append(shared.memory.acceptance.squares - before)
    assert (learned[1] > 0).any()
    assert (learned[2] > 0).any()
    assert learned[0].sum() > max(each.sum() for each in learned[1:])


def test_what_is_recalled_is_drafted_in_another_text() -> None:
    shared = PathSearch(small_memory(), LONGEST)
    drafter = PathDrafter(shared)
    drafter.start(np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]))
    draft, _ = drafter.propose(LONGEST)
    assert draft.tolist()[:4] == [4, 5, 6, 7]
    drafter.recall([4, 5, 6])
    shared.write()
    drafter.extend([4, 5, 6])
    drafter.start(np.array([9, 1, 2, 3]))
    draft, _ = drafter.propose(LONGEST)
    assert draft.tolist()[:3] == [4, 5, 6]


def test_tokens_that_are_not_the_likeliest_are_believed_after_a_while() -> None:
    shared = PathSearch(small_memory(), LONGEST)
    drafter = PathDrafter(shared)
    drafter.start(np.array([1, 2]))
    others = np.array([[5, 6, 7, 8]]), np.array([[0.9, 0.05, 0.02, 0.01]], dtype=np.float32)
    for token in [3, 1, 2] * 8:  # selected by a grammar, say
        drafter.propose(1)
        drafter.learn([token], *others)
        shared.write()
        drafter.extend([token])
    assert drafter.propose(1)[0].tolist() == [3]


def test_a_text_of_one_token_has_a_draft_of_none() -> None:
    shared = PathSearch(small_memory(), LONGEST)
    drafter = PathDrafter(shared)
    drafter.start(np.array([4]))
    assert len(drafter.propose(LONGEST)[0]) == 0
    assert len(drafter.propose(0)[0]) == 0
