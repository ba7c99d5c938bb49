"""Drafter of `preset="auto"`: all sources in one tree, the likeliest continuation first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MAX_NODES_PER_STEP, MOST_CHOSEN_NODES
from lookahead.core.protocols import FixedBudget, StepBudget
from lookahead.core.results import StepResult, StepResults
from lookahead.core.roots import Roots
from lookahead.core.token_tree import TokenTree, first_path
from lookahead.core.watching import CERTAIN, Explanation, Origin
from lookahead.drafting.auto.batch import DraftBatch, shared_batch
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.sources import PredictedText, Source, permitted
from lookahead.drafting.auto.texts import MATCH_CLASSES
from lookahead.values import require, whole_number

_SEARCHED_WHERE_FORBIDDEN = 4
"""Maximum number of nodes searched if a source may forbid some, as a multiple of the nodes sent."""


class AutoDrafter:
    """Drafter with one best-first search over the n-gram memory and earlier occurrences in the text.

    From the root on, all sources propose continuations of a node. Weights combine their evidence into one probability
    for each candidate. The candidate with the most probable path is added next, until the budget is spent. If sources
    propose little, as at the start of a text, the remaining nodes try recent predictions of the model: its predictions
    after them fill the memory.

    At its first draft the text gets a slot in a `DraftBatch`, which drafts and learns. Drafters with the same memory
    and settings share this batch, unless they have sources.

    Args:
        memory: N-gram memory of the model. Sequences of a process may share it, at once or one after another; each has
            its own drafter. `None` to remember nothing.
        budget: Nodes of a step, the root included, or a `StepBudget` that chooses them.
        max_nodes: Maximum number of nodes of a step, the root included, whatever the budget would choose.
        explore: Try recent predictions with leftover nodes. Has no effect if predictions are not known.
        sources: Further sources that list paths before each step; each serves only this sequence.
        predicted: Predicted output: a source, and tokens that are searched as if they preceded the prompt.
        chains: Draft one path instead of a tree, for models that cannot run trees.

    Attributes:
        budget, memory, sources: The arguments; `predicted` is a source.
        place: Slot in the batch; -1 before the first draft.
        learns: Whether anything is remembered.
        late: Tokens of the text that the batch does not have yet.
        certain: Tokens of this step's tree that are part of the text already.
        knowing: Sources of certain tokens.
        permitting: Sources that forbid tokens.
        max_candidates: Maximum number of candidates of a step, the certain ones included.
        searched: Maximum number of nodes of a search.

    Raises:
        InvalidArgumentError: The budget is less than one node, or an argument has the wrong type.
    """

    def __init__(
        self,
        memory: DraftMemory | None,
        budget: int | StepBudget,
        max_nodes: int = MOST_CHOSEN_NODES,
        explore: bool = True,
        sources: Sequence[Source] = (),
        predicted: PredictedText | None = None,
        chains: bool = False,
    ) -> None:
        is_memory = memory is None or isinstance(memory, DraftMemory)
        require(is_memory, "memory", memory, "must be a DraftMemory, or None to remember nothing")
        if not hasattr(budget, "backs_off"):
            max_nodes = whole_number("budget", budget, 1, MAX_NODES_PER_STEP, "nodes of a step, or what chooses them")
            budget = FixedBudget(max_nodes)
        max_nodes = whole_number("max_nodes", max_nodes, 1)
        self.budget: StepBudget = cast(StepBudget, budget)
        self.memory = DraftMemory(1, 1, 1) if memory is None else memory
        self.learns = memory is not None
        self.sources: list[Source] = [*sources, *([] if predicted is None else [predicted])]
        self.certain = 0
        self.place = -1
        self.late: list[int] = []
        self.max_candidates = max_nodes - 1
        self._before = [] if predicted is None else predicted.tokens
        self._chains = chains
        self.knowing: list[Any] = [source for source in self.sources if getattr(source, "certain", None) is not None]
        self.permitting = [source for source in sources if getattr(source, "permits", None) is not None]
        self.searched = self.max_candidates * (_SEARCHED_WHERE_FORBIDDEN if self.permitting else 1)
        # With `permits`, search a tree even for chains: another path may be permitted if the likeliest one is not.
        self._settings = self.searched, chains and not self.permitting, explore and self.learns and not chains

    @cached_property
    def _batch(self) -> DraftBatch:
        """Batch with the arrays of the text, made for the first draft: many short texts have none."""
        if self.sources:
            return DraftBatch(self.memory, *self._settings, len(self.sources))
        return shared_batch(self.memory, self._settings)

    @cached_property
    def together(self) -> DraftBatch | None:
        """Batch that drafts for several texts in one call (`RowsDrafter`).

        With sources it has no other text, as an error of a source must end only the drafts of its own text. `None` in
        subclasses, which may change `propose` and `observe`.
        """
        return self._batch if type(self) is AutoDrafter else None

    @property
    def top_k(self) -> int:
        """Number of likeliest next tokens that `observe` needs for each node; see `DraftBatch.top_k_of`."""
        return self._batch.top_k_of([self])

    @property
    def rests(self) -> bool:
        """Whether the coming step is plain, and nothing is learned from it at once."""
        return not self.sources and getattr(self.budget, "rests", False)

    def defer(self, token: int) -> None:
        """Keep the token of a plain step for the next step that learns."""
        with self.memory.lock:
            self.late.append(token)
            if self.place >= 0:
                self._batch.sent[self.place] = 0

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self.late = list(prompt)
        if self.place >= 0:
            self._begin()
        for source in self.sources:
            source.start(prompt)

    def join(self) -> None:
        """Reserve a slot in the batch."""
        self.place = self._batch.take_place(self)
        self._begin()

    def _begin(self) -> None:
        """Begin the text in its slot of the batch."""
        text = self.late
        self.late = []
        self._batch.begin(self.place, text, self._before)

    def propose(self, tree: TokenTree) -> None:
        """Add the certain tokens, and the likeliest paths after them, the likeliest node first."""
        roots = Roots([tree])
        found = self._batch.find_rows([self], [0], roots)
        if found is not None:
            counts = self.budget.choose(*found, roots, [0])
            self._batch.send_rows([self], [0], roots, counts)

    def add_certain(self, tree: TokenTree) -> bool:
        """Add the certain tokens to a tree; return whether drafts are to be searched after them."""
        certain: list[int] = self.knowing[0].certain()
        if certain:
            tree.add_certain(certain[: self.max_candidates])
        self.certain = 0
        fits = len(certain) < min(self.max_candidates, tree.room) and tree.certain == len(certain)
        if self.budget.backs_off or (certain and not fits):
            return False
        self.late += certain
        self.certain = len(certain)
        return True

    def forbid(self, batch: DraftBatch, limits: NDArray[Any], room: int, search: Callable[[], None]) -> None:
        """Remove nodes that sources do not permit; search for more nodes if too few are left.

        Args:
            batch: Its draft was searched.
            limits: Limits of the search, `LIMITS` `[1]`.
            room: Maximum number of candidates of this step.
            search: Searches again with these limits.
        """
        while True:
            limit = int(limits["nodes"][0])
            count = int(batch.counts[self.place])
            nodes = batch.trees[self.place]
            rows = permitted(self.permitting, nodes["token"][1 : count + 1], nodes["parent"][1 : count + 1])
            if self._chains:
                rows = np.array([0, *first_path(rows[1:].tolist(), nodes["parent"][rows[1:]].tolist(), 0)])
            if len(rows) > room or limit == self.searched or count < limit:
                break
            limits["nodes"] = min(2 * limit, self.searched)
            search()
        numbers = np.zeros(count + 1, dtype=np.int64)
        numbers[rows] = np.arange(len(rows))
        nodes[: len(rows)] = nodes[rows]
        nodes["parent"][: len(rows)] = numbers[nodes["parent"][: len(rows)]]
        batch.counts[self.place] = len(rows) - 1

    def explain(self, tree: TokenTree) -> Explanation:
        """Return the sources of each node, and its estimated probability."""
        with self.memory.lock:
            entries = int(np.count_nonzero(self.memory.entries.heads["tag"])) if self.learns else None
            origins: list[Origin] = []
            if self.place >= 0:
                names = [source.name for source in self.sources]
                sent = int(self._batch.sent[self.place])
                origins = [_origin_of(node, names) for node in self._batch.state.trees[self.place, 1 : sent + 1]]
        return Explanation([*[Origin((CERTAIN,))] * tree.certain, *origins], entries)

    def observe(self, result: StepResult) -> None:
        """Learn from the predictions after every node, and add the new tokens to the text."""
        for source in self.sources:
            source.observe(result)
        self._batch.learn_rows([self], [0], StepResults.of_one(result))

    def statistics(self) -> dict[str, Any]:
        """Return statistics of the n-gram memory; see `DraftMemory.statistics`."""
        return self.memory.statistics()


def _origin_of(node: np.void, names: Sequence[str]) -> Origin:
    """Return the sources of a `NODE`, the one with the longest context first.

    Args:
        node: The node.
        names: Names of the sources that list paths.
    """
    order = int(node["order"])
    match = int(node["match"])
    source = int(node["source"])
    evidence_by_length: list[tuple[float, str]] = []
    if order:
        evidence_by_length.append((order + 0.5, f"n-gram memory, {order} token{'s' if order > 1 else ''}"))
    if match >= 0:
        evidence_by_length.append((MATCH_CLASSES[match], f"context match, {MATCH_CLASSES[match]} tokens or more"))
    if source >= 0:
        evidence_by_length.append((0.5, names[source]))
    if not evidence_by_length:
        evidence_by_length.append((0.5, "rejected sibling" if node["listed"] > 0 else "recent prediction"))
    evidence = tuple(name for _, name in sorted(evidence_by_length, key=lambda pair: -pair[0]))
    return Origin(evidence, float(node["probability"]))
