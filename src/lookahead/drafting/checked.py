"""User-defined drafters and sources, with checks of their trees and paths."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np

from lookahead.config import LookaheadConfig
from lookahead.core.protocols import Drafter
from lookahead.core.results import StepResult
from lookahead.core.token_tree import NodeKind, TokenTree, first_path
from lookahead.core.watching import Explanation, explain
from lookahead.drafting.auto.sources import Source, TokenPaths
from lookahead.errors import InvalidArgumentError

_LISTS = ("tokens", "parents", "kinds", "depths", "needs_logits")
"""Attributes of a `TokenTree` with a value for each node."""


def _check_members(field: str, made: Any, members: Sequence[str]) -> None:
    """Raise an error if an object from a factory in a field of `LookaheadConfig` lacks a required member."""
    missing = [member for member in members if not hasattr(made, member)]
    if missing:
        raise InvalidArgumentError(
            f"{field} made {made!r}, which lacks {', '.join(missing)}; it needs {', '.join(members)}"
        )


class CheckedDrafter:
    """Wrapper of a user-defined drafter that checks its proposals.

    Args:
        make: Factory of the drafter, which serves one sequence.
        max_nodes: Maximum number of nodes of a step, the root included.
        chain: Maximum number of nodes of a chain, the root included, for a model that runs only chains. Of the tree one
            path is sent, the first-added child of each node, and `StepResult.tree` has this path. `None` for trees.

    Raises:
        InvalidArgumentError: The drafter lacks a member of `Drafter`.
    """

    def __init__(self, make: Callable[[], Any], max_nodes: int, chain: int | None = None) -> None:
        drafter = make()
        _check_members("drafter", drafter, ("top_k", "start", "propose", "observe", "statistics"))
        self._drafter: Drafter = drafter
        self._max_nodes = max_nodes
        self._chain = chain
        self.start: Callable[[Sequence[int]], None] = drafter.start
        self.observe: Callable[[StepResult], None] = drafter.observe
        self.statistics: Callable[[], dict[str, Any]] = drafter.statistics

    @property
    def top_k(self) -> int:
        """Number of likeliest tokens that the drafter needs for each node.

        Raises:
            InvalidArgumentError: It is negative or no whole number. It would affect all sequences of a step.
        """
        top_k = self._drafter.top_k
        if not isinstance(top_k, Integral) or top_k < 0:
            raise InvalidArgumentError(f"drafter={self._drafter!r} has top_k={top_k!r}; it must be 0, 1, 2, ...")
        return int(top_k)

    def propose(self, tree: TokenTree) -> None:
        """Add the drafter's proposal to the tree, and check it.

        Raises:
            InvalidArgumentError: The tree is too large, a token is outside of the vocabulary, or a parent does not
                precede its child; or the drafter has changed more than its draft.
        """
        before = len(tree)
        known = tree.vocabulary
        decided = {name: getattr(tree, name)[:] for name in _LISTS}
        root = tree.root
        tree.vocabulary = sys.maxsize  # so that unknown tokens raise an error below, instead of being left out
        try:
            self._drafter.propose(tree)
        finally:
            tree.vocabulary = known
            is_changed = tree.root != root or any(getattr(tree, one)[:before] != decided[one] for one in _LISTS)
            if is_changed:
                vars(tree).update(decided, root=root)
        if is_changed:
            raise InvalidArgumentError(
                f"drafter={self._drafter!r} changed the decided text; only add nodes to the tree"
            )
        if len(tree) - tree.root > self._max_nodes:
            raise InvalidArgumentError(
                f"drafter={self._drafter!r} proposed {len(tree) - before} nodes, but a step may have "
                f"{self._max_nodes}, the root included; propose fewer, or choose a larger step_budget"
            )
        for node in range(before, len(tree)):
            token = tree.tokens[node]
            parent = tree.parents[node]
            if not isinstance(token, Integral) or not 0 <= token < known:
                raise InvalidArgumentError(
                    f"drafter={self._drafter!r} proposed token {token!r}, which the model does not know; its tokens "
                    f"are 0 to {known - 1}"
                )
            if not (tree.needs_logits[node] or tree.kinds[node] is NodeKind.WINDOW):
                raise InvalidArgumentError(f"drafter={self._drafter!r} has a candidate without needs_logits")
            if not tree.root <= parent < node:
                raise InvalidArgumentError(
                    f"drafter={self._drafter!r} proposed a token after node {parent}; give a node of the draft that "
                    f"comes before it, or the root, {tree.root}"
                )
        if self._chain is not None:
            path = first_path(range(before, len(tree)), tree.parents[before:], tree.root)
            tree.keep_path(path[: self._chain - 1])

    def explain(self, tree: TokenTree) -> Explanation:
        """Return the drafter's explanation, if it has one."""
        return explain(self._drafter, tree)


