"""A user's drafters and sources: the page's examples run, texts stay the same, invalid ones are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import lookahead
from lookahead import LookaheadConfig
from lookahead.core.protocols import FixedBudget
from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory, PredictedText, TokenPaths
from lookahead.drafting.checked import CheckedSource
from lookahead.errors import InvalidArgumentError, LookaheadWarning
from model_zoo import VOCAB_SIZE, build, greedy

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
PROMPT = (5, 8, 2, 5, 8, 2, 5)
TOKENS = 40


class Fixed:
    """A source that always lists the same paths."""

    name = "fixed"

    def __init__(self, paths: Any = None) -> None:
        self.paths = TokenPaths.chain([1, 2, 3]) if paths is None else paths

    def start(self, prompt: Any) -> None:
        pass

    def propose(self) -> Any:
        return self.paths

    def observe(self, result: StepResult) -> None:
        pass


def steps_with(config: LookaheadConfig, rows: int = 1) -> int:
    """Return the steps of a text, after checking that it equals `model.generate`."""
    output = lookahead.generate(
        build("llama", seed=0),
        torch.tensor([PROMPT] * rows),
        lookahead_config=replace(config, memory="request"),  # whatever earlier calls have taught
        max_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == [[*PROMPT, *greedy(build("llama", seed=0), PROMPT, TOKENS)]] * rows
    return int(output.statistics.steps)


def run_page() -> dict[str, Any]:
    """Run the page's examples with the model's text as their data, and return the names that they define."""
    model = build("llama", seed=0)
    expected = [*PROMPT, *greedy(model, PROMPT, TOKENS)]
    names: dict[str, Any] = {"model": model, "texts": [expected], "input_ids": torch.tensor([PROMPT])}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert len(block.splitlines()) < 60
        exec(block, names)
        assert names["output"].tolist() == [expected]
    return names


def test_the_pages_examples_run_and_save_steps() -> None:
    names = run_page()
    expected = names["texts"][0]
    store = names["TextStore"]([expected])
    for rows in (1, 2):
        assert steps_with(LookaheadConfig(step_budget=32, drafter=lambda: names["StoreDrafter"](store)), rows) <= 8
    with_source = steps_with(LookaheadConfig(step_budget=16, sources=(lambda: names["ExpectedText"](expected),)))
    assert with_source < steps_with(LookaheadConfig(step_budget=16))


def test_the_store_finds_all_that_follows() -> None:
    store = run_page()["TextStore"]([[1, 2, 3, 1, 2, 4], [9, 1, 2, 5]])
    assert sorted(store.tokens[place] for place in store.following([1, 2], 8)) == [3, 4, 5]
    assert list(store.following([2, 9], 8)) == []


def test_listed_paths_are_drafted_as_they_branch() -> None:
    paths = TokenPaths([7, 8, 9, 6], [-1, 0, 0, -1], [0.8, 0.6, 0.3, 0.1])
    drafter = AutoDrafter(DraftMemory(), 5, explore=False, sources=[CheckedSource(Fixed(paths))])
    drafter.start([5])
    tree = TokenTree([5])
    drafter.propose(tree)
    drafted = {(tree.tokens[parent], token) for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True)}
    assert drafted == {(5, 7), (7, 8), (7, 9), (5, 6)}
    assert tree.tokens.index(8) < tree.tokens.index(9)


def first_draft(drafter: AutoDrafter, text: int) -> tuple[TokenTree, float]:
    """Return the tree of the next step, and the drafter's probability of its first node."""
    tree = TokenTree([text])
    drafter.propose(tree)
    return tree, float(drafter.explain(tree).origins[0].probability or 0)


