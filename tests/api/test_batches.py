"""Batches equal `model.generate`, and each row equals its own single call."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import lookahead
import lookahead.serving.request
from compared.case import Case, zoo_case
from compared.outcome import EQUAL, REFUSED, run_case
from compared.report import check, describe
from compared.settings import NEED_AN_END, with_tokens
from compared.tables import FOR_ROWS, OF_THE_TEXT, batch_case
from compared.tables import ZOO as ALL
from model_zoo import ARCHITECTURES, MAX_POSITIONS, ROPE_CONTEXT, build, greedy
from quick import diagonal, quickly

ZOO = ("llama", "gemma3", "gpt2", "qwen3_moe", "mistral_sliding", "phi", "gpt_neox", "llama4_chunked", "gpt_oss")
"""Architectures of the random cases; `run_cases.py --batches` runs all."""
DRAFTING = {"window_size": 4, "ngram_size": 3, "guess_set_size": 6, "pool_from_prompt": True, "pool_from_output": True}
PROMPTS = ((3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6), (40, 41), (8, 8, 8, 8, 8), (61,))
KEPT = {"output_scores": True, "output_logits": True}
SEEN = KEPT | {"streamer": True}
STOPS = tuple(sorted({*greedy(build("llama", 0, "eager"), PROMPTS[0], 9)[5:], *greedy(build("llama"), PROMPTS[1], 3)}))
"""End tokens for the rows of `RAGGED`: one early, one late."""


def ragged(name: str = "llama", prompts: tuple[tuple[int, ...], ...] = PROMPTS, **options: Any) -> Case:
    """Return the case with other settings, attention or drafting."""
    return zoo_case(name, *prompts, **{"drafting": DRAFTING, "max_new_tokens": 32} | options)


@pytest.mark.parametrize("number", quickly(range(3), [0]))
@pytest.mark.parametrize("name", ZOO)
def test_random_cases_match(name: str, number: int) -> None:
    check(batch_case(number * len(ALL) + ALL.index(name)))


def test_rows_are_packed_with_a_cache_or_without() -> None:
    model, shapes = build("llama"), []
    ids = torch.tensor([PROMPTS[0], (0,) * 10 + PROMPTS[1]])
    mask = (ids != 0).long()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: shapes.append(inputs[0].shape[0]) if isinstance(module, torch.nn.Embedding) else None
    )
    try:
        for options in ({}, {"return_dict_in_generate": True}, {"do_sample": True}):
            lookahead.generate(model, ids, attention_mask=mask, max_new_tokens=2)  # checks run before
            arguments = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False} | options
            torch.manual_seed(2)
            expected = model.generate(ids, **arguments)
            shapes.clear()
            torch.manual_seed(2)
            output = lookahead.generate(model, ids, **arguments)
            assert set(shapes) == {1}, options
            if "return_dict_in_generate" not in options:
                assert torch.equal(output, expected)
                continue
            text, longer = expected.sequences, torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1)
            assert torch.equal(output.sequences, text)
            arguments |= {"attention_mask": longer}
            expected = model.generate(text, past_key_values=expected.past_key_values, **arguments)
            shapes.clear()
            output = lookahead.generate(model, text, past_key_values=output.past_key_values, **arguments)
            assert set(shapes) == {1}
            assert torch.equal(output.sequences, expected.sequences)
    finally:
        hook.remove()


def test_rows_may_finish_at_different_steps() -> None:
    # If all rows accept equal numbers of tokens, equality proves nothing about rows of different lengths.
    steps: list[lookahead.StepRecord] = []
    outcome = check(ragged())
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    config = lookahead.LookaheadConfig(**DRAFTING)
    lookahead.generate(
        build("llama"), ids, max_new_tokens=32, do_sample=False, on_step=steps.append, lookahead_config=config
    )
    assert sum(outcome.accepted) / len(outcome.accepted) > 1.3
    by_row = [[len(step.tokens) for step in steps if step.index == row] for row in range(2)]
    assert by_row[0] != by_row[1]


def ends(*tokens: int) -> dict[str, Any]:
    return {"eos": tokens} if tokens else {}


@pytest.mark.parametrize(("eos", "kept"), diagonal([(), STOPS], [{}, KEPT]))
def test_streamed_columns_equal_transformers(eos: tuple[int, ...], kept: dict[str, Any]) -> None:
    check(ragged(**ends(*eos), **kept, streamer=True))
    check(ragged(**ends(*eos), streamer=True, return_dict_in_generate=False))


@pytest.mark.parametrize("eos", [(), STOPS])
@pytest.mark.parametrize("name", quickly(["llama", "gemma2", "opt", "mixtral"], ["gemma2"]))
def test_scores_and_logits_equal_transformers(name: str, eos: tuple[int, ...]) -> None:
    check(ragged(name, **ends(*eos), **KEPT, no_repeat_ngram_size=2))


def test_rows_that_a_criterion_ends_go_on_as_in_transformers() -> None:
    # Without an end-of-sequence token nothing is padded: rows continue until the last one has ended.
    alone = check(ragged(criterion=STOPS, **SEEN)).answer
    both = check(ragged(criterion=STOPS[:1], eos=STOPS[1:], **SEEN)).answer
    never = check(ragged(criterion=(70,), streamer=True)).answer
    assert both.counted_tokens < alone.counted_tokens <= never.counted_tokens


def test_a_row_may_end_with_its_first_token() -> None:
    first = greedy(build("llama", 0, "eager"), PROMPTS[1], 1)
    outcome = check(ragged(eos=first, **SEEN))
    assert outcome.answer.counted_tokens < len(PROMPTS) * 32
    check(ragged(prompts=(PROMPTS[1],) * 3, eos=first, **SEEN))
    check(ragged(max_new_tokens=1, **SEEN))


@pytest.mark.parametrize("name", FOR_ROWS)
@pytest.mark.parametrize("returns", quickly([1, 2], [2]))
def test_processors_treat_each_row_as_its_own(name: str, returns: int) -> None:
    value = OF_THE_TEXT[name](Random(f"row {name}"))
    settings = {name: (72, value) if name == "allowed" else value, **KEPT, "max_new_tokens": 16}
    settings |= {"num_return_sequences": 2, "do_sample": True, "top_k": 1} if returns > 1 else {}
    settings |= ends(*STOPS) if name in (*NEED_AN_END, "forced_eos_token_id") else {}
    check(ragged(**with_tokens(settings, lambda token: token % 72)))


def test_criteria_and_processors_get_the_row_number() -> None:
    # All rows have one prompt, so only the row number makes the texts differ.
    prompts = ((5, 6, 7),) * 3
    check(ragged(prompts=prompts, allowed=(72, 3)))
    seen: set[int] = set()

    def allowed(batch_id: int, text: torch.Tensor) -> list[int]:
        seen.add(batch_id)
        return list(range(batch_id * 10, batch_id * 10 + 10))

    ids = torch.tensor(prompts)
    texts = lookahead.generate(build("llama"), ids, max_new_tokens=6, do_sample=False, prefix_allowed_tokens_fn=allowed)
    assert seen == {0, 1, 2}
    assert (texts[:, 3:] // 10).tolist() == [[0] * 6, [1] * 6, [2] * 6]


@pytest.mark.parametrize("share_pool", [False, True])
def test_a_pool_that_rows_share_changes_no_text(share_pool: bool) -> None:
    # Rows of one prompt find each other's tokens in the pool, and must not mistake them for their own text.
    prompts = (PROMPTS[0], PROMPTS[0][3:], PROMPTS[0][1:], PROMPTS[0][:-1])
    check(ragged(prompts=prompts, drafting={**DRAFTING, "share_pool": share_pool}))
    check(ragged(prompts=prompts, drafting={"preset": "jacobi"}))


SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 0}


@pytest.mark.parametrize("eos", [(), STOPS])
@pytest.mark.parametrize("name", quickly(["llama", "gpt2", "gemma3"], ["gpt2"]))
def test_sampled_rows_equal_transformers(name: str, eos: tuple[int, ...]) -> None:
    options = {**SAMPLING, "num_return_sequences": 3, **ends(*eos)}
    assert max(check(ragged(name, **options, **SEEN)).accepted) > 1
    settings = {"repetition_penalty": 1.3, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2}
    check(ragged(name, **options, **SEEN, **settings))
    check(ragged(name, **options, **SEEN, criterion=(7, 9, 23)))
    check(ragged(name, **options, attention="sdpa", return_dict_in_generate=False))


@pytest.mark.parametrize("name", quickly(sorted(ARCHITECTURES), ["llama", "gemma2", "qwen3_moe"]))
def test_random_sampled_batches_match(name: str) -> None:
    check(batch_case(ALL.index(name), sampled=True))


@pytest.mark.slow_by_nature("finds the rules of invariant products")
def test_invariant_passes_sample_the_rows_of_transformers() -> None:
    # Rounding cannot change these tokens, as their logits are far apart.
    check(ragged(**SAMPLING, attention="sdpa", drafting={**DRAFTING, "invariant": True}))


def test_several_sampled_texts_differ_and_are_repeated_under_the_same_seed() -> None:
    texts = []
    for _ in range(2):
        torch.manual_seed(4)
        ids = torch.tensor([PROMPTS[2]])
        texts.append(lookahead.generate(build("llama"), ids, max_new_tokens=12, do_sample=True, num_return_sequences=5))
    assert torch.equal(*texts)
    assert len({tuple(text) for text in texts[0].tolist()}) == 5


@pytest.mark.parametrize(("name", "uneven"), diagonal(["gpt2", "gpt_bigcode", "opt"], [False, True]))
def test_rows_to_the_last_learned_position(name: str, uneven: bool) -> None:
    # An ended row must not keep the others from their remaining positions.
    prompts = PROMPTS if uneven else ((5, 6, 7) * 4, (9,) * 12, PROMPTS[0])
    check(ragged(name, prompts, max_new_tokens=MAX_POSITIONS + 1 - len(PROMPTS[0])))


@pytest.mark.parametrize(
    ("name", "uneven"),
    diagonal([name for name in ARCHITECTURES if "rope_parameters" in ARCHITECTURES[name].overrides], [False, True]),
)
def test_where_positions_depend_on_the_longest_row_texts_are_exact_or_refused(name: str, uneven: bool) -> None:
    # The longest row sets the frequencies of a forward pass for all rows, and these rows differ in length.
    random = Random(name)
    lengths = [9, 3, 20] if uneven else [9, 9, 9]
    prompts = tuple(tuple(random.choices(range(72), k=length)) for length in lengths)
    outcome = run_case(ragged(name, prompts, max_new_tokens=ROPE_CONTEXT + 8))
    assert outcome.kind in (EQUAL, REFUSED), describe(outcome, "batches")
    check(ragged(name, prompts, max_new_tokens=ROPE_CONTEXT + 1 - max(lengths)))
