"""Measure what the drafting of `preset="auto"` takes: microseconds of each part of a step, bytes over many requests.

No model runs: one made of a hash function says what follows after every node, with tokens as unevenly frequent as those
of texts, so that the parts can be timed alone and the vocabulary can be as large as one likes. Times are CPU time of
the process, since wall time counts the work of others on a shared machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.bench.rows import Row, resident_bytes
from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.budget import FixedBudget, Send
from lookahead.core.compiled import IS_COMPILED
from lookahead.core.pace import Pace, PacedRow
from lookahead.core.step_costs import StepCosts
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import (
    AutoDrafter,
    DraftMemory,
    StepResult,
)
from lookahead.errors import InvalidArgumentError
from probe import Probe, Unit, option

TOP_K = 8
PROBABILITIES: NDArray[np.float32] = np.array([0.5, 0.18, 0.09, 0.05, 0.03, 0.02, 0.015, 0.01], dtype=np.float32)
TOPIC_TOKENS = 50
"""Tokens after which the model changes its mind about pairs of tokens, so that texts do not go round in circles."""

PROMPT_TOKENS = 200
WARM_UP_STEPS = 40
TEXT_STEPS = 200
REQUEST_STEPS, REQUEST_NODES = 24, 16
MARKS = (1, 10, 100, 1000)

PARTS: dict[str, tuple[str, str]] = {
    "search the tree": ("_batch", "find"),
    "budget": ("budget", "offer"),
    "add to the tree": ("", "_send"),
    "learn": ("_batch", "learn"),
}
"""Where the parts of a step are: an attribute of `AutoDrafter`, or none for itself, and a method of that."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    vocabulary: int = option(128_000, f"tokens that the model knows, a multiple of {TOP_K}")
    texts: int = option(5, f"texts of {TEXT_STEPS} steps for each size")
    requests: int = option(1000, "texts with one memory")


