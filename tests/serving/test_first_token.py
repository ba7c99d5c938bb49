"""Time to the first token, by a simulated clock: drafts of other requests do not delay it."""

from __future__ import annotations

import copy
import random
from statistics import mean

import pytest
import torch

from lookahead import LookaheadConfig
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.serving import Engine
from model_zoo import build

CLIENTS, ROWS, REQUESTS = 32, 16, 96
STEP, NODE = 1.0, 1 / 16
"""Seconds of a step, and of each node; as on a CPU, no node is free."""


class Clock:
    """A clock that advances by the number of tokens in each step."""

    now = 0.0

    def watch(self, model: torch.nn.Module) -> None:
        def count(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.now += STEP + NODE * inputs[0].numel()

        model.get_input_embeddings().register_forward_pre_hook(count)


def first_tokens(config: LookaheadConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Return the mean time to the first token, and the total time, of clients that send requests without pause."""
    clock, random_, model = Clock(), random.Random(0), copy.deepcopy(build("llama"))
    with monkeypatch.context() as patch:
        patch.setattr("lookahead.backends.machine.step_clock", lambda device: lambda: clock.now)
        engine = Engine(model, config, max_rows=ROWS)
    clock.watch(engine_model(model))
    phrase = [random_.randrange(5, 60) for _ in range(12)]
    left, begun, waited = REQUESTS, {}, []

    def ask() -> None:
        prompt = [random_.randrange(5, 60) for _ in range(8)] + phrase * 3
        begun[engine.submit(prompt, max_new_tokens=24, do_sample=False)] = clock.now

    while begun or left:
        while left and len(begun) < CLIENTS:
            ask()
            left -= 1
        before = {handle for handle in begun if not handle.tokens}
        engine.step()
        waited += [clock.now - begun[handle] for handle in before if handle.tokens]
        begun = {handle: since for handle, since in begun.items() if not handle.done}
    return mean(waited), clock.now


def test_first_tokens_come_as_soon_as_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_time = first_tokens(LookaheadConfig(preset="autoregressive"), monkeypatch)
    drafted, drafted_time = first_tokens(LookaheadConfig(memory="process"), monkeypatch)
    assert drafted <= 1.1 * plain
    assert drafted_time <= 1.02 * plain_time
