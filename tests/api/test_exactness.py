"""Lookahead decoding writes exactly the text of `model.generate`, for all models and settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from compared.calls import call
from compared.case import Case, zoo_case
from compared.models import forget, load
from compared.outcome import REFUSED, Outcome, run_case
from compared.report import check
from compared.tables import ZOO, greedy_case
from model_zoo import (
    ARCHITECTURES,
    LOGIT_SPREAD,
    MAX_POSITIONS,
    ROPE_CONTEXT,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    build,
    position_limit,
)
from quick import REPRESENTATIVES, diagonal, quickly

NEAR_TIE = 1e-4
"""Largest gap between two logits that rounding may decide; logits of the zoo differ by up to about 2e-5."""
NAMES = sorted(ARCHITECTURES)
LEARNED_POSITIONS = [name for name in NAMES if position_limit(name)]
SHORT_SIGHTED = [
    name for name in NAMES if {"sliding_window", "attention_chunk_size"} & {*ARCHITECTURES[name].overrides}
]
LENGTH_SCALED = [name for name in NAMES if "rope_parameters" in ARCHITECTURES[name].overrides]
PAPER = {"preset": "paper", "window_size": 6, "ngram_size": 4, "guess_set_size": 6}
FROM_PROMPT = PAPER | {"pool_from_prompt": True}
FROM_OUTPUT = PAPER | {"pool_from_output": True}


@pytest.mark.parametrize("name", quickly(ZOO))
def test_random_cases_match(name: str) -> None:
    for turn in range(2):
        check(greedy_case(turn * len(ZOO) + ZOO.index(name)))


@pytest.mark.parametrize("name", quickly(NAMES, REPRESENTATIVES[::2]))
def test_logits_of_trees_equal_plain_decoding(name: str) -> None:
    """A stricter check than equal tokens: a wrong mask may change logits without changing a token."""
    for attention in ARCHITECTURES[name].attention:
        case = zoo_case(name, (5, 8, 2, 5, 8, 2, 5), attention=attention, drafting=FROM_PROMPT, output_logits=True)
        model, logits = load(case)[0], []
        for ours in (False, True):
            forget(model)
            logits.append(torch.cat(call(model, case.turns[0], None, ours).logits))
        assert float((logits[0] - logits[1]).abs().max()) < NEAR_TIE


def paper(case: Case, **drafting: Any) -> Case:
    """Return the case with the paper's method, which drafts much, and without an end token."""
    sizes = {"window_size": 8, "ngram_size": 4, "guess_set_size": 12, "pool_from_prompt": True, **drafting}
    turns = (turn.without("eos") for turn in case.turns)
    return replace(case, turns=tuple(turns)).having(drafting={"preset": "paper"} | sizes)


def test_candidates_are_accepted_in_the_random_cases() -> None:
    # Without accepted candidates, equality proves nothing about masks, positions and the cache.
    names = [name for name in REPRESENTATIVES[::2] if name not in LENGTH_SCALED]
    outcomes = [check(paper(greedy_case(ZOO.index(name)))) for name in names]
    lengths = [length for outcome in outcomes for length in outcome.accepted]
    assert sum(lengths) / len(lengths) > 1.2
    assert sum(length > 1 for length in lengths) / len(lengths) > 0.1
    faster = [sum(outcome.accepted) > 1.1 * len(outcome.accepted) for outcome in outcomes]
    assert sum(faster) > len(outcomes) / 2


@pytest.mark.parametrize("name", quickly(SHORT_SIGHTED, REPRESENTATIVES[::2]))
def test_text_longer_than_the_sliding_window(name: str) -> None:
    for attention in ARCHITECTURES[name].attention:
        check(zoo_case(name, tuple(range(3)) * SLIDING_WINDOW, attention=attention, drafting=FROM_PROMPT))


@pytest.mark.parametrize("name", quickly(SHORT_SIGHTED, REPRESENTATIVES[1::2]))
def test_text_growing_across_the_sliding_window(name: str) -> None:
    for length in (1, SLIDING_WINDOW - 1, SLIDING_WINDOW, SLIDING_WINDOW + 1):
        check(zoo_case(name, range(length), drafting=FROM_OUTPUT, max_new_tokens=2 * SLIDING_WINDOW))


@pytest.mark.parametrize(("name", "beyond"), diagonal(LEARNED_POSITIONS, [-1, 0, 1]))
def test_text_to_the_last_learned_position(name: str, beyond: int) -> None:
    # The last token is never read, so a text may be one token longer than the table of positions.
    for prompt in ((7,), (3, 1, 4) * 8, tuple(range(40)), (5, 6) * (MAX_POSITIONS // 2 - 1)):
        tokens = MAX_POSITIONS - len(prompt) + beyond
        outcome = check(zoo_case(name, prompt, drafting=FROM_PROMPT, max_new_tokens=tokens))
        assert outcome.answer.new_tokens == tokens


@pytest.mark.parametrize("name", LENGTH_SCALED)
def test_text_growing_into_scaled_positions(name: str) -> None:
    for length in (1, ROPE_CONTEXT - 3, ROPE_CONTEXT - 1, ROPE_CONTEXT, ROPE_CONTEXT + 1, ROPE_CONTEXT + 9):
        check(zoo_case(name, range(length), drafting=FROM_PROMPT))


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "phi3_long_rope"])
def test_padded_text_growing_into_scaled_positions(name: str) -> None:
    for length in (1, ROPE_CONTEXT - 4, ROPE_CONTEXT - 2):
        check(zoo_case(name, range(length), padding=2, drafting=FROM_PROMPT, max_new_tokens=50))


