"""The proposer under vLLM's protocol, simulated with arrays: inputs, drafts, and recognition of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lookahead.errors import InvalidArgumentError
from lookahead.integrations.vllm import LookaheadProposer

VOCABULARY, PLACES, ROOM = 64, 8, 200


def config(drafted: int = 4, **settings: Any) -> SimpleNamespace:
    """Return the part of vLLM's configuration that the proposer reads."""
    model = SimpleNamespace(model="m", revision=None, max_model_len=ROOM, get_vocab_size=lambda: VOCABULARY)
    return SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted),
        scheduler_config=SimpleNamespace(max_num_seqs=PLACES),
        additional_config={"lookahead": {"adaptive": False, **settings}},
    )


class Model:
    """A model: the last two tokens decide the next one."""

    def __init__(self, seed: int = 0, period: int = VOCABULARY) -> None:
        self._table = np.random.default_rng(seed).integers(0, period, (VOCABULARY, VOCABULARY))

    def after(self, text: Sequence[int]) -> int:
        return int(self._table[text[-2], text[-1]])

    def compute_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits with a peak at the next tokens `tokens`, `[rows]`."""
        return torch.nn.functional.one_hot(tokens, VOCABULARY).float() * 9

    def text(self, prompt: Sequence[int], new: int) -> list[int]:
        text = list(prompt)
        for _ in range(new):
            text.append(self.after(text))
        return text[len(prompt) :]


class Engine:
    """vLLM's work between two calls of a proposer, for each row: verify the draft, and add one token more."""

    def __init__(self, proposer: LookaheadProposer, model: Model) -> None:
        self.proposer, self._model = proposer, model
        self.texts: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.steps = 0

    def add(self, prompt: Sequence[int], place: int | None = None) -> None:
        self.texts.insert(len(self.texts) if place is None else place, list(prompt))
        self.drafts.insert(len(self.drafts) if place is None else place, [])

    def remove(self, place: int) -> list[int]:
        self.drafts.pop(place)
        return self.texts.pop(place)

    def step(self, most: int = ROOM, partial: Sequence[int] = ()) -> None:
        """Run one step. Prompts of rows in `partial` are not fully processed yet. Texts stop at `most` tokens."""
        sampled, followers = [], []
        for row, (text, draft) in enumerate(zip(self.texts, self.drafts, strict=True)):
            path = [text + draft[:count] for count in range(len(draft) + 1)]
            follows = [self._model.after(one) for one in path]
            followers += follows
            new = [follows[0]]
            for token, following in zip(draft, follows[1:], strict=True):
                if token != new[-1]:
                    break
                new.append(following)
            new = [] if row in partial else new[: most - len(text)]
            text += new
            sampled.append(new)
        self._model.compute_logits(torch.tensor(followers))
        lengths, tokens = np.zeros(PLACES, dtype=np.int32), np.zeros((PLACES, ROOM), dtype=np.int32)
        for row, text in enumerate(self.texts):
            lengths[row] = len(text)
            tokens[row, : len(text)] = text
        self.drafts = self.proposer.propose(sampled, lengths, tokens)
        assert len(self.drafts) == len(self.texts)
        self.steps += 1


def started(model: Model, drafted: int = 4, **settings: Any) -> Engine:
    proposer = LookaheadProposer(config(drafted, **settings))
    proposer.load_model(model)
    return Engine(proposer, model)


def complete(engine: Engine, prompt: Sequence[int], new: int) -> list[int]:
    engine.add(prompt)
    while len(engine.texts[-1]) < len(prompt) + new:
        engine.step(len(prompt) + new)
    return engine.remove(len(engine.texts) - 1)[len(prompt) :]


@pytest.mark.parametrize("learn", ["logits", "tokens"])
def test_texts_stay_and_take_fewer_steps(learn: str) -> None:
    model = Model(period=6)
    engine = started(model, learn=learn)
    for prompt in ([1, 2, 3], [3, 1], [5, 4, 1, 2]):
        assert complete(engine, prompt, 60) == model.text(prompt, 60)
    assert engine.steps < 120


def test_drafts_are_no_longer_than_asked_and_fit_the_context() -> None:
    model = Model(period=3)
    engine = started(model, drafted=3)
    engine.add([1, 2])
    while len(engine.texts[0]) < ROOM - 1:
        engine.step(ROOM - 1)
        assert len(engine.drafts[0]) <= min(3, ROOM - len(engine.texts[0]) - 1)


def test_logits_after_rejected_tokens_are_learned() -> None:
    """Predictions after rejected tokens help when these tokens occur later."""
    model = Model(seed=3, period=24)
    steps = []
    for learn in ("logits", "tokens"):
        engine = started(model, drafted=8, learn=learn)
        for start in range(8):
            complete(engine, [start, start + 1], 50)
        steps.append(engine.steps)
    assert steps[0] < steps[1]