@pytest.mark.parametrize("comes_true", [False, True])
def test_a_source_is_believed_as_often_as_it_came_true(comes_true: bool) -> None:
    memory = DraftMemory(2, 64, 2)
    source = CheckedSource(Fixed(TokenPaths([1], [-1], [0.6])))
    drafter = AutoDrafter(memory, 2, explore=False, sources=[source])
    drafter.start([5])
    tree, first = first_draft(drafter, 5)
    assert tree.tokens == [5, 1]
    for step in range(20):
        # Clear the memory, which would also draft from the text.
        ids = np.array([[1 if comes_true else 10 + step], [1 if comes_true else -1]])[: len(tree)]
        shares = np.full(ids.shape, 0.9, dtype=np.float32)
        memory.clear()
        path = [1] if comes_true else []
        drafter.observe(StepResult(tree, ids[:, 0], path, [int(ids[0, 0])] * (1 + len(path)), ids, shares))
        memory.clear()
        tree, last = first_draft(drafter, int(ids[0, 0]))
    assert (last > 0.8) if comes_true else (last < 0.3)
    drafter.start([5])
    assert first_draft(drafter, 5)[1] == first, "another text begins anew"


class Forbidding(Fixed):
    """A source that lists a tree, and forbids some of its tokens."""

    def __init__(self, paths: Any, forbidden: set[int]) -> None:
        super().__init__(paths)
        self.forbidden = forbidden
        self.searched: list[int] = []

    def permits(self, tokens: list[int], parents: list[int]) -> list[bool]:
        self.searched.append(len(tokens))
        return [token not in self.forbidden for token in tokens]


def test_forbidden_drafts_are_replaced_by_others() -> None:
    paths = TokenPaths([1, 2, 3, 4, 5], [-1, 0, -1, 2, 3], [0.9, 0.9, 0.8, 0.9, 0.9])
    memory = DraftMemory(2, 64, 2)
    drafter = AutoDrafter(memory, 4, explore=False, sources=[CheckedSource(Forbidding(paths, {1}))])
    drafter.start([7])
    tree = TokenTree([7])
    drafter.propose(tree)
    assert (tree.tokens, tree.parents) == ([7, 3, 4, 5], [-1, 0, 1, 2])  # 2 comes after the forbidden 1
    likely = [origin.probability or 0.0 for origin in drafter.explain(tree).origins]
    assert len(likely) == 3
    assert (np.diff(likely) <= 0).all()
    ids = np.array([[3, 6], [4, 6], [6, 5], [6, 5]])
    shares = np.full(ids.shape, 0.4, dtype=np.float32)
    drafter.observe(StepResult(tree, ids[:, 0], [1, 2], [3, 4, 6], ids, shares))


def test_no_more_is_searched_than_a_draft_without_forbidden_tokens_needs() -> None:
    source = Forbidding(TokenPaths(list(range(12)), [-1] * 12, [0.05] * 12), {0})
    drafter = AutoDrafter(None, 4, explore=False, sources=[CheckedSource(source)])
    drafter.start([7])
    drafter.propose(tree := TokenTree([7]))
    assert (tree.tokens[1:], source.searched) == ([1, 2, 3], [3, 6])


def test_sources_without_permits_forbid_nothing() -> None:
    paths, expected = TokenPaths([1, 2], [-1, -1], [0.9, 0.8]), PredictedText([1, 4])
    sources = [CheckedSource(Forbidding(paths, {1})), CheckedSource(Fixed(paths))]
    drafter = AutoDrafter(None, 4, explore=False, sources=sources, predicted=expected)
    drafter.start([7])
    tree = TokenTree([7])
    drafter.propose(tree)
    assert tree.tokens == [7, 2]


def test_forbidden_drafts_only_change_steps() -> None:
    text = greedy(build("llama", seed=0), PROMPT, TOKENS)
    most = steps_with(LookaheadConfig(step_budget=8))
    assert steps_with(LookaheadConfig(step_budget=8, sources=(lambda: Forbidding(None, set(text)),))) == TOKENS
    other = set(range(VOCAB_SIZE)) - set(text)
    assert steps_with(LookaheadConfig(step_budget=8, sources=(lambda: Forbidding(None, other),))) <= most


