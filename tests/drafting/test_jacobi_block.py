"""Jacobi decoding (Algorithm 1) against a plain reference of the same algorithm."""

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import follow
from lookahead.drafting import JacobiBlockDrafter, StepResult

NextToken = Callable[[list[int]], int]


def run(drafter: JacobiBlockDrafter, next_token: NextToken, prompt: list[int], tokens: int) -> list[list[int]]:
    """Decode at least `tokens` tokens with a fake model; return the accepted tokens of each step."""
    drafter.start(prompt)
    text, steps = list(prompt), []
    while sum(map(len, steps)) < tokens:
        tree = TokenTree(text[-1:])
        drafter.propose(tree)
        guesses = tree.tokens[1:]
        predictions = np.array([next_token(text + guesses[:i]) for i in range(len(tree))])
        walked = follow(tree, lambda node, p=predictions: (int(p[node]), False))
        text += walked.tokens
        drafter.observe(StepResult(tree, predictions, walked.path, walked.tokens))
        steps.append(walked.tokens)
    return steps


def reference_steps(next_token: NextToken, prompt: list[int], guesses: list[int]) -> list[int]:
    """Run Algorithm 1 on one block, recomputing all positions; return the number of tokens confirmed per iteration.

    A position is confirmed if all positions before it are, and its guess did not change.
    """
    block, confirmed, steps = list(guesses), 0, []
    while confirmed < len(block):
        new = [next_token(prompt + block[:i]) for i in range(len(block))]
        # The first open position depends only on decided text; later ones are right while the guesses before were.
        right = confirmed + 1
        while right < len(block) and block[right - 1] == new[right - 1]:
            right += 1
        steps.append(right - confirmed)
        block, confirmed = new, right
    return steps


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(2, 5))
def test_block_takes_the_steps_of_algorithm_1(seed: int, size: int, vocabulary: int) -> None:
    table = np.random.default_rng(seed).integers(vocabulary, size=(vocabulary, vocabulary))

    def next_token(text: list[int]) -> int:
        return int(table[text[-1], text[-2]])

    prompt = [0, 1, 1]
    drafter = JacobiBlockDrafter(size, max_iterations=size, seed=seed)
    drafter.start(prompt)
    drafter.propose(tree := TokenTree(prompt[-1:]))
    first_block = tree.tokens[1:]
    expected = reference_steps(next_token, prompt, first_block)
    got = [len(tokens) for tokens in run(drafter, next_token, prompt, size)]
    # The last step of a block may confirm its end, and predict the token after it at no cost.
    assert got[: len(expected) - 1] == expected[:-1]
    assert got[len(expected) - 1] in (expected[-1], expected[-1] + 1)


def test_block_is_given_up_after_max_iterations() -> None:
    drafter = JacobiBlockDrafter(block_size=6, max_iterations=2, seed=0)
    drafter.start([1, 2, 3])
    lengths = []
    for step in range(4):
        tree = TokenTree([9])
        drafter.propose(tree)
        lengths.append(len(tree) - 1)
        drafter.observe(StepResult(tree, np.full(len(tree), 50 + step), path=[], tokens=[50 + step]))
    assert lengths == [6, 5, 6, 5]


def test_block_starts_from_prompt_tokens() -> None:
    drafter = JacobiBlockDrafter(block_size=20, max_iterations=20, seed=4)
    drafter.start([7, 8])
    tree = TokenTree([8])
    drafter.propose(tree)
    assert set(tree.tokens) == {7, 8}
