"""A drafter takes a place and fills pages with its first draft, and no earlier."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers.model_state import state_of
from lookahead.core.protocols import FixedBudget
from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory
from model_zoo import build


class Switch(FixedBudget):
    """A budget that backs off until `backs_off` is cleared."""

    backs_off = True


def test_nothing_is_made_while_drafting_backs_off_and_the_text_is_known_when_it_begins() -> None:
    budget, memory = Switch(4), DraftMemory()
    drafter = AutoDrafter(memory, budget, explore=False)
    drafter.start([1, 2, 3, 9])
    for token in (1, 2):
        tree = TokenTree([token])
        drafter.propose(tree)
        drafter.observe(StepResult(tree, np.array([token]), [], [token]))
    assert drafter.top_k == 0
    assert drafter.place < 0, "the text has no slot"
    budget.backs_off = False
    drafter.propose(tree := TokenTree([2]))
    assert tree.tokens == [2, 3, 9, 1], "as in the prompt, after the same two tokens"
    assert drafter.top_k == memory.top_k


def test_a_call_that_backs_off_gives_the_same_text() -> None:
    model, prompt = build("llama"), torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(prompt, **options)
    lookahead.generate(model, prompt, **options)
    backing_off = generate_with(model, prompt, rest=99, **options)
    assert torch.equal(backing_off.sequences, expected)
    assert backing_off.statistics.mean_nodes == 1
    assert backing_off.statistics.sources[0]
    assert torch.equal(generate_with(model, prompt, rest=3, **options).sequences, expected)


def generate_with(model: PreTrainedModel, prompt: torch.Tensor, rest: int, **options: Any) -> Any:
    """Generate during a rest with `rest` plain steps left."""
    for pace in state_of(model).paces.values():
        pace.credit.cooldown = pace.credit.until_probe = rest
    config = LookaheadConfig()
    return lookahead.generate(model, prompt, lookahead_config=config, return_dict_in_generate=True, **options)
