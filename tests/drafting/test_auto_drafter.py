"""The merged drafter: drafts from all sources, bounds, and unchanged texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.ranking import UNRANKED
from lookahead.core.roots import Roots
from lookahead.core.step import Batch, step
from lookahead.core.token_tree import Noise, TokenTree
from lookahead.core.walk import follow
from lookahead.drafting import AutoDrafter, DraftMemory, StepResult
from lookahead.drafting.auto.weights import NOTHING, all_weights, feature_names
from lookahead.errors import InvalidArgumentError
from model_zoo import VOCAB_SIZE, build, greedy
from ngram_access import insert, lookup

VOCABULARY = 12
TOP_K = 4


def likely_of(drafter: AutoDrafter, tree: TokenTree) -> NDArray[np.float64]:
    """Return the drafter's probability of each node of a tree."""
    return np.array([origin.probability for origin in drafter.explain(tree).origins])


class Chain:
    """A simple model: the last two tokens and a seed decide the next token.

    Attributes:
        text: The text so far.
        likely: The drafter's probabilities of the nodes in the last step.
    """

    def __init__(self, drafter: AutoDrafter, prompt: list[int], seed: int = 0, positions: int | None = None) -> None:
        self.text = list(prompt)
        self._drafter = drafter
        self._seed = seed
        self._positions = positions
        self._cached = 0
        drafter.start(prompt)

    def predict(self, context: Sequence[int]) -> tuple[list[int], list[float]]:
        return _top_tokens(self._seed, *context[-2:])

    def step(self) -> TokenTree:
        """Run one step, and return the tree that was sent."""
        tree = TokenTree(self.text[self._cached :], None if self._positions is None else self._positions - self._cached)
        self._drafter.propose(tree)
        self.likely = likely_of(self._drafter, tree)
        ids = np.full((len(tree), TOP_K), -1)
        shares = np.zeros((len(tree), TOP_K), dtype=np.float32)
        contexts: list[list[int]] = []
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            contexts.append([*(self.text[: self._cached] if parent < 0 else contexts[parent]), token])
            if tree.needs_logits[node]:
                ids[node], shares[node] = self.predict(contexts[-1])
        self._cached = len(self.text)

        def take(node: int) -> tuple[int, bool]:
            self.text.append(int(ids[node, 0]))
            return self.text[-1], False

        walked = follow(tree, take)
        self._cached += len(walked.path)
        self._drafter.observe(StepResult(tree, ids[:, 0], walked.path, walked.tokens, ids, shares))
        return tree


@cache
def _top_tokens(*seed: int) -> tuple[list[int], list[float]]:
    rng = np.random.default_rng(seed)
    shares = -np.sort(-rng.dirichlet(np.full(VOCABULARY, 0.3)))
    return rng.permutation(VOCABULARY)[:TOP_K].tolist(), shares[:TOP_K].tolist()


def drafter_of(budget: int, **settings: object) -> AutoDrafter:
    return AutoDrafter(DraftMemory(3, 256, TOP_K), budget, **settings)  # type: ignore[arg-type]


def plain(chain: Chain, count: int) -> list[int]:
    text = list(chain.text)
    for _ in range(count):
        text.append(chain.predict(text)[0][0])
    return text


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    budget=st.integers(1, 40),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=50),
    seed=st.integers(0, 9),
    positions=st.sampled_from([None, 60]),
)
def test_texts_are_the_same_and_bounds_are_kept(
    budget: int, prompt: list[int], seed: int, positions: int | None
) -> None:
    memory = DraftMemory(3, 64, TOP_K)
    chain = Chain(AutoDrafter(memory, budget), prompt, seed, positions)
    expected = plain(chain, 130)
    while len(chain.text) < min(80, positions or 80):
        length = len(chain.text)
        tree = chain.step()
        assert len(tree) - tree.root <= budget
        if positions is not None:
            assert max(tree.depths) - tree.depths[tree.root] + length - 1 <= positions
    assert chain.text == expected[: len(chain.text)]


def test_it_takes_fewer_steps_as_it_learns() -> None:
    memory = DraftMemory(3, 4096, TOP_K)
    steps = []
    for _ in range(2):
        chain = Chain(AutoDrafter(memory, 16), [1, 2, 3])
        count = 0
        while len(chain.text) < 60:
            chain.step()
            count += 1
        steps.append(count)
    assert steps[1] < steps[0] < 57
    assert steps[1] <= 57 / 4


def test_nodes_come_by_falling_probability_after_their_parents() -> None:
    drafter = drafter_of(30)
    chain = Chain(drafter, [1, 2, 3])
    for _ in range(8):
        tree = chain.step()
        probabilities = chain.likely
        assert np.all(np.diff(probabilities) <= 0)
        assert np.all((probabilities > 0) & (probabilities < 1))
        assert len({(parent, token) for parent, token in zip(tree.parents, tree.tokens, strict=True)}) == len(tree)


