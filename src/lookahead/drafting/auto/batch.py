"""Texts that share a memory: one call drafts for all of them, and one call learns from all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop
from lookahead.core.ranking import UNRANKED
from lookahead.core.results import StepResults
from lookahead.core.roots import Roots
from lookahead.core.token_tree import Noise
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import FEEDBACK, OUTCOME, SETTINGS, UNTRUSTED, BatchState, Step, learn, summarize
from lookahead.drafting.auto.search import (
    FORESEEN,
    LIMITS,
    NO_NOISE,
    NODE,
    Room,
    find,
    list_offers,
    padded_noise,
    take_nodes,
)
from lookahead.drafting.auto.sources import LISTED, MOST_LISTED, PRIOR, ListedArrays, TokenPaths, with_paths
from lookahead.drafting.auto.texts import (
    BUCKETS,
    LEAST_ROOM,
    LONGEST,
    OCCURRENCE,
    SEARCHED,
    TextArrays,
    allocate_texts,
    with_room,
)
from lookahead.drafting.auto.weights import all_weights

Member = Any
"""A drafter of one text in a batch: an `AutoDrafter`, whose file imports this one."""

_NONE = np.zeros(0, dtype=np.int64)
_place = attrgetter("place")


def _places_of(drafters: Sequence[Member]) -> NDArray[np.int64]:
    """Return the slots of some drafters; -1 before the first draft."""
    return np.array(list(map(_place, drafters)), dtype=np.int64)


class DraftBatch:
    """Texts that share a memory, and their drafts.

    Args:
        memory: N-gram memory of the model.
        nodes: Maximum number of nodes of a draft, without the root.
        chains: Whether drafts are single paths instead of trees.
        explores: Whether leftover nodes of a tree try recent predictions, if predictions are known.
        sources: Number of sources that list paths. With any, the batch holds one text.
        places: Initial capacity in texts.
        reach: Minimum number of tokens of each text that are searched.

    Attributes:
        memory: N-gram memory of the model.
        reads: Whether predictions of the model are learned; otherwise selected tokens replace them.
        state: Arrays of the texts, their drafts, and the evidence for these.
        sent: Number of nodes of each draft that were sent in the step: the first ones, `[places]`.
        room: Buffers of the search; learning overwrites its queue.
    """

    def __init__(
        self,
        memory: DraftMemory,
        nodes: int,
        chains: bool = False,
        explores: bool = False,
        sources: int = 0,
        places: int = 1,
        reach: int = 2 * BUCKETS,
    ) -> None:
        self.memory = memory
        size = nodes + 1
        self.reads = not memory.observed
        at_a_node = memory.orders * memory.top_k + SEARCHED + (1 + sources) * MOST_LISTED
        explores = explores and self.reads and not chains
        self.state = BatchState(
            memory.entries,
            allocate_texts(places, 1, reach),
            np.zeros(places, dtype=FEEDBACK),
            np.zeros((places, size), dtype=np.int64),
            ListedArrays(
                np.zeros(0, dtype=LISTED), np.zeros((sources, size), dtype=np.int64), np.full((sources, 2), PRIOR)
            ),
            np.zeros((places, size), dtype=NODE),
            np.full(places, -1, dtype=np.int64),
            all_weights(memory.orders),
            np.array((chains, explores, memory.observed), dtype=SETTINGS)[()],
        )
        self.state.feedback["share"] = 1.0
        self.state.feedback["copied"] = PRIOR
        self.room = Room(
            np.zeros(size * at_a_node + size, dtype=NODE),
            np.zeros(size, dtype=np.int64),
            np.zeros((size, SEARCHED), dtype=OCCURRENCE),
            np.zeros(LONGEST, dtype=np.int64),
            np.zeros(memory.orders, dtype=np.int64),
        )
        self.sent = np.zeros(places, dtype=np.int64)
        self._find = TypedLoop(find)
        self._offer = TypedLoop(list_offers)
        self._take = TypedLoop(take_nodes)
        self._learn = TypedLoop(learn)
        self._summarize = TypedLoop(summarize)
        self._owners: list[weakref.ref[Any] | None] = [None] * places
        self._free = 0  # tokens that fit into every text before capacity must be checked

    @property
    def texts(self) -> TextArrays:
        """Texts of all slots."""
        return self.state.texts

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of nodes of the last draft of each slot, `[slots]`; -1 without a draft."""
        return self.state.counts

    @property
    def trees(self) -> NDArray[Any]:
        """Nodes of the last draft of each slot, `[slots, nodes]` of `NODE`; node 0 is the root."""
        return self.state.trees

    def length_of(self, places: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Return the number of tokens of some texts."""
        length: NDArray[np.int64] = self.texts.dropped[places] + self.texts.lengths[places]
        return length

    def take_place(self, owner: Any) -> int:
        """Reserve a slot for a text until `owner` is garbage-collected, and return its index."""
        with self.memory.lock:
            for place, reference in enumerate(self._owners):
                if reference is None or reference() is None:
                    self._owners[place] = weakref.ref(owner)
                    return place
            places = 2 * len(self._owners)
            state = self.state
            self.state = state._replace(
                texts=with_room(state.texts, places, state.texts.tokens.shape[1]),
                feedback=_doubled(state.feedback),
                recent=_doubled(state.recent),
                trees=_doubled(state.trees),
                counts=np.concatenate([state.counts, np.full_like(state.counts, -1)]),
            )
            self.sent = _doubled(self.sent)
            self._owners += [None] * len(self._owners)
            return self.take_place(owner)

    def begin(self, place: int, tokens: Sequence[int] | NDArray[np.integer], before: Sequence[int] = ()) -> None:
        """Begin a text in a slot; the tokens `before` are searched as if they preceded it."""
        new = np.array([*before, *tokens], dtype=np.int64) if len(before) else np.array(tokens, dtype=np.int64)
        with self.memory.lock:
            of_text = self.state.feedback[place]
            recent = self.state.recent[place]
            self.sent[place] = 0
            of_text["seen"] = of_text["agreed"] = of_text["share"] = 1.0
            of_text["recalled"] = 0
            of_text["copied"] = PRIOR
            latest: dict[int, None] = {}
            end = len(new) if self.state.settings["explores"] else 0
            while end > len(before) and len(latest) < len(recent):
                begin = max(end - 4 * len(recent), len(before))
                latest |= dict.fromkeys(new[begin:end][::-1].tolist())
                end = begin
            count = min(len(latest), len(recent))
            of_text["count"], recent[:count] = count, [*latest][:count]
            self.state.listed.record[:] = PRIOR  # trust the probabilities of each source at first
            self._begin(place, new, -len(before))
            if not self.reads:
                self._learn_text(place, len(new))

    def _begin(self, place: int, tokens: NDArray[np.int64], dropped: int) -> None:
        """Index a text anew, given its tokens; `dropped` is the number of earlier tokens that are no longer stored."""
        texts = self.state.texts
        surplus = len(tokens) - texts.reach if len(tokens) > 2 * texts.reach else 0
        texts.newest[place] = -1
        texts.lengths[place], texts.dropped[place] = 0, dropped + surplus
        self.extend(place, tokens[surplus:])

    def extend(self, place: int, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Extend a text by tokens without predictions."""
        new = np.array(tokens, dtype=np.int64)
        texts = self.state.texts
        with self.memory.lock:
            if len(new) > 2 * texts.reach:
                self._begin(place, new, int(texts.dropped[place] + texts.lengths[place]))
            else:
                self.learn(Step.of_text(place, new, _NONE))

    def _learn_text(self, place: int, count: int) -> None:
        """Add the last tokens of a text, at most `count`, to the memory as if the model had predicted them."""
        texts = self.state.texts
        length = int(texts.lengths[place])
        taught = min(count, length - max(-int(texts.dropped[place]), 0))
        selected = np.append(texts.tokens[place, length - taught + 1 : length], -1)
        self.learn(Step.of_text(place, _NONE, selected[:taught]))

    def list_paths(self, paths: Sequence[TokenPaths]) -> None:
        """Set the paths that sources propose for the coming step."""
        self.state = self.state._replace(listed=with_paths(self.state.listed, paths))

    def top_k_of(self, drafters: Sequence[Member]) -> int:
        """Return the number of likeliest next tokens to list after each node (`RowsDrafter.top_k_of`).

        It is 0 before the first draft, while drafting backs off, and while selected tokens rarely match predictions.
        """
        first = drafters[0]
        if first.budget.backs_off or not (self.reads and first.learns):
            return 0
        places = _places_of(drafters)
        return int(self.memory.top_k) if (self._trusted(places) & (places >= 0)).any() else 0

    def _trusted(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether predictions often match the selected tokens of each text, or it has no slot yet, `[rows]`."""
        trusted: NDArray[np.bool_] = self.state.feedback["share"][places] >= UNTRUSTED
        return trusted | (places < 0)

    def find_rows(
        self, drafters: Sequence[Member], rows: Sequence[int], roots: Roots
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
        """Draft for several texts with a common budget (`RowsDrafter.find_rows`)."""
        first = drafters[0]  # with sources the only one
        budget = first.budget
        places = _places_of(drafters)
        trusted = self._trusted(places)
        budget.begin(int(np.count_nonzero(trusted)) if self.reads and first.learns else 0)
        fits = first.add_certain(roots.tree(rows[0])) if first.knowing else True
        if budget.backs_off or not fits:
            return None
        new = (places < 0).nonzero()[0].tolist()
        if new:
            for index in new:
                drafters[index].join()
            places = _places_of(drafters)
        with self.memory.lock:
            self._catch_up(drafters)
            if first.sources:
                self.list_paths([source.propose() for source in first.sources])
            limits = np.empty(len(places), dtype=LIMITS)
            limits["place"], limits["nodes"] = places, min(first.searched, budget.max_candidates)
            levels = roots.rooms_of(rows)
            limits["levels"] = levels if not first.certain else [level - first.certain for level in levels]
            limits["min_probability"] = budget.min_probability
            noises = self._foresee(levels, roots, rows, trusted, first.certain) if roots.foresee else {}
            room = min(budget.max_candidates, first.max_candidates - first.certain)
            search = partial(self._search_rows, limits, noises, budget.ranking)
            search()
            if first.permitting:
                first.forbid(self, limits, room, search)
            # A draft of a text with a larger vocabulary ends before a token that the model does not know.
            likely = np.empty(len(places) * room)
            counts = np.empty(len(places), dtype=np.int64)
            end = self._offer(places, room, roots.vocabulary, self.state.trees, self.state.counts, likely, counts)
            return likely[:end], counts

    def _catch_up(self, drafters: Sequence[Member]) -> None:
        """Add the deferred tokens to the texts."""
        for drafter in drafters:
            if drafter.late:
                self.extend(drafter.place, drafter.late)
                drafter.late = []

    def send_rows(
        self, drafters: Sequence[Member], rows: Sequence[int], roots: Roots, counts: NDArray[np.int64]
    ) -> None:
        """Add the first nodes of the drafts to the trees (`RowsDrafter.send_rows`)."""
        places = _places_of(drafters)
        tokens, parents = np.empty((2, int(counts.sum())), dtype=np.int64)
        with self.memory.lock:
            self._take(places, counts, self.state.trees, tokens, parents)
            self.sent[places] = counts
        roots.add(np.array(rows), counts, tokens, parents)

    def _foresee(
        self, levels: Sequence[int], roots: Roots, rows: Sequence[int], trusted: NDArray[np.bool_], certain: int
    ) -> dict[int, Noise]:
        """Return the noise that the next tokens of some texts will be sampled with, if known, by index in `rows`.

        With it the search knows which prediction of the model is selected.
        """
        noises: dict[int, Noise] = {}
        for index, row in enumerate(rows):
            foresee = roots.foresee.get(row) if trusted[index] else None
            noise = None if foresee is None else foresee(min(certain + FORESEEN, levels[index]))
            if noise is not None:
                noises[index] = padded_noise(Noise(noise.places[certain:], noise.temperature))
        return noises

    def _search_rows(self, limits: NDArray[Any], noises: dict[int, Noise], ranking: NDArray[np.int64]) -> None:
        """Search drafts for some texts in one call; texts with known sampling noise have a call each."""
        for index, noise in noises.items():
            self.find(limits[index : index + 1], noise, ranking)
        if len(noises) < len(limits):
            self.find(np.delete(limits, [*noises]) if noises else limits, ranking=ranking)

    def find(self, limits: NDArray[Any], noise: Noise = NO_NOISE, ranking: NDArray[np.int64] = UNRANKED) -> None:
        """Search drafts for some texts and write them to the state; see `search.find`."""
        self._find(limits, noise, self.state, self.room, ranking)

    def observe_rows(self, drafters: Sequence[Member], rows: Sequence[int], step: StepResults) -> None:
        """Learn from a step for several texts (`RowsDrafter.observe_rows`)."""
        first = drafters[0]
        if first.sources:
            result = step.of(rows[0])
            for source in first.sources:
                source.observe(result)
        self.learn_rows(drafters, rows, step)

    def learn_rows(self, drafters: Sequence[Member], rows: Sequence[int], step: StepResults) -> None:
        """Learn from a step for several texts, without their sources.

        All work is deferred during a rest and before the first draft, which many short texts never have.
        """
        forest, outputs, walks = step
        first = drafters[0]  # with sources the only one
        certain = forest[rows[0]].certain if first.knowing else 0
        learns = first.learns and not first.budget.backs_off and certain <= first.certain
        certain = certain if certain <= first.certain else 0  # others are not in the text of the batch yet
        if not learns:
            self._defer(drafters, rows, step, certain)
            return
        ids = outputs.top_ids
        is_listed = ids.shape[1] > 0
        with self.memory.lock:  # another thread may replace the arrays for more texts
            places = _places_of(drafters)
            learning = places >= 0
            if not (is_listed or self.memory.observed):
                learning &= ~self._trusted(places)
            if not learning.all():
                late = (~learning).nonzero()[0].tolist()
                self._defer([drafters[index] for index in late], [rows[index] for index in late], step, certain)
                kept = learning.nonzero()[0].tolist()
                if not kept:
                    return
                drafters = [drafters[index] for index in kept]
                rows = [rows[index] for index in kept]
                places = places[learning]
            self._catch_up(drafters)
            outcomes = np.empty(len(places), dtype=OUTCOME)
            lengths = forest.roots, forest.counts, forest.firsts, walks.counts
            self._summarize(places, np.array(rows), certain, *lengths, self.sent, outcomes)
            # Copies, as learning overwrites them.
            if self.reads and is_listed:
                ids, probabilities = ids.copy(), outputs.top_probabilities.copy()
            else:
                ids = outputs.predictions[:, None].copy() if self.reads else np.full((len(forest.tokens), 1), -1)
                probabilities = np.ones(ids.shape, dtype=np.float32)
            self.learn(Step(outcomes, walks.tokens, ids, probabilities, np.empty(len(ids), dtype=np.int64)))

    def _defer(self, drafters: Sequence[Member], rows: Sequence[int], step: StepResults, certain: int) -> None:
        """Keep the tokens of a step, without the certain ones, for the next step that learns."""
        tokens = step.walks.tokens.tolist()
        firsts = step.forest.firsts.tolist()
        counts = step.walks.counts.tolist()
        with self.memory.lock:
            for drafter, row in zip(drafters, rows, strict=True):
                drafter.late += tokens[firsts[row] + certain : firsts[row] + counts[row]]
                if drafter.place >= 0:
                    self.sent[drafter.place] = 0

    def learn(self, step: Step) -> int:
        """Learn from a step: append its tokens to the texts, and discard their drafts.

        Returns:
            Number of accepted draft tokens.
        """
        self._make_room(step)
        self.memory.clock += len(step.ids) > 0
        accepted, lost = self._learn(step, self.memory.clock, self.state, self.memory.writing, self.room.queue)
        if lost:  # in these texts predictions rarely match the selected tokens
            for place in step.rows["place"].tolist():
                of_text = self.state.feedback[place]
                if place >= 0 and of_text["share"] < UNTRUSTED and not of_text["recalled"]:
                    of_text["recalled"] = 1
                    self._learn_text(place, self.memory.capacity)
        return int(accepted)

    def _make_room(self, step: Step) -> None:
        """Grow the arrays for the tokens of a step; a text beyond the limit keeps its last tokens."""
        added = sum(step.rows["added"].tolist())
        self._free -= added
        if self._free >= 0:
            return
        texts = self.state.texts
        longest = int(texts.lengths.max()) + added
        reach = texts.reach
        if min(longest, 2 * reach) >= texts.tokens.shape[1]:
            texts = with_room(texts, len(texts.lengths), 1 + min(max(2 * longest, LEAST_ROOM), 2 * reach))
            self.state = self.state._replace(texts=texts)
        if longest > 2 * reach:
            for place, added in zip(step.rows["place"].tolist(), step.rows["added"].tolist(), strict=True):
                length = int(texts.lengths[place])
                if place >= 0 and length + added > 2 * reach:
                    surplus = length - max(reach - added, 0)
                    latest = texts.tokens[place, surplus:length].copy()
                    self._begin(place, latest, int(texts.dropped[place]) + surplus)
        self._free = min(texts.tokens.shape[1] - 1, 2 * reach) - longest


def shared_batch(memory: DraftMemory, settings: tuple[int, bool, bool]) -> DraftBatch:
    """Return the batch that all drafters without sources share for this memory and these settings."""
    with memory.lock:
        batch: DraftBatch | None = memory.batches.get(settings)
        if batch is None:
            memory.batches[settings] = batch = DraftBatch(memory, *settings)
        return batch


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of the array with twice its capacity; the new half is 0."""
    return np.concatenate([array, np.zeros_like(array)])
