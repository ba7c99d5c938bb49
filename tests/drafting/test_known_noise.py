"""Drafts with known sampling noise: the same text in fewer steps, without additional random draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.core.roots import Roots
from lookahead.core.token_tree import Noise, TokenTree
from lookahead.core.walk import follow
from lookahead.drafting import AutoDrafter, DraftMemory, StepResult

VOCABULARY, TOP_K = 12, 6


def drafter_of(budget: int, **settings: bool) -> AutoDrafter:
    return AutoDrafter(DraftMemory(2, 256, TOP_K), budget, **settings)


class SampledChain:
    """A model of token pairs, sampled with noise drawn in advance."""

    def __init__(self, tokens: int, knows: bool, temperature: float = 1.0, chains: bool = False) -> None:
        random = np.random.default_rng(0)
        self._shares = random.dirichlet(np.full(VOCABULARY, 0.5), VOCABULARY)
        self._noise = random.exponential(size=(tokens + 64, VOCABULARY)).astype(np.float32)
        self._temperature, self._knows = temperature, knows
        self._drafter = drafter_of(5, chains=chains)
        self.text, self.steps = [0], 0
        self._drafter.start(self.text)
        while len(self.text) <= tokens:
            self._step()

    def _select(self, token: int) -> int:
        return int(np.argmax(np.log(self._shares[token]) / self._temperature - np.log(self._noise[len(self.text) - 1])))

    def _foresee(self, tokens: int) -> Noise:
        begin = len(self.text) - 1
        return Noise(tuple(self._noise[begin : begin + tokens]), self._temperature)

    def _step(self) -> None:
        tree = TokenTree(self.text[-1:])
        propose(self._drafter, tree, self._foresee if self._knows else None)
        ids = np.argsort(-self._shares[tree.tokens], axis=1)[:, :TOP_K]
        likely = np.take_along_axis(self._shares[tree.tokens], ids, axis=1).astype(np.float32)
        self.steps += 1

        def take(node: int) -> tuple[int, bool]:
            self.text.append(self._select(tree.tokens[node]))
            return self.text[-1], False

        walked = follow(tree, take)
        self._drafter.observe(StepResult(tree, ids[:, 0], walked.path, walked.tokens, ids, likely))


@pytest.mark.parametrize("chains", [False, True])
def test_known_noise_saves_steps_and_changes_no_token(chains: bool) -> None:
    known, unknown = SampledChain(1500, True, chains=chains), SampledChain(1500, False, chains=chains)
    assert known.text[:1500] == unknown.text[:1500]
    assert known.steps < 0.8 * unknown.steps


def test_noise_counts_less_where_the_temperature_is_low() -> None:
    # The likeliest token is nearly certain: noise with full weight would be wrong.
    known, unknown = SampledChain(1500, True, 0.1), SampledChain(1500, False, 0.1)
    assert known.text[:1500] == unknown.text[:1500]
    assert known.steps <= unknown.steps


def propose(drafter: AutoDrafter, tree: TokenTree, foresee: Callable[[int], Noise] | None) -> None:
    """Draft for a text with this noise."""
    roots = Roots([tree])
    if foresee is not None:
        roots.foresee[0] = foresee
    assert drafter.together is not None
    found = drafter.together.find_rows([drafter], [0], roots)
    assert found is not None
    drafter.together.send_rows([drafter], [0], roots, drafter.budget.choose(*found, roots, [0]))


def learned(drafter: AutoDrafter, likely: dict[int, float]) -> None:
    """Teach predictions after token 1, in a text that ends with it."""
    drafter.start([1])
    tree = TokenTree([1])
    drafter.propose(tree)
    ids, shares = np.array([[*likely]]), np.array([[*likely.values()]], dtype=np.float32)
    drafter.observe(StepResult(TokenTree([1]), ids[:, 0], [], [1], ids, shares))


@pytest.mark.parametrize("selected", [4, 5, 6])
def test_prefers_the_token_that_the_noise_selects(selected: int) -> None:
    drafter = drafter_of(3)
    learned(drafter, {4: 0.4, 5: 0.35, 6: 0.25})
    noise: NDArray[np.float32] = np.full(VOCABULARY, 3.0, dtype=np.float32)
    noise[selected] = 0.05
    tree = TokenTree([1])
    propose(drafter, tree, lambda tokens: Noise((noise,), 1.0))
    assert tree.tokens[1] == selected


def test_tokens_that_the_noise_does_not_reach_are_drafted_without() -> None:
    drafter = drafter_of(3)
    learned(drafter, {4: 0.6, 5: 0.4})
    tree = TokenTree([1])
    propose(drafter, tree, lambda tokens: Noise((np.ones(5, dtype=np.float32),), 1.0))  # without noise for token 5
    assert {4, 5} <= set(tree.tokens)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_sampler_foresees_its_noise(rows: int) -> None:
    probabilities = torch.softmax(torch.randn((40, VOCABULARY), generator=torch.Generator().manual_seed(1)), dim=-1)
    plain = torch.Generator().manual_seed(7)
    expected = [torch.multinomial(place.expand(rows, -1), 1, generator=plain)[:, 0].tolist() for place in probabilities]

    noise = SamplingNoise(rows, torch.Generator().manual_seed(7))
    samplers = [TextSampler(noise=noise, row=row) for row in range(rows)]
    assert samplers[0].foresee(4) is None  # the size and device of the vocabulary are unknown before the first use
    for place, shares in enumerate(probabilities):
        for row, sampler in enumerate(samplers):
            foreseen = sampler.foresee(3)
            token = sampler.choose(None, shares.log()[None])
            assert token == expected[place][row]
            if foreseen is not None:
                assert len(foreseen.places) == 3
                assert token == int(np.argmax(shares.numpy() / foreseen.places[0]))


@pytest.mark.parametrize(("rows", "sees"), [(1, True), (2, True), (3, False)])
def test_many_rows_with_little_room_foresee_nothing(rows: int, sees: bool) -> None:
    noise = SamplingNoise(rows, torch.Generator().manual_seed(3), max_bytes=4 * 6 * 2 * 4 * VOCABULARY)
    sampler = TextSampler(noise=noise)
    sampler.choose(None, torch.zeros((1, VOCABULARY)))
    assert (sampler.foresee(6) is not None) == sees


def test_foreseeing_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    sampler = TextSampler(noise=SamplingNoise(1, generator))
    sampler.choose(None, torch.zeros((1, VOCABULARY)))
    state = generator.get_state()
    foreseen = sampler.foresee(6)
    assert foreseen is not None
    assert torch.equal(generator.get_state(), state)
    fresh = torch.Generator()
    fresh.set_state(state)
    for place in foreseen.places:
        assert np.array_equal(place, torch.empty((1, VOCABULARY)).exponential_(generator=fresh)[0].numpy())