class HashedModel:
    """A model without weights: what follows depends on the last two tokens, and now and then on the place.

    Args:
        vocabulary: Its tokens; a multiple of `TOP_K`.
        seed: Which of all such models.
    """

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self._seed = seed

    def top_ids(self, tokens: NDArray[np.int64], before: NDArray[np.int64], place: int) -> NDArray[np.int64]:
        """The likeliest next tokens after each pair of tokens, `[pairs, TOP_K]`; every second one by the last alone."""
        ranks = np.arange(TOP_K)
        pairs = (before + 1) * 7919 + place // TOPIC_TOKENS * 104729
        codes = tokens[:, None] * 1_000_003 + np.where(ranks % 2, 0, pairs[:, None]) + ranks * 613 + self._seed
        return self.from_codes(codes) + ranks

    def from_codes(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that are multiples of `TOP_K`, small ones more often, as in texts."""
        mixed = (codes * 2654435761) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
        shares = (mixed ^ (mixed >> 13)) / 2**32
        return ((self.vocabulary // TOP_K) ** shares - 1).astype(np.int64) * TOP_K


class Text:
    """A text that `HashedModel` writes, drafted for by a drafter."""

    def __init__(self, model: HashedModel, drafter: AutoDrafter, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = model.from_codes(rng.integers(1 << 30, size=PROMPT_TOKENS)).tolist()
        self.drafter = drafter
        self.accepted = 0
        self._model = model
        self._cached = 0
        drafter.start(self.tokens)

    def propose(self) -> TokenTree:
        """The tree of the next step."""
        tree = TokenTree(self.tokens[self._cached :])
        self.drafter.propose(tree)
        return tree

    def result(self, tree: TokenTree) -> StepResult:
        """What the model says about it; the text goes on."""
        tokens = np.array(tree.tokens)
        before = np.array(
            [tree.tokens[parent] if parent >= 0 else self.tokens[self._cached - 1] for parent in tree.parents]
        )
        read = np.array(tree.needs_logits)
        ids = np.where(read[:, None], self._model.top_ids(tokens, before, len(self.tokens)), -1)
        shares = np.where(read[:, None], PROBABILITIES, np.float32(0))
        node, path, new = tree.root, [], []
        while True:
            new.append(int(ids[node, 0]))
            child = tree.child(node, new[-1])
            if child is None:
                break
            node = child
            path.append(node)
        self._cached = len(self.tokens) + len(path)
        self.tokens += new
        self.accepted += len(new)
        return StepResult(tree, ids[:, 0], path, new, ids, shares)


class ChosenBudget(FixedBudget):
    """Asks a `Pace`, whose work counts, then sends a fixed number of nodes: so sizes can be compared."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self._row = PacedRow(Pace(StepCosts()))

    def offer(self, likely: NDArray[np.float64], send: Send, pending: int = 1) -> None:
        """See `StepBudget`."""
        self._row.begin()
        self._row.offer(likely, lambda chosen: None, pending)
        super().offer(likely, send, pending)

    def learn(self, accepted: Sequence[int]) -> None:
        """See `StepBudget`."""
        self._row.learn(accepted)


class PartTimes:
    """Nanoseconds of the parts of each step."""

    def __init__(self, drafter: AutoDrafter) -> None:
        self.steps: list[dict[str, int]] = [{}]
        drafter.memory.batches.clear()  # what is watched is this drafter's alone
        drafter._join()
        for part, (holder, method) in PARTS.items():
            self._watch(getattr(drafter, holder) if holder else drafter, method, part)

    def _watch(self, holder: Any, method: str, part: str) -> None:
        call: Callable[..., Any] = getattr(holder, method)

        def timed(*arguments: Any) -> Any:
            start = process_time_ns()
            value = call(*arguments)
            self.steps[-1][part] = self.steps[-1].get(part, 0) + process_time_ns() - start
            return value

        setattr(holder, method, timed)


def new_drafter(memory: DraftMemory, nodes: int, chooses: bool) -> AutoDrafter:
    """A drafter as `preset="auto"` has it, with a `step_budget` or with one that chooses."""
    budget, most = (ChosenBudget(nodes), MOST_CHOSEN_NODES) if chooses else (nodes, nodes)
    return AutoDrafter(memory, budget, most)


def time_steps(vocabulary: int, nodes: int, chooses: bool, texts: int) -> Row:
    """Medians of the microseconds that drafting takes in a step, as a whole and by its parts."""
    proposing, observing, sent = [], [], []
    steps: list[dict[str, int]] = []
    model, memory, accepted = HashedModel(vocabulary), DraftMemory(), 0
    for seed in range(2 * texts):
        drafter = new_drafter(memory, nodes, chooses)
        times = PartTimes(drafter) if seed % 2 else None  # clocks take time as well: the whole is timed without them
        text = Text(model, drafter, seed)
        for step in range(WARM_UP_STEPS + TEXT_STEPS):
            if times is not None:
                times.steps.append({})
            start = process_time_ns()
            tree = text.propose()
            middle = process_time_ns()
            result = text.result(tree)
            begin = process_time_ns()
            drafter.observe(result)
            end = process_time_ns()
            if step >= WARM_UP_STEPS and times is None:
                proposing.append(middle - start)
                observing.append(end - begin)
                sent.append(len(tree) - tree.root)
                accepted += len(result.tokens)
        if times is not None:
            steps += times.steps[-TEXT_STEPS:]
    whole = [before + after for before, after in zip(proposing, observing, strict=True)]
    return {
        "kind": "steps",
        "nodes": nodes,
        "budget": "chosen" if chooses else "fixed",
        "vocabulary": vocabulary,
        "steps": len(whole),
        "mean_nodes": round(float(np.mean(sent)), 2),
        "tokens_per_step": round(accepted / len(whole), 3),
        "microseconds": {
            "propose": microseconds(proposing),
            "observe": microseconds(observing),
            "whole": microseconds(whole),
            "whole_quartiles": [round(float(value) / 1000, 1) for value in np.percentile(whole, (25, 75))],
        },
        "parts": {part: microseconds([step.get(part, 0) for step in steps]) for part in PARTS},
    }


def microseconds(nanoseconds: Sequence[int]) -> float:
    """The median."""
    return round(median(nanoseconds) / 1000, 1)


def array_bytes(*holders: Any) -> int:
    """Bytes of the arrays that the objects hold, in tuples as well."""
    values = [value for holder in holders for value in vars(holder).values()]
    arrays = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    return sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))


def serve(
    memory: DraftMemory, requests: int, vocabulary: int, marks: Sequence[int] = MARKS, steps: int = REQUEST_STEPS
) -> Iterator[Row]:
    """Draft for many short texts with one memory; yields what is kept after so many of them as `marks` say."""
    model = HashedModel(vocabulary)
    for number in range(1, requests + 1):
        drafter = AutoDrafter(memory, REQUEST_NODES)
        text = Text(model, drafter, number)
        for _ in range(steps):
            drafter.observe(text.result(text.propose()))
        if number in marks:
            statistics = memory.ngrams.statistics()
            yield {
                "kind": "requests",
                "requests": number,
                "steps": steps,
                "nodes": REQUEST_NODES,
                "entries": statistics.entries,
                "capacity": statistics.capacity,
                "memory_bytes": array_bytes(memory.ngrams),
                "request_bytes": array_bytes(drafter._batch),
                "resident_bytes": resident_bytes(),
            }


def probe(options: Options) -> Probe:
    """The units: steps by nodes and budget, and many requests."""
    vocabulary, texts = options.vocabulary, options.texts
    if vocabulary % TOP_K:
        raise InvalidArgumentError(f"--vocabulary {vocabulary} must be a multiple of {TOP_K}")
    units = [
        Unit(f"steps, {nodes}, {name}", lambda n=nodes, c=chooses: [time_steps(vocabulary, n, c, texts)])
        for name, chooses in (("fixed", False), ("chosen", True))
        for nodes in (32, 64)
    ]
    served = partial(serve, DraftMemory(), options.requests, vocabulary)
    return Probe([*units, Unit("requests", served)], {"compiled": IS_COMPILED})
