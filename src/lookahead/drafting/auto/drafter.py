"""All sources of drafts in one tree, the likeliest continuation first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

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
from lookahead.drafting.auto.search import FORESEEN, Wanted, with_noise
from lookahead.drafting.auto.sources import Source, permitted
from lookahead.drafting.best_first import first_path

_SEARCHED_WHERE_FORBIDDEN = 4
"""How many times as many nodes are searched, at most, where a source may forbid some of them."""

_ROOT = np.zeros(1, dtype=np.int64)


class AutoDrafter:
    """Drafts from the n-gram memory and from earlier occurrences in the text, by one best-first search.

    From the root on, all sources propose what may follow a node; `Weights` turn what they say into one probability
    for each proposal; and the continuation whose path is most probable is added next, until the budget is spent. When
    the sources have little to say, as at the beginning of a text, the nodes that are left try tokens that the model
    lately thought of, those first whose continuation is unknown: what it predicts after them fills the memory.

    Nothing is made before the first step that drafts. From then on the text has a place in a `DraftBatch`, which
    drafters with the same memory and settings share, unless they have sources.

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
        if isinstance(budget, int):
            most = budget
        self.budget: StepBudget = FixedBudget(budget) if isinstance(budget, int) else budget
        self.memory = DraftMemory(NGramMemory(1, 1, 1)) if memory is None else memory
        self._learns = memory is not None
        self._most = most - 1
        self._read_prompt = warm_up
        self._is_read = False  # whether the prompt is: later pending tokens were read when they were drafted
        self._sources, self._before = list(sources), before
        self._asked = [source for source in sources if getattr(source, "permits", None) is not None]
        self._sure: Any = next((source for source in sources if getattr(source, "certain", None) is not None), None)
        searched = self._most * (_SEARCHED_WHERE_FORBIDDEN if self._asked else 1)
        # Of a tree some path is permitted where the likeliest one is not.
        self._settings = searched, chains and not self._asked, explore and self._learns and not chains
        self._chains = chains
        self._searched = searched
        self._batch: DraftBatch | None = None
        self._place = -1
        self._late: list[int] = []  # tokens of the text that are not in its place yet
        self._length = 0
        self._certain = 0  # tokens of this step's tree that are part of the text already
        self._sure_nodes = 0  # candidates of this step's tree that were not searched
        self._tree: TokenTree | None = None  # this step's
        self._rows = _ROOT  # the root, and those of the nodes found that it has
        self._likely: NDArray[np.float64] = np.empty(0)  # the probabilities of all nodes found

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
    def path_probabilities(self) -> NDArray[np.float64]:
        """Probability that each candidate that `propose` added is accepted, in the order of the nodes."""
        return np.concatenate([np.ones(self._sure_nodes), self._likely[self._rows[1:] - 1]])

    @property
    def _is_lost(self) -> bool:
        """Whether predictions have nothing to say."""
        return self._batch is not None and bool(self._batch.heard["share"][self._place] < UNTRUSTED)

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._late = list(prompt)
        self._length = 0
        self._is_read = False
        self._tree = None
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
            with batch.memory.lock:
                for drafter, tree in group:
                    drafter._prepare(batch, tree)
                cls._find(batch, group)
            for drafter, tree in group:
                drafter._offer(batch, tree)

    @classmethod
    def _find(cls, batch: DraftBatch, group: Sequence[tuple[AutoDrafter, TokenTree]]) -> None:
        """Find the nodes of some trees: in one call, but for those whose noise is known, as each has its own."""
        together = []
        for drafter, tree in group:
            noise = drafter._foresee(tree)
            if noise is None:
                together.append((drafter, tree))
            else:
                cls._search(batch, [(drafter, tree)], noise)
        if together:
            cls._search(batch, together)

    def _foresee(self, tree: TokenTree) -> Noise | None:
        """What the tokens below the root are sampled with, if that is known, and says something: it says which of the
        model's predictions is selected."""
        if tree.foresee is None or self._is_lost:
            return None
        return tree.foresee(min(self._certain + FORESEEN, tree.room))

    @staticmethod
    def _search(batch: DraftBatch, group: Sequence[tuple[AutoDrafter, TokenTree]], noise: Noise | None = None) -> None:
        """Find the nodes of some trees in one call; of a single one where the noise is known."""
        wanted = [(one._place, one._limit, max(tree.room - one._certain, 0), one.budget.least) for one, tree in group]
        places, limits, levels, least = zip(*wanted, strict=True)
        rows = np.array((places, limits, levels), dtype=np.int64)
        found = Wanted(rows[0], rows[1], rows[2], np.array(least, dtype=np.float64))
        batch.find(found if noise is None else with_noise(found, noise, group[0][0]._certain))
        likely = batch.nodes["probability"][rows[0], 1:]  # copied: others may search after the same texts
        for row, count in enumerate(batch.counts[rows[0]].tolist()):
            group[row][0]._likely = likely[row, :count]

    def _begins(self, tree: TokenTree) -> bool:
        """Add what is certain; whether there is something to search."""
        self.budget.begin()
        self._certain = self._sure_nodes = 0
        self._rows = _ROOT
        if self._sure is not None and self._send_certain(tree, self._sure):
            return False
        if self.budget.backs_off:
            return False
        if self._batch is None:
            self._join()
        return True

    def _send_certain(self, tree: TokenTree, source: Any) -> bool:
        """Add the tokens that are certain. Returns whether the step sends nothing else; if not, the search continues
        behind them."""
        certain = source.certain()
        room = min(self._most, tree.room) - len(certain)
        tree.add_certain(certain[: self._most])
        self._sure_nodes = tree.certain
        if self.budget.backs_off or room <= 0:
            return True
        self._late += certain
        self._certain = len(certain)
        return False

    def _join(self) -> None:
        """Take a place for the text."""
        if self._sources:
            self._batch = DraftBatch(self.memory, *self._settings, len(self._sources))
        else:
            self._batch = _shared_batch(self.memory, self._settings)
        self._place = self._batch.take_place(self)
        self._begin(self._batch)

    def _begin(self, batch: DraftBatch) -> None:
        """Begin the text in its place."""
        text, self._late, self._length = self._late, [], len(self._late)
        batch.begin(self._place, text, self._before)
        batch.listed.start()

    def _prepare(self, batch: DraftBatch, tree: TokenTree) -> None:
        """Make ready for a search."""
        self._catch_up(batch)
        read = 0 if self._is_read or not self.budget.reads_prompts else self._read_prompt
        for node in range(max(0, tree.root - read), tree.root):
            tree.needs_logits[node] = True
        if self._sources:
            batch.listed.fill([source.propose() for source in self._sources])
        self._limit = min(self.budget.most, self._searched)

    def _offer(self, batch: DraftBatch, tree: TokenTree) -> None:
        """Have the budget choose among the nodes found."""
        most = min(self.budget.most, self._most - self._certain)
        rows = self._permitted(batch, tree, most) if self._asked else np.arange(min(len(self._likely), most) + 1)
        pending = tree.root + 1 if self._chains else 1
        likely = self._likely[rows[1:] - 1]
        self.budget.offer(likely, lambda chosen: self._send(batch, tree, rows[: chosen + 1]), pending)

    def _permitted(self, batch: DraftBatch, tree: TokenTree, most: int) -> NDArray[np.int64]:
        """0, and the numbers of the first nodes found that can come true; more are searched where they are too few."""
        while True:
            tokens, parents = self._found(batch, len(self._likely))
            rows = permitted(self._asked, tokens, parents)
            if self._chains:
                rows = np.array([0, *first_path(rows[1:].tolist(), parents[rows[1:] - 1].tolist(), 0)])
            rows = rows[: most + 1]
            if len(rows) > most or self._limit == self._searched or len(self._likely) < self._limit:
                return rows
            self._limit = min(2 * self._limit, self._searched)
            with batch.memory.lock:
                self._find(batch, [(self, tree)])

    def _found(self, batch: DraftBatch, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of the first nodes found, and their parents."""
        nodes = batch.nodes[self._place, 1 : 1 + count]
        return nodes["token"], nodes["parent"]

    def _send(self, batch: DraftBatch, tree: TokenTree, rows: NDArray[np.int64]) -> None:
        """Add nodes to a tree; 0 and their numbers, ascending, each with its parent."""
        last = int(rows[-1])
        self._rows, self._tree = rows, tree
        tokens, parents = self._found(batch, last)
        if last >= len(rows):  # some are left out
            places = np.zeros(last + 1, dtype=np.int64)
            places[rows] = np.arange(len(rows))
            tokens, parents = tokens[rows[1:] - 1], places[parents[rows[1:] - 1]]
        grown = tree.beyond(self._certain)
        grown.add_new_candidates(tokens.tolist(), (parents + grown.root).tolist())

    def explain(self, tree: TokenTree) -> Explanation:
        """Which sources named each node, and how likely it was taken to be."""
        with self.memory.lock:
            entries = int(np.count_nonzero(self.memory.ngrams.entries.heads["tag"])) if self._learns else None
            found: list[Origin] = []
            if tree is self._tree and self._batch is not None:
                names = [source.name for source in self._sources]
                found = origins_of(self._rows[1:].tolist(), self._place, self._batch, names)
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
                batch.learn(_step_of([drafter._shown(batch, result) for drafter, result in group]))
                for drafter, result in group:
                    drafter._length += len(result.tokens) - drafter._certain

    def _ends(self, result: StepResult) -> bool:
        """Note what became of a draft. Whether there is something to learn; if not, the tokens are kept for later."""
        for source in self._sources:
            source.observe(result)
        tree, self._tree = self._tree, None
        self._is_read = True
        is_searched = not self.budget.backs_off and result.tree.certain <= self._certain
        if not is_searched:  # a resting drafter does nothing that can wait
            self._late += result.tokens
            return False
        is_drafted = result.tree is tree
        result = result.beyond(self._certain)
        if not is_drafted or self._batch is None:
            self._rows = _ROOT
        elif self._sources:
            with self.memory.lock:
                self._batch.listed.learn(result.tokens)
        is_shown = result.top_ids.shape[1] > 0 or self._is_lost or self.memory.ngrams.observed
        if not self._learns or not is_shown:
            self._late += result.tokens
            return False
        if self._batch is None:
            self._join()
        return True

    def _shown(self, batch: DraftBatch, result: StepResult) -> _Shown:
        """What a step showed."""
        self._catch_up(batch)
        result = result.beyond(self._certain)
        root, count = result.tree.root, len(self._rows) + result.tree.root
        nodes = self._rows if root == 0 else np.concatenate([np.arange(-root, 0), self._rows])
        if batch.reads and result.top_ids.shape[1]:
            ids, probabilities = result.top_ids[:count], result.top_probabilities[:count]
        elif not batch.reads:
            ids = np.full((count, 1), -1, dtype=np.int64)
            probabilities = np.zeros(ids.shape, dtype=np.float32)
        else:
            ids = result.predictions[:count, None]
            probabilities = np.ones(ids.shape, dtype=np.float32)
        return _Shown(self._place, nodes, result.tokens, ids, probabilities)

    def statistics(self) -> dict[str, Any]:
        """Of the n-gram memory; see `NGramMemory.statistics`."""
        return self.memory.statistics()

    def _catch_up(self, batch: DraftBatch) -> None:
        """Add the tokens to the text that were not added yet."""
        if self._late:
            batch.extend(self._place, self._late)
            self._length += len(self._late)
            self._late = []


class _Shown(NamedTuple):
    """What a step showed of one text; see `Step`."""

    place: int
    nodes: NDArray[np.int64]
    tokens: list[int]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]


def _step_of(rows: Sequence[_Shown]) -> Step:
    """The rows of a step."""
    places, nodes, tokens, ids, probabilities = zip(*rows, strict=True)
    ends, added = list(accumulate(map(len, nodes))), list(map(len, tokens))
    counts = np.array((places, ends, added), dtype=np.int64)
    return Step(
        counts[0],
        counts[1],
        np.array([token for new in tokens for token in new], dtype=np.int64),
        counts[2],
        np.concatenate(nodes),
        np.concatenate(ids),  # a copy, which is written over
        np.concatenate(probabilities),
    )


T = TypeVar("T")


def _by_batch(asked: Iterable[tuple[AutoDrafter, T]]) -> Iterator[tuple[DraftBatch, list[tuple[AutoDrafter, T]]]]:
    """Drafters, each with its own, by the batch that their texts are in."""
    groups: dict[int, tuple[DraftBatch, list[tuple[AutoDrafter, T]]]] = {}
    for drafter, its_own in asked:
        batch = drafter._batch
        assert batch is not None
        groups.setdefault(id(batch), (batch, []))[1].append((drafter, its_own))
    yield from groups.values()


def _shared_batch(memory: DraftMemory, settings: tuple[int, bool, bool]) -> DraftBatch:
    """The batch of all drafters with this memory and these settings."""
    with memory.lock:
        batch: DraftBatch | None = memory.batches.get(settings)
        if batch is None:
            memory.batches[settings] = batch = DraftBatch(memory, *settings)
        return batch
