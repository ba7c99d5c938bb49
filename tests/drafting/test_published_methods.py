"""Suffix decoding and RACER: drafts by hand and by brute force, and texts equal to `generate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import lookahead
from lookahead import InvalidArgumentError, LookaheadConfig
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import RacerDrafter, StepResult, SuffixDecodingDrafter, build_drafter
from model_zoo import build

Paths = dict[tuple[int, ...], float]


def frequencies(text: Sequence[int], suffix: Sequence[int], depth: int, at_least: float) -> Iterator[tuple[Any, float]]:
    """Yield each continuation of a suffix with its relative frequency, counted in the plain text."""
    places = [end for end in range(len(suffix), len(text) + 1) if text[end - len(suffix) : end] == suffix]
    for length in range(1, depth - len(suffix) + 1):
        counts = Counter(tuple(text[end : end + length]) for end in places if end + length <= len(text))
        for path, times in counts.items():
            if times / len(places) >= at_least:
                yield path, times / len(places)


def best_sum(text: list[int], nodes: int, factor: float, at_least: float, depth: int) -> float:
    """Largest sum of probabilities of the drafts of all suffixes."""
    sums = [0.0]
    for length in range(1, min(len(text), depth)):
        found = sorted((share for _, share in frequencies(text, text[-length:], depth, at_least)), reverse=True)
        sums.append(sum(found[: min(nodes - 1, int(length * factor))]))
    return max(sums)


def tree_of(drafter: Any, text: Sequence[int], **limits: Any) -> TokenTree:
    tree = TokenTree([text[-1]], **limits)
    drafter.propose(tree)
    return tree


def path_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    return () if node == tree.root else (*path_of(tree, tree.parents[node]), tree.tokens[node])


@pytest.mark.parametrize(("nodes", "factor", "at_least"), [(16, 1.0, 0.1), (12, 4.0, 0.01), (40, 2.5, 0.3)])
def test_suffix_decoding_drafts_the_largest_sum_of_frequencies(nodes: int, factor: float, at_least: float) -> None:
    random = Random(0)
    for _ in range(40):
        text = [random.randint(1, random.choice((2, 4))) for _ in range(random.randint(1, 60))]
        drafter = SuffixDecodingDrafter(nodes, factor, 0.0, at_least, depth=20)
        cut = random.randint(1, len(text))
        drafter.start(text[:cut])
        if cut < len(text):
            drafter.observe(StepResult(TokenTree([text[cut - 1]]), np.array([0]), [], text[cut:]))
        tree = tree_of(drafter, text)
        likely = [origin.probability or 0.0 for origin in drafter.explain(tree).origins]
        assert sum(likely) == pytest.approx(best_sum(text, nodes, factor, at_least, 20))
        drafted = {path_of(tree, node + 1): share for node, share in enumerate(likely)}
        suffixes = (text[-length:] for length in range(1, min(len(text), 20)))
        assert not drafted or any(
            drafted.items()
            <= {path: pytest.approx(share) for path, share in frequencies(text, suffix, 20, at_least)}.items()
            for suffix in suffixes
        )


def test_suffix_decoding_keeps_to_room_vocabulary_and_chains() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 1, 2, 3, 1, 2]
    for chains in (False, True):
        drafter = SuffixDecodingDrafter(16, 8.0, 0.0, 0.01, 64, chains)
        drafter.start(text)
        assert tree_of(drafter, text, max_depth=2).depths == [0, 1, 2] if chains else True
        tree = tree_of(drafter, text)
        assert all(parent == node for node, (parent, _) in enumerate(pairwise([*tree.parents[1:], 0]))) == chains
        tree = TokenTree([2])
        tree.vocabulary = 4
        drafter.propose(tree)
        assert max(tree.tokens) == 3


def observe(drafter: RacerDrafter, root: int, listed: dict[int, list[int]], tokens: list[int]) -> None:
    """Observe a step whose tree has the root and the listed tokens as nodes."""
    tree = TokenTree([root])
    tree.add_candidates([token for token in listed if token != root])
    ids = np.array([listed.get(token, [-1, -1]) for token in tree.tokens])
    drafter.observe(StepResult(tree, ids[:, 0], [], tokens, ids, np.ones(ids.shape, dtype=np.float32)))


def test_racer_retrieves_first_and_fills_up_with_likely_tokens() -> None:
    drafter = RacerDrafter(8, ngram_size=4, breadth=2, capacity=1000)
    drafter.start([1, 2, 3, 4, 1, 2, 3, 5, 1])
    observe(drafter, 1, {1: [7, 2], 2: [8, 9]}, [2])
    # After 1, 2 came 3 twice, then 4 or 5 once; the last n-gram ends before the 2.
    assert [path_of(tree, node) for tree in [tree_of(drafter, [2])] for node in range(1, len(tree))] == [
        (3,),
        (3, 4),
        (3, 5),
        (8,),
        (9,),
    ]


def test_racer_levels_the_likely_tokens_by_rank() -> None:
    drafter = RacerDrafter(12, ngram_size=10, breadth=4, capacity=1000)
    drafter.start([1])
    listed = {token: [10 * token + rank for rank in range(1, 5)] for token in (1, 11, 12, 13)}
    observe(drafter, 1, listed, [1])
    tree = tree_of(drafter, [1])
    counts = Counter(path_of(tree, node)[:-1] for node in range(1, len(tree)))
    assert counts == {(): 4, (11,): 2, (12,): 1, (13,): 1}


def test_racer_forgets_the_least_recently_used_ngrams() -> None:
    small, large = (RacerDrafter(8, ngram_size=3, breadth=2, capacity=size) for size in (9, 1000))
    text = [1, 2, 3, *range(20, 32), 1]
    for drafter, expected in ((small, []), (large, [3])):
        drafter.start(text)
        observe(drafter, 1, {}, [2])
        assert drafter.statistics()["entries"] <= drafter.capacity
        assert tree_of(drafter, [2]).tokens[1:] == expected


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 1.2}])
@pytest.mark.parametrize(
    "fields",
    [
        {"preset": "suffix_decoding"},
        {"suffix_factor": 16, "suffix_min_probability": 0.01, "step_budget": 24},
        {"preset": "racer"},
        {"racer_ngram_size": 4, "racer_breadth": 3, "racer_capacity": 60, "step_budget": 16},
    ],
)
def test_texts_equal_generate(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    model, config = build("llama"), LookaheadConfig(**fields)
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]])
    options = {"max_new_tokens": 60, "attention_mask": torch.ones_like(prompt), **sampling}
    torch.manual_seed(0)
    expected = model.generate(prompt, **options)
    torch.manual_seed(0)
    output = lookahead.generate(model, prompt, lookahead_config=config, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected)
    if not sampling["do_sample"]:
        assert output.statistics.steps < 60


@pytest.mark.parametrize("fields", [{"suffix_factor": -1}, {"suffix_offset": float("nan")}, {"racer_ngram_size": 2}])
def test_wrong_sizes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(fields))):
        LookaheadConfig(**fields)
    assert build_drafter(LookaheadConfig(preset="racer"), chains=True).top_k == 8
