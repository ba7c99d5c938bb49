"""What is done before the first step: loops are compiled, so that no step has to; how much of a prompt is read."""

from __future__ import annotations

import sys
from copy import deepcopy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead
from lookahead import LookaheadConfig
from lookahead.drafting.warm_up import compile_loops
from lookahead.serving.drafting import MOST_LOGITS, MOST_READ, warm_up_tokens
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


def test_prompts_are_read_as_far_as_it_pays() -> None:
    model = deepcopy(build("llama", seed=0))
    assert warm_up_tokens(model, 10, time_decides=False) == MOST_READ
    few, many = (warm_up_tokens(model, prompt, time_decides=True) for prompt in (10, 1000))
    assert 0 <= few < many <= MOST_READ
    model.lm_head = torch.nn.Linear(4, MOST_LOGITS // 100, bias=False, device="meta")
    assert warm_up_tokens(model, 10, time_decides=False) == 100
    model.lm_head = torch.nn.Identity()
    assert warm_up_tokens(model, 10, time_decides=False) == 0