def test_probabilities_of_one_node_are_a_softmax_of_their_scores() -> None:
    memory = DraftMemory(2, 64, 2, old_share=0.0)
    insert(memory, np.array([[5, -1]]), np.array([[1, 2]]), np.array([[0.5, 0.25]], dtype=np.float32))
    insert(memory, np.array([[5, 4]]), np.array([[3, 1]]), np.array([[0.8, 0.1]], dtype=np.float32))
    insert(memory, np.array([[5, -1]]), np.array([[1, 2]]), np.array([[0.5, 0.25]], dtype=np.float32))
    drafter = AutoDrafter(memory, 4, explore=False)
    drafter.start([4, 5])
    tree = TokenTree([5], max_depth=1)
    drafter.propose(tree)
    names = feature_names(2)
    columns = [names.index(name) for name in ("after 1 token", "after 2 tokens", NOTHING)]
    weights = all_weights(memory.orders)[0, 2, columns]
    unlisted = [np.log(0.3 * 0.25), np.log(0.3 * 0.1)]  # after one token and after two tokens
    log_shares = {1: [np.log(0.5), np.log(0.1)], 2: [np.log(0.25), unlisted[1]], 3: [unlisted[0], np.log(0.8)]}
    scores = {token: float(np.dot(weights[:2], logs)) for token, logs in log_shares.items()}
    total = sum(np.exp(list(scores.values()))) + np.exp(weights[-1])
    expected = sorted(((np.exp(score) / total, token) for token, score in scores.items()), reverse=True)
    assert tree.tokens[1:] == [token for _, token in expected]
    assert likely_of(drafter, tree) == pytest.approx([gain for gain, _ in expected], rel=1e-5)


