"""The paired comparison of two checkouts: intervals, verdicts, and files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock

from command import main
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import NoDrafter
from playback import PlayedBackend, PlayedRow, TextScript, VLLMLoop, play_text
from worth import FAILS, PASSES, UNDECIDED, Comparison, estimate, report


def cases(*ratios: float) -> dict[str, list[float]]:
    return {str(number): [ratio] for number, ratio in enumerate(ratios)}


def test_equal_cases_have_no_interval_and_pass() -> None:
    result = estimate(cases(*[1.0] * 10))
    assert (result.median, result.low, result.high) == (0, 0, 0)
    assert result.verdict(-0.01) == PASSES


@pytest.mark.parametrize(("change", "verdict"), [(0.0, PASSES), (-0.011, UNDECIDED), (-0.05, FAILS)])
def test_a_verdict_goes_by_the_ends_of_the_interval(change: float, verdict: str) -> None:
    noise = np.random.default_rng(0).normal(0, 0.005, 40)
    assert estimate(cases(*(1 + change + noise).tolist())).verdict(-0.01) == verdict


def test_turns_of_a_case_count_as_their_mean() -> None:
    assert estimate({"a": [1.25, 0.8], "b": [1.0]}).median == pytest.approx(0)


def test_a_played_text_is_decoded_without_a_model() -> None:
    assert play_text([1, 2], [3, 4, 5], NoDrafter()).steps == 3


def test_a_text_says_its_token_on_its_path_and_nothing_elsewhere() -> None:
    backend = PlayedBackend([PlayedRow(TextScript([1, 2, 3, 4, 5]))])
    tree: TokenTree = backend.begin_tree(0, [1, 2])
    right, wrong = tree.add_candidates([3, 4]), tree.add_candidates([9, 4])
    (outputs,) = backend.forward([tree], top_k=3)
    assert outputs.predictions[[tree.root, *right]].tolist() == [3, 4, 5]
    assert outputs.top_ids[right[0]].tolist() == [4, -1, -1]
    assert outputs.predictions[wrong].tolist() == [-1, -1]


class Guess:
    """Draft one right token and one wrong token."""

    def propose(self, added: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        return [[int(tokens[row, length - 1]) + 1, 0] for row, length in enumerate(lengths)]


def test_vllm_accepts_right_tokens_and_adds_one() -> None:
    loop = VLLMLoop(Guess(), 16)
    loop.run([[1], [1]], [[2, 3, 4, 5, 6], [2, 3]])
    assert [[accepted for _, accepted in step] for step in loop.steps] == [[0, 0], [1, 0], [1]]


def add(comparison: Comparison, case: str, *sides: list[int]) -> None:
    """Add a turn of a line, with the given steps of a case on each side."""
    for file, counts in zip(comparison._files, sides, strict=True):
        rows = [{"case": case, "tokens": 30, "steps": count, "seconds": 1.0} for count in counts]
        file.append({"line": "line", "turn": 0, "rows": rows})


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worth.FOLDER", tmp_path)


def test_cases_are_paired_by_their_places(tmp_path: Path) -> None:
    comparison = Comparison(SimpleNamespace(name="a"), SimpleNamespace(name="b"), tmp_path, quick=True)
    add(comparison, "same", [4, 6], [2, 6])
    assert comparison.ratios("line", 1, "S") == {"0: same": [2.0], "1: same": [1.0]}
    assert report(comparison, ["line"], 1, ["S"]) == 0


@pytest.mark.parametrize(("steps", "status"), [([10, 10, 10], 0), ([10, 11, 12], 3), ([12, 12, 12], 1)])
def test_the_exit_status_is_that_of_the_worst_line(
    steps: list[int], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison(SimpleNamespace(name="a"), SimpleNamespace(name="b"), tmp_path, quick=True)
    add(comparison, "x", [10] * 3, steps)
    assert report(comparison, ["line"], 1, ["S"]) == status
    assert ("undecided: --turns 4" in capsys.readouterr().out) == (status == 3)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(tmp_path / "lock"):
        assert main(["worth", "--base", "HEAD", "--quick"]) == 2
    assert f"another comparison is running in {tmp_path}" in capsys.readouterr().err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