def test_invalid_permits_stop_the_drafts() -> None:
    source = Fixed()
    source.permits = lambda tokens, parents: [True]  # type: ignore[attr-defined]
    with pytest.warns(LookaheadWarning, match="drafting stopped.*returned shape"):
        steps_with(LookaheadConfig(step_budget=8, sources=(lambda: source,)))


class Sure(Fixed):
    """A source that is certain of the next tokens."""

    def __init__(self, certain: list[int], paths: Any) -> None:
        super().__init__(paths)
        self.known = certain

    def certain(self) -> list[int]:
        return self.known


class Resting(FixedBudget):
    """A budget that never drafts."""

    backs_off = True


NEXT = TokenPaths.chain([7])


@pytest.mark.parametrize(
    ("budget", "room", "tokens", "parents"),
    [
        (Resting(16), 99, [5, 1, 2], [-1, 0, 1]),
        (FixedBudget(4), 99, [5, 1, 2, 7], [-1, 0, 1, 2]),
        (FixedBudget(2), 99, [5, 1], [-1, 0]),
        (FixedBudget(16), 1, [5, 1], [-1, 0]),
    ],
)
def test_certain_tokens_are_sent_even_while_drafts_rest(
    budget: FixedBudget, room: int, tokens: list[int], parents: list[int]
) -> None:
    source = CheckedSource(Sure([1, 2], NEXT))
    drafter = AutoDrafter(None, budget, max_nodes=budget.max_candidates + 1, explore=False, sources=[source])
    drafter.start([5])
    tree = TokenTree([5], room)
    drafter.propose(tree)
    assert (tree.tokens, tree.parents) == (tokens, parents)
    assert len(drafter.explain(tree).origins) == len(tokens) - 1


def test_a_chain_sends_certain_tokens_while_its_budget_rests() -> None:
    source = CheckedSource(Sure([1, 2], NEXT))
    drafter = AutoDrafter(DraftMemory(), Resting(16), sources=[source], chains=True)
    drafter.start([5])
    drafter.propose(tree := TokenTree([5]))
    assert (tree.tokens, tree.parents, tree.certain) == ([5, 1, 2], [-1, 0, 1], 2)
    drafter.observe(StepResult(tree, np.array([1, 2, 6]), [1, 2], [1, 2, 6]))
    drafter.budget = FixedBudget(16)
    drafter.propose(tree := TokenTree([6]))
    assert tree.tokens[:3] == [6, 1, 2]
    assert tree.parents == list(range(-1, len(tree) - 1))


def test_certain_tokens_that_the_model_does_not_know_are_refused() -> None:
    for certain in ([9], [1, -1]):
        source = CheckedSource(Sure(certain, NEXT), vocabulary=9)
        drafter = AutoDrafter(None, FixedBudget(8), explore=False, sources=[source])
        drafter.start([5])
        with pytest.raises(InvalidArgumentError, match="tokens outside"):
            drafter.propose(TokenTree([5]))


def test_drafts_continue_after_certain_tokens() -> None:
    drafter = AutoDrafter(
        DraftMemory(), 6, explore=False, sources=[CheckedSource(source := Sure([1, 2], TokenPaths.chain([])))]
    )
    drafter.start([8, 1, 2, 3, 4, 9, 5])
    tree = TokenTree([5])
    drafter.propose(tree)
    assert tree.tokens[:5] == [5, 1, 2, 3, 4]  # as in the prompt
    ids = np.full((len(tree), 2), 6)
    shares = np.full(ids.shape, 0.4, dtype=np.float32)
    drafter.observe(StepResult(tree, ids[:, 0], [1, 2, 3], [1, 2, 3, 8], ids, shares))
    source.known = []
    drafter.propose(tree := TokenTree([8]))
    assert tree.tokens[:4] == [8, 1, 2, 3]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (TokenPaths([VOCAB_SIZE], [-1], [0.5]), "tokens outside"),
        (TokenPaths([1, 2], [-1, 1], [0.5, 0.5]), "parent"),
        (TokenPaths([1], [-1], [0.0]), "probability"),
        (TokenPaths([1, 2], [-1], [0.5]), "shapes"),
        ([1, 2, 3], "no TokenPaths"),
    ],
)
def test_invalid_paths_stop_the_drafts(paths: Any, message: str) -> None:
    with pytest.warns(LookaheadWarning, match=f"drafting stopped.*{message}"):
        steps_with(LookaheadConfig(step_budget=8, sources=(lambda: Fixed(paths),)))


