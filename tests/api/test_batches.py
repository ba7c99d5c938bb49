"""Batches of lookahead decoding are the batches of `model.generate`, and each row is what it would be alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import lookahead
import lookahead.serving.request
import run_batches
from batch_exactness import (
    PROCESSORS,
    BatchCase,
    BatchOutcome,
    Collector,
    random_batch_case,
    random_sampled_case,
    run_batch_case,
)
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.serving.output import StreamFeeder
from model_zoo import ARCHITECTURES, MAX_POSITIONS, ROPE_CONTEXT, build, greedy
from quick import quickly
from sampling_exactness import SETTINGS

ZOO = ("llama", "gemma3", "gpt2", "qwen3_moe", "mistral_sliding", "phi", "gpt_neox", "llama4_chunked", "gpt_oss")
"""Architectures that random cases are made for; `run_batches.py` runs all of them."""
DRAFTING = {"window_size": 4, "ngram_size": 3, "guess_set_size": 6, "pool_from_prompt": True, "pool_from_output": True}
PROMPTS = ((3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6), (40, 41), (8, 8, 8, 8, 8), (61,))
RAGGED = BatchCase("llama", PROMPTS, max_new_tokens=32, drafting=DRAFTING)
STOPS = tuple(sorted({*greedy(build("llama", 0, "eager"), PROMPTS[0], 9)[5:], *greedy(build("llama"), PROMPTS[1], 3)}))
"""Tokens at which the rows of `RAGGED` end, one early and one late."""


def check(case: BatchCase) -> BatchOutcome:
    """Run a case that must match."""
    outcome = run_batch_case(case)
    assert outcome.matched, outcome.report()
    return outcome


@pytest.mark.parametrize("number", quickly(range(3), [0]))
@pytest.mark.parametrize("name", ZOO)
def test_random_cases_match(name: str, number: int) -> None:
    check(random_batch_case(Random(f"sample {name} {number}"), name))


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
            found = lookahead.generate(model, ids, **arguments)
            assert set(shapes) == {1}, options
            if "return_dict_in_generate" not in options:
                assert torch.equal(found, expected)
                continue
            text, longer = expected.sequences, torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1)
            assert torch.equal(found.sequences, text)
            arguments |= {"attention_mask": longer}
            expected = model.generate(text, past_key_values=expected.past_key_values, **arguments)
            shapes.clear()
            found = lookahead.generate(model, text, past_key_values=found.past_key_values, **arguments)
            assert set(shapes) == {1}
            assert torch.equal(found.sequences, expected.sequences)
    finally:
        hook.remove()


def test_rows_may_finish_at_different_steps() -> None:
    # Where all rows accept the same, equality says nothing about rows at different places.
    steps: list[lookahead.StepRecord] = []
    outcome = check(RAGGED)
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    config = lookahead.LookaheadConfig(**DRAFTING)
    lookahead.generate(
        build("llama"), ids, max_new_tokens=32, do_sample=False, on_step=steps.append, lookahead_config=config
    )
    assert outcome.tokens / len(outcome.accepted_lengths) > 1.3
    by_row = [[len(step.tokens) for step in steps if step.index == row] for row in range(2)]
    assert by_row[0] != by_row[1]


@pytest.mark.parametrize("eos", [(), STOPS])
@pytest.mark.parametrize("collected", [False, True])
def test_streamed_columns_are_those_of_transformers(eos: tuple[int, ...], collected: bool) -> None:
    check(replace(RAGGED, eos=eos, streamed=True, collected=collected))


@pytest.mark.parametrize("eos", [(), STOPS])
@pytest.mark.parametrize("name", quickly(["llama", "gemma2", "opt", "mixtral"], ["gemma2"]))
def test_scores_and_logits_are_those_of_transformers(name: str, eos: tuple[int, ...]) -> None:
    check(replace(RAGGED, architecture=name, eos=eos, collected=True, settings={"no_repeat_ngram_size": 2}))


def test_rows_that_a_criterion_ends_go_on_as_in_transformers() -> None:
    # Without an end-of-sequence token nothing is padded: rows go on until the last one is through.
    alone = check(replace(RAGGED, ends=STOPS, streamed=True, collected=True))
    both = check(replace(RAGGED, ends=STOPS[:1], eos=STOPS[1:], streamed=True, collected=True))
    never = check(replace(RAGGED, ends=(70,), streamed=True))
    assert both.tokens < alone.tokens <= never.tokens


def test_a_row_may_end_with_its_first_token() -> None:
    first = greedy(build("llama", 0, "eager"), PROMPTS[1], 1)
    outcome = check(replace(RAGGED, eos=first, streamed=True, collected=True))
    assert outcome.tokens < len(PROMPTS) * RAGGED.max_new_tokens
    check(replace(RAGGED, prompts=(PROMPTS[1],) * 3, eos=first, streamed=True, collected=True))
    check(replace(RAGGED, max_new_tokens=1, streamed=True, collected=True))


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("returns", quickly([1, 2], [2]))
def test_processors_treat_each_row_as_its_own(name: str, returns: int) -> None:
    every_token = tuple(token for prompt in PROMPTS for token in prompt)
    settings = SETTINGS[name].draw(Random(f"row {name}"), every_token, 72)
    eos = STOPS if SETTINGS[name].needs_eos else ()
    check(replace(RAGGED, settings=settings, eos=eos, returns=returns, max_new_tokens=16, collected=True))


def test_criteria_and_processors_get_the_row_number() -> None:
    # With one prompt in all rows, it is the number of the row alone that makes the texts differ.
    prompts = ((5, 6, 7),) * 3
    check(replace(RAGGED, prompts=prompts, settings={"allowed": (72, 3)}))
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
    # Rows of one prompt find in the pool what another row has just written, and must not take it for their own.
    prompts = (PROMPTS[0], PROMPTS[0][3:], PROMPTS[0][1:], PROMPTS[0][:-1])
    for preset in ("paper", "jacobi"):
        check(replace(RAGGED, prompts=prompts, drafting={**DRAFTING, "preset": preset, "share_pool": share_pool}))


@pytest.mark.parametrize("eos", [(), STOPS])
@pytest.mark.parametrize("name", quickly(["llama", "gpt2", "gemma3"], ["gpt2"]))
def test_sampled_rows_are_those_of_transformers(name: str, eos: tuple[int, ...]) -> None:
    sampling = {"temperature": 0.6, "top_k": 0}
    case = replace(RAGGED, architecture=name, returns=3, eos=eos, streamed=True, collected=True, sampling=sampling)
    assert max(check(case).accepted_lengths) > 1
    settings = {"repetition_penalty": 1.3, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2}
    check(replace(case, settings=settings))
    check(replace(case, ends=(7, 9, 23)))
    check(replace(case, attention="sdpa", streamed=False, collected=False))


@pytest.mark.parametrize("name", quickly(sorted(ARCHITECTURES), ["llama", "gemma2", "qwen3_moe"]))
def test_random_sampled_batches_match(name: str) -> None:
    check(random_sampled_case(Random(f"sampled {name}"), name))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sampled_rows_draw_their_noise_again_where_it_was_dropped(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SamplingNoise.__init__, "__defaults__", (1, None, 0))
    check(replace(RAGGED, returns=3, eos=STOPS, attention=attention, sampling={"temperature": 0.6, "top_k": 0}))


def test_invariant_passes_sample_the_rows_of_transformers() -> None:
    # Tokens that are not close do not change with the bits of the logits.
    check(replace(RAGGED, attention="sdpa", sampling={"temperature": 0.6}, drafting={**DRAFTING, "invariant": True}))


def test_several_sampled_texts_differ_and_are_repeated_under_the_same_seed() -> None:
    texts = []
    for _ in range(2):
        torch.manual_seed(4)
        ids = torch.tensor([PROMPTS[2]])
        texts.append(lookahead.generate(build("llama"), ids, max_new_tokens=12, do_sample=True, num_return_sequences=5))
    assert torch.equal(*texts)
    assert len({tuple(text) for text in texts[0].tolist()}) == 5


@pytest.mark.parametrize("name", quickly(["gpt2", "gpt_bigcode", "opt"]))
@pytest.mark.parametrize("ragged", [False, True])
def test_rows_to_the_last_learned_position(name: str, ragged: bool) -> None:
    # A row that is through must not stand in the way of the others, which still have positions to go.
    prompts = PROMPTS if ragged else ((5, 6, 7) * 4, (9,) * 12, PROMPTS[0])
    check(replace(RAGGED, architecture=name, prompts=prompts, max_new_tokens=MAX_POSITIONS + 1 - len(PROMPTS[0])))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "rope_parameters" in ARCHITECTURES[name].overrides])
@pytest.mark.parametrize("ragged", [False, True])
def test_where_positions_depend_on_the_longest_row_texts_are_exact_or_refused(name: str, ragged: bool) -> None:
    # All rows share the frequencies of the longest one in a forward pass, and rows are at different places here.
    random = Random(name)
    lengths = [9, 3, 20] if ragged else [9, 9, 9]
    prompts = tuple(tuple(random.choices(range(72), k=length)) for length in lengths)
    case = replace(RAGGED, architecture=name, prompts=prompts, max_new_tokens=ROPE_CONTEXT + 8)
    outcome = run_batch_case(case)
    if not outcome.matched:
        assert "UnsupportedArgumentError" in outcome.problems[0], outcome.report()
    check(replace(case, max_new_tokens=ROPE_CONTEXT + 1 - max(lengths)))


# --- the suite has teeth: with a fault put into the library, cases fail ---------------------------------------

_commit, _narrow_all = ModelRunner.commit, lookahead.serving.request.row_processors


def _commits_the_first_row(self: ModelRunner, kept: list[list[int]]) -> None:
    """Every row keeps the states that the first row accepted."""
    _commit(self, [list(kept[0])[: len(nodes)] + list(nodes)[len(kept[0]) :] for nodes in kept])


def _narrows_to_the_first_row(processors: LogitsProcessorList, row: int, batch_size: int) -> LogitsProcessorList:
    """Every row has the processors of the first."""
    return _narrow_all(processors, 0, batch_size)


def _hands_over_at_once(self: StreamFeeder, step: lookahead.StepRecord) -> None:
    """Streams the tokens of a row when they come, whatever the others have."""
    for token in step.tokens:
        self._streamer.put(torch.tensor([token] * len(self._waiting)))


FAULTS: dict[str, tuple[object, str, Callable[..., Any], dict[str, Any]]] = {
    "cache keeps another row's nodes": (ModelRunner, "commit", _commits_the_first_row, {}),
    "processors of another row": (
        lookahead.serving.request,
        "row_processors",
        _narrows_to_the_first_row,
        {"settings": {"encoder_no_repeat_ngram_size": 1}},
    ),
    "streams rows as they come": (StreamFeeder, "add", _hands_over_at_once, {"streamed": True}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_detects_a_wrong_row(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, broken, options = FAULTS[fault]
    case = replace(RAGGED, **options)
    check(case)
    monkeypatch.setattr(owner, method, broken)
    outcome = run_batch_case(case)
    assert not outcome.matched
    assert "MISMATCH" in outcome.report()


@pytest.mark.parametrize(
    ("name", "settings"), [("sequences", {}), ("scores", {"collected": True}), ("logits", {"collected": True})]
)
def test_the_comparison_detects_a_wrong_output(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = lookahead.generate

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        value = output[name]
        last = value if name == "sequences" else value[-1]
        if last is not None and len(last) > 1:
            last[1, -1] += 1
        return output

    check(replace(RAGGED, **settings))
    monkeypatch.setattr(lookahead, "generate", wrong)
    assert not run_batch_case(replace(RAGGED, **settings)).matched


# --- the runner -----------------------------------------------------------------------------------------------


def test_runner_reports_and_exits_by_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_batches.py", "--cases", "3", "--seed", "3", "--architectures", "llama"])
    assert run_batches.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 passed, 0 failed"
    monkeypatch.setattr(ModelRunner, "commit", _commits_the_first_row)
    assert run_batches.main() == 1
    output = capsys.readouterr().out
    assert "MISMATCH" in output
    assert not output.splitlines()[-1].endswith(" 0 failed")


def test_cases_do_not_depend_on_their_number() -> None:
    few = list(run_batches.draw_cases(4, 0, ["llama", "gpt2"]))
    many = list(run_batches.draw_cases(12, 0, ["gpt2", "phi", "llama"]))
    assert {repr(case) for case in few} <= {repr(case) for case in many}


def test_a_case_is_run_again_from_its_repr() -> None:
    for name in ARCHITECTURES:
        case = random_batch_case(Random(name), name)
        assert eval(repr(case)) == case


def test_collector_keeps_what_it_is_given() -> None:
    collector = Collector()
    collector.put(torch.tensor([1, 2]))
    collector.end()
    assert (collector.puts, collector.ended) == ([[1, 2]], 1)
