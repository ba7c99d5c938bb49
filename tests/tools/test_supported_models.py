"""The rows of supported models name every family that transformers has."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from lookahead.errors import InvalidArgumentError

TOOL = importlib.import_module("supported_models")
KINDS = {family: row["runs_on"] for family, row in TOOL.read_rows().items()}


def test_every_family_has_a_row() -> None:
    seeing = {f"{family}+image" for family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    missing = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *seeing} - set(KINDS))
    assert not missing, f"transformers {transformers.__version__} has {missing}; run python tools/supported_models.py"


def test_no_family_gives_wrong_text() -> None:
    assert set(KINDS.values()) == {"trees", "chains", "refused", "not tried"}


@pytest.mark.parametrize(("family", "kind"), [("llama", "trees"), ("xlnet", "refused"), ("qwen3_5+image", "chains")])
def test_recorded_verdicts_match_the_checks(family: str, kind: str) -> None:
    assert TOOL.try_family(family)["runs_on"] == kind == KINDS[family]


def test_written_rows_are_read_again(tmp_path: Path) -> None:
    rows = TOOL.read_rows()
    TOOL.write_rows(rows.values(), tmp_path / "models.jsonl")
    assert TOOL.read_rows(tmp_path / "models.jsonl") == rows


def test_rows_are_not_written_over_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(InvalidArgumentError, match="does not begin with a row"):
        TOOL.main(["llama", "--output", str(path)])
    assert path.read_text() == "mine"