def test_chunks_of_a_prompt_are_refused_where_the_cache_is_dropped() -> None:
    """Each chunk would drop the ones before."""
    case = partial(zoo_case, "phi3_long_rope", prefill_chunk_size=5, max_new_tokens=6)
    check(case(range(ROPE_CONTEXT - 3)))
    outcome = run_case(case(range(ROPE_CONTEXT + 4)))
    assert (outcome.kind, "prefill_chunk_size" in outcome.detail) == (REFUSED, True)


@pytest.mark.parametrize(
    ("name", "preset"), diagonal(["llama", "gemma3", "gpt2"], ["paper", "jacobi", "autoregressive"])
)
def test_texts_of_one_to_three_tokens_are_exact(name: str, preset: str) -> None:
    drafting = FROM_PROMPT if preset == "paper" else {"preset": preset}
    for prompt in ((9,), (9, 9, 9, 9, 9, 9)):
        for tokens in (1, 2, 3):
            outcome = check(zoo_case(name, prompt, drafting=drafting, max_new_tokens=tokens))
            assert outcome.answer.new_tokens == tokens


@pytest.mark.parametrize(
    ("name", "sizes"),
    diagonal(
        ["llama", "mistral_sliding", "gpt2", "opt", "mixtral"],
        [(1, 2, 1), (1, 8, 1), (16, 2, 16), (60, 3, 1), (1, 5, 60), (40, 6, 20)],
    ),
)
def test_texts_are_exact_with_extreme_sizes(name: str, sizes: tuple[int, int, int]) -> None:
    drafting = FROM_OUTPUT | dict(zip(("window_size", "ngram_size", "guess_set_size"), sizes, strict=True))
    check(zoo_case(name, (1, 2, 3, 1, 2, 3, 1), drafting=drafting))


@pytest.mark.parametrize(
    "name", quickly(["llama", "qwen3", "gemma2", "gpt_neox", "falcon_new", "mixtral"], ["qwen3", "gemma2"])
)
def test_stop_token_inside_an_accepted_run(name: str) -> None:
    whole, place = _with_long_run(name)
    text = whole.answer.text
    outcome = check(whole.case.having(eos=(text[place],)))
    assert outcome.answer.text == text[: place + 1]
    steps = len(outcome.accepted)
    assert outcome.accepted[:-1] == whole.accepted[: steps - 1]
    assert 0 < outcome.accepted[-1] < whole.accepted[steps - 1]


def _with_long_run(name: str) -> tuple[Outcome, int]:
    """Return a case with a step of three or more tokens, and the index of a token in it that is new to the text."""
    for turn in range(50):
        outcome = check(paper(greedy_case(turn * len(ZOO) + ZOO.index(name)), pool_from_output=True))
        start, text = 0, outcome.answer.text
        for length in outcome.accepted:
            for place in range(start, start + length - 1):
                if length >= 3 and text[place] not in text[:place]:
                    return outcome, place
            start += length
    raise AssertionError(f"no step of three tokens in 50 cases of {name}")


# --- the zoo is fit for the purpose -------------------------------------------------------------------------


@pytest.mark.parametrize("name", quickly(NAMES, REPRESENTATIVES[1::3]))
def test_zoo_text_is_varied_and_depends_on_distant_tokens(name: str) -> None:
    model = build(name, 0, ARCHITECTURES[name].attention[0])
    random = Random(name)
    prompts = [tuple(random.choices(range(VOCAB_SIZE), k=SLIDING_WINDOW + 2)) for _ in range(4)]
    prompts += [((prompt[0] + 1) % VOCAB_SIZE, *prompt[1:]) for prompt in prompts]
    ids = torch.tensor(prompts)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    texts, changed = whole[:, len(prompts[0]) :].view(2, 4, 30).tolist()
    assert len({token for text in texts for token in text}) > VOCAB_SIZE / 6
    assert sum(text != other for text, other in zip(texts, changed, strict=True)) >= 2
    with torch.inference_mode():
        assert float(model(torch.tensor(prompts)).logits.std()) > LOGIT_SPREAD / 2


def test_zoo_models_are_the_same_every_time() -> None:
    first = build("llama", 1)
    assert build("llama", 1) is first
    build.cache_clear()
    again = build("llama", 1)
    assert again is not first
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
