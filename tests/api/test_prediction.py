"""`prediction`: a predicted output changes the steps of a call, never its text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead
from lookahead import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from model_zoo import build, greedy

PROMPT = (3, 14, 15, 9, 2, 6)
CONFIG = LookaheadConfig(step_budget=8)


def call(prediction: Any, rows: int = 1, config: LookaheadConfig = CONFIG) -> Any:
    """Generate 24 tokens with a tiny Llama."""
    return lookahead.generate(
        build("llama"),
        torch.tensor([PROMPT] * rows),
        lookahead_config=config,
        prediction=prediction,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda text: torch.tensor([text]), lambda text: [text]])
def test_a_text_that_comes_true_takes_few_steps(kind: Any) -> None:
    text = list(greedy(build("llama"), PROMPT, 24))
    expected = call(kind(text))
    assert expected.sequences[0, len(PROMPT) :].tolist() == text
    assert expected.statistics.steps <= 4
    assert call(None).statistics.steps > expected.statistics.steps


def test_a_wrong_prediction_changes_no_token() -> None:
    text = list(greedy(build("llama"), PROMPT, 24))
    changed = [*text[:5], 1, 2, *text[5:9], *text[12:]]
    assert call(changed).sequences[0, len(PROMPT) :].tolist() == text


def test_each_row_has_a_text_of_its_own_or_none() -> None:
    text = list(greedy(build("llama"), PROMPT, 24))
    output = call([text, None], rows=2)
    assert output.sequences[:, len(PROMPT) :].tolist() == [text, text]
    assert len(output.statistics.accepted_lengths) < 2 * len(call([None, None], rows=2).statistics.accepted_lengths)


@pytest.mark.parametrize("prediction", [[0.5], [-1], [10**6], "text", torch.zeros(2, 3, 4, dtype=torch.long)])
def test_a_prediction_that_is_no_token_ids_is_refused(prediction: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="prediction"):
        call(prediction)


def test_one_text_for_each_prompt_is_needed() -> None:
    with pytest.raises(InvalidArgumentError, match="2 prompts"):
        call([[1, 2]], rows=2)


def test_other_presets_do_not_draft_from_it() -> None:
    with pytest.raises(UnsupportedArgumentError, match="prediction"):
        call([1, 2], config=LookaheadConfig(preset="context_matches"))