class CheckedSource:
    """Wrapper of a user-defined source that checks its paths before the search.

    Args:
        source: Source from a factory in `LookaheadConfig(sources=...)`.
        vocabulary: Vocabulary size of the model; `None` allows any token.

    Raises:
        InvalidArgumentError: `source` lacks a member of `Source`, or its name is no text.
    """

    def __init__(self, source: Any, vocabulary: int | None = None) -> None:
        _check_members("sources", source, ("name", "start", "propose", "observe"))
        if not isinstance(source.name, str) or not source.name:
            raise InvalidArgumentError(
                f"sources made {source!r} with name={source.name!r}; it must be a non-empty string"
            )
        self._source: Source = source
        self._vocabulary = np.iinfo(np.int32).max if vocabulary is None else vocabulary
        self.name = source.name
        self.start = source.start
        self.observe = source.observe
        self.permits = getattr(source, "permits", None)
        self.certain = None
        if getattr(source, "certain", None) is not None:
            self.certain = lambda: self._checked(source.certain())

    def propose(self) -> TokenPaths:
        """Return the source's paths after checking them.

        Raises:
            InvalidArgumentError: The paths have wrong types, shapes, tokens, parents or probabilities.
        """
        paths = self._source.propose()
        try:
            tokens, parents = (np.array(values, dtype=np.int64) for values in (paths.tokens, paths.parents))
            probabilities = np.array(paths.probabilities, dtype=np.float64)
        except (AttributeError, TypeError, ValueError) as error:
            raise self._refusal(f"{paths!r}, which is no TokenPaths of numbers") from error
        if tokens.ndim != 1 or not tokens.shape == parents.shape == probabilities.shape:
            raise self._refusal(f"arrays of shapes {tokens.shape}, {parents.shape}, {probabilities.shape}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            raise self._refusal(f"tokens outside of 0 to {self._vocabulary - 1}")
        if (parents < -1).any() or (parents >= np.arange(len(parents))).any():
            raise self._refusal("a parent that does not come before its token")
        if not ((probabilities > 0) & (probabilities <= 1)).all():
            raise self._refusal("a probability that is not above 0 and at most 1")
        return TokenPaths(tokens, parents, probabilities)

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        if not all(0 <= token < self._vocabulary for token in tokens):
            raise self._refusal(f"tokens outside of 0 to {self._vocabulary - 1}")
        return list(tokens)

    def _refusal(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"source {self.name!r} proposed {what}; see lookahead.drafting.TokenPaths")


def shielded(config: LookaheadConfig, generators: Sequence[Any]) -> LookaheadConfig:
    """Return `config` with drafters and sources that draw from their own random state.

    It starts as a copy of the state of torch's `generators`, which sample the tokens.
    """
    if config.drafter is None and not config.sources:
        return config
    states = {generator: generator.get_state() for generator in generators}
    drafter = None if config.drafter is None else partial(_Shielded, config.drafter, states)
    return replace(config, drafter=drafter, sources=tuple(partial(_Shielded, make, states) for make in config.sources))


class _Shielded:
    """Drafter or source from `make` that runs with its own states in torch's generators.

    The states persist between calls, and all drafters and sources of a `generate` call share them. A swap takes
    microseconds.
    """

    def __init__(self, make: Callable[[], Any], states: dict[Any, Any]) -> None:
        self._states = states
        self._inner = self._run(make)

    def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self._swap()
        try:
            return call(*arguments)
        finally:
            self._swap()

    def _swap(self) -> None:
        for generator, state in self._states.items():
            self._states[generator] = generator.get_state()
            generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return partial(self._run, value) if callable(value) else value

    def __repr__(self) -> str:
        return repr(self._inner)