def test_text_that_was_there_before_is_copied() -> None:
    drafter = AutoDrafter(DraftMemory(), 6, explore=False)
    drafter.start([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    tree = TokenTree([3])
    drafter.propose(tree)
    assert tree.tokens == [3, 4, 5, 6, 7, 1]
    assert tree.parents == [-1, 0, 1, 2, 3, 4]


def test_without_anything_to_go_by_recent_tokens_are_tried() -> None:
    drafter = drafter_of(4)
    drafter.start([7, 8, 9])
    tree = TokenTree([7, 8, 9])
    drafter.propose(tree)
    assert tree.tokens[3:] == [9, 8, 7]
    assert set(tree.parents[3:]) == {tree.root}


def test_nothing_is_indexed_before_a_first_draft_and_then_every_step_teaches() -> None:
    drafter = drafter_of(8)
    drafter.start([1, 2])
    tree, shares = TokenTree([1, 2]), np.array([[0, 0], [0.9, 0.05]], dtype=np.float32)
    drafter.observe(StepResult(tree, np.array([-1, 3]), [], [3], np.array([[-1, -1], [3, 4]]), shares))
    assert drafter.place < 0
    assert not lookup(drafter.memory, np.array([[2, 1, -1]]))[0].any()
    drafter.propose(TokenTree([3]))
    tree = TokenTree([3])  # a tree without a draft
    drafter.observe(StepResult(tree, np.array([5]), [], [5], np.array([[5, 6]]), shares[1:]))
    assert lookup(drafter.memory, np.array([[3, 2, 1]]))[0].tolist() == [[True, True, True]]


class Stingy:
    """A budget that accepts two nodes, and records its offers."""

    backs_off = False
    ranking = UNRANKED
    min_probability = 0.0
    max_candidates = 24

    def __init__(self) -> None:
        self.offers: list[list[float]] = []
        self.taught: list[bool] = []

    def begin(self, teaches: bool = True) -> None:
        self.taught.append(teaches)

    def choose(self, likely: NDArray[np.float64], counts: NDArray[np.int64], roots: Roots, rows: Sequence[int]) -> Any:
        self.offers.append(likely.tolist())
        return np.array([2])


def test_a_budget_decides_how_many_nodes_are_sent() -> None:
    budget = Stingy()
    drafter = AutoDrafter(DraftMemory(3, 256, TOP_K), budget)
    chain = Chain(drafter, [1, 2, 3])
    trees = [chain.step() for _ in range(6)]
    assert all(len(tree) - tree.root == 3 for tree in trees)
    assert len(budget.offers) == 6
    assert budget.taught == [True] * 6
    assert all(probabilities == sorted(probabilities, reverse=True) for probabilities in budget.offers)
    assert drafter.top_k == TOP_K
    budget.backs_off = True
    assert chain.step().is_chain
    assert drafter.top_k == 0
    assert len(budget.offers) == 6


@pytest.mark.parametrize("memory", [lambda: DraftMemory(3, 256, TOP_K), DraftMemory.of_texts, lambda: None])
def test_a_budget_knows_whether_nodes_teach(memory: Callable[[], DraftMemory | None]) -> None:
    budget = Stingy()
    draft_memory = memory()
    drafter = AutoDrafter(draft_memory, budget)
    drafter.start([1, 2, 3])
    drafter.propose(TokenTree([1, 2, 3]))
    assert budget.taught == [draft_memory is not None and not draft_memory.observed]
    assert drafter.together is not None
    drafter.together.state.feedback["share"] = 0.0  # a processor changes the text, so predictions are useless
    drafter.propose(TokenTree([1, 2, 3]))
    assert not budget.taught[-1]
    assert drafter.top_k == 0


def test_a_budget_decides_how_likely_nodes_are_that_are_searched_for() -> None:
    def offered(least: float) -> list[float]:
        budget = Stingy()
        chain = Chain(AutoDrafter(DraftMemory(3, 256, TOP_K), budget), [1, 2, 3])
        for _ in range(8):
            chain.step()
        budget.min_probability = least
        chain.step()
        return budget.offers[-1]

    every = offered(0.0)
    assert len(set(every)) > 5
    for least in (every[-2], every[3], every[0], 1.0):
        assert offered(least) == [probability for probability in every if probability >= least]


def test_recent_tokens_are_offered_as_likely_as_they_come_true() -> None:
    budget = Stingy()
    drafter = AutoDrafter(DraftMemory(3, 256, TOP_K), budget)
    drafter.start(range(1, 41))
    for token in range(100, 160):  # no recent tokens
        tree = TokenTree([token - 1])
        drafter.propose(tree)
        says, shares = np.full((len(tree), 1), 50), np.full((len(tree), 1), 0.01, dtype=np.float32)
        says[0], shares[0] = token, 1.0
        drafter.observe(StepResult(tree, says[:, 0], [], [token], says, shares))
    assert budget.offers[0] == pytest.approx([0.2 / (4 + rank) for rank in range(24)])
    assert max(budget.offers[-1]) < 0.9 * budget.offers[0][0]
    roots = Roots([None], [159], lambda: [99])
    roots.foresee[0] = lambda count: Noise([np.ones(200, dtype=np.float32)] * count, 1.0)
    assert drafter.together is not None
    found = drafter.together.find_rows([drafter], [0], roots)
    assert found is not None
    drafter.together.send_rows([drafter], [0], roots, drafter.budget.choose(*found, roots, [0]))
    assert sum(budget.offers[-1]) < 0.01, "what noise says is heard by the order alone"


def test_no_node_at_all_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        drafter_of(0)


@pytest.mark.parametrize("budget", [1, 24])
def test_texts_of_a_transformers_model_are_the_same(budget: int) -> None:
    model = build("llama", seed=0)
    prompt = [5, 8, 2, 5, 8, 2, 5]
    drafter = AutoDrafter(DraftMemory(), budget)
    sequence = TextSequence(torch.tensor([prompt]), prompt, drafter, TextSampler(), lambda text: len(text.tokens) >= 60)
    with torch.no_grad():
        runner, batch = ModelRunner(model, 1), Batch([sequence])
        while not batch.finished:
            step(runner, batch)
    assert sequence.tokens == [*prompt, *greedy(model, tuple(prompt), 80)[: len(sequence.tokens) - len(prompt)]]
    assert max(sequence.tokens) < VOCAB_SIZE


TREES = """
from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory
import numpy as np

random = np.random.default_rng(0)
drafter, text, trees = AutoDrafter(DraftMemory(3, 256, 4), 40), [1, 2, 3, 1, 2], []
drafter.start(text)
for _ in range(25):
    tree = TokenTree(text[-1:])
    drafter.propose(tree)
    trees.append([*tree.tokens, *tree.parents])
    ids = (np.array(tree.tokens)[:, None] * [3, 5, 7, 9] + [1, 2, 4, 8]) % 11
    shares = -np.sort(-random.dirichlet(np.ones(4), len(tree)), axis=1).astype(np.float32)
    drafter.observe(StepResult(tree, ids[:, 0], [], [int(ids[tree.root, 0])], ids, shares))
    text.append(int(ids[tree.root, 0]))
"""


def test_compiled_loops_give_the_same_trees() -> None:
    names: dict[str, Any] = {}
    exec(TREES, names)
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    program = [sys.executable, "-c", TREES + "print(trees)"]
    assert names["trees"] == json.loads(subprocess.check_output(program, env=environment, text=True))
    assert max(map(len, names["trees"])) > 40


def test_without_a_memory_it_only_drafts_from_the_text() -> None:
    drafter = AutoDrafter(None, 8, explore=False)
    assert drafter.top_k == 0
    chain = Chain(drafter, [1, 2, 3, 1, 2])
    expected = plain(chain, 250)
    sent = [len(chain.step()) for _ in range(30)]
    assert chain.text == expected[: len(chain.text)]
    assert drafter.memory.statistics()["entries"] == [0]
    assert max(sent) > 1


def test_a_tree_without_room_below_its_root_gets_no_draft() -> None:
    drafter = AutoDrafter(DraftMemory(), 16)
    chain = Chain(drafter, [1, 2, 3, 1, 2])
    for _ in range(6):
        chain.step()
    tree = TokenTree(chain.text[-1:], 0)
    drafter.propose(tree)
    assert tree.is_chain
