"""Loops are compiled before the first step, so that no step has to."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead
from lookahead import LookaheadConfig
from lookahead.drafting.background import compile_loops
from model_zoo import build


def compiled_signatures() -> dict[str, int]:
    registry = pytest.importorskip("numba.core.registry")
    return {
        f"{name}.{key}": len(value.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith("lookahead.drafting")
        for key, value in vars(module).items()
        if isinstance(value, registry.CPUDispatcher)
    }


@pytest.mark.parametrize(
    "fields", [{}, {"step_budget": 16}, {"preset": "context_matches"}, {"preset": "token_recycling"}]
)
def test_decoding_compiles_nothing_more(fields: dict[str, object]) -> None:
    compile_loops()
    before = compiled_signatures()
    assert before
    prompt = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    config = LookaheadConfig(**fields)  # type: ignore[arg-type]
    lookahead.generate(build("llama"), prompt, lookahead_config=config, max_new_tokens=32, do_sample=False)
    after = compiled_signatures()
    assert {name: count for name, count in after.items() if count != before[name]} == {}


class Forces(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -1e9)
        forced[:, input_ids.shape[1] % 7] = 0
        return forced


def test_forced_and_expected_texts_compile_nothing_more() -> None:
    compile_loops()
    before = compiled_signatures()
    model, prompt = build("llama"), torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    lookahead.generate(model, prompt, logits_processor=LogitsProcessorList([Forces()]), max_new_tokens=48)
    lookahead.generate(model, prompt, prediction=[3, 4, 5, 6], max_new_tokens=16, do_sample=False)
    after = compiled_signatures()
    assert {name: count for name, count in after.items() if count != before[name]} == {}


def test_a_process_compiles_before_its_first_step() -> None:
    pytest.importorskip("numba")
    fresh = lookahead.drafting.build_drafter
    compile_loops.cache_clear()
    fresh(LookaheadConfig(preset="paper"))
    assert compile_loops.cache_info().currsize == 0  # the paper's method has no loops to compile
    fresh(LookaheadConfig())
    assert compile_loops.cache_info().currsize == 1
