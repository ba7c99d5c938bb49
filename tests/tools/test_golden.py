"""The golden record: drafts equal the recorded ones, and every difference is detected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import golden
from golden import Sent, compare, difference
from golden_record import NotRecordedError, Recording, Sampling, load, pack, save, unpack
from lookahead.core.token_tree import TokenTree

PLAYED = ("tree of 16", "chain of 4", "paper", "jacobi", "kept", "cheap", "dear", "tokens, 4 drafted", "predicted")
"""Parts of the record that run here; `make golden` runs all."""


def test_drafters_send_the_recorded_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    counts = compare(lambda name: name.endswith(PLAYED) or any(part in name for part in PLAYED))
    assert not counts["different"], capsys.readouterr().out
    assert counts["equal"] > 2000


def test_the_first_step_that_differs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sent = load(golden.SENT)
    sent["demo, tree of 16"][9][0][0] += 1
    assert compare(lambda name: name == "demo, tree of 16", sent) == {"different": 1}
    output = capsys.readouterr().out
    assert output.startswith("demo, tree of 16: draft ")
    assert "recorded" in output


@pytest.mark.parametrize(
    "sent",
    [
        [Sent((1, 2), (-1, 0), 1), Sent((4,), (-1,), 0)],  # another token
        [Sent((1, 2), (-1, -1), 1)],  # another parent
        [Sent((1, 2), (-1, 0), 2)],  # more accepted
        [Sent((1, 2), (-1, 0), 1)],  # ends early
        [Sent((1, 2), (-1, 0), 1), Sent((3,), (-1,), 0), Sent((), (), 0)],  # one step more
    ],
)
def test_any_difference_is_found(sent: list[Sent]) -> None:
    recorded = [Sent((1, 2), (-1, 0), 1), Sent((3,), (-1,), 0)]
    assert difference(sent, recorded).startswith("draft ")
    assert not difference(recorded, recorded)


def test_recordings_come_back_from_a_file(tmp_path: Path) -> None:
    listed = np.array([5, 9]), np.array([0.75, 0.125], dtype=np.float32)
    predictions = {(2, ()): listed, (2, (5, 6)): listed, (2, (7,)): listed, (3, ()): listed}
    used = {(2, ()), (2, (5, 6)), (2, (7,))}
    path = tmp_path / "said.json.xz"
    save(
        path, pack({"a": Recording([1, 2], [5, 6], Sampling(0.8, 3), predictions, used=used), "b": Recording([1], [2])})
    )
    loaded = unpack(load(path))
    assert (loaded["a"].text, loaded["a"].sampling, loaded["b"].sampling) == ([1, 2, 5, 6], Sampling(0.8, 3), None)
    assert loaded["a"].said.keys() == used
    for tokens, likely in loaded["a"].said.values():
        assert (tokens.tolist(), likely.tolist()) == ([5, 9], [0.75, 0.125])


def test_a_node_without_recorded_predictions_is_an_error() -> None:
    tree = TokenTree([1])
    tree.add_candidates([9])
    with pytest.raises(NotRecordedError):
        Recording([1], [2]).listed(0, tree)
