"""Lookahead decoding writes exactly the text of `model.generate`, whatever the model and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from exactness import NEAR_TIE, Case, Outcome, cases, logit_difference, random_case, run_case
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.tree_cache import TreeCache
from lookahead.core import forest, walk
from lookahead.core.forest import Forest
from lookahead.core.token_tree import NodeKind, TokenTree
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
from quick import REPRESENTATIVES, quickly

EXAMPLES = 2
"""Drawn cases for each architecture."""

NAMES = sorted(ARCHITECTURES)
LEARNED_POSITIONS = [name for name in NAMES if position_limit(name)]
SHORT_SIGHTED = [
    name for name in NAMES if {"sliding_window", "attention_chunk_size"} & {*ARCHITECTURES[name].overrides}
]
LENGTH_SCALED = [name for name in NAMES if "rope_parameters" in ARCHITECTURES[name].overrides]


def check(case: Case) -> Outcome:
    """Run a case that must match."""
    outcome = run_case(case)
    assert outcome.matched, outcome.report()
    return outcome


@pytest.mark.parametrize("name", quickly(NAMES))
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_cases_match(name: str, data: st.DataObject) -> None:
    check(data.draw(cases(name)))


@pytest.mark.parametrize("name", quickly(NAMES, REPRESENTATIVES[::2]))
def test_logits_of_trees_are_those_of_plain_decoding(name: str) -> None:
    for attention in ARCHITECTURES[name].attention:
        case = Case(name, (5, 8, 2, 5, 8, 2, 5), 0, attention, continued=8, pool_from_prompt=True)
        assert logit_difference(case) < NEAR_TIE


def test_candidates_are_accepted_in_the_random_cases() -> None:
    # Where nothing is ever accepted, equality says nothing about masks, positions and the cache.
    cases = [replace(random_case(Random(place), name), preset="paper") for place, name in enumerate(NAMES[::4])]
    outcomes = [check(case) for case in cases if case.architecture not in LENGTH_SCALED]
    lengths = [length for outcome in outcomes for length in outcome.accepted_lengths]
    assert sum(lengths) / len(lengths) > 1.2
    assert sum(length > 1 for length in lengths) / len(lengths) > 0.1
    assert sum(outcome.step_compression > 1.1 for outcome in outcomes) > len(outcomes) / 2


@pytest.mark.parametrize("name", quickly(SHORT_SIGHTED))
def test_text_longer_than_the_sliding_window(name: str) -> None:
    prompt = tuple(range(3)) * SLIDING_WINDOW
    for attention in ARCHITECTURES[name].attention:
        check(Case(name, prompt, attention=attention, max_new_tokens=40, pool_from_prompt=True))


@pytest.mark.parametrize("name", quickly(SHORT_SIGHTED))
def test_text_growing_across_the_sliding_window(name: str) -> None:
    for length in (1, SLIDING_WINDOW - 1, SLIDING_WINDOW, SLIDING_WINDOW + 1):
        check(Case(name, tuple(range(length)), max_new_tokens=2 * SLIDING_WINDOW, pool_from_output=True))


@pytest.mark.parametrize("name", quickly(LEARNED_POSITIONS))
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_text_to_the_last_learned_position(name: str, beyond: int) -> None:
    # The last token of the text is not read, so a text may be one token longer than there are positions.
    for prompt in ((7,), (3, 1, 4) * 8, tuple(range(40)), (5, 6) * (MAX_POSITIONS // 2 - 1)):
        case = Case(name, prompt, max_new_tokens=MAX_POSITIONS - len(prompt) + beyond, pool_from_prompt=True)
        outcome = check(case)
        assert len(outcome.got) == case.max_new_tokens


@pytest.mark.parametrize("name", LENGTH_SCALED)
def test_text_growing_into_scaled_positions(name: str) -> None:
    for length in (1, ROPE_CONTEXT - 3, ROPE_CONTEXT - 1, ROPE_CONTEXT, ROPE_CONTEXT + 1, ROPE_CONTEXT + 9):
        check(Case(name, tuple(range(length)), max_new_tokens=40, pool_from_prompt=True))


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "phi3_long_rope"])
def test_padded_text_growing_into_scaled_positions(name: str) -> None:
    for length in (1, ROPE_CONTEXT - 4, ROPE_CONTEXT - 2):
        check(Case(name, tuple(range(length)), padding=2, max_new_tokens=50, pool_from_prompt=True))


@pytest.mark.parametrize("preset", ["paper", "jacobi", "autoregressive"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_texts_of_one_to_three_tokens_are_exact(name: str, preset: str) -> None:
    for prompt in ((9,), (9, 9, 9, 9, 9, 9)):
        for new_tokens in (1, 2, 3):
            outcome = check(Case(name, prompt, max_new_tokens=new_tokens, preset=preset, pool_from_prompt=True))
            assert len(outcome.got) == new_tokens


@pytest.mark.parametrize("name", quickly(["llama", "mistral_sliding", "gpt2", "opt", "mixtral"], ["llama", "gpt2"]))
@pytest.mark.parametrize(
    ("window_size", "ngram_size", "guess_set_size"),
    [(1, 2, 1), (1, 8, 1), (16, 2, 16), (60, 3, 1), (1, 5, 60), (40, 6, 20)],
)
def test_texts_are_exact_with_extreme_sizes(name: str, window_size: int, ngram_size: int, guess_set_size: int) -> None:
    sizes = {"window_size": window_size, "ngram_size": ngram_size, "guess_set_size": guess_set_size}
    check(Case(name, (1, 2, 3, 1, 2, 3, 1), max_new_tokens=40, pool_from_output=True, **sizes))


@pytest.mark.parametrize(
    "name", quickly(["llama", "qwen3", "gemma2", "gpt_neox", "falcon_new", "mixtral"], ["qwen3", "gemma2"])
)
def test_stop_token_inside_an_accepted_run(name: str) -> None:
    whole, place = _with_long_run(name)
    outcome = check(replace(whole.case, eos_at=(place,)))
    assert outcome.got == whole.got[: place + 1]
    steps = len(outcome.accepted_lengths)
    assert outcome.accepted_lengths[:-1] == whole.accepted_lengths[: steps - 1]
    assert 0 < outcome.accepted_lengths[-1] < whole.accepted_lengths[steps - 1]


def _with_long_run(name: str) -> tuple[Outcome, int]:
    """A case with a step of three or more tokens, and the place of a token in it that was new to the text."""
    random = Random(name)
    for _ in range(50):
        case = replace(random_case(random, name), eos_at=(), padding=0, preset="paper", pool_from_output=True)
        outcome = check(case)
        start = 0
        for length in outcome.accepted_lengths:
            for place in range(start, start + length - 1):
                if length >= 3 and outcome.got[place] not in outcome.got[:place]:
                    return outcome, place
            start += length
    raise AssertionError(f"no step of three tokens in 50 cases of {name}")


# --- the suite has teeth: with a fault put into the library, texts differ -----------------------------------


def _any_child(self: TokenTree, node: int, token: int) -> int | None:
    """Verification that accepts the first candidate, whatever it holds."""
    candidates = (child for child in range(node + 1, len(self)) if self.kinds[child] is NodeKind.CANDIDATE)
    return next((child for child in candidates if self.parents[child] == node), None)


def _walk_one_by_one(
    rows: list[int], sequences: Sequence[Any], forest: Forest, predictions: NDArray[np.int64], walks: list[Any]
) -> None:
    """The walk of plain rows, by the children that `TokenTree.child` finds."""
    for row in rows:
        said, text = predictions[forest.firsts[row] :], sequences[row]
        walks[row] = walk.follow(
            forest[row], lambda node, said=said, text=text: (int(said[node]), text.append(said[node]))
        )


def _sees_all_before(firsts: NDArray[np.int64], parent_slots: NDArray[np.int64], mask: NDArray[np.bool_]) -> None:
    """A tree mask that shows a node everything that was sent before it, as a plain causal mask does."""
    for row, count in enumerate(np.diff(firsts)):
        mask[row, :count, :count] = np.tri(count, dtype=np.bool_)


def _positions_in_order(self: Forest) -> NDArray[np.int64]:
    """Position ids that count the nodes, as those of plain text do, instead of their depth."""
    found: NDArray[np.int64] = np.arange(len(self.tokens)) - self.firsts[self.rows_of_slots]
    return found


def _keeps_first_slots(self: TreeCache, *places: object) -> None:
    """A cache that keeps as many states as were accepted, but not those that were accepted."""


def _full_everywhere(self: MaskBuilder, kind: str) -> tuple[int | None, int | None]:
    """Masks that forget the sliding window."""
    return None, None


Patches = list[tuple[object, str, Any]]

FAULTS: dict[str, tuple[Patches, list[str]]] = {
    "accepts any child": ([(TokenTree, "child", _any_child), (walk, "_walk_plain_rows", _walk_one_by_one)], NAMES),
    "causal instead of tree mask": ([(forest, "see_ancestors", _sees_all_before)], NAMES),
    "positions count nodes": ([(Forest, "slot_depths", property(_positions_in_order))], NAMES),
    "cache keeps the wrong nodes": ([(TreeCache, "move", _keeps_first_slots)], NAMES),
    "no sliding window": ([(MaskBuilder, "reach", _full_everywhere)], SHORT_SIGHTED),
}


believed = cache(check)
"""Cases that match, for several faults."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_detects_a_wrong_token(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, names = FAULTS[fault]
    # Where RoPE depends on the length, hardly anything is drafted, so hardly anything can go wrong.
    chosen = [name for name in names if name not in LENGTH_SCALED]
    options = {"preset": "paper", "ngram_size": 4, "guess_set_size": 12, "pool_from_prompt": True, "eos_at": ()}
    cases = [replace(random_case(Random(place), name), **options) for place, name in enumerate(chosen)][-8:]
    for case in cases:
        believed(case)  # the library has now tried each model, and believes it
    for patch in patches:
        monkeypatch.setattr(*patch)
    outcomes = [run_case(case) for case in cases]
    differing = [outcome for outcome in outcomes if outcome.error is None and not outcome.matched]
    # With a third, a run of ten cases overlooks the fault once in 60 times, one of a hundred never.
    assert len(differing) > len(outcomes) / 3, [outcome.case.architecture for outcome in differing]


# --- the zoo is fit for the purpose -------------------------------------------------------------------------


@pytest.mark.parametrize("name", quickly(NAMES))
def test_zoo_text_is_varied_and_depends_on_what_lies_far_back(name: str) -> None:
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
