"""Measuring of step times by nodes and context."""

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
from lookahead.backends.transformers.static_engine import call_runner
from lookahead.config import EngineName, LookaheadConfig
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import DraftMemory
from lookahead.errors import InvalidArgumentError

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 2048)

BRANCH = 4
"""Nodes of each candidate in the timed trees: a 5-gram without its first token."""


@dataclass(frozen=True)
class Point:
    """Median time of steps of one size after a text.

    Attributes:
        nodes: Nodes of the step, root included.
        context: Tokens in the cache.
        seconds: Median time, by the clock of `clock_of`.
        repeats: Number of timed steps.
    """

    nodes: int
    context: int
    seconds: float
    repeats: int


def clock_of(device: torch.device) -> str:
    """Clock for a device: `"cpu"` or `"wall"`. On a shared CPU, wall time would include the work of others."""
    return "cpu" if device.type == "cpu" else "wall"


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Time of a function by the clock of the device, synchronised before and after."""
    now = process_clock if clock_of(device) == "cpu" else perf_counter
    wait = getattr(torch, device.type).synchronize if device.type in ("cuda", "mps", "xpu") else lambda: None
    wait()
    begin = now()
    work()
    wait()
    return now() - begin


class StepBench:
    """Bench with a random text of `context` tokens in the cache, for steps of any size after it.

    `pack_weights` and `engine` are fields of `LookaheadConfig`.

    Raises:
        InvalidArgumentError: The model has no room for the text and a branch after it.
        UnsupportedModelError: The model cannot run on token trees.
    """

    def __init__(
        self, model: PreTrainedModel, context: int, pack_weights: bool = False, engine: EngineName = "auto"
    ) -> None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._random = np.random.default_rng(0)
        self._vocabulary = int(vocabulary)
        self._listed = DraftMemory(capacity=1).top_k  # of each node of a draft
        self.context = context
        module = engine_model(model, pack_weights, invariant=False)
        self._runner = ModelRunner(module, 1)
        if runs_static(model, engine, invariant=False):
            sizes = LookaheadConfig(step_budget=max(NODE_COUNTS), engine=engine)
            runner = call_runner(module, sizes, 1, context + 2)
            self._runner = self._runner if isinstance(runner, str) else runner
        self.text = self._random.integers(self._vocabulary, size=context + 1).tolist()
        last = self._runner.last_length
        if last is not None and context + BRANCH > last:
            raise InvalidArgumentError(
                f"contexts has {context}, which with {BRANCH} tokens after it exceeds the {last} "
                "positions of this model"
            )
        # All but the last token go into the cache; that one is the root of every tree.
        prompt = self._runner.begin_tree(0, self.text[:-1])
        self._runner.forward([prompt])
        self._runner.commit([range(len(prompt))])
        if self._runner.begin_tree(0, self.text).room < BRANCH:
            raise InvalidArgumentError(
                f"contexts has {context}, which is too close to a length where this model switches its attention; "
                f"choose one that is {BRANCH + 1} tokens shorter or longer"
            )

    def tree(self, nodes: int) -> TokenTree:
        """Make a tree like a drafter's: the root, and candidates of `BRANCH` tokens; every node is read."""
        tree = self._runner.begin_tree(0, self.text)
        # Different first tokens, so that no candidates share nodes and the tree has exactly `nodes`.
        for first in self._random.permutation(self._vocabulary)[:nodes].tolist():
            if length := min(BRANCH, nodes - len(tree)):
                tree.add_candidates([first, *self._random.integers(self._vocabulary, size=length - 1).tolist()])
        if len(tree) < nodes:
            raise InvalidArgumentError(
                f"node_counts has {nodes}, too many for a vocabulary of {self._vocabulary} tokens"
            )
        return tree

    def step(self, tree: TokenTree) -> None:
        """Run one step, and accept the root and the first candidate's first token."""
        self._runner.forward([tree], self._listed if len(tree) > 1 else 0)
        self._runner.commit([range(min(2, len(tree)))])

    def undo(self) -> None:
        """Remove the tokens of the last step from the cache."""
        self._runner.rows[0].crop(self.context)


def measure(
    model: PreTrainedModel,
    node_counts: Sequence[int] = NODE_COUNTS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
    progress: Callable[[str], None] = lambda what: None,
    pack_weights: bool = False,
) -> list[Point]:
    """Time steps of each size after texts of each length; points are ordered by context, then by nodes.

    All sizes and contexts alternate, `repeats` times, after one round that is not counted. So a machine that becomes
    slower affects all of them, and the medians are comparable.

    Args:
        model: Model, on its device and in its type.
        node_counts: Sizes of the steps in nodes, root included.
        contexts: Lengths of the text before the step, in tokens.
        repeats: Number of timed steps for each size and length.
        progress: Called before each timing with its description; `timings` is the number of calls.
        pack_weights: See `LookaheadConfig.pack_weights`.

    Raises:
        InvalidArgumentError: A number is too large for the model.
        UnsupportedModelError: The model cannot run on token trees.
        UnsupportedArgumentError: The weights cannot be packed on this machine.
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
    """Number of times that `measure` calls `progress`."""
    return (repeats + 1) * len(node_counts) * len(contexts)
