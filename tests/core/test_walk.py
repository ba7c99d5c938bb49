"""The walk, and the sampler's selection of tokens."""

from copy import copy
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.core.forest import Forest
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import follow, take_token, walk_trees


def tree_with(*paths: list[int]) -> TokenTree:
    tree = TokenTree([0])
    for path in paths:
        tree.add_candidates(path)
    return tree


def walked(tree: TokenTree, answers: list[int], stop_at: int | None = None) -> tuple[list[int], list[int], bool]:
    """Walk with a sampler that selects `answers` in order; return the path's tokens, the selected tokens, and whether
    the walk stopped."""
    named = iter(answers)
    walk = follow(tree, lambda node: (token := next(named), token == stop_at))
    return [tree.tokens[node] for node in walk.path], walk.tokens, walk.stopped


def test_bonus_token_after_a_fully_accepted_ngram_is_kept() -> None:
    assert walked(tree_with([1, 2, 3]), [1, 2, 3, 9]) == ([1, 2, 3], [1, 2, 3, 9], False)


def test_walk_leaves_at_the_first_token_nobody_drafted() -> None:
    assert walked(tree_with([1, 2, 3], [1, 5, 6]), [1, 5, 7]) == ([1, 5], [1, 5, 7], False)


def test_walk_selects_one_token_when_nothing_matches() -> None:
    assert walked(tree_with([1, 2]), [4]) == ([], [4], False)


def test_walk_stops_inside_an_accepted_run() -> None:
    # The last token is not on the path: as in plain decoding, its keys are not needed.
    assert walked(tree_with([1, 2, 3]), [1, 2, 3, 9], stop_at=2) == ([1], [1, 2], True)


class Text:
    """A text of a greedy row, for both kinds of walks; without `end_tokens`, rows are walked one by one."""

    finished, error = False, None

    def __init__(self, most_tokens: int, end_tokens: tuple[int, ...] | None) -> None:
        self.tokens: list[int] = []
        self.most_tokens, self.end_tokens = most_tokens, end_tokens
        self.sampler = TextSampler()

    @property
    def remaining(self) -> int:
        return self.most_tokens - len(self.tokens)

    def append(self, token: int) -> bool:
        self.tokens.append(token)
        return token in (self.end_tokens or ()) or len(self.tokens) >= self.most_tokens

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens


def random_tree(random: Random) -> TokenTree:
    """Return a tree of few distinct tokens, with pending tokens, branches, and maybe a window."""
    tree = TokenTree(random.choices(range(3), k=random.randint(1, 3)))
    for _ in range(random.randint(0, 6)):
        tree.add_candidates(random.choices(range(4), k=random.randint(1, 4)), random.randrange(tree.root, len(tree)))
    if random.random() < 0.3:
        tree.add_window_node(random.randrange(4), tree.root, needs_logits=True)
    return tree


class Predictions:
    """Outputs of a pass with random predictions."""

    def __init__(self, forest: Forest, random: Random) -> None:
        self.predictions = np.array([random.randrange(4) for _ in forest.tokens])
        self._firsts = forest.firsts

    def __getitem__(self, row: int) -> "Predictions":
        one = copy(self)
        one.predictions = self.predictions[self._firsts[row] : self._firsts[row + 1]]
        return one


def test_rows_walked_together_equal_single_walks() -> None:
    random, accepted, ended = Random(1), 0, 0
    for _ in range(300):
        forest = Forest([random_tree(random) for _ in range(random.randint(1, 5))])
        outputs = Predictions(forest, random)
        ends = [random.choice([None, (), (random.randrange(4),)]) for _ in forest]
        rules = [(random.randint(1, 6), tokens) for tokens in ends]
        together, alone = ([Text(*rule) for rule in rules] for _ in range(2))
        walks = walk_trees(together, forest, outputs)
        for row, text in enumerate(alone):
            assert walks[row] == follow(forest[row], partial(take_token, text, outputs[row]))
            assert together[row].tokens == text.tokens
            accepted += len(walks[row].path)
            ended += walks[row].stopped
    assert accepted > 200
    assert ended > 100


def test_sampler_draws_as_transformers_does() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    warper = TemperatureLogitsWarper(0.7)
    torch.manual_seed(5)
    expected = [
        int(torch.multinomial(torch.softmax(warper(torch.zeros(1, 1), logits), -1), 1).squeeze(1)) for _ in range(20)
    ]
    sampler = TextSampler(LogitsProcessorList([warper]), SamplingNoise())
    torch.manual_seed(5)
    assert [sampler.choose(torch.zeros(1, 1), logits) for _ in range(20)] == expected


def test_processors_see_the_exact_text_and_cannot_harm_the_logits() -> None:
    seen = []

    def processor(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(text.tolist())
        scores[:, 2] = 100.0
        return scores

    logits = torch.tensor([[0.0, 5.0, 1.0]])
    sampler = TextSampler(processor, keep_logits=True, keep_scores=True)
    assert sampler.choose(torch.tensor([[7, 8]]), logits) == 2
    assert seen == [[[7, 8]]]
    assert logits.tolist() == [[0.0, 5.0, 1.0]]
    assert sampler.logits is not None
    assert sampler.scores is not None
    assert sampler.logits[0].tolist() == [[0.0, 5.0, 1.0]]
    assert sampler.scores[0].tolist() == [[0.0, 5.0, 100.0]]


@pytest.mark.parametrize(
    ("sampler", "argmax"),
    [
        (TextSampler(), True),
        (TextSampler(noise=SamplingNoise()), False),
        (TextSampler(keep_scores=True), False),
        (TextSampler(max), False),
    ],
)
def test_logits_are_left_alone_where_the_argmax_will_do(sampler: TextSampler, argmax: bool) -> None:
    assert sampler.needs_logits is not argmax
