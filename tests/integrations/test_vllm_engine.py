"""vLLM with and without our drafts, and checks of vLLM's behaviour that the proposer relies on.

`make test-vllm` runs this file in its own environment. Each engine has its own process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

TESTED = ("0.32.0",)
NEW, PROMPTS = 48, 40
SCENARIOS = Path(__file__).with_name("vllm_scenarios.py")
SECONDS = 400


def run(scenario: str, folder: Path) -> Any:
    output = folder / f"{scenario}.json"
    command = [sys.executable, str(SCENARIOS), scenario, str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("without_drafts", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("with_drafts", tmp_path_factory.mktemp("drafting"))


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("contract", tmp_path_factory.mktemp("called"))


def changed(plain: Any, what: str) -> str:
    return f"vLLM {plain['version']} (tested: {', '.join(TESTED)}) has changed: {what}"


@pytest.mark.parametrize("at_once", [1, 16])
def test_texts_equal_texts_without_drafts(plain: Any, drafting: Any, at_once: int) -> None:
    assert len(plain["texts"]) == PROMPTS
    assert drafting[f"texts, {at_once} at once"] == plain["texts"]
    assert drafting[f"steps, {at_once} at once"] * at_once < 0.75 * PROMPTS * NEW


def test_requests_arrive_and_are_aborted(plain: Any, drafting: Any) -> None:
    assert PROMPTS / 3 < len(drafting["aborted"]) < PROMPTS
    for number, text in drafting["aborted"].items():
        assert text == plain["texts"][int(number)]


def test_log_probabilities_change_nothing(plain: Any, drafting: Any) -> None:
    assert drafting["with log-probabilities"] == plain["texts"][:8]


def test_sampled_texts_are_complete(plain: Any, drafting: Any) -> None:
    assert [len(text) for text in drafting["sampled"]] == [NEW] * 8
    assert drafting["sampled"] != plain["texts"][:8]


def test_prompts_in_parts_preempted_requests_and_shared_prefixes(plain: Any, tmp_path: Path) -> None:
    result = run("with_little_memory", tmp_path)
    assert result["texts"] == 2 * plain["texts"]
    assert result["statistics"]["accepted"] > 0


def test_the_version_is_one_that_was_tested(plain: Any) -> None:
    version = plain["version"].split("+")[0]
    assert version in TESTED, f"vLLM {version} is not in docs/vllm.md; if all other tests pass, add it there and here"


def test_the_class_is_built_and_given_the_model(plain: Any, called: Any) -> None:
    assert called["class"] == "LookaheadProposer", changed(plain, "the drafter is not the class that was named")
    assert called["reads"], changed(plain, "load_model is not called with the target, or that has no compute_logits")


def test_vllm_calls_propose_with_the_expected_arguments(plain: Any, called: Any) -> None:
    assert called["calls"], changed(plain, "propose is not called after steps")
    for call in called["calls"]:
        assert call["given"] == 3, changed(plain, f"propose has {call['given']} positional arguments, not 3")
        assert call["named"] == ["slot_mappings"], changed(plain, f"propose has the named arguments {call['named']}")
        assert call["lists"], changed(plain, "sampled_token_ids is no list of lists")
        assert call["ends"], changed(plain, "token_ids_cpu does not end with the tokens that were sampled")


def test_logits_have_a_row_for_each_drafted_token(plain: Any, called: Any, drafting: Any) -> None:
    for result in (called, drafting):
        assert result["statistics"]["unread"] == 0, changed(
            plain, "compute_logits is not called through the target, or not with a row for each drafted token"
        )


def test_a_setting_that_is_unknown_is_named(plain: Any, tmp_path: Path) -> None:
    assert "adaptiv" in run("unknown_setting", tmp_path)["error"], changed(plain, "additional_config is not passed on")
