"""What followed tokens in the root's place is drafted after the right one; how much of a prompt is read."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch

from lookahead.core.token_tree import TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory, NGramMemory, StepResult
from lookahead.serving.drafting import MOST_LOGITS, MOST_READ, warm_up_tokens
from model_zoo import build

TOP_K = 4


def test_what_followed_a_rejected_sibling_is_drafted_after_the_right_token() -> None:
    memory = DraftMemory(NGramMemory(2, 64, TOP_K))
    memory.ngrams.insert(np.array([[5, -1]]), np.array([[7]]), np.float32([[0.8]]))
    drafter = AutoDrafter(memory, 2, explore=False)
    drafter.start([5])
    tree = TokenTree([5])
    drafter.propose(tree)
    assert tree.tokens == [5, 7]
    # The model says 8, not 7; after 7 it would have said 9, or else 3.
    ids, shares = np.array([[8, 7], [9, 3]]), np.float32([[0.9, 0.1], [0.7, 0.2]])
    drafter.observe(StepResult(tree, ids[:, 0], [], [8], ids, shares))
    coming = TokenTree([8])
    drafter.propose(coming)
    assert coming.tokens == [8, 9]


def test_prompts_are_read_as_far_as_it_pays() -> None:
    model = deepcopy(build("llama", seed=0))
    assert warm_up_tokens(model, 10, time_decides=False) == MOST_READ
    few, many = (warm_up_tokens(model, prompt, time_decides=True) for prompt in (10, 1000))
    assert 0 <= few < many <= MOST_READ
    model.lm_head = torch.nn.Linear(4, MOST_LOGITS // 100, bias=False, device="meta")
    assert warm_up_tokens(model, 10, time_decides=False) == 100
    model.lm_head = torch.nn.Identity()
    assert warm_up_tokens(model, 10, time_decides=False) == 0
