"""`lookahead warm-up`: the work of a first call, done in advance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookahead import LookaheadConfig
from lookahead.backends.transformers.findings import describe_setting, load_costs
from lookahead.cli import main

CPU = ["--device", "cpu", "--dtype", "float32"]


def test_it_says_where_loops_and_prices_are_kept(
    own_findings: Path, capsys: pytest.CaptureFixture[str], demo: Any
) -> None:
    assert main(["warm-up", "--json", *CPU]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(any(Path(report["loops"]).glob(name)) for name in ("all-*", "snapshots._add_up*"))
    assert Path(report["costs"]) in own_findings.rglob("*.json")
    assert load_costs(describe_setting(demo[0], LookaheadConfig())) is not None


def test_prices_can_be_left_out(own_findings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-up", "--no-price", *CPU]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["loops", "trials"]
    assert not any(own_findings.rglob("*.json"))


def test_a_folder_that_keeps_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, own_findings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lookahead.cli.tune.are_kept", lambda: False)
    assert main(["warm-up", "--no-price", *CPU]) == 2
    assert "name another folder by XDG_CACHE_HOME" in capsys.readouterr().err


def test_a_curve_that_cannot_be_kept_names_the_remedy(own_findings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own_findings / "lookahead-decoding").touch()
    assert main(["tune", "--context", "8", "--nodes", "2", "--repeats", "1", *CPU]) == 2
    message = capsys.readouterr().err
    assert "cannot keep the curve: " in message
    assert "make room, name another folder by XDG_CACHE_HOME, or give --no-store" in message
