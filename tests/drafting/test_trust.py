"""Texts that are not what the model would write: what is learned from the tokens selected, and from what is beside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead
from lookahead import LookaheadConfig
from lookahead.core.outputs import StepResult
from lookahead.core.shaping import Shaping
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import follow
from lookahead.drafting import AutoDrafter, ContextMatches, DraftMemory, TokenPaths
from lookahead.drafting.auto.source import CheckedSource
from lookahead.drafting.auto.trust import Trust, believed
from model_zoo import VOCAB_SIZE, build

PIECES = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 3, 4], [10, 2, 3, 11, 12, 13, 14]]


def text_of(pieces: Sequence[int]) -> list[int]:
    return [token for piece in pieces for token in PIECES[piece]]


def write(drafter: AutoDrafter, prompt: list[int], answer: list[int], right: bool = False) -> list[int]:
    """Steps of a text that is decided beforehand, with predictions that are right or have nothing to do with it; the
    nodes that each step sent."""
    whole, text, cached = [*prompt, *answer], list(prompt), 0
    drafter.start(prompt)
    sent = []
    while len(text) < len(whole):
        tree = TokenTree(text[cached:])
        drafter.propose(tree)
        ids = (np.array(tree.tokens)[:, None] * 7 + np.arange(8) + 20) % 50
        if right:
            before = len(text) - tree.root - 1  # tokens before the tree
            places = np.minimum(before + np.array(tree.depths) + 1, len(whole) - 1)
            ids[:, 0] = np.array(whole)[places]
        shares = np.full(ids.shape, 0.05, dtype=np.float32)
        shares[:, 0] = 0.5 if right else 0.05
        cached = len(text)

        def append(token: int) -> bool:
            text.append(token)
            return len(text) == len(whole)

        walk = follow(tree, lambda node: whole[len(text)], append)
        cached += len(walk.path)
        count = drafter.top_k
        result = StepResult(tree, ids[:, 0].copy(), walk.path, walk.tokens, ids[:, :count], shares[:, :count])
        drafter.observe(result)
        sent.append(len(tree) - tree.root)
    return sent


def drafter_of(nodes: int, *sources: object) -> AutoDrafter:
    return AutoDrafter(DraftMemory(), ContextMatches(), nodes, warm_up=100, sources=sources)  # type: ignore[arg-type]


def test_a_text_that_is_forced_is_drafted_as_well_as_from_the_text_alone() -> None:
    prompt, answer = text_of([0, 1, 2, 0, 2, 1]), text_of([1, 0, 2, 2, 0, 1, 0, 1, 2, 1])
    matches = AutoDrafter(None, ContextMatches(), 16, explore=False)
    alone, auto = write(matches, prompt, answer), write(drafter_of(16), prompt, answer)
    assert len(auto) <= len(alone)
    assert len(auto) < len(answer) / 2


def test_nothing_is_listed_where_predictions_say_nothing_and_again_where_they_do() -> None:
    drafter = drafter_of(8)
    write(drafter, text_of([0]), text_of([1, 2, 0]))
    assert drafter.top_k == 0
    trust = drafter._trust
    tree = TokenTree([1])
    for _ in range(12):
        trust.note(StepResult(tree, np.array([5]), [], [5]))
    assert not trust.is_lost
    write(drafter, text_of([0]), text_of([1, 2, 0]), right=True)
    assert drafter.top_k == 8


class Wrong:
    """A source that is sure, and always wrong."""

    name = "wrong"

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing to begin."""

    def propose(self) -> TokenPaths:
        return TokenPaths.chain([40, 41, 42, 43, 44, 45])

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


@pytest.mark.parametrize("right", [False, True])
def test_a_source_that_keeps_failing_costs_no_more_than_some_steps(right: bool) -> None:
    prompt, answer = text_of([0, 1, 2, 0, 2, 1]), text_of([1, 0, 2, 2, 0, 1, 0, 1, 2, 1, 0, 2])
    without = write(drafter_of(6), prompt, answer, right)
    assert len(write(drafter_of(6, CheckedSource(Wrong())), prompt, answer, right)) <= len(without) + 6


