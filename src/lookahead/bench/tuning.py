"""Measures what a step costs: its time against nodes and context, beside what reading the weights alone takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.engine_model import engine_model, runs_static
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.static_engine import acquire_steps
from lookahead.config import LookaheadConfig
from lookahead.core.step_costs import StepCosts
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 2048)

BRANCH = 4
"""Nodes of each candidate of the trees that are timed: an n-gram of five without its first token."""

MOST_READ = 2**31
"""Most bytes that the memory limit is measured with."""

LISTED = 8
"""Likeliest tokens that a step with a draft lists for each node; one without lists none."""

Progress = Callable[[str], None]
"""Called with what is being timed, before each timing."""


@dataclass(frozen=True)
class Point:
    """One size at one context length.

    Attributes:
        nodes: Nodes of the tree, the root included.
        context: Tokens of text in the cache.
        seconds: Median time of a step, by the clock that suits the device (see `clock_of`).
        repeats: Steps timed.
    """

    nodes: int
    context: int
    seconds: float
    repeats: int


@dataclass(frozen=True)
class Measurement:
    """What was measured of one model on one device.

    Attributes:
        points: Each size at each context, in the order they were asked for.
        weight_bytes: Bytes of weights that one step reads at least.
        limit: Seconds that reading these bytes once takes on this device: no step can be shorter while the weights
            do not fit into its caches.
        clock: `"cpu"` or `"wall"`, the clock of `Point.seconds` and `limit`.
    """

    points: list[Point]
    weight_bytes: int
    limit: float
    clock: str

    @property
    def bandwidth(self) -> float:
        """Bytes read in a second."""
        return self.weight_bytes / self.limit

    def costs(self) -> StepCosts:
        """The curve through the points."""
        return StepCosts.fit((point.nodes, point.context, point.seconds) for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and lists, ready for JSON."""
        return asdict(self) | {"bandwidth": self.bandwidth}


def clock_of(device: torch.device) -> str:
    """`"cpu"` or `"wall"`, the better clock: on a CPU that others share, wall time counts their work too."""
    return "cpu" if device.type == "cpu" else "wall"


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Time of some work by the clock of the device, from one idle moment of it to the next."""
    now = process_time if clock_of(device) == "cpu" else perf_counter
    wait = getattr(torch, device.type).synchronize if device.type in ("cuda", "mps", "xpu") else lambda: None
    wait()
    begin = now()
    work()
    wait()
    return now() - begin


class StepBench:
    """One text of a fixed length in the cache, and steps of any size after it.

    Args:
        model: The model.
        context: Tokens of random text to fill the cache with.
        seed: Of the text and the trees.
        pack_weights: See `LookaheadConfig.pack_weights`.
        engine: See `LookaheadConfig.engine`.

    Raises:
        InvalidArgumentError: The model has no room for the text and a branch after it.
        UnsupportedModelError: The model cannot be run on token trees.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: int,
        seed: int = 0,
        pack_weights: bool = False,
        engine: str = "auto",
    ) -> None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._random = np.random.default_rng(seed)
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
    progress: Progress | None = None,
    pack_weights: bool = False,
) -> Measurement:
    """Time steps of each size after texts of each length.

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
        InvalidArgumentError: A list is empty, or a number too small or too large for the model.
        UnsupportedModelError: The model cannot be run on token trees.
        UnsupportedArgumentError: The weights cannot be packed here.
    """
    for name, values in (("node_counts", node_counts), ("contexts", contexts), ("repeats", [repeats])):
        if not values or min(values) < 1:
            raise InvalidArgumentError(f"{name}={values} must be at least 1, and at least one number")
    times: dict[Hashable, list[float]] = defaultdict(list)
    weight_bytes = bytes_read(model)
    note = progress or (lambda _: None)
    with torch.no_grad():
        read, share = weight_reader(model.device, weight_bytes)
        benches = [StepBench(model, context, pack_weights=pack_weights) for context in contexts]
        for repeat in range(repeats + 1):
            if repeat == 1:
                times.clear()  # the warm-up
            note("reading the weights")
            times["limit"].append(seconds_of(model.device, read))
            for bench, nodes in product(benches, node_counts):
                note(f"{nodes} nodes, context {bench.context}")
                work = partial(bench.step, bench.tree(nodes))
                times[nodes, bench.context].append(seconds_of(model.device, work))
                bench.undo()
    points = [
        Point(nodes, context, median(times[nodes, context]), repeats)
        for context, nodes in product(contexts, node_counts)
    ]
    return Measurement(points, weight_bytes, median(times["limit"]) / share, clock_of(model.device))


def timings(node_counts: Sequence[int], contexts: Sequence[int], repeats: int) -> int:
    """How often `measure` calls `progress`."""
    return (repeats + 1) * (len(node_counts) * len(contexts) + 1)


def bytes_read(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads at least.

    All of them, but for the table of input embeddings, of which a step reads a row for each node; a table that is
    also the output's (tied) is read in full. Of a mixture of experts this counts every expert, so it is no bound.
    """
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is not None and getattr(outputs, "weight", None) is getattr(inputs, "weight", None)
    skipped = set() if tied or inputs is None else {id(parameter) for parameter in inputs.parameters()}
    return sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters() if id(parameter) not in skipped
    )


def weight_reader(device: torch.device, weight_bytes: int, most: int = MOST_READ) -> tuple[Callable[[], object], float]:
    """What reads as much memory as the weights take, as fast as it goes, and the share of the weights that this is.

    On a CPU it sums float32 numbers: an addition for four bytes is hidden behind the reading, and of the ways that
    torch has to read memory (sums, maxima, dot products, matrix by vector) no other is faster. On other devices it
    copies, as is usual for them: half the bytes are read and half of them written. The array is as large as the
    weights, so that weights that fit into a cache are read from the cache here too.

    Args:
        device: Where the memory is.
        weight_bytes: Bytes of the weights.
        most: Most bytes to read; the time for more is in proportion.
    """
    share = min(1.0, most / weight_bytes)
    numbers = max(1, int(weight_bytes * share) // 4)
    if device.type == "cpu":
        return torch.ones(numbers).sum, share
    array = torch.ones(numbers // 2 + 1, device=device)  # each byte counts twice, once read and once written
    return partial(torch.empty_like(array).copy_, array), share
