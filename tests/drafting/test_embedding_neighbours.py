"""What unknown tokens borrow from their neighbours and from what stood in their place, against brute force."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lookahead.api.prompt_warm_up import MOST_LOGITS, MOST_READ, warm_up_tokens
from lookahead.backends.transformers.model_state import neighbours
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, ContextMatches, DraftMemory, EmbeddingNeighbours, NGramMemory, StepResult
from lookahead.drafting.auto.embedding_neighbours import follow_neighbours, neighbour_arrays
from lookahead.errors import InvalidArgumentError
from model_zoo import build

TOP_K = 4
VOCABULARY = 60


def cosines(rows: NDArray[np.float32], token: int) -> NDArray[np.float64]:
    """Of the rows of an embedding with that of `token`, the mean of all taken away."""
    centred = rows.astype(np.float64) - rows.mean(axis=0)
    result: NDArray[np.float64] = centred @ centred[token]
    return result / np.linalg.norm(centred, axis=1) / np.linalg.norm(centred[token])


def followed(
    memory: NGramMemory, table: EmbeddingNeighbours, token: int, known: list[int]
) -> tuple[list[int], list[float]]:
    arrays = neighbour_arrays(table, TOP_K)
    count = follow_neighbours(token, np.array(known, dtype=np.int64), arrays, memory.entries)
    return arrays.followers[:count].tolist(), arrays.shares[:count].tolist()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 999), known=st.lists(st.integers(0, VOCABULARY - 1), unique=True), token=st.integers(0, 70))
def test_followers_are_those_of_the_nearest_known_tokens(seed: int, known: list[int], token: int) -> None:
    rng, memory = np.random.default_rng(seed), NGramMemory(2, 256, TOP_K)
    rows = rng.standard_normal((VOCABULARY, 24)).astype(np.float32)
    told: dict[int, dict[int, float]] = {}
    for other in rng.permutation(VOCABULARY)[:40].tolist():
        ids, shares = rng.permutation(VOCABULARY)[:TOP_K], np.float32([0.5, 0.2, 0.1, 0.05])
        memory.insert(np.array([[other, -1]]), ids[None], shares[None])
        told[other] = dict(zip(ids.tolist(), shares.tolist(), strict=True))
    table = EmbeddingNeighbours(rows)
    followers, shares = followed(memory, table, token, known)
    asked = [other for other in known if other != token and other in told]
    if token >= VOCABULARY or not asked:
        assert followers == []
        return
    exact = cosines(rows, token)
    own = (table.codes @ table.codes[token].astype(np.float64)) / (table.lengths * table.lengths[token])
    assert own == pytest.approx(exact, abs=0.02), "8 bits are enough"
    nearest = sorted(asked, key=lambda other: -own[other])[:16]
    weights = {other: np.exp(8 * own[other]) for other in nearest}
    expected: dict[int, float] = {}
    for other, weight in weights.items():
        for follower, share in told[other].items():
            expected[follower] = expected.get(follower, 0.0) + share * weight / sum(weights.values())
    assert dict(zip(followers, shares, strict=True)) == pytest.approx(expected, rel=1e-4)
    assert shares == sorted(shares, reverse=True)


def test_tokens_without_a_direction_have_no_neighbours() -> None:
    rows = np.zeros((5, 3), dtype=np.float32)
    rows[1, 0] = np.nan
    table = EmbeddingNeighbours(rows)
    memory = NGramMemory(1, 64, TOP_K)
    memory.insert(np.array([[2]]), np.array([[3]]), np.array([[0.9]], dtype=np.float32))
    assert followed(memory, table, 0, [1, 2, 3]) == ([], [])
    assert EmbeddingNeighbours(np.zeros((0, 0), dtype=np.float32)).bytes == 0
    with pytest.raises(InvalidArgumentError, match="embedding"):
        EmbeddingNeighbours(np.zeros(3, dtype=np.float32))


def drafted(table: EmbeddingNeighbours | None) -> list[int]:
    """What is drafted to follow token 6, which was never seen, when 9 is known to follow 5."""
    memory = DraftMemory(NGramMemory(2, 64, TOP_K))
    memory.ngrams.insert(np.array([[5, -1]]), np.array([[9, 8, 7, 1]]), np.float32([[0.8, 0.1, 0.03, 0.01]]))
    drafter = AutoDrafter(memory, ContextMatches(), 3, explore=False, neighbours=table)
    drafter.start([5, 3, 6])
    tree = TokenTree([5, 3, 6], max_depth=3)
    drafter.propose(tree)
    return tree.tokens[3:]


def test_an_unknown_token_is_followed_by_what_follows_its_neighbour() -> None:
    rows = np.eye(10, dtype=np.float32)
    rows[6] = rows[5]
    assert drafted(EmbeddingNeighbours(rows)) == [9, 8]
    assert drafted(None) == []


def test_what_followed_a_rejected_sibling_is_drafted_after_the_right_token() -> None:
    memory = DraftMemory(NGramMemory(2, 64, TOP_K))
    memory.ngrams.insert(np.array([[5, -1]]), np.array([[7]]), np.float32([[0.8]]))
    drafter = AutoDrafter(memory, ContextMatches(), 2, explore=False)
    drafter.start([5])
    tree = TokenTree([5])
    drafter.propose(tree)
    assert tree.tokens == [5, 7]
    # The model says 8, not 7; after 7 it would have said 9, or else 3.
    ids, shares = np.array([[8, 7], [9, 3]]), np.float32([[0.9, 0.1], [0.7, 0.2]])
    drafter.observe(StepResult(tree, ids[:, 0], [], [8], ids, shares))
    coming = TokenTree([8])
    drafter.propose(coming)
    assert coming.tokens == [8, 9]


def test_only_embeddings_of_plain_numbers_are_read() -> None:
    model = build("llama", seed=0)
    table = neighbours(model)
    assert table is not None
    assert neighbours(model) is table
    assert len(table.codes) == model.get_input_embeddings().num_embeddings
    empty = deepcopy(model)
    empty.model.embed_tokens = torch.nn.Embedding(64, 16, device="meta")
    assert neighbours(empty) is None


def test_prompts_are_read_as_far_as_it_pays() -> None:
    model = deepcopy(build("llama", seed=0))
    assert warm_up_tokens(model, 10, time_decides=False) == MOST_READ
    few, many = (warm_up_tokens(model, prompt, time_decides=True) for prompt in (10, 1000))
    assert 0 <= few < many <= MOST_READ
    model.lm_head = torch.nn.Linear(4, MOST_LOGITS // 100, bias=False, device="meta")
    assert warm_up_tokens(model, 10, time_decides=False) == 100
    model.lm_head = torch.nn.Identity()
    assert warm_up_tokens(model, 10, time_decides=False) == 0