def result_of(tokens: list[int], predictions: list[int], samples: bool = False) -> StepResult:
    """A root whose only child is accepted, and a sibling of that."""
    tree = TokenTree([1])
    (path,) = tree.add_candidates([tokens[0]], tree.root)
    tree.add_candidates([30], tree.root)
    ids = np.array([[token, 9, 8] for token in predictions])
    shares = np.tile(np.array([0.5, 0.3, 0.1], dtype=np.float32), (3, 1))
    return StepResult(tree, ids[:, 0], [path], tokens, ids, shares, Shaping() if samples else None)


def test_what_is_selected_as_predicted_is_believed_as_it_is() -> None:
    result, trust = result_of([5, 6], [5, 6, 7]), Trust()
    trust.note(result)
    assert trust.share == 1
    ids, shares = believed(result, trust.share)
    assert ids is result.top_ids
    assert shares is result.top_probabilities


def test_what_is_selected_otherwise_is_learned_in_its_place() -> None:
    result = result_of([5, 9], [4, 6, 7])
    ids, shares = believed(result, 0.6)
    assert ids.tolist() == [[5, 4, 9], [9, 6, 8], [7, 9, 8]]
    assert shares == pytest.approx(np.array([[0.4, 0.3, 0.18], [0.58, 0.3, 0.06], [0.5, 0.3, 0.1]]))
    ids, shares = believed(result, 0.1)
    assert ids.tolist() == [[5], [9], [-1]], "beside the path nothing is known"
    assert shares.tolist() == [[1], [1], [0]]


def test_sampled_tokens_that_are_as_likely_as_predicted_keep_the_trust() -> None:
    random = np.random.default_rng(0)
    trust = Trust()
    for _ in range(300):
        tokens = [int(random.choice([5, 9, 8, 30], p=[0.5, 0.3, 0.1, 0.1])), 6]
        trust.note(result_of(tokens, [5, 6, 7], samples=True))
        assert not trust.is_lost
    for _ in range(150):
        trust.note(result_of([31, 32], [5, 6, 7], samples=True))
    assert trust.is_lost


class Recorded(LogitsProcessor):
    """Leaves one token at each place."""

    def __init__(self, answer: list[int], prompt: int) -> None:
        self._answer, self._prompt = answer, prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._answer[input_ids.shape[1] - self._prompt]] = 0
        return forced  # type: ignore[return-value]


@pytest.mark.parametrize("sample", [False, True])
def test_a_model_that_is_made_to_write_a_text_writes_it_in_few_steps(sample: bool) -> None:
    model = build("llama", seed=0)
    prompt = text_of([0, 1, 2, 0, 2, 1])
    answer = text_of([1, 0, 2, 2, 0, 1, 0, 1, 2, 1])
    assert max(answer) < VOCAB_SIZE
    steps = {}
    for preset in ("auto", "context_matches"):
        processors = LogitsProcessorList([Recorded(answer, len(prompt))])
        output = lookahead.generate(
            model,
            torch.tensor([prompt]),
            lookahead_config=LookaheadConfig(preset=preset, step_budget=16),
            max_new_tokens=len(answer),
            do_sample=sample,
            logits_processor=processors,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        assert output.sequences[0, len(prompt) :].tolist() == answer
        steps[preset] = output.statistics.steps
    assert steps["auto"] <= steps["context_matches"] + 2 * sample


def test_what_is_believed_again_though_nothing_was_listed() -> None:
    tree = TokenTree([5])
    (child,) = tree.add_candidates([6])
    nothing = np.empty((2, 0), dtype=np.int64), np.empty((2, 0), dtype=np.float32)
    result = StepResult(tree, np.array([6, 7]), [child], [6, 7], *nothing)
    ids, probabilities = believed(result, 1.0)
    assert ids.tolist() == [[6], [7]]
    assert probabilities.tolist() == [[1.0], [1.0]]
