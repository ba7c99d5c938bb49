"""Commands of a CPU choose float32 if the processor is slower in the 16-bit type of the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, cycle, repeat
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead.backends import loading
from lookahead.cli import main
from lookahead.demo import demo_model_path

PROMPT = "def add(a, b):"
PRODUCTS = 6
"""Timed products of one type, the warm-up included."""


@pytest.fixture
def products_take(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Replace the clock: products take these seconds in 16 bits and in float32."""

    def replace(slow: float, fast: float) -> None:
        readings = chain.from_iterable(zip(repeat(0.0), [slow] * PRODUCTS + [fast] * PRODUCTS, strict=False))
        monkeypatch.setattr(loading, "perf_counter", cycle(readings).__next__)

    return replace


def decode(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    assert main(["generate", PROMPT, "--json", "--device", "cpu", "-n", "8", *options]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_generate_takes_float32_where_it_is_faster_and_says_so(
    capsys: pytest.CaptureFixture[str], products_take: Callable[[float, float], None]
) -> None:
    products_take(3.0, 2.0)
    result, notes = decode(capsys)
    assert result["dtype"] == "float32"
    assert "1.5 times as fast" in notes
    assert "--dtype bfloat16" in notes
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert result["tokens"] == model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("options", [[], ["--dtype", "bfloat16"], ["--invariant"]])
def test_generate_keeps_the_type_of_the_files_otherwise(
    capsys: pytest.CaptureFixture[str], products_take: Callable[[float, float], None], options: list[str]
) -> None:
    products_take(3.0, 2.0 if options else 2.9)
    result, notes = decode(capsys, *options)
    assert result["dtype"] == "bfloat16"
    assert "float32" not in notes
