"""The page of supported models names every family that transformers has."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ROWS = dict(re.findall(r"^\| `([\w.+-]+)` \| \w+ \| ([\w ]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_family_has_a_row() -> None:
    seeing = {f"{family}+image" for family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    missing = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *seeing} - set(ROWS))
    assert not missing, f"transformers {transformers.__version__} has {missing}; run python tools/supported_models.py"


def test_no_family_gives_wrong_text() -> None:
    assert set(ROWS.values()) == {"trees", "chains", "refused", "not tried"}


@pytest.mark.parametrize(("family", "kind"), [("llama", "trees"), ("mamba", "refused"), ("qwen3_5+image", "chains")])
def test_what_is_said_is_what_happens(family: str, kind: str) -> None:
    spec = importlib.util.spec_from_file_location("supported_models", PAGE.parents[1] / "tools" / "supported_models.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules["supported_models"] = tool  # where its dataclasses look
    spec.loader.exec_module(tool)
    assert tool.try_family(family).kind == kind == ROWS[family]
