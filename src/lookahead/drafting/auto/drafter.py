"""Drafter of `preset="auto"`: all sources in one tree, the likeliest continuation first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MAX_NODES_PER_STEP, MOST_CHOSEN_NODES
from lookahead.core.protocols import FixedBudget, StepBudget
from lookahead.core.results import StepResult
from lookahead.core.shared_pace import UNRANKED
from lookahead.core.token_tree import Noise, TokenTree, first_path
from lookahead.core.watching import CERTAIN, Explanation, Origin
from lookahead.drafting.auto.batch import DraftBatch, shared_batch
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import OUTCOME, UNTRUSTED, Step
from lookahead.drafting.auto.search import FORESEEN, LIMITS, NO_NOISE, padded_noise
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

    At its first draft the text gets a slot in a `DraftBatch`. Drafters with the same memory and settings share this
    batch, unless they have sources.

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
        budget, memory: The arguments.
        together: Batch that drafts for several texts in one call; `None` before its first draft, and with sources, as
            an error of a source must end only the drafts of its own text.
        place: Slot in the batch; -1 before the first draft.
        learns: Whether anything is remembered.
        shares: Whether candidates compete with those of other rows (`SharingDrafter.shares`).
        late: Tokens of the text that the batch does not have yet; see `catch_up`.

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
        self.shares = self.budget.is_shared
        self._max_candidates = max_nodes - 1
        self._sources: list[Source] = [*sources, *([] if predicted is None else [predicted])]
        self._before = [] if predicted is None else predicted.tokens
        self._chains = chains
        self._knowing: list[Any] = [source for source in self._sources if getattr(source, "certain", None) is not None]
        self._permitting = [source for source in sources if getattr(source, "permits", None) is not None]
        searched = self._max_candidates * (_SEARCHED_WHERE_FORBIDDEN if self._permitting else 1)
        # With `permits`, search a tree even for chains: another path may be permitted if the likeliest one is not.
        self._settings = searched, chains and not self._permitting, explore and self.learns and not chains
        self._batch: DraftBatch | None = None
        self.place = -1
        self.late: list[int] = []
        self._certain = 0  # tokens of this step's tree that are part of the text already
        self.together: DraftBatch | None = None

    @property
    def top_k(self) -> int:
        """Number of likeliest next tokens that `observe` needs for each node.

        It is 0 before the first draft, while drafting backs off, and while selected tokens rarely match predictions.
        """
        listens = self._batch is not None and self._listens and not self.budget.backs_off
        return self.memory.top_k if listens else 0

    @property
    def _listens(self) -> bool:
        """Whether predictions after nodes are learned."""
        return self.learns and not self._is_lost and not self.memory.observed

    @property
    def _is_lost(self) -> bool:
        """Whether predictions are useless, because they rarely match the selected tokens."""
        return self._batch is not None and bool(self._batch.state.feedback["share"][self.place] < UNTRUSTED)

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self.late = list(prompt)
        if self.together is None and not self._sources:
            self.together = self.memory.batches.get(self._settings)
        if self._batch is not None:
            self._begin(self._batch)
        for source in self._sources:
            source.start(prompt)

    def propose(self, tree: TokenTree) -> None:
        """Add the certain tokens, and the likeliest paths after them, the likeliest node first."""
        likely = self.find(tree)
        if likely is not None:
            self.send(tree, self.budget.choose(likely, tree.root + 1 if self._chains else 1))

    def find(self, tree: TokenTree) -> NDArray[np.float64] | None:
        """Add the certain tokens, and return the probabilities of candidates after them (`SharingDrafter.find`)."""
        if not self._begin_step(tree):
            return None
        with self.memory.lock:
            batch = self._join()
            self.catch_up(batch)
            if self._sources:
                batch.list_paths([source.propose() for source in self._sources])
            self._search(batch, tree, min(self.budget.max_candidates, self.searched))
            if self._permitting:
                self._forbid(batch, tree)
            return batch.offers(np.array([self.place]), self._room, tree.vocabulary)[0]

    def _search(self, batch: DraftBatch, tree: TokenTree, nodes: int) -> None:
        """Search a draft of at most `nodes` nodes after the certain tokens."""
        limits = (self.place, nodes, tree.room - self._certain, self.budget.min_probability)
        ranking = cast(Any, self.budget).ranking if self.budget.is_shared else UNRANKED
        batch.find(np.array([limits], dtype=LIMITS), self._foresee(tree), ranking)

    def send(self, tree: TokenTree, count: int) -> None:
        """Add the first candidates to the tree (`SharingDrafter.send`)."""
        if self._batch is not None and count:
            tokens, parents = self._batch.take(np.array([self.place]), np.array([count]))
            tree.add_new_candidates(tokens.tolist(), (parents + tree.root + self._certain).tolist())

    def _begin_step(self, tree: TokenTree) -> bool:
        """Begin a step, and add the certain tokens; return whether drafts are to be searched after them."""
        self.budget.begin(self._listens)
        if self._batch is not None:
            self._batch.sent[self.place] = 0
        certain: list[int] = self._knowing[0].certain() if self._knowing else []
        if certain:
            tree.add_certain(certain[: self._max_candidates])
        self._certain = 0
        fits = len(certain) < min(self._max_candidates, tree.room) and tree.certain == len(certain)
        if self.budget.backs_off or (certain and not fits):
            return False
        self.late += certain
        self._certain = len(certain)
        return True

    def _join(self) -> DraftBatch:
        """Return the batch of the text; at the first call, reserve a slot in it."""
        if self._batch is None:
            if self._sources:
                return self.join(DraftBatch(self.memory, *self._settings, len(self._sources)))
            self.together = shared_batch(self.memory, self._settings)
            return self.join(self.together)
        return self._batch

    def join(self, batch: DraftBatch) -> DraftBatch:
        """Reserve a slot in a batch, and return the batch."""
        self._batch, self.place = batch, batch.take_place(self)
        self._begin(batch)
        return batch

    def _begin(self, batch: DraftBatch) -> None:
        """Begin the text in its slot of the batch."""
        text = self.late
        self.late = []
        batch.begin(self.place, text, self._before)

    def _foresee(self, tree: TokenTree) -> Noise:
        """Return the noise that the next tokens will be sampled with, if it is known and predictions are trusted.

        With it the search knows which prediction of the model is selected.
        """
        if tree.foresee is None or self._is_lost:
            return NO_NOISE
        noise = tree.foresee(min(self._certain + FORESEEN, tree.room))
        return NO_NOISE if noise is None else padded_noise(Noise(noise.places[self._certain :], noise.temperature))

    def _forbid(self, batch: DraftBatch, tree: TokenTree) -> None:
        """Remove nodes that sources do not permit; search for more nodes if too few are left."""
        count = self._room
        limit = min(self.budget.max_candidates, self.searched)
        while True:
            count = int(batch.counts[self.place])
            nodes = batch.trees[self.place]
            rows = permitted(self._permitting, nodes["token"][1 : count + 1], nodes["parent"][1 : count + 1])
            if self._chains:
                rows = np.array([0, *first_path(rows[1:].tolist(), nodes["parent"][rows[1:]].tolist(), 0)])
            if len(rows) > count or limit == self.searched or count < limit:
                break
            limit = min(2 * limit, self.searched)
            self._search(batch, tree, limit)
        numbers = np.zeros(count + 1, dtype=np.int64)
        numbers[rows] = np.arange(len(rows))
        nodes[: len(rows)] = nodes[rows]
        nodes["parent"][: len(rows)] = numbers[nodes["parent"][: len(rows)]]
        batch.counts[self.place] = len(rows) - 1

    @property
    def _room(self) -> int:
        """Maximum number of candidates of this step."""
        return min(self.budget.max_candidates, self._max_candidates - self._certain)

    @property
    def searched(self) -> int:
        """Maximum number of nodes of a search."""
        return self._settings[0]

    def explain(self, tree: TokenTree) -> Explanation:
        """Return the sources of each node, and its estimated probability."""
        with self.memory.lock:
            entries = int(np.count_nonzero(self.memory.entries.heads["tag"])) if self.learns else None
            origins: list[Origin] = []
            if self._batch is not None:
                names = [source.name for source in self._sources]
                sent = int(self._batch.sent[self.place])
                origins = [_origin_of(node, names) for node in self._batch.state.trees[self.place, 1 : sent + 1]]
        return Explanation([*[Origin((CERTAIN,))] * tree.certain, *origins], entries)

    def observe(self, result: StepResult) -> None:
        """Learn from the predictions after every node, and add the new tokens to the text."""
        for source in self._sources:
            source.observe(result)
        certain = result.tree.certain
        batch = self._batch
        # Defer all work during a rest and before the first draft, which many short texts never have.
        is_searched = batch is not None and not self.budget.backs_off and certain <= self._certain
        is_read = result.top_ids.shape[1] > 0 or self.memory.observed or self._is_lost
        if batch is not None and is_searched and self.learns and is_read:
            self._certain = certain
            self._learn(batch, result.beyond(certain))
        else:
            self.defer(result.tokens[certain if is_searched else 0 :])

    def _learn(self, batch: DraftBatch, result: StepResult) -> None:
        """Learn the outcome of a step."""
        root = result.tree.root
        with self.memory.lock:
            self.catch_up(batch)
            count = min(root + 1 + int(batch.sent[self.place]), len(result.tree))  # another tree may have been sent
            batch.sent[self.place] = 0
            if batch.reads and result.top_ids.shape[1]:
                predictions = result.top_ids[:count].copy(), result.top_probabilities[:count].copy()
            else:
                unread = np.full((count, 1), -1, dtype=np.int64)
                ids = result.predictions[:count, None].copy() if batch.reads else unread
                predictions = ids, np.ones((count, 1), dtype=np.float32)
            row = np.array([(self.place, root, count, len(result.tokens), 0, 0)], dtype=OUTCOME)
            batch.learn(
                Step(row, np.array(result.tokens, dtype=np.int64), *predictions, np.empty(count, dtype=np.int64))
            )

    def defer(self, tokens: Sequence[int]) -> None:
        """Take tokens of the text that will be added to the batch later."""
        self.late += tokens

    def statistics(self) -> dict[str, Any]:
        """Return statistics of the n-gram memory; see `DraftMemory.statistics`."""
        return self.memory.statistics()

    def catch_up(self, batch: DraftBatch) -> None:
        """Add deferred tokens to the text in the batch."""
        if self.late:
            batch.extend(self.place, self.late)
            self.late = []


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
