"""A drafter that is made for the first step that drafts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers.model_state import state_of
from lookahead.core.token_tree import TokenTree
from lookahead.drafting.deferred import DeferredDrafter
from lookahead.drafting.token_recycling import TokenRecyclingDrafter
from model_zoo import build


class Switch:
    """A budget that backs off until it is told otherwise."""

    backs_off = True
    chosen = left = 0

    def begin(self) -> None:
        pass


class Listening(TokenRecyclingDrafter):
    """Notes what it is started with."""

    def start(self, prompt: list[int]) -> None:
        super().start(prompt)
        self.text = list(prompt)


def test_it_is_made_when_drafting_begins_and_knows_the_text_by_then() -> None:
    import numpy as np

    from lookahead.core.outputs import StepResult

    made: list[Listening] = []

    def make() -> Listening:
        made.append(Listening(4))
        return made[-1]

    budget = Switch()
    drafter = DeferredDrafter(make, budget, dict)  # type: ignore[arg-type]
    drafter.start([1, 2])
    for token in (3, 4):
        tree = TokenTree([token - 1])
        drafter.propose(tree)
        drafter.observe(StepResult(tree, np.array([token]), [], [token]))
    assert (made, drafter.top_k) == ([], 0)
    budget.backs_off = False
    drafter.propose(TokenTree([4]))
    assert made[0].text == [1, 2, 3, 4]
    assert drafter.top_k == made[0].top_k


def test_a_call_that_backs_off_gives_the_same_text() -> None:
    model, prompt = build("llama"), torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(prompt, **options)
    lookahead.generate(model, prompt, **options)
    backing_off = generate_with(model, prompt, credit=-0.1, **options)
    assert torch.equal(backing_off.sequences, expected)
    assert backing_off.statistics.mean_nodes == 1
    assert backing_off.statistics.sources[0]
    # On the brink: from which step on it drafts, the clock decides.
    assert torch.equal(generate_with(model, prompt, credit=3.99, **options).sequences, expected)


def generate_with(model: PreTrainedModel, prompt: torch.Tensor, credit: float, **options: Any) -> Any:
    """A call whose account has backed off, with so much credit to begin with."""
    for account in state_of(model).accounts.values():
        account._credit, account._backs_off = credit, True
    config = LookaheadConfig()
    return lookahead.generate(model, prompt, lookahead_config=config, return_dict_in_generate=True, **options)
