"""No draft reaches beyond the last token allowed by `max_new_tokens`, in any kind of run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria

import lookahead
import tiny.families
from lookahead import Engine, LookaheadConfig
from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from model_zoo import build
from tiny.variant import Variant

PROMPT = [5, 8, 2, 5, 8, 2, 5]
TOKENS = 9


class Recorder:
    """Propose a path that is much too long, and record its final depth with the length of the text."""

    top_k = 0

    def __init__(self, depths: list[tuple[int, int]]) -> None:
        self.depths, self.length = depths, 0

    def start(self, prompt: Any) -> None:
        self.length = len(prompt)

    def propose(self, tree: TokenTree) -> None:
        path = tree.add_candidates([1] * 30)
        self.depths.append((self.length, len(path)))

    def observe(self, result: StepResult) -> None:
        self.length += len(result.tokens)

    def statistics(self) -> dict[str, Any]:
        return {}


def check(depths: list[tuple[int, int]], prompt: int, tokens: int = TOKENS) -> None:
    assert depths
    for length, depth in depths:
        assert depth == prompt + tokens - length - 1, (
            length,
            depth,
        )  # the last node is followed by one more selected token


@pytest.mark.parametrize("prompt_tokens", [512, 3])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])  # packed rows and padded rows
def test_drafts_of_an_engine_end_at_the_last_token(name: str, prompt_tokens: int) -> None:
    depths: list[tuple[int, int]] = []
    engine = Engine(build(name), LookaheadConfig(drafter=lambda: Recorder(depths)), prompt_tokens=prompt_tokens)
    for _ in range(2):
        engine.submit(PROMPT, max_new_tokens=TOKENS, do_sample=False)
    engine.run()
    check(depths, len(PROMPT))


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_of_generate_end_at_the_last_token(rows: int, options: dict[str, Any]) -> None:
    depths: list[tuple[int, int]] = []
    config = LookaheadConfig(drafter=lambda: Recorder(depths))
    lookahead.generate(
        build("llama"), torch.tensor([PROMPT] * rows), lookahead_config=config, max_new_tokens=TOKENS, **options
    )
    check(depths, len(PROMPT))


def test_chains_end_at_the_last_token() -> None:
    depths: list[tuple[int, int]] = []
    model: PreTrainedModel = tiny.families.build("qwen3_next", Variant(), "sdpa")
    config = LookaheadConfig(drafter=lambda: Recorder(depths))
    lookahead.generate(model, torch.tensor([PROMPT]), lookahead_config=config, max_new_tokens=TOKENS, do_sample=False)
    check([(length, depth) for length, depth in depths if depth], len(PROMPT))  # a prompt has no draft


class EndsFirstRow(StoppingCriteria):  # type: ignore[misc]
    """End one text early; without an end-of-sequence token it continues to the length of the others."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = [len(PROMPT) + (2 if int(row[0]) == 1 else 5) for row in input_ids]
        return torch.tensor([input_ids.shape[1] >= end for end in ends])


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_stay_within_the_room_of_the_longest_row(do_sample: bool) -> None:
    depths: list[tuple[int, int]] = []
    model = build("llama")  # before the seed, as the first build draws random numbers
    prompts = torch.tensor([[1, *PROMPT[1:]], PROMPT])
    options = {"max_new_tokens": 20, "do_sample": do_sample, "eos_token_id": None}
    torch.manual_seed(0)
    expected = model.generate(prompts, stopping_criteria=[EndsFirstRow()], **options)
    torch.manual_seed(0)
    config = LookaheadConfig(drafter=lambda: Recorder(depths))
    criteria = [EndsFirstRow()]
    text = lookahead.generate(model, prompts, lookahead_config=config, stopping_criteria=criteria, **options)
    assert torch.equal(text, expected)
    assert all(length + depth < len(PROMPT) + 20 for length, depth in depths)
