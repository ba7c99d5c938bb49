"""Texts that differ from the model's predictions: learning from the selected tokens, and trust in predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import lookahead
from lookahead import LookaheadConfig
from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import follow
from lookahead.drafting import AutoDrafter, DraftMemory, TokenPaths
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.learning import OUTCOME, UNTRUSTED, Step
from lookahead.drafting.checked import CheckedSource
from model_zoo import VOCAB_SIZE, build

PIECES = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 3, 4], [10, 2, 3, 11, 12, 13, 14]]


def text_of(pieces: Sequence[int]) -> list[int]:
    return [token for piece in pieces for token in PIECES[piece]]


def write(drafter: AutoDrafter, prompt: list[int], answer: list[int], right: bool = False) -> list[int]:
    """Run the steps of a fixed text, with right or unrelated predictions; return the number of nodes of each step."""
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

        def take(node: int) -> tuple[int, bool]:
            text.append(whole[len(text)])
            return text[-1], len(text) == len(whole)

        walk = follow(tree, take)
        cached += len(walk.path)
        count = drafter.top_k
        result = StepResult(tree, ids[:, 0].copy(), walk.path, walk.tokens, ids[:, :count], shares[:, :count])
        drafter.observe(result)
        sent.append(len(tree) - tree.root)
    return sent


def drafter_of(nodes: int, *sources: object) -> AutoDrafter:
    return AutoDrafter(DraftMemory(), nodes, sources=sources)  # type: ignore[arg-type]


def test_a_forced_text_is_drafted_as_well_as_from_only_text() -> None:
    prompt, answer = text_of([0, 1, 2, 0, 2, 1]), text_of([1, 0, 2, 2, 0, 1, 0, 1, 2, 1])
    matches = AutoDrafter(None, 16, explore=False)
    alone, auto = write(matches, prompt, answer), write(drafter_of(16), prompt, answer)
    assert len(auto) <= len(alone)
    assert len(auto) < len(answer) / 2


def test_a_long_copy_is_drafted_though_its_tokens_were_followed_by_others_elsewhere() -> None:
    prompt: list[int] = np.random.default_rng(0).integers(50, size=1500).tolist()
    answer = [token for begin in (20, 410, 310, 230) for token in prompt[begin : begin + 50]]
    alone = write(AutoDrafter(None, 16, explore=False), prompt, answer)
    assert len(write(drafter_of(16), prompt, answer)) <= 2 * len(alone)


def test_nothing_is_listed_where_predictions_say_nothing_and_again_where_they_do() -> None:
    drafter = drafter_of(8)
    write(drafter, text_of([0]), text_of([1, 2, 0]))
    assert drafter.top_k == 0
    for _ in range(12):
        drafter.observe(StepResult(TokenTree([1]), np.array([5]), [], [5]))
    assert drafter.top_k == 8
    write(drafter, text_of([0]), text_of([1, 2, 0]), right=True)
    assert drafter.top_k == 8


class Wrong:
    """A source that is confident and always wrong."""

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


def shares_of(tokens: Sequence[int], predicted: Sequence[int]) -> list[float]:
    """Return the share of selected tokens that were predicted, after each token; each step has one node."""
    batch = DraftBatch(DraftMemory(2, 64, 3), 1)
    batch.begin(0, [1])
    shares = []
    for token, first in zip(tokens, predicted, strict=True):
        ids, likely = np.array([[first, 9, 8]]), np.array([[0.5, 0.3, 0.1]], dtype=np.float32)
        rows = np.array([(0, 0, 1, 1, 0, 0)], dtype=OUTCOME)
        batch.learn(Step(rows, np.array([token]), ids, likely, np.empty(1, dtype=np.int64)))
        shares.append(float(batch.state.feedback["share"][0]))
    return shares


def test_predictions_that_are_selected_keep_the_trust_and_others_lose_it() -> None:
    assert shares_of([5] * 9, [5] * 9) == pytest.approx([1.0] * 9)
    lost = shares_of([7] * 30, [5] * 30)
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < UNTRUSTED


def test_sampled_tokens_that_were_thought_likely_keep_the_trust() -> None:
    random = np.random.default_rng(0)
    tokens = random.choice([5, 9, 8, 30], size=300, p=[0.5, 0.3, 0.1, 0.1]).tolist()
    shares = shares_of([*tokens, *[31] * 150], [5] * 450)
    assert min(shares[:300]) > UNTRUSTED
    assert shares[-1] < UNTRUSTED


class Recorded(LogitsProcessor):
    """Allow one token at each index."""

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
        torch.manual_seed(0)
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
    assert steps["auto"] <= steps["context_matches"] + (4 if sample else 1)
