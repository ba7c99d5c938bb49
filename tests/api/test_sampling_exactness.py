"""Under the same seed sampling gives the very tokens of `model.generate`, and leaves the random state as it does."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

import lookahead
import run_sampling
from lookahead import LookaheadConfig
from lookahead.backends.transformers.sampler import TextSampler
from model_zoo import build
from sampling_exactness import (
    DEMO,
    FAMILIES,
    NEAR_TIE,
    SETTINGS,
    SamplingCase,
    SamplingOutcome,
    racing_scores,
    random_sampling_case,
    run_sampling_case,
)

PROMPT = (5, 8, 20, 5, 8, 20, 5, 8)
DRAFTING = {"window_size": 4, "ngram_size": 4, "guess_set_size": 6, "pool_from_prompt": True, "pool_from_output": True}
ZOO = ("llama", "gemma3", "gpt2", "qwen3_moe", "mistral_sliding", "phi", "gpt_neox", "cohere2", "falcon_new")
"""Architectures that random cases are made for; `run_sampling.py` runs all of them."""
SHARP = SamplingCase("llama", PROMPT, {"temperature": 0.5}, seed=1, drafting=DRAFTING, max_new_tokens=48)
"""A case in which drafts are accepted although tokens are sampled."""


def check(case: SamplingCase) -> SamplingOutcome:
    """Run a case that must match."""
    outcome = run_sampling_case(case)
    assert outcome.matched, outcome.report()
    return outcome


@pytest.mark.parametrize("place", range(len(FAMILIES)), ids=FAMILIES)
def test_random_cases_match(place: int) -> None:
    # A model of the zoo for each setting; the demo model, which is slower, for every tenth.
    family = FAMILIES[place]
    names = [ZOO[place % len(ZOO)], *([DEMO] if place % 10 == 0 else [])]
    for name in names:
        check(random_sampling_case(Random(f"sample {family} {name}"), family, name))


def test_candidates_are_accepted_in_random_cases() -> None:
    # Where nothing is ever accepted, equality says nothing about the processors' text and the order of draws.
    outcomes = [check(random_sampling_case(Random(f"accepted {name}"), "temperature", name)) for name in ZOO[::2]]
    lengths = [length for outcome in outcomes for length in outcome.accepted_lengths]
    assert sum(lengths) / len(lengths) > 1.1
    assert sum(max(outcome.accepted_lengths) > 1 for outcome in outcomes) > len(outcomes) / 2


@pytest.mark.exact
def test_settings_change_texts() -> None:
    # A setting that changes nothing tests nothing. These two change scores, but no token.
    for family in sorted({*SETTINGS} - {"remove_invalid_values", "renormalize_logits"}):
        assert any(_changes_the_text(family, number) for number in range(12)), family


def _changes_the_text(family: str, number: int) -> bool:
    random = Random(f"effect {family} {number}")
    case = replace(random_sampling_case(random, "plain", "llama"), max_new_tokens=24)
    eos = {"eos_token_id": [1, *case.prompt]} if SETTINGS[family].needs_eos else {}
    without = run_sampling_case(replace(case, settings=eos)).expected
    return without != check(replace(case, settings={**eos, **SETTINGS[family].draw(random, case.prompt, 72)})).expected


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_the_first_use_of_a_model_leaves_the_random_state_alone(name: str) -> None:
    # At first use a model is tried on token trees; that must not draw anything.
    model = copy.deepcopy(build(name))
    ids = torch.tensor([PROMPT])
    torch.manual_seed(3)
    expected, state = model.generate(ids, max_new_tokens=12, do_sample=True), torch.get_rng_state()
    torch.manual_seed(3)
    got = lookahead.generate(model, ids, max_new_tokens=12, do_sample=True)
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_drafter_does_not_change_what_is_sampled() -> None:
    texts = {
        check(replace(SHARP, drafting={**DRAFTING, "seed": seed, "window_size": 1 + seed})).got for seed in range(4)
    }
    texts |= {check(replace(SHARP, drafting={"preset": preset})).got for preset in ("jacobi", "autoregressive")}
    assert len(texts) == 1


def test_other_seeds_draw_other_texts() -> None:
    texts = {check(replace(SHARP, seed=seed)).got for seed in range(6)}
    assert len(texts) == 6


def test_eos_inside_an_accepted_run_ends_the_draws() -> None:
    # The step that ends the text must not draw for the rest of its accepted path.
    whole = check(SHARP)
    starts = [sum(whole.accepted_lengths[:step]) for step in range(len(whole.accepted_lengths))]
    runs = [(start, length) for start, length in zip(starts, whole.accepted_lengths, strict=True) if length > 1]
    assert runs
    for start, _ in runs:
        ended = check(replace(SHARP, settings={**SHARP.settings, "eos_token_id": whole.got[start]}))
        assert ended.got == whole.got[: whole.got.index(whole.got[start]) + 1]


def test_multinomial_is_an_argmax_over_exponential_noise() -> None:
    # What mismatches are explained with: the token with the best score and noise is the one that was sampled.
    scores = torch.randn(1, 72, generator=torch.Generator().manual_seed(0))
    for seed in range(5):
        torch.manual_seed(seed)
        sampled = [int(torch.multinomial(torch.softmax(scores, -1), 1)) for _ in range(12)]
        assert [int(racing_scores(scores, seed, place).argmax()) for place in range(12)] == sampled


# --- the suite has teeth: with a fault put into the library, cases fail ---------------------------------------

_choose = TextSampler.choose


def _draws_for_nothing(self: TextSampler, text: torch.Tensor, logits: torch.Tensor) -> int:
    """One random number too many for each token."""
    torch.rand(())
    return _choose(self, text, logits)


def _processes_an_older_text(self: TextSampler, text: torch.Tensor, logits: torch.Tensor) -> int:
    """The text that the step began with, or nearly so."""
    return _choose(self, text[:, :-1] if text.shape[1] > 1 else text, logits)


def _processes_twice(self: TextSampler, text: torch.Tensor, logits: torch.Tensor) -> int:
    """Harmless but for processors with a memory."""
    if self._processor is not None:
        self._processor(text, logits.clone())
    return _choose(self, text, logits)


FAULTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "draws too often": (_draws_for_nothing, {}),
    "processors see an older text": (_processes_an_older_text, {"fatigue": 2.0}),
    "processors run twice": (_processes_twice, {"fatigue": 2.0}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_detects_a_wrong_draw(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, settings = FAULTS[fault]
    case = replace(SHARP, settings={**SHARP.settings, **settings})
    check(case)
    monkeypatch.setattr(TextSampler, "choose", broken)
    outcome = run_sampling_case(case)
    assert not outcome.matched
    assert "MISMATCH" in outcome.report()
    assert outcome.gap is None or abs(outcome.gap) > NEAR_TIE


def test_a_draw_after_the_last_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = lookahead.generate

    def draws_once_more(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        torch.rand(())
        return output

    monkeypatch.setattr(lookahead, "generate", draws_once_more)
    outcome = run_sampling_case(SHARP)
    assert outcome.got == outcome.expected
    assert not outcome.matched


# --- the runner -----------------------------------------------------------------------------------------------


def test_runner_reports_and_exits_by_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_sampling.py", "--cases", "3", "--model", "llama", "--families", "top_k"])
    assert run_sampling.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 passed, 0 failed"
    monkeypatch.setattr(TextSampler, "choose", _draws_for_nothing)
    assert run_sampling.main() == 1
    output = capsys.readouterr().out
    assert "MISMATCH" in output
    assert not output.splitlines()[-1].endswith(" 0 failed")


def test_cases_do_not_depend_on_their_number() -> None:
    few = list(run_sampling.draw_cases(4, 0, ["plain", "top_k"]))
    many = list(run_sampling.draw_cases(12, 0, ["top_k", "temperature", "plain"]))
    assert {repr(case) for case in few} <= {repr(case) for case in many}


def test_a_case_is_run_again_from_its_repr() -> None:
    for family in FAMILIES:
        case = random_sampling_case(Random(family), family)
        assert eval(repr(case)) == case


@pytest.mark.parametrize("temperature", [5e-3, 1e-3, 1e-6])
def test_low_temperatures_match(temperature: float) -> None:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 30, "pad_token_id": 0}
    model, config = build("llama"), LookaheadConfig(step_budget=16)
    for seed in range(3):
        ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(seed))
        texts = []
        for decode in (
            model.generate,
            lambda ids, **kwargs: lookahead.generate(model, ids, lookahead_config=config, **kwargs),
        ):
            torch.manual_seed(seed)
            texts.append(decode(ids, **sampling))
        assert torch.equal(*texts)
