"""Simulated processors: the clock of decoding advances by a table of step times.

With real models and drafts, and reproducible times, `standard --prices NAME` shows how well the number of nodes is
chosen on other processors. Drafting is free here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cases import Case, Counts, generate
from lines import Config, Runner
from lookahead.backends.base import Call, CallSession
from lookahead.backends.session import open_session
from lookahead.config import LookaheadConfig
from lookahead.core.token_tree import TokenTree

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
PRICES = {
    "float32": (1, 1.35, 1.5, 1.7, 2.0, 2.65, 4.0, 7.0),
    "bfloat16": (1, 1.08, 1.12, 1.2, 1.5, 2.0, 3.0, 5.0),
    "amx": (1, 1.03, 1.05, 1.07, 1.12, 1.25, 1.5, 2.2),
    "gpu": (1, 1.03, 1.05, 1.07, 1.08, 1.11, 1.23, 1.37),
}
"""Times of steps of `NODES`, relative to a step of one node: for CPUs in float32, in bfloat16 with AVX-512 and with
AMX, and for an H200 with the shapes of an 8B model (`results/gpu-h200.jsonl`, after 512 tokens)."""

SAVED_STATES = 0.35
"""Extra time of a step with drafts for a model with running states, which are saved first; in steps of one node."""


class PricedSession(CallSession):
    """Session that runs a model with simulated step times.

    Args:
        name: Name of the table in `PRICES`.

    Attributes:
        seconds: Simulated time of all passes after the prompt, in steps of one node.
    """

    def __init__(self, name: str) -> None:
        self._prices = PRICES[name]
        self.seconds = 0.0

    def open_session(self, model: Any) -> PricedSession:
        """Open the model's session, and return this one; `generate` accepts it in place of a session of ranks."""
        self._session = open_session(model)
        return self

    def settle(self, config: LookaheadConfig) -> LookaheadConfig:
        """Forward to the model's session; see `CallSession`."""
        return self._session.settle(config)

    def begin(self, *arguments: Any) -> Call:
        """Begin a call with simulated step times; see `CallSession`."""
        call = self._session.begin(*arguments)
        runner, forward, reads_prompt = call.runner, call.runner.forward, True

        def priced(trees: Sequence[TokenTree], top_k: int = 0) -> Any:
            nonlocal reads_prompt
            if not reads_prompt:
                self.seconds += self._price(trees[0], runner.chains)
            reads_prompt = False
            return forward(trees, top_k)

        runner.forward = priced  # type: ignore[method-assign]  # for this call only
        call.clock = lambda: self.seconds
        return call

    def _price(self, tree: TokenTree, chains: bool) -> float:
        saves = chains and len(tree) > tree.root + 1
        return float(np.interp(len(tree), NODES, self._prices)) + SAVED_STATES * saves


class PricedRunner(Runner):
    """Runner with simulated step times."""

    def __init__(self, models: Any, name: str) -> None:
        super().__init__(models)
        self._name = name

    def texts(self, name: str, new: int, config: Config, case: Case, turn: int, **more: Any) -> Counts:
        """Run `Runner.texts`, with a smaller model for forced answers, as its weights have no effect."""
        return super().texts("tiny" if name == "forced" else name, new, config, case, turn, **more)

    def generate(self, model: Any, case: Case, config: Config, **more: Any) -> Counts:
        """Run `Runner.generate`, with simulated seconds."""
        if config is None:
            counts = generate(model, case, None, **more)
            return replace(counts, seconds=counts.steps - 1.0)
        session = PricedSession(self._name)
        counts = generate(model, case, config, parallel=session, **more)
        return replace(counts, seconds=session.seconds)
