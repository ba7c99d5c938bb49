"""Measures what a step costs: its time against nodes and context."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.machine import process_clock
from lookahead.backends.transformers.engine_model import engine_model, runs_static
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.static_engine import acquire_steps
from lookahead.config import EngineName, LookaheadConfig
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 2048)

BRANCH = 4
"""Nodes of each candidate of the trees that are timed: an n-gram of five without its first token."""

LISTED = 8
"""Likeliest tokens that a step with a draft lists for each node; one without lists none."""


@dataclass(frozen=True)
class Point:
    """The median of so many steps of a size after a text: nodes with the root, tokens in the cache, and seconds by the
    clock that suits the device (see `clock_of`)."""

    nodes: int
    context: int
    seconds: float
    repeats: int


def clock_of(device: torch.device) -> str:
    """`"cpu"` or `"wall"`, the better clock: on a CPU that others share, wall time counts their work too."""
    return "cpu" if device.type == "cpu" else "wall"


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Time of some work by the clock of the device, from one idle moment of it to the next."""
    now = process_clock if clock_of(device) == "cpu" else perf_counter
    wait = getattr(torch, device.type).synchronize if device.type in ("cuda", "mps", "xpu") else lambda: None
    wait()
    begin = now()
    work()
    wait()
    return now() - begin


class StepBench:
    """One text of a fixed length in the cache, and steps of any size after it.

    Args:
        context: Tokens of random text to fill the cache with.
        pack_weights, engine: See `LookaheadConfig`.

    Raises:
        InvalidArgumentError: The model has no room for the text and a branch after it.
        UnsupportedModelError: The model cannot be run on token trees.
    """

    def __init__(
        self, model: PreTrainedModel, context: int, pack_weights: bool = False, engine: EngineName = "auto"
    ) -> None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._random = np.random.default_rng(0)
        self._vocabulary = int(vocabulary)
        self.context = context
        module, steps = engine_model(model, pack_weights, invariant=False), None
        if runs_static(model, engine, invariant=False):
            sizes = LookaheadConfig(step_budget=max(NODE_COUNTS), engine=engine)
            found = acquire_steps(module, sizes, 1, context + 2)
            steps = None if isinstance(found, str) else found
        self._runner = ModelRunner(module, 1, steps=steps)
        self.text = self._random.integers(self._vocabulary, size=context + 1).tolist()
        last = self._runner.last_length
        if last is not None and context + BRANCH > last:
            raise InvalidArgumentError(
                f"contexts has {context}, which with {BRANCH} tokens after it is above the {last} "
                "positions of this model"
            )
        # All but the last token go into the cache; that one is the root of every tree.
        prompt = self._runner.begin_tree(0, self.text[:-1])
        self._runner.forward([prompt])
        self._runner.commit([range(len(prompt))])
        if self._runner.begin_tree(0, self.text).room < BRANCH:
            raise InvalidArgumentError(
                f"contexts has {context}, so near to a length where this model changes that no "
                f"tree fits behind it; choose one that is {BRANCH + 1} tokens shorter or longer"
            )

    def tree(self, nodes: int) -> TokenTree:
        """A tree such as a drafter makes: the root, and candidates of `BRANCH` tokens; every node is read."""
        tree = self._runner.begin_tree(0, self.text)
        # Different first tokens, so that no candidates share nodes and the tree has as many as were asked for.
        for first in self._random.permutation(self._vocabulary)[:nodes].tolist():
            if length := min(BRANCH, nodes - len(tree)):
                tree.add_candidates([first, *self._random.integers(self._vocabulary, size=length - 1).tolist()])
        if len(tree) < nodes:
            raise InvalidArgumentError(
                f"node_counts has {nodes}, more than there are trees for with {self._vocabulary} tokens"
            )
        return tree

    def step(self, tree: TokenTree) -> None:
        """Lay out, mask, run and commit; the root and the first candidate's first token are accepted."""
        self._runner.forward([tree], LISTED if len(tree) > 1 else 0)
        self._runner.commit([range(min(2, len(tree)))])

    def undo(self) -> None:
        """Forget what the last step kept."""
        self._runner.rows[0].crop(self.context)


def measure(
    model: PreTrainedModel,
    node_counts: Sequence[int] = NODE_COUNTS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    progress: Callable[[str], None] = lambda what: None,
    pack_weights: bool = False,
) -> list[Point]:
    """Time steps of each size after texts of each length; the points are in the order in which they were asked for.

    All sizes and contexts take turns, `repeats` times, after one round that does not count. So a machine that
    becomes slower meets all of them, and the medians are comparable.

    Args:
        model: The model, on its device and in its type.
        node_counts: Sizes of the steps, in nodes, the root included; at least 1.
        contexts: Lengths of the text before the step, in tokens; at least 1.
        repeats: Steps timed of each size after each length; at least 1.
        progress: Called before each timing with what it is; see `timings`.
        pack_weights: See `LookaheadConfig.pack_weights`.

    Raises:
        InvalidArgumentError: A number is too large for the model.
        UnsupportedModelError: The model cannot be run on token trees.
        UnsupportedArgumentError: The weights cannot be packed here.
    """
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    with torch.no_grad():
        benches = [StepBench(model, context, pack_weights=pack_weights) for context in contexts]
        for _ in range(repeats + 1):
            for bench, nodes in product(benches, node_counts):
                progress(f"{nodes} nodes, context {bench.context}")
                work = partial(bench.step, bench.tree(nodes))
                times[nodes, bench.context].append(seconds_of(model.device, work))
                bench.undo()
    return [
        Point(nodes, context, median(times[nodes, context][1:]), repeats)
        for context, nodes in product(contexts, node_counts)
    ]


def timings(node_counts: Sequence[int], contexts: Sequence[int], repeats: int) -> int:
    """How often `measure` calls `progress`."""
    return (repeats + 1) * len(node_counts) * len(contexts)
