"""Fixtures for commands: standard input, and a hook on steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import lookahead
from lookahead import StepRecord
from standard_input import StandardInput

Change = Callable[[StepRecord], StepRecord | None]


@pytest.fixture(autouse=True)
def stdin(monkeypatch: pytest.MonkeyPatch) -> StandardInput:
    """Standard input: empty, unless a test fills it."""
    return StandardInput(partial(monkeypatch.setattr, sys, "stdin"))


@pytest.fixture
def on_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Call a function for each step of `lookahead.generate`; commands see the step that it returns, if any."""
    real = lookahead.generate

    def let(change: Change) -> None:
        def generate(model: Any, input_ids: torch.Tensor, *, on_step: Any, **kwargs: Any) -> Any:
            tokens: list[int] = []

            def changed(step: StepRecord) -> None:
                step = change(step) or step
                tokens.extend(step.tokens)
                on_step(step)

            output = real(model, input_ids, on_step=changed, **kwargs)
            output.sequences = torch.cat([input_ids, torch.tensor([tokens])], dim=1)
            return output

        monkeypatch.setattr("lookahead.cli.generate.generate", generate)

    return let
