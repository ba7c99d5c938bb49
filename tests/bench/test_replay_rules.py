"""The rules that replays compare with, beside brute force and transformers' own."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import TokenTree
from replay.lookup_rules import BestCopy, FirstOccurrence, RecycledText, TextRule
from replay.suffix_decoding import SuffixDecoding, SuffixText, speculate


def random_text(random: Random, tokens: int, length: int) -> list[int]:
    return [random.randrange(tokens) for _ in range(length)]


def drafted(rule: TextRule | SuffixDecoding, text: list[int]) -> list[int]:
    rule.start(text)
    tree = TokenTree(text[-1:])
    rule.propose(tree)
    return tree.tokens[1:]


@pytest.mark.parametrize("seed", range(20))
def test_prompt_lookup_is_that_of_transformers(seed: int) -> None:
    random = Random(seed)
    text = random_text(random, random.choice((2, 4, 9)), random.randrange(2, 40))
    theirs = PromptLookupCandidateGenerator(num_output_tokens=6, max_matching_ngram_size=2, max_length=1000)
    ids, _ = theirs.get_candidates(torch.tensor([text]))
    assert drafted(FirstOccurrence(6, 1, 2), text) == ids[0, len(text) :].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_n_gram_rule_takes_the_first_occurrence_of_the_longest(seed: int) -> None:
    random = Random(seed)
    text = random_text(random, random.choice((2, 3, 5)), random.randrange(2, 60))
    found: list[int] = []
    for size in (4, 3, 2):
        starts = [at for at in range(len(text) - size) if text[at : at + size] == text[len(text) - size :]]
        if starts:
            found = text[starts[0] + size : starts[0] + size + 5]
            break
    assert drafted(FirstOccurrence(5, 2, 4), text) == found


def test_recycled_text_drafts_what_followed_last() -> None:
    rule = RecycledText(3)
    rule.start([1, 2, 3, 1, 4, 1])
    tree = TokenTree([1])
    rule.propose(tree)
    assert list(zip(tree.tokens, tree.parents, strict=True))[1:] == [(4, 0), (2, 0), (1, 1)]


def test_the_best_copy_is_the_longest_run_of_the_answer() -> None:
    rule = BestCopy(3, [1, 2, 9, 1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    assert drafted(rule, [7]) == [1, 2, 3]
    rule.extend([1, 2, 3, 4])
    assert rule.look_up() == []


def continuations(texts: list[list[int]], suffix: list[int], depth: int) -> dict[tuple[int, ...], int]:
    """How often each continuation of a suffix occurs, the empty one included."""
    counts: dict[tuple[int, ...], int] = {}
    for text in texts:
        for end in range(len(text), len(suffix) - 1, -1):  # the latest first, as drafts take equal ones
            if text[end - len(suffix) : end] == suffix:
                for size in range(min(depth - len(suffix), len(text) - end) + 1):
                    key = tuple(text[end : end + size])
                    counts[key] = counts.get(key, 0) + 1
    return counts


def best_score(texts: list[list[int]], most: int, factor: float, least: float, branches: bool, depth: int) -> float:
    """The score of suffix decoding's draft, from the counts of all continuations."""
    text, best = texts[-1], 0.0
    for size in range(1, min(len(text) - 1, depth) + 1):
        counts = continuations(texts, text[-size:], depth)
        limit = min(most, int(size * factor + 1e-6))
        probabilities = {(): 1.0}
        score, waiting = 0.0, [()]
        taken: list[tuple[int, ...]] = []
        while len(taken) < limit and waiting:
            path = waiting.pop(0)
            children = [key for key in counts if len(key) == len(path) + 1 and key[:-1] == path]
            for key in children:
                probabilities[key] = probabilities[path] * counts[key] / counts[path]
            if branches:
                waiting = sorted([*waiting, *children], key=lambda key: -probabilities[key])
            else:
                waiting = sorted(children, key=lambda key: -probabilities[key])[:1]
            waiting = [key for key in waiting if probabilities[key] >= least]
            if waiting:
                taken.append(waiting[0])
                score += probabilities[waiting[0]]
        best = max(best, score)
    return best


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_suffix_decoding_has_the_score_of_all_continuations(seed: int, branches: bool) -> None:
    random = Random(seed)
    texts = [random_text(random, random.choice((2, 4)), random.randrange(1, 24)) for _ in range(random.randrange(1, 4))]
    known = SuffixText()
    for text in texts:
        known.begin()
        known.extend(text)
    settings = (random.choice((3, 9)), random.choice((1.0, 2.5)), 0.1, branches)
    draft = speculate(known, np.array(texts[-1]), *settings, depth=12)
    assert draft.score == pytest.approx(best_score(texts, *settings, depth=12))


def test_suffix_decoding_drafts_what_was_most_frequent() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    assert drafted(SuffixDecoding(5, factor=2), text) == [4, 8, 1, 2]


def test_outputs_of_earlier_requests_are_drafted_from() -> None:
    outputs = SuffixText()
    first = SuffixDecoding(4, outputs, factor=2)
    first.start([1])
    tree = TokenTree([1])
    first.observe(StepResult(tree, None, [], [5, 6, 7, 8]))  # type: ignore[arg-type]
    second = SuffixDecoding(4, outputs, factor=2)
    second.start([9])
    second.observe(StepResult(tree, None, [], [5, 6]))  # type: ignore[arg-type]
    after = TokenTree([6])
    second.propose(after)
    assert after.tokens[1:] == [7, 8]
