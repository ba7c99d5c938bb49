"""All sources of drafts in one tree, the likeliest continuation first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.budget import FixedBudget, StepBudget
from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import Noise, TokenTree
from lookahead.core.watching import CERTAIN, Explanation, Origin
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import UNTRUSTED, Step
from lookahead.drafting.auto.ngrams import NGramMemory
from lookahead.drafting.auto.origins import origins_of
from lookahead.drafting.auto.search import FORESEEN, Wanted
from lookahead.drafting.auto.sources import Source, permitted
from lookahead.drafting.best_first import first_path

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
        warm_up: How many of the last tokens of the prompt are read like drafted ones when it is sent, so that the
            memory begins with what the model predicts there. Costs the vocabulary projection of as many tokens.
        explore: Try recent predictions with the nodes that are left. Not where predictions are not known.
        sources: What else lists paths before each step; each serves this sequence alone.
        before: Tokens that are searched as if they stood before the prompt.
        chains: Draft one path: the likeliest token, and the likeliest after that; for models that run no trees.

    Raises:
        InvalidArgumentError: The budget is less than one node.
    """

    def __init__(
        self,
        memory: DraftMemory | None,
        budget: int | StepBudget,
        most: int = MOST_CHOSEN_NODES,
        warm_up: int = 0,
        explore: bool = True,
        sources: Sequence[Source] = (),
        before: Sequence[int] = (),
        chains: bool = False,
    ) -> None:
        most = budget if isinstance(budget, int) else most
        self.budget: StepBudget = FixedBudget(budget) if isinstance(budget, int) else budget
        self.memory = DraftMemory(NGramMemory(1, 1, 1)) if memory is None else memory
        self._learns = memory is not None
        self._most = most - 1
        self._read_prompt, self._is_read = warm_up, False  # later pending tokens were read when they were drafted
        self._sources, self._before, self._chains = list(sources), before, chains
        self._forbids = any(getattr(source, "permits", None) is not None for source in sources)
        searched = self._most * (_SEARCHED_WHERE_FORBIDDEN if self._forbids else 1)
        # Of a tree some path is permitted where the likeliest one is not.
        self._settings = searched, chains and not self._forbids, explore and self._learns and not chains
        self._batch: DraftBatch | None = None
        self._place = -1
        self._late: list[int] = []  # tokens of the text that are not in its place yet
        self._certain = 0  # tokens of this step's tree that are part of the text already
        self._tree: TokenTree | None = None  # this step's, if something was found for it
        self._sent = 0  # how many of the nodes found it has: the first ones

    @property
    def drafts_together(self) -> bool:
        """Whether others may draft in the same call: what a source raises is a matter of its own text."""
        return not self._sources

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; none while drafting backs off, and while
        what the model says is not what is selected."""
        if self.budget.backs_off or not self._learns or self._is_lost or self.memory.ngrams.observed:
            return 0
        return self.memory.ngrams.top_k

    @property
    def _is_lost(self) -> bool:
        """Whether predictions have nothing to say."""
        return self._batch is not None and bool(self._batch.heard["share"][self._place] < UNTRUSTED)

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._late, self._is_read, self._tree = list(prompt), False, None
        if self._batch is not None:
            self._begin(self._batch)
        for source in self._sources:
            source.start(prompt)

    def propose(self, tree: TokenTree) -> None:
        """Add the certain tokens, and the likeliest paths after them, the likeliest node first."""
        self.propose_rows([self], [tree])

    @classmethod
    def propose_rows(cls, drafters: Sequence[AutoDrafter], trees: Sequence[TokenTree]) -> None:
        """`propose` for several texts, whose drafts are found in one call."""
        asked = [(drafter, tree) for drafter, tree in zip(drafters, trees, strict=True) if drafter._begins(tree)]
        for batch, group in _by_batch(asked):
            places = [drafter._place for drafter, _ in group]
            with batch.memory.lock:
                for drafter, tree in group:
                    drafter._prepare(batch, tree)
                _find(batch, group, [min(drafter.budget.most, drafter._settings[0]) for drafter, _ in group])
                for drafter, tree in group:
                    if drafter._forbids:
                        drafter._forbid(batch, tree)
                nodes, counts = batch.nodes[places], batch.counts[places].tolist()
            likely = np.ascontiguousarray(nodes["probability"])
            found = zip(nodes["token"].tolist(), nodes["parent"].tolist(), likely, counts, strict=True)
            for (drafter, tree), of_row in zip(group, found, strict=True):
                drafter._offer(tree, *of_row)

    def _begins(self, tree: TokenTree) -> bool:
        """Add what is certain; whether there is something to search behind it."""
        self.budget.begin()
        certain: list[int] = []
        for source in self._sources:
            if getattr(source, "certain", None) is not None:
                certain = source.certain()  # type: ignore[attr-defined]
                break
        if certain:
            tree.add_certain(certain[: self._most])
        self._certain = 0
        if self.budget.backs_off or (certain and min(self._most, tree.room) <= len(certain)):
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
                self._batch = _shared_batch(self.memory, self._settings)
            self._place = self._batch.take_place(self)
            self._begin(self._batch)
        return self._batch

    def _begin(self, batch: DraftBatch) -> None:
        """Begin the text in its place."""
        text, self._late = self._late, []
        batch.begin(self._place, text, self._before)

    def _prepare(self, batch: DraftBatch, tree: TokenTree) -> None:
        """Make ready for a search."""
        self._catch_up(batch)
        if self._read_prompt and not self._is_read and self.budget.reads_prompts:
            for node in range(max(0, tree.root - self._read_prompt), tree.root):
                tree.needs_logits[node] = True
        if self._sources:
            batch.list_paths([source.propose() for source in self._sources])

    def _foresee(self, tree: TokenTree) -> Noise | None:
        """What the tokens below the root are sampled with, if that is known, and says something: it says which of the
        model's predictions is selected."""
        if tree.foresee is None or self._is_lost:
            return None
        return tree.foresee(min(self._certain + FORESEEN, tree.room))

    def _forbid(self, batch: DraftBatch, tree: TokenTree) -> None:
        """Leave the nodes found that can come true; more are searched where they are too few."""
        most, limit = min(self.budget.most, self._most - self._certain), min(self.budget.most, self._settings[0])
        while True:
            count, nodes = int(batch.counts[self._place]), batch.nodes[self._place]
            rows = permitted(self._sources, nodes["token"][1 : count + 1], nodes["parent"][1 : count + 1])
            if self._chains:
                rows = np.array([0, *first_path(rows[1:].tolist(), nodes["parent"][rows[1:]].tolist(), 0)])
            if len(rows) > most or limit == self._settings[0] or count < limit:
                break
            limit = min(2 * limit, self._settings[0])
            _find(batch, [(self, tree)], [limit])
        numbers = np.zeros(count + 1, dtype=np.int64)
        numbers[rows] = np.arange(len(rows))
        nodes[: len(rows)] = nodes[rows]
        nodes["parent"][: len(rows)] = numbers[nodes["parent"][: len(rows)]]
        batch.counts[self._place] = len(rows) - 1

    def _offer(
        self, tree: TokenTree, tokens: list[int], parents: list[int], likely: NDArray[np.float64], count: int
    ) -> None:
        """Have the budget choose among the nodes found, of which there are `count` behind the root."""
        most = min(self.budget.most, self._most - self._certain, count)
        pending = tree.root + 1 if self._chains else 1
        self._tree, self._sent = tree, 0
        self.budget.offer(likely[1 : most + 1], partial(self._send, tree, tokens, parents), pending)

    def _send(self, tree: TokenTree, tokens: list[int], parents: list[int], chosen: int) -> None:
        """Add the first nodes found to a tree."""
        self._sent = chosen
        grown = tree.beyond(self._certain)
        root = grown.root
        grown.add_new_candidates(tokens[1 : chosen + 1], [root + parent for parent in parents[1 : chosen + 1]])

    def explain(self, tree: TokenTree) -> Explanation:
        """Which sources named each node, and how likely it was taken to be."""
        with self.memory.lock:
            entries = int(np.count_nonzero(self.memory.ngrams.entries.heads["tag"])) if self._learns else None
            found: list[Origin] = []
            if tree is self._tree and self._batch is not None:
                nodes = self._batch.nodes[self._place, 1 : self._sent + 1]
                found = origins_of(nodes, [source.name for source in self._sources])
        return Explanation([*[Origin((CERTAIN,))] * tree.certain, *found], entries)

    def observe(self, result: StepResult) -> None:
        """Learn from the predictions after every node, and add the new tokens to the text."""
        self.observe_rows([self], [result])

    @classmethod
    def observe_rows(cls, drafters: Sequence[AutoDrafter], results: Sequence[StepResult]) -> None:
        """`observe` for several texts, which learn in one call."""
        asked = [(drafter, result) for drafter, result in zip(drafters, results, strict=True) if drafter._ends(result)]
        for batch, group in _by_batch(asked):
            with batch.memory.lock:
                rows = [drafter._shown(batch, result) for drafter, result in group]
                places, roots, sizes, tokens, ids, probabilities = zip(*rows, strict=True)
                numbers = np.array((places, roots, [*accumulate(sizes)], [*map(len, tokens)]), dtype=np.int64)
                added = np.array([*chain.from_iterable(tokens)], dtype=np.int64)
                selected = np.empty(sum(sizes), dtype=np.int64)
                said = np.concatenate(ids), np.concatenate(probabilities)  # copied: they are written over
                batch.learn(Step(numbers[0], numbers[1], numbers[2], numbers[3], added, *said, selected))

    def _ends(self, result: StepResult) -> bool:
        """Note what became of a draft. Whether there is something to learn; if not, the tokens are kept for later."""
        for source in self._sources:
            source.observe(result)
        if result.tree is not self._tree:
            self._sent = 0
        self._tree, self._is_read = None, True
        # A resting drafter does nothing that can wait.
        is_searched = not self.budget.backs_off and result.tree.certain <= self._certain
        is_shown = result.top_ids.shape[1] > 0 or self._is_lost or self.memory.ngrams.observed
        if not (is_searched and is_shown and self._learns):
            self._late += result.tokens[result.tree.certain if is_searched else 0 :]
            return False
        self._certain = result.tree.certain
        return True

    def _shown(
        self, batch: DraftBatch, result: StepResult
    ) -> tuple[int, int, int, list[int], NDArray[np.int64], NDArray[np.float32]]:
        """What a step showed of one text: its place, the root's node, how many nodes there are, the tokens that were
        selected, and what was predicted after each node; see `Step`."""
        self._catch_up(batch)
        result = result.beyond(self._certain)
        root = result.tree.root
        count = root + 1 + self._sent
        if batch.reads and result.top_ids.shape[1]:
            ids, probabilities = result.top_ids[:count], result.top_probabilities[:count]
        else:
            ids = result.predictions[:count, None] if batch.reads else np.full((count, 1), -1, dtype=np.int64)
            probabilities = np.ones(ids.shape, dtype=np.float32)
        return self._place, root, count, result.tokens, ids, probabilities

    def statistics(self) -> dict[str, Any]:
        """Of the n-gram memory; see `NGramMemory.statistics`."""
        return self.memory.statistics()

    def _catch_up(self, batch: DraftBatch) -> None:
        """Add the tokens to the text that were not added yet."""
        if self._late:
            batch.extend(self._place, self._late)
            self._late = []


