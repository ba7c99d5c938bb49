"""With the same seed, sampling gives exactly the tokens of `model.generate`, and leaves the same random state."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import lookahead
from compared.case import zoo_case
from compared.report import check
from compared.settings import WARPERS
from compared.tables import OF_THE_TEXT, SETTINGS, sampled_case
from model_zoo import DEMO, build

PROMPT = (5, 8, 20, 5, 8, 20, 5, 8)
DRAFTING = {"window_size": 4, "ngram_size": 4, "guess_set_size": 6, "pool_from_prompt": True, "pool_from_output": True}
ZOO = ("llama", "gemma3", "gpt2", "qwen3_moe", "mistral_sliding", "phi", "gpt_neox", "cohere2", "falcon_new")
"""Architectures of the random cases; `run_cases.py --sampled` runs all."""
SHARP = zoo_case(
    "llama", PROMPT, drafting=DRAFTING, do_sample=True, top_k=0, temperature=0.5, seed=1, max_new_tokens=48
)
"""A case of sampling with accepted drafts."""


@pytest.mark.parametrize("place", range(len(SETTINGS)), ids=SETTINGS)
def test_random_cases_match(place: int) -> None:
    # A model of the zoo for each setting; the slower demo model for every tenth.
    for model in (ZOO[place % len(ZOO)], *([DEMO] if place % 10 == 0 else [])):
        check(sampled_case(place, model=model))


def test_candidates_are_accepted_in_random_cases() -> None:
    # Without accepted candidates, equality proves nothing about the processors' text and the order of draws.
    number = SETTINGS.index("temperature")
    cases = [sampled_case(number + turn * len(SETTINGS), model=name) for turn, name in enumerate(ZOO[::2], 1)]
    cases = [replace(case.having(drafting=DRAFTING), kind="") for case in cases]
    outcomes = [check(case) for case in cases]
    lengths = [length for outcome in outcomes for length in outcome.accepted]
    assert sum(lengths) / len(lengths) > 1.1
    assert sum(max(outcome.accepted) > 1 for outcome in outcomes) > len(outcomes) / 2


@pytest.mark.exact
def test_settings_change_texts() -> None:
    # A setting that changes nothing tests nothing. These two change scores, but no token.
    for name in sorted({*WARPERS, *OF_THE_TEXT} - {"renormalize_logits"}):
        numbers = range(SETTINGS.index(name), 24 * len(SETTINGS), len(SETTINGS))
        assert any(_changes_the_text(name, number) for number in numbers), name


def _changes_the_text(name: str, number: int) -> bool:
    case = sampled_case(number, model="llama").having(max_new_tokens=24)
    without = replace(case, turns=(case.turns[0].without(name),))
    return check(without).answer.text != check(case).answer.text


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_the_first_use_of_a_model_keeps_the_random_state(name: str) -> None:
    # The first use of a model tries it on token trees, which must not draw random numbers.
    model = copy.deepcopy(build(name))
    ids = torch.tensor([PROMPT])
    torch.manual_seed(3)
    expected, state = model.generate(ids, max_new_tokens=12, do_sample=True), torch.get_rng_state()
    torch.manual_seed(3)
    got = lookahead.generate(model, ids, max_new_tokens=12, do_sample=True)
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_drafter_does_not_change_samples() -> None:
    drafting = [{**DRAFTING, "seed": seed, "window_size": 1 + seed} for seed in range(4)]
    drafting += [{"preset": preset} for preset in ("jacobi", "autoregressive")]
    texts = {tuple(check(SHARP.having(drafting=one)).answer.text) for one in drafting}
    assert len(texts) == 1


def test_other_seeds_draw_other_texts() -> None:
    assert len({tuple(check(SHARP.having(seed=seed)).answer.text) for seed in range(6)}) == 6


def test_eos_inside_an_accepted_run_ends_the_draws() -> None:
    # The step that ends the text must not draw for the rest of its accepted path.
    whole = check(SHARP)
    text, lengths = whole.answer.text, whole.accepted
    runs = [sum(lengths[:step]) for step, length in enumerate(lengths) if length > 1]
    assert runs
    for start in runs:
        assert check(SHARP.having(eos=text[start])).answer.text == text[: text.index(text[start]) + 1]


@pytest.mark.parametrize("temperature", [5e-3, 1e-3, 1e-6])
def test_low_temperatures_match(temperature: float) -> None:
    for seed in range(3):
        prompt = torch.randint(3, 60, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
        settings = {"temperature": temperature, "top_k": 0, "seed": seed, "max_new_tokens": 30}
        check(zoo_case("llama", prompt, attention="sdpa", drafting={"step_budget": 16}, do_sample=True, **settings))