def test_rows_that_move_leave_and_come_back_are_recognised() -> None:
    random, model = Random(5), Model(seed=1, period=12)
    engine = started(model)
    texts = [[random.randrange(12), random.randrange(12)] for _ in range(4)]
    for text in texts:
        engine.add(text)
    away: list[list[int]] = []
    for _ in range(60):
        engine.step()
        action = random.random()
        if action < 0.2 and len(engine.texts) > 1:  # preempted
            away.append(engine.remove(random.randrange(len(engine.texts))))
        elif action < 0.4 and away:
            engine.add(away.pop(), random.randrange(len(engine.texts) + 1))
        elif action < 0.6:
            order = random.sample(range(len(engine.texts)), len(engine.texts))
            engine.texts = [engine.texts[place] for place in order]
            engine.drafts = [engine.drafts[place] for place in order]
        if max(map(len, engine.texts)) > ROOM - 20:
            break
    for text in (*engine.texts, *away):
        assert text[2:] == model.text(text[:2], len(text) - 2)
    assert engine.proposer.statistics.requests == 4


def test_requests_of_equal_texts_are_two() -> None:
    model = Model(period=5)
    engine = started(model)
    engine.add([1, 2, 3])
    engine.add([1, 2, 3])
    for _ in range(10):
        engine.step()
    assert engine.texts[0] == engine.texts[1]
    assert engine.proposer.statistics.requests == 2


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_prompt_in_parts_is_not_drafted_for(adaptive: bool) -> None:
    engine = started(Model(), adaptive=adaptive)
    engine.add([1, 2, 3])
    engine.add([4, 5, 6])
    engine.step(partial=[1])
    assert engine.drafts[1] == []
    engine.remove(0)
    engine.step(partial=[0])
    assert engine.drafts == [[]]
    engine.step()
    assert len(engine.texts[0]) == 4


def test_aborted_requests_are_forgotten() -> None:
    engine = started(Model(period=7))
    for number in range(5 * PLACES):
        engine.add([number % VOCABULARY, number // 2, 3])
        engine.step()
        engine.step()
        engine.remove(0)
    proposer = engine.proposer
    assert proposer.statistics.requests == 5 * PLACES
    assert len(proposer._requests.absent) < PLACES


def test_tokens_that_came_unseen_are_read() -> None:
    model = Model(period=6)
    engine = started(model)
    engine.add([1, 2])
    engine.step()
    text = engine.texts[0]
    text += model.text(text, 5)
    engine.drafts[0] = []
    engine.step()
    assert engine.proposer.statistics.requests == 1
    assert text[2:] == model.text([1, 2], len(text) - 2)


def test_logits_of_other_calls_are_not_mistaken_for_the_steps() -> None:
    model = Model(period=6)
    engine = started(model)
    engine.add([1, 2])
    engine.step()
    model.compute_logits(torch.zeros(3, dtype=torch.int64))  # for example, log-probabilities of a prompt
    model.compute_logits(torch.zeros(PLACES * 5 + 1, dtype=torch.int64))
    for _ in range(20):
        engine.step()
    assert engine.texts[0][2:] == model.text([1, 2], len(engine.texts[0]) - 2)


def test_the_hook_is_only_on_the_object() -> None:
    first, second, method = Model(), Model(), Model.compute_logits
    started(first)
    assert "compute_logits" in vars(first)
    assert "compute_logits" not in vars(second)
    assert Model.compute_logits is method


def test_it_rests_where_drafts_do_not_pay() -> None:
    """A simulated clock charges a whole step for each drafted token, and the text is unpredictable."""
    random, now = Random(1), 0.0
    proposer = LookaheadProposer(config(8, adaptive=True))

    class Noise(Model):
        def after(self, text: Sequence[int]) -> int:
            return random.randrange(VOCABULARY)

    model = Noise()
    proposer.load_model(model)
    proposer._clock = lambda: now
    engine = Engine(proposer, model)
    engine.add([1, 2])
    sent = []
    for _ in range(150):
        now += 1.0 + len(engine.drafts[0])
        engine.step()
        sent.append(len(engine.drafts[0]))
    assert sum(sent[100:]) < 15


def test_a_memory_outlasts_the_worker(tmp_path: Path) -> None:
    model, path = Model(seed=2, period=30), tmp_path / "memory.npz"
    steps = []
    for _ in range(2):
        engine = started(model, memory=str(path), save_seconds=0)
        complete(engine, [1, 2, 3], 60)
        complete(engine, [7, 8], 1)
        steps.append(engine.steps)
    assert path.exists()
    assert steps[1] < steps[0]


def test_a_target_without_logits_is_drafted_for() -> None:
    model = Model(period=5)
    proposer = LookaheadProposer(config())
    proposer.load_model(object())
    engine = Engine(proposer, model)
    assert complete(engine, [1, 2, 3], 60) == model.text([1, 2, 3], 60)
    assert engine.steps < 50


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"learn": "all"}, "lookahead.learn='all'"),
        ({"adaptive": 1}, "lookahead.adaptive=1"),
        ({"memory": ""}, "lookahead.memory=''"),
        ({"save_seconds": -1}, "lookahead.save_seconds=-1"),
        ({"memory": "m.npz", "learn": "tokens"}, "learn='logits'"),
        ({"depth": 3}, "'depth': 3"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named.replace("(", r"\(")):
        LookaheadProposer(config(**settings))


def test_the_second_model_runner_is_refused_with_the_remedy() -> None:
    configuration = config()
    configuration.use_v2_model_runner = True
    with pytest.raises(InvalidArgumentError, match="VLLM_USE_V2_MODEL_RUNNER=1.* unset it"):
        LookaheadProposer(configuration)