class TooMany:
    top_k = 0

    def __init__(self, token: int = 1, nodes: int = 20) -> None:
        self.path = [token] * nodes

    def start(self, prompt: Any) -> None:
        pass

    def propose(self, tree: TokenTree) -> None:
        tree.add_candidates(self.path)

    def observe(self, result: StepResult) -> None:
        pass

    def statistics(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": TooMany, "step_budget": 8}, "proposed 20 nodes.*step_budget"),
        ({"drafter": lambda: TooMany(VOCAB_SIZE, 2)}, f"token {VOCAB_SIZE}"),
    ],
)
def test_invalid_nodes_stop_the_drafts(fields: dict[str, Any], message: str) -> None:
    with pytest.warns(LookaheadWarning, match=f"drafting stopped.*{message}"):
        assert steps_with(LookaheadConfig(**fields)) == TOKENS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": object}, "lacks top_k, start"),
        ({"drafter": TooMany()}, "must be a class or function"),
        ({"drafter": TooMany, "preset": "auto"}, "drafter=.* applies to preset 'own'"),
        ({"drafter": TooMany, "window_size": 3}, "window_size"),
        ({"preset": "own"}, "not known"),
        ({"sources": (object,)}, "lacks name"),
        ({"sources": Fixed}, "must be a tuple"),
        ({"sources": (Fixed, Fixed)}, "two named 'fixed'"),
        ({"sources": (Fixed,), "preset": "paper"}, "sources=.* applies to preset 'auto'"),
    ],
)
def test_objects_that_cannot_draft_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        steps_with(LookaheadConfig(**fields))


class RandomSource(Fixed):
    """A source that draws tokens from torch's default generator."""

    drawn: ClassVar[list[list[int]]] = []

    def propose(self) -> TokenPaths:
        self.drawn.append(torch.randint(3, VOCAB_SIZE, (4,)).tolist())
        return TokenPaths.chain(self.drawn[-1])


class RandomDrafter:
    """A drafter that draws tokens, and draws random numbers in every call."""

    top_k = 0

    def __init__(self) -> None:
        torch.rand(3)

    def start(self, prompt: Any) -> None:
        torch.manual_seed(3)

    def propose(self, tree: TokenTree) -> None:
        tree.add_candidates(torch.randint(3, VOCAB_SIZE, (4,)).tolist())

    def observe(self, result: StepResult) -> None:
        torch.rand(5)

    def statistics(self) -> dict[str, Any]:
        return {"drawn": torch.rand(1)}


@pytest.mark.parametrize("own", [{"sources": (RandomSource,)}, {"drafter": RandomDrafter}], ids=["source", "drafter"])
def test_random_draws_of_drafters_change_neither_texts_nor_the_generator(own: dict[str, Any]) -> None:
    model, prompt = build("llama", seed=0), torch.tensor([PROMPT])
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "pad_token_id": 0}
    texts, states = [], []
    RandomSource.drawn.clear()
    for generate in (model.generate, lambda ids, **kwargs: lookahead.generate(model, ids, **kwargs)):
        own_config = {} if generate == model.generate else {"lookahead_config": LookaheadConfig(step_budget=16, **own)}
        torch.manual_seed(1)
        output = generate(prompt, return_dict_in_generate=True, **sampling, **own_config)
        texts.append(output.sequences)
        states.append(torch.get_rng_state())
    assert torch.equal(*texts)
    assert torch.equal(*states)
    drawn = [tuple(tokens) for tokens in RandomSource.drawn]
    assert len({*drawn}) == len(drawn), "they draw from a random state that goes on"