def _find(batch: DraftBatch, group: Sequence[tuple[AutoDrafter, TokenTree]], limits: Sequence[int]) -> None:
    """Find the nodes of some trees, so many: in one call, but for those whose noise is known, as each has its own."""
    rows = [
        (one._place, limit, max(tree.room - one._certain, 0)) for (one, tree), limit in zip(group, limits, strict=True)
    ]
    places, most, levels = np.array(rows, dtype=np.int64).T.copy()
    wanted = Wanted(places, most, levels, np.array([one.budget.least for one, _ in group], dtype=np.float64))
    left = len(group)
    for row, (drafter, tree) in enumerate(group):
        noise = drafter._foresee(tree)
        if noise is not None:
            batch.find(wanted.alone(row, noise, drafter._certain))
            places[row] = -1
            left -= 1
    if left:
        batch.find(wanted)


T = TypeVar("T")


def _by_batch(asked: Iterable[tuple[AutoDrafter, T]]) -> Iterator[tuple[DraftBatch, list[tuple[AutoDrafter, T]]]]:
    """Drafters, each with its own, by the batch that their texts are in."""
    groups: dict[DraftBatch, list[tuple[AutoDrafter, T]]] = {}
    for row in asked:
        groups.setdefault(row[0]._join(), []).append(row)
    yield from groups.items()


def _shared_batch(memory: DraftMemory, settings: tuple[int, bool, bool]) -> DraftBatch:
    """The batch of all drafters with this memory and these settings."""
    with memory.lock:
        batch: DraftBatch | None = memory.batches.get(settings)
        if batch is None:
            memory.batches[settings] = batch = DraftBatch(memory, *settings)
        return batch
