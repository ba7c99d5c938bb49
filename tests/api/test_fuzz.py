"""A slice of the fuzzer's cases, and faults that its runner must detect."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import run_cases
from compared.calls import call
from compared.case import Case, Turn
from compared.changes import PLACES, change
from compared.draws import draw_case
from compared.faults import KINDS, draw_fault
from compared.outcome import EQUAL, REFUSED, WRONG, Judge, Outcome, compare, difference, run_case
from compared.report import CaseRows, report
from compared.tables import TABLES
from run_cases import Run, draw_cases
from tiny.families import build, family_names
from tiny.variant import Variant

SLICE = 6
"""Number of cases; `make fuzz` runs more."""
FAULTS = {62: "changed model", 16: "small vocabulary", 40: "own loop", 29: "without a cache", 8: "images in an engine"}
FAULTS |= {52: "processors"}
"""One case of each kind, for the tests of faults."""
TURN = Turn(ours=True, prompts=((3, 14, 15, 9, 2, 6),), padding=(0,), settings={"max_new_tokens": 20})


def _case(**changes: object) -> Case:
    return replace(Case(0, "llama", Variant(), "sdpa", False, (TURN,)), **changes)


def test_number_is_all_that_a_case_depends_on() -> None:
    families = family_names()
    assert draw_case(123, families) == draw_case(123, families)
    assert draw_case(123, families) != draw_case(124, families)
    chosen = next(draw_cases(250, TABLES["all"], ["qwen3"]))  # the first ones are of other families
    assert chosen == draw_case(chosen.seed, families)
    assert chosen.family == "qwen3"


def test_weights_only_depend_on_the_seed() -> None:
    first = build("mixtral", Variant(seed=5), "eager").state_dict()
    second = build("mixtral", Variant(seed=5), "eager").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build("mixtral", Variant(seed=6), "eager").state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_families_equal_transformers() -> None:
    names = family_names()
    assert len(names) > 200
    assert {"llama", "gpt2", "qwen3", "gemma3", "qwen2_5_vl/multimodal"} <= set(names)


LONG = replace(TURN, prompts=(tuple(range(2, 62)),), settings={"max_new_tokens": 4, "return_dict_in_generate": True})


def test_a_prompt_and_drafts_are_no_more_than_a_table_that_is_expanded_to_a_pass() -> None:
    outcome = run_case(_case(family="big_bird", variant=Variant(context=64), turns=(LONG,)))
    assert outcome.kind == EQUAL, outcome.detail


def test_a_table_that_grows_with_the_cache_is_not_read_with_fixed_shapes() -> None:
    later = replace(LONG, prompts=((5, 9, 11, 4),), drafting={"engine": "static"}, cache="whole")
    outcome = run_case(_case(family="xglm", variant=Variant(context=64), turns=(replace(LONG, ours=False), later)))
    assert outcome.kind == EQUAL, outcome.detail


@pytest.mark.parametrize("size", [5, 32])
@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_chunks_of_prompts_with_scaled_positions_are_exact_or_refused(rope: str, size: int) -> None:
    """Chunks of transformers contain hidden tokens, which are not sent."""
    variant = Variant(context=36 if rope == "dynamic" else 128, rope=rope, rope_context=32)
    for tokens, holes in ((28, (13, 14)), (60, ()), (60, (13, 14)), (60, (0, 1))):
        settings = {"max_new_tokens": 3, "prefill_chunk_size": size, "output_logits": True}
        turn = replace(TURN, prompts=(tuple(range(2, 2 + tokens)),), settings=settings, holes=holes)
        outcome = run_case(_case(variant=variant, turns=(turn,)))
        refuses = tokens > 32 and holes != ()
        assert (outcome.kind, "prefill_chunk_size" in outcome.detail) == (REFUSED if refuses else EQUAL, refuses)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 3, "temperature": 1.5}])
def test_other_tokens_are_found(settings: dict[str, object]) -> None:
    model = build("llama", Variant(), "sdpa")
    reference = copy.deepcopy(model)
    case = _case(turns=(replace(TURN, settings=TURN.settings | settings),))
    assert compare(case, model, reference)[0].kind == EQUAL
    with torch.no_grad():
        reference.lm_head.weight[:] = reference.lm_head.weight.roll(1, 0)
    outcome, _ = compare(case, model, reference)
    assert outcome.kind == WRONG
    assert "part at new token" in outcome.detail


def test_an_error_is_found() -> None:
    reference = build("llama", Variant(), "sdpa")
    answer = call(reference, TURN, None, False)
    outcome, _ = Judge(_case(), reference, TURN, None, "row 1: ", 0).judge(RuntimeError("no"), answer)
    assert outcome.kind == WRONG
    assert "row 1: raises RuntimeError: no" in outcome.detail


def test_another_random_state_is_found() -> None:
    turn = replace(TURN, settings=TURN.settings | {"do_sample": True})
    answer = call(build("llama", Variant(), "sdpa"), turn, None, True)
    assert not difference(answer, answer, turn)
    other = replace(answer, random_state=answer.random_state.flip(0))
    assert difference(answer, other, turn) == "another random state afterwards"


def test_other_scores_are_found() -> None:
    model = build("llama", Variant(), "sdpa")
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.lm_head.weight[:] *= 1.001  # the same tokens
    settings = TURN.settings | {"output_logits": True}
    outcome, _ = compare(_case(turns=(replace(TURN, settings=settings),)), model, reference)
    assert outcome.kind == WRONG
    assert "logits at step 0" in outcome.detail


def test_refusals_are_distinguished_from_failures() -> None:
    outcome = run_case(_case(family="recurrent_gemma"))
    assert outcome.kind == REFUSED
    assert "running state" in outcome.detail


def test_report_names_the_command() -> None:
    case = _case(seed=77)
    text = report([Outcome(case, EQUAL, tokens=20), Outcome(case, WRONG, "rows [0] part")], "all")
    assert "make fuzz SEED=77   WRONG: rows [0] part" in text
    assert "llama:1" in text
    assert "2 cases: 1 equal" in text


def test_rows_are_gone_on_with(tmp_path: Path) -> None:
    def drawn() -> Iterator[Case]:
        return (_case(seed=seed, family="xlnet" if seed % 2 else "llama") for seed in range(100))

    for equal, seeds in ((2, [0, 1, 2]), (3, [3, 4])):  # seed 3 was equal before, and xlnet is refused
        outcomes: list[Outcome] = []
        with CaseRows(tmp_path / "fuzz.jsonl", "all") as rows:
            Run("all", equal=equal, chosen=True, rows=rows).run(drawn(), outcomes)
            assert rows.equal().total() == equal
        assert [outcome.case.seed for outcome in outcomes] == seeds
    with CaseRows(tmp_path / "fuzz.jsonl", "all") as rows:
        assert {family: len(set(reasons)) for family, reasons in rows.reasons().items()} == {"llama": 1, "xlnet": 1}


@pytest.mark.slow_by_nature("builds six models and makes all their calls")
def test_slice_of_the_cases() -> None:
    outcomes: list[Outcome] = []
    Run("all", SLICE).run(draw_cases(40_000, TABLES["all"]), outcomes)
    wrong = [outcome for outcome in outcomes if outcome.kind == WRONG]
    assert not wrong, report(wrong, "all")
    assert sum(outcome.kind == EQUAL for outcome in outcomes) > SLICE // 3  # a refusal is not enough


@pytest.mark.parametrize("seed", FAULTS)
def test_kinds_of_faults(seed: int) -> None:
    case = draw_fault(seed)
    assert case == draw_fault(seed)
    assert set(FAULTS.values()) == set(KINDS)
    outcome = run_case(case)
    assert outcome.kind in (EQUAL, REFUSED), report([outcome], "faults")
    assert f"1 {FAULTS[seed]}: " in report([outcome], "faults")


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_one_and_can_be_taken_back(place: str) -> None:
    model = build("llama", Variant(), "sdpa")
    ids = torch.tensor([TURN.prompts[0]])
    before = model(ids).logits
    undo = change(model, f"{place}: last place", seed=1)
    assert not torch.equal(model(ids).logits, before)
    undo()
    assert torch.equal(model(ids).logits, before)


def test_the_runner_reports_and_exits_by_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cases.main(["--sampled", "--cases", "2", "--only", "top_k"]) == 0
    assert "2 cases: 2 equal" in capsys.readouterr().out.splitlines()[-1]
    assert run_cases.main(["--sampled", "--cases", "1", "--limit", "1e-6"]) == 1
    assert "make fuzz SEED=" in capsys.readouterr().out


def test_a_case_that_takes_too_long_is_wrong() -> None:
    outcomes: list[Outcome] = []
    Run("all", 1, limit=1e-6).run(iter([_case()]), outcomes)
    assert outcomes[0].kind == WRONG
    assert "not done after 1e-06 s" in outcomes[0].detail
    Run("all", seconds=-1.0).run(iter([_case()]), outcomes)
    assert len(outcomes) == 1


@pytest.mark.parametrize("name", TABLES)
def test_a_case_is_run_again_from_its_repr(name: str) -> None:
    drawn = [next(draw_cases(number, TABLES[name])) for number in (0, 7)]
    assert [eval(repr(case)) for case in drawn] == drawn
    assert [TABLES[name].draw(case.seed) for case in drawn] == drawn


@pytest.mark.exact
@pytest.mark.parametrize("seed", range(3))
def test_passes_over_several_tokens_do_not_choose_among_equal_entries(seed: int) -> None:
    """DeepSeek V4's indexer scores many entries with 0."""
    settings = {"max_new_tokens": 40, "return_dict_in_generate": True}
    turn = replace(TURN, prompts=((5, 8, 2, 5, 8, 2, 5, 8) * 4,), settings=settings)
    outcome = run_case(_case(family="deepseek_v4", variant=Variant(seed=seed), turns=(turn,)))
    assert outcome.kind == EQUAL, outcome.detail
