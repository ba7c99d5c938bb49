"""Keeps torch's random state from drafters and sources of a user's own, so that what they draw changes no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lookahead.config import LookaheadConfig


def shielded(config: LookaheadConfig, device: torch.device) -> LookaheadConfig:
    """`config` with drafters and sources that draw from a random state of their own, which begins as torch's.

    Args:
        config: How to draft.
        device: Where tokens are sampled.
    """
    if config.drafter is None and not config.sources:
        return config
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    shield = _Shield(generators)
    drafter = None if config.drafter is None else partial(_made, config.drafter, shield)
    return replace(config, drafter=drafter, sources=tuple(partial(_made, make, shield) for make in config.sources))


class _Shield:
    """Runs code with other states in torch's generators, and puts theirs back."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._generators = generators
        self._inside = self._states()

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What `call` returns. Takes microseconds."""
        outside = self._states()
        self._set(self._inside)
        try:
            return call(*arguments)
        finally:
            self._inside = self._states()
            self._set(outside)

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _Shielded:
    """A drafter or source, whose methods run behind a shield."""

    def __init__(self, inner: Any, shield: _Shield) -> None:
        self._inner = inner
        self._shield = shield

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return partial(self._shield.run, value) if callable(value) else value

    def __repr__(self) -> str:
        return repr(self._inner)


def _made(make: Callable[[], Any], shield: _Shield) -> _Shielded:
    return _Shielded(shield.run(make), shield)
