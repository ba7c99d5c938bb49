"""All sources of drafts in one tree, the likeliest continuation first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from lookahead.config import MAX_NODES_PER_STEP, MOST_CHOSEN_NODES
from lookahead.core.protocols import FixedBudget, StepBudget, StepResult
from lookahead.core.token_tree import Noise, TokenTree, first_path
from lookahead.core.watching import CERTAIN, Explanation, Origin
from lookahead.drafting.auto.batch import DraftBatch, Shown, shared_batch
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import UNTRUSTED
from lookahead.drafting.auto.predicted_text import PredictedText
from lookahead.drafting.auto.search import FORESEEN, NO_NOISE, WANTED
from lookahead.drafting.auto.sources import Source, permitted
from lookahead.drafting.auto.texts import MATCH_CLASSES
from lookahead.values import require, whole_number

_SEARCHED_WHERE_FORBIDDEN = 4
"""How many times as many nodes are searched, at most, where a source may forbid some of them."""


class AutoDrafter:
    """Drafts from the n-gram memory and from earlier occurrences in the text, by one best-first search.

    From the root on, all sources propose what may follow a node; weights turn what they say into one probability for
    each proposal; and the continuation whose path is most probable is added next, until the budget is spent. When
    the sources have little to say, as at the beginning of a text, the nodes that are left try tokens that the model
    lately thought of, those first whose continuation is unknown: what it predicts after them fills the memory.

    From the first step that drafts the text has a place in a `DraftBatch`, which drafters with the same memory and
    settings share, unless they have sources.

    Args:
        memory: What is known about the model. It may be shared by the sequences of a process and kept from one to the
            next; each sequence has a drafter of its own. If not given, nothing is remembered.
        budget: Nodes of a step, the root included, or what chooses them.
        most: Nodes of a step at most, the root included, whatever the budget would choose.
        explore: Try recent predictions with the nodes that are left. Not where predictions are not known.
        sources: What else lists paths before each step; each serves this sequence alone.
        predicted: A text that is expected: a source, whose tokens are searched as if they stood before the prompt.
        chains: Draft one path: the likeliest token, and the likeliest after that; for models that run no trees.

    Raises:
        InvalidArgumentError: The budget is less than one node, or an argument is of another kind.
    """

    def __init__(
        self,
        memory: DraftMemory | None,
        budget: int | StepBudget,
        most: int = MOST_CHOSEN_NODES,
        explore: bool = True,
        sources: Sequence[Source] = (),
        predicted: PredictedText | None = None,
        chains: bool = False,
    ) -> None:
        is_memory = memory is None or isinstance(memory, DraftMemory)
        require(is_memory, "memory", memory, "must be a DraftMemory, or None to remember nothing")
        if not callable(getattr(budget, "offer", None)):
            most = whole_number("budget", budget, 1, MAX_NODES_PER_STEP, "nodes of a step, or what chooses them")
            budget = FixedBudget(most)
        most = whole_number("most", most, 1)
        self.budget: StepBudget = cast(StepBudget, budget)
        self.memory = DraftMemory(1, 1, 1) if memory is None else memory
        self._learns = memory is not None
        self._most = most - 1
        self._sources: list[Source] = [*sources, *([] if predicted is None else [predicted])]
        self._before, self._chains = [] if predicted is None else predicted.tokens, chains
        self._knowing: list[Any] = [source for source in self._sources if getattr(source, "certain", None) is not None]
        self._permitting = [source for source in sources if getattr(source, "permits", None) is not None]
        searched = self._most * (_SEARCHED_WHERE_FORBIDDEN if self._permitting else 1)
        # Of a tree some path is permitted where the likeliest one is not.
        self._settings = searched, chains and not self._permitting, explore and self._learns and not chains
        self._batch: DraftBatch | None = None
        self._place = -1
        self._late: list[int] = []  # tokens of the text that are not in its place yet
        self._certain = 0  # tokens of this step's tree that are part of the text already
        self._tree: TokenTree | None = None  # this step's, if something was found for it
        self._sent = 0  # how many of the nodes found it has: the first ones

    @property
    def together(self) -> DraftBatch | None:
        """What drafts for it and others in one call, if anything does: what a source raises is a matter of its own
        text."""
        return None if self._sources else self._batch

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; none before a first draft,
        while drafting backs off, and while what the model says is not what is selected."""
        listens = self._batch is not None and self._listens and not self.budget.backs_off
        return self.memory.top_k if listens else 0

    @property
    def _listens(self) -> bool:
        """Whether what the model says after a node is learned."""
        return self._learns and not self._is_lost and not self.memory.observed

    @property
    def _is_lost(self) -> bool:
        """Whether predictions have nothing to say."""
        return self._batch is not None and bool(self._batch.state.heard["share"][self._place] < UNTRUSTED)

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._late, self._tree = list(prompt), None
        if self._batch is not None:
            self._begin(self._batch)
        for source in self._sources:
            source.start(prompt)

    def propose(self, tree: TokenTree) -> None:
        """Add the certain tokens, and the likeliest paths after them, the likeliest node first."""
        if self.begins(tree):
            self._join().draft([(self, tree)])

    def begins(self, tree: TokenTree) -> bool:
        """Begin a step, and add what is certain; whether there is something to search behind it."""
        self.budget.begin(self._listens)
        certain: list[int] = self._knowing[0].certain() if self._knowing else []
        if certain:
            tree.add_certain(certain[: self._most])
        self._certain = 0
        fits = len(certain) < min(self._most, tree.room) and tree.certain == len(certain)
        if self.budget.backs_off or (certain and not fits):
            return False
        self._late += certain
        self._certain = len(certain)
        return True

    def _join(self) -> DraftBatch:
        """The batch in which the text has a place."""
        if self._batch is None:
            if self._sources:
                self._batch = DraftBatch(self.memory, *self._settings, len(self._sources))
            else:
                self._batch = shared_batch(self.memory, self._settings)
            self._place = self._batch.take_place(self)
            self._begin(self._batch)
        return self._batch

    def _begin(self, batch: DraftBatch) -> None:
        """Begin the text in its place."""
        text, self._late = self._late, []
        batch.begin(self._place, text, self._before)

    def wanted(self, batch: DraftBatch, tree: TokenTree) -> tuple[int, int, int, float]:
        """Make ready for a search, and say what is looked for: a `WANTED`."""
        self._catch_up(batch)
        if self._sources:
            batch.list_paths([source.propose() for source in self._sources])
        return self._wanted(tree, min(self.budget.most, self._settings[0]))

    def _wanted(self, tree: TokenTree, nodes: int) -> tuple[int, int, int, float]:
        return self._place, nodes, tree.room - self._certain, self.budget.least

    def foresee(self, tree: TokenTree) -> Noise | None:
        """What the tokens below the root are sampled with, if that is known, and says something: it says which of the
        model's predictions is selected."""
        if tree.foresee is None or self._is_lost:
            return None
        noise = tree.foresee(min(self._certain + FORESEEN, tree.room))
        if noise is None:
            return None
        return Noise((*noise.places[self._certain :], *NO_NOISE.places)[:FORESEEN], noise.temperature)

    def forbid(self, batch: DraftBatch, tree: TokenTree) -> None:
        """Leave the nodes found that can come true, if sources know; more are searched where they are too few."""
        if not self._permitting:
            return
        most, limit = min(self.budget.most, self._most - self._certain), min(self.budget.most, self._settings[0])
        while True:
            count, nodes = int(batch.state.counts[self._place]), batch.state.trees[self._place]
            rows = permitted(self._permitting, nodes["token"][1 : count + 1], nodes["parent"][1 : count + 1])
            if self._chains:
                rows = np.array([0, *first_path(rows[1:].tolist(), nodes["parent"][rows[1:]].tolist(), 0)])
            if len(rows) > most or limit == self._settings[0] or count < limit:
                break
            limit = min(2 * limit, self._settings[0])
            batch.search([(self, tree)], np.array([self._wanted(tree, limit)], dtype=WANTED))
        numbers = np.zeros(count + 1, dtype=np.int64)
        numbers[rows] = np.arange(len(rows))
        nodes[: len(rows)] = nodes[rows]
        nodes["parent"][: len(rows)] = numbers[nodes["parent"][: len(rows)]]
        batch.state.counts[self._place] = len(rows) - 1

    @property
    def most(self) -> int:
        """Most candidates that are sent in this step."""
        return min(self.budget.most, self._most - self._certain)

    def send(self, tree: TokenTree, tokens: list[int], parents: list[int]) -> None:
        """Add the first nodes found to the tree, each after its parent, a node of the tree."""
        self._tree, self._sent = tree, len(tokens)
        if tokens:
            tree.add_new_candidates(tokens, parents)

    def first_node(self, tree: TokenTree) -> int:
        """The node of the tree that drafts follow: the root, or the last certain token."""
        return tree.root + self._certain

    def pending(self, tree: TokenTree) -> int:
        """Nodes of the tree that count for a budget beside candidates."""
        return tree.root + 1 if self._chains else 1

    def explain(self, tree: TokenTree) -> Explanation:
        """Which sources named each node, and how likely it was taken to be."""
        with self.memory.lock:
            entries = int(np.count_nonzero(self.memory.entries.heads["tag"])) if self._learns else None
            found: list[Origin] = []
            if tree is self._tree and self._batch is not None:
                names = [source.name for source in self._sources]
                found = [_origin_of(node, names) for node in self._batch.state.trees[self._place, 1 : self._sent + 1]]
        return Explanation([*[Origin((CERTAIN,))] * tree.certain, *found], entries)

    def observe(self, result: StepResult) -> None:
        """Learn from the predictions after every node, and add the new tokens to the text."""
        for source in self._sources:
            source.observe(result)
        if self.ends(result.tree, result.tokens, result.top_ids.shape[1]) and self._batch is not None:
            self._batch.learn_rows([(self, result)])

    def ends(self, tree: TokenTree, tokens: list[int], listed: int) -> bool:
        """Note what became of a draft. Whether there is something to learn; if not, the tokens are kept for later.

        Args:
            tree: The tree that was sent.
            tokens: The tokens that the step added to the text.
            listed: Number of likeliest tokens that are known of each node.
        """
        if tree is not self._tree:
            self._sent = 0
        self._tree = None
        # Nothing is done that can wait: not in a rest, and before a first draft, which many short texts never have.
        is_searched = self._batch is not None and not self.budget.backs_off and tree.certain <= self._certain
        if is_searched and self._learns and (listed or self.memory.observed or self._is_lost):
            self._certain = tree.certain
            return True
        self._late += tokens[tree.certain if is_searched else 0 :]
        return False

    def shown_nodes(self, batch: DraftBatch, tree: TokenTree, added: int) -> tuple[int, int, int, int]:
        """A `SHOWN` of a step without certain tokens, which added so many tokens."""
        self._catch_up(batch)
        return self._place, tree.root, tree.root + 1 + self._sent, added

    def shown(self, batch: DraftBatch, result: StepResult) -> Shown:
        """What a step showed."""
        self._catch_up(batch)
        if self._certain:
            result = result.beyond(self._certain)
        root = result.tree.root
        count = root + 1 + self._sent
        if batch.reads and result.top_ids.shape[1]:
            ids, probabilities = result.top_ids[:count], result.top_probabilities[:count]
        else:
            ids = result.predictions[:count, None] if batch.reads else np.full((count, 1), -1, dtype=np.int64)
            probabilities = np.ones(ids.shape, dtype=np.float32)
        return (self._place, root, count, len(result.tokens)), result.tokens, ids, probabilities

    def statistics(self) -> dict[str, Any]:
        """Of the n-gram memory; see `DraftMemory.statistics`."""
        return self.memory.statistics()

    def _catch_up(self, batch: DraftBatch) -> None:
        """Add the tokens to the text that were not added yet."""
        if self._late:
            batch.extend(self._place, self._late)
            self._late = []


def _origin_of(node: np.void, names: Sequence[str]) -> Origin:
    """What named the token of a `NODE`, what knew the longest context first; `names` are those of the sources that list
    paths."""
    order, match, source = int(node["order"]), int(node["match"]), int(node["source"])
    found: list[tuple[float, str]] = []
    if order:
        found.append((order + 0.5, f"n-gram memory, {order} token{'s' if order > 1 else ''}"))
    if match >= 0:
        found.append((MATCH_CLASSES[match], f"context match, {MATCH_CLASSES[match]} tokens or more"))
    if source >= 0:
        found.append((0.5, names[source]))
    if not found:
        found.append((0.5, "rejected sibling" if node["listed"] > 0 else "recent prediction"))
    evidence = tuple(name for _, name in sorted(found, key=lambda pair: -pair[0]))
    return Origin(evidence, float(node["probability"]))
