"""The walk, and how the target names tokens."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from lookahead.token_tree import TokenTree
from lookahead.verification import Target, walk


def tree_with(*paths: list[int]) -> TokenTree:
    tree = TokenTree([0])
    for path in paths:
        tree.add_candidates(path)
    return tree


def follow(tree: TokenTree, answers: list[int], stop_at: int | None = None) -> tuple[list[int], list[int], bool]:
    """Walk with a target that names `answers` in order; returns tokens of the path, tokens named, stopped."""
    named = iter(answers)
    walked = walk(tree, lambda node: next(named), lambda token: token == stop_at)
    return [tree.tokens[node] for node in walked.path], walked.tokens, walked.stopped


def test_bonus_token_after_a_fully_accepted_ngram_is_kept() -> None:
    assert follow(tree_with([1, 2, 3]), [1, 2, 3, 9]) == ([1, 2, 3], [1, 2, 3, 9], False)


def test_walk_leaves_at_the_first_token_nobody_drafted() -> None:
    assert follow(tree_with([1, 2, 3], [1, 5, 6]), [1, 5, 7]) == ([1, 5], [1, 5, 7], False)


def test_walk_names_one_token_when_nothing_matches() -> None:
    assert follow(tree_with([1, 2]), [4]) == ([], [4], False)


def test_walk_stops_inside_an_accepted_run() -> None:
    # The last token is not on the path: its keys are not wanted, as in plain decoding.
    assert follow(tree_with([1, 2, 3]), [1, 2, 3, 9], stop_at=2) == ([1], [1, 2], True)


def test_target_draws_as_transformers_does() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    warper = TemperatureLogitsWarper(0.7)
    torch.manual_seed(5)
    expected = [
        int(torch.multinomial(torch.softmax(warper(torch.zeros(1, 1), logits), -1), 1).squeeze(1)) for _ in range(20)
    ]
    target = Target(LogitsProcessorList([warper]), sample=True)
    torch.manual_seed(5)
    assert [target.choose(torch.zeros(1, 1), logits) for _ in range(20)] == expected


def test_processors_see_the_exact_text_and_cannot_harm_the_logits() -> None:
    seen = []

    def processor(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(text.tolist())
        scores[:, 2] = 100.0
        return scores

    logits = torch.tensor([[0.0, 5.0, 1.0]])
    target = Target(processor, keep_logits=True, keep_scores=True)
    assert target.choose(torch.tensor([[7, 8]]), logits) == 2
    assert seen == [[[7, 8]]]
    assert logits.tolist() == [[0.0, 5.0, 1.0]]
    assert target.logits is not None
    assert target.scores is not None
    assert target.logits[0].tolist() == [[0.0, 5.0, 1.0]]
    assert target.scores[0].tolist() == [[0.0, 5.0, 100.0]]


@pytest.mark.parametrize(
    ("target", "argmax"),
    [(Target(), True), (Target(sample=True), False), (Target(keep_scores=True), False), (Target(max), False)],
)
def test_logits_are_left_alone_where_the_argmax_will_do(target: Target, argmax: bool) -> None:
    assert target.is_argmax is argmax
