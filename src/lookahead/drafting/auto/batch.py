"""Texts that share a memory: one call drafts for all of them, and one call learns from all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop
from lookahead.core.protocols import RowsBudget, StepResult, StepResults
from lookahead.core.token_tree import Noise, TokenTree
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.learning import HEARD, SETTINGS, SHOWN, UNTRUSTED, BatchState, Step, learn
from lookahead.drafting.auto.search import NO_NOISE, NODE, WANTED, Room, find
from lookahead.drafting.auto.sources import LISTED, MOST_LISTED, PRIOR, ListedArrays, TokenPaths, with_paths
from lookahead.drafting.auto.texts import BUCKETS, LEAST_ROOM, LONGEST, OCCURRENCE, SEARCHED, allocate_texts, with_room
from lookahead.drafting.auto.weights import all_weights

if TYPE_CHECKING:
    from lookahead.drafting.auto.drafter import AutoDrafter

Shown = tuple[tuple[int, int, int, int], list[int], NDArray[np.int64], NDArray[np.float32]]
"""Outcome of a step for one text: a `SHOWN`, the tokens added, and the predictions after each node; see `Step`.
"""

_NONE = np.zeros(0, dtype=np.int64)


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
            np.zeros(places, dtype=HEARD),
            np.zeros((places, size), dtype=np.int64),
            ListedArrays(
                np.zeros(0, dtype=LISTED), np.zeros((sources, size), dtype=np.int64), np.full((sources, 2), PRIOR)
            ),
            np.zeros((places, size), dtype=NODE),
            np.full(places, -1, dtype=np.int64),
            all_weights(memory.orders),
            np.array((chains, explores, memory.observed), dtype=SETTINGS)[()],
        )
        self.state.heard["share"] = 1.0
        self.room = Room(
            np.zeros(size * at_a_node + size, dtype=NODE),
            np.zeros(size, dtype=np.int64),
            np.zeros((size, SEARCHED), dtype=OCCURRENCE),
            np.zeros(LONGEST, dtype=np.int64),
            np.zeros(memory.orders, dtype=np.int64),
        )
        self._find, self._learn = TypedLoop(find), TypedLoop(learn)
        self._owners: list[weakref.ref[Any] | None] = [None] * places
        self._free = 0  # tokens that fit into every text before capacity must be checked

    def take_place(self, owner: Any) -> int:
        """Reserve a slot for a text until `owner` is garbage-collected, and return its index."""
        with self.memory.lock:
            for place, reference in enumerate(self._owners):
                if reference is None or reference() is None:
                    self._owners[place] = weakref.ref(owner)
                    return place
            places, state = 2 * len(self._owners), self.state
            self.state = state._replace(
                texts=with_room(state.texts, places, state.texts.tokens.shape[1]),
                heard=_doubled(state.heard),
                recent=_doubled(state.recent),
                trees=_doubled(state.trees),
                counts=np.concatenate([state.counts, np.full_like(state.counts, -1)]),
            )
            self._owners += [None] * len(self._owners)
            return self.take_place(owner)

    def begin(self, place: int, tokens: Sequence[int] | NDArray[np.integer], before: Sequence[int] = ()) -> None:
        """Begin a text in a slot; the tokens `before` are searched as if they preceded it."""
        new = np.array([*before, *tokens], dtype=np.int64) if len(before) else np.array(tokens, dtype=np.int64)
        with self.memory.lock:
            of_text, recent = self.state.heard[place], self.state.recent[place]
            of_text["seen"] = of_text["agreed"] = of_text["share"] = 1.0
            of_text["recalled"] = 0
            latest: list[int] = []
            if self.state.settings["explores"]:
                latest = [*dict.fromkeys(new[len(before) :][::-1].tolist())][: len(recent)]
            of_text["count"], recent[: len(latest)] = len(latest), latest
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
        new, texts = np.array(tokens, dtype=np.int64), self.state.texts
        with self.memory.lock:
            if len(new) > 2 * texts.reach:
                self._begin(place, new, int(texts.dropped[place] + texts.lengths[place]))
            else:
                self.learn(Step.of_text(place, new, _NONE))

    def _learn_text(self, place: int, most: int) -> None:
        """Add the last tokens of a text, at most `most`, to the memory as if the model had predicted them."""
        texts = self.state.texts
        length = int(texts.lengths[place])
        taught = min(most, length - max(-int(texts.dropped[place]), 0))
        selected = np.append(texts.tokens[place, length - taught + 1 : length], -1)
        self.learn(Step.of_text(place, _NONE, selected[:taught]))

    def list_paths(self, paths: Sequence[TokenPaths]) -> None:
        """Set the paths that sources propose for the coming step."""
        self.state = self.state._replace(listed=with_paths(self.state.listed, paths))

    def propose_rows(self, drafters: Sequence[AutoDrafter], trees: Sequence[TokenTree]) -> None:
        """Draft for several texts (`RowsDrafter.propose_rows`)."""
        self.draft([(drafter, tree) for drafter, tree in zip(drafters, trees, strict=True) if drafter.begins(tree)])

    def draft(self, requests: Sequence[tuple[AutoDrafter, TokenTree]]) -> None:
        """Search drafts for some texts, and let their budgets choose the nodes that are added to the trees."""
        if not requests:
            return
        with self.memory.lock:
            wanted = np.array([drafter.wanted(self, tree) for drafter, tree in requests], dtype=WANTED)
            self.search(requests, wanted)
            for drafter, tree in requests:
                drafter.forbid(self, tree)
            places = wanted["place"]
            rows, nodes = _spread(self.state.counts[places])
            found = self.state.trees[places[rows], nodes + 1]
        self._offer(requests, places, found["token"], found["offered"].copy())

    def _offer(
        self,
        requests: Sequence[tuple[AutoDrafter, TokenTree]],
        places: NDArray[np.int64],
        tokens: NDArray[np.int64],
        likely: NDArray[np.float64],
    ) -> None:
        """Let the budgets choose among the nodes of the search, and add the chosen ones to the trees.

        Args:
            requests: Drafters and their trees.
            places: Slot of each text.
            tokens: Tokens of the nodes, text after text.
            likely: Probabilities of the nodes, text after text.
        """
        found = self.state.counts[places]
        most = np.minimum(found, [drafter.most for drafter, _ in requests])

        def send(counts: NDArray[np.int64]) -> None:
            rows, nodes = _spread(counts)
            sent = self.state.trees[places[rows], nodes + 1]
            firsts = np.array([drafter.first_node(tree) for drafter, tree in requests])
            tokens, parents = sent["token"].tolist(), (sent["parent"] + firsts[rows]).tolist()
            end = 0
            for (drafter, tree), count in zip(requests, counts.tolist(), strict=True):
                begin, end = end, end + count
                drafter.send(tree, tokens[begin:end], parents[begin:end])

        vocabulary = min([tree.vocabulary for _, tree in requests])
        if int(tokens.max(initial=0)) >= vocabulary:  # learned from a model with a larger vocabulary
            most = np.minimum(
                most, [self._known(place, tree) for place, (_, tree) in zip(places, requests, strict=True)]
            )
        if (most < found).any():
            rows, nodes = _spread(found)
            likely = likely[nodes < most[rows]]
        budget = requests[0][0].budget
        if len({id(drafter.budget) for drafter, _ in requests}) == 1 < len(requests) and isinstance(budget, RowsBudget):
            budget.offer_rows(likely, most, send)
            return
        ends = most.cumsum().tolist()
        for row, (drafter, tree) in enumerate(requests):
            offered = likely[ends[row] - int(most[row]) : ends[row]]
            one = partial(self._send_one, drafter, tree, int(places[row]))
            drafter.budget.offer(offered.copy(), one, drafter.pending(tree))

    def _known(self, place: np.int64, tree: TokenTree) -> int:
        """Return the number of leading nodes with tokens inside the vocabulary."""
        tokens = self.state.trees["token"][place, 1 : self.state.counts[place] + 1]
        unknown = np.flatnonzero(tokens >= tree.vocabulary)
        return int(unknown[0]) if len(unknown) else len(tokens)

    def _send_one(self, drafter: AutoDrafter, tree: TokenTree, place: int, count: int) -> None:
        """Add the first `count` nodes of a text's draft to its tree."""
        sent = self.state.trees[place, 1 : count + 1]
        drafter.send(tree, sent["token"].tolist(), (sent["parent"] + drafter.first_node(tree)).tolist())

    def search(self, requests: Sequence[tuple[AutoDrafter, TokenTree]], wanted: NDArray[Any]) -> None:
        """Search drafts for some texts in one call; texts with known sampling noise have a call each."""
        sampled = [row for row, (_, tree) in enumerate(requests) if tree.foresee is not None]
        noises = {row: noise for row in sampled if (noise := requests[row][0].foresee(requests[row][1])) is not None}
        for row, noise in noises.items():
            self.find(wanted[row : row + 1], noise)
        if len(noises) < len(wanted):
            self.find(np.delete(wanted, [*noises]) if noises else wanted)

    def find(self, wanted: NDArray[Any], noise: Noise = NO_NOISE) -> None:
        """Search drafts for some texts and write them to the state; see `search.find`."""
        self._find(wanted, noise, self.state, self.room)

    def observe_rows(self, drafters: Sequence[AutoDrafter], rows: Sequence[int], step: StepResults) -> None:
        """Learn from a step for several texts (`RowsDrafter.observe_rows`)."""
        outputs, added, shown, firsts = step.outputs, list[int](), list[tuple[int, int, int, int]](), list[int]()
        listed = outputs.top_ids.shape[1]
        with self.memory.lock:
            for drafter, row in zip(drafters, rows, strict=True):
                walk = step.walks[row]
                if walk is not None and drafter.ends(walk.tree, walk.tokens, listed):
                    shown.append(drafter.shown_nodes(self, walk.tree, len(walk.tokens)))
                    firsts.append(row)
                    added += walk.tokens
            if not shown:
                return
            of_rows = np.array(shown, dtype=SHOWN)
            of_row, nodes = _spread(of_rows["nodes"])
            nodes += step.forest.firsts[firsts][of_row]
            if self.reads and listed:
                predictions = (
                    outputs.top_ids[nodes],
                    outputs.top_probabilities[nodes],
                )  # copies, because learning overwrites them
            else:
                ids = (
                    outputs.predictions[nodes][:, None] if self.reads else np.full((len(nodes), 1), -1, dtype=np.int64)
                )
                predictions = ids, np.ones(ids.shape, dtype=np.float32)
            tokens = np.array(added, dtype=np.int64)
            self.learn(Step(of_rows, tokens, *predictions, np.empty(len(nodes), dtype=np.int64)))

    def learn_rows(self, requests: Sequence[tuple[AutoDrafter, StepResult]]) -> None:
        """Learn the outcome of a step for some texts."""
        if not requests:
            return
        with self.memory.lock:
            rows, tokens, ids, likely = zip(*(drafter.shown(self, result) for drafter, result in requests), strict=True)
            predictions = np.concatenate(ids), np.concatenate(likely)  # copies, because learning overwrites them
            added = np.array([*chain.from_iterable(tokens)], dtype=np.int64)
            self.learn(
                Step(np.array([*rows], dtype=SHOWN), added, *predictions, np.empty(len(predictions[0]), dtype=np.int64))
            )

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
                of_text = self.state.heard[place]
                if place >= 0 and of_text["share"] < UNTRUSTED and not of_text["recalled"]:
                    of_text["recalled"] = 1
                    self._learn_text(place, self.memory.capacity)
        return int(accepted)

    def _make_room(self, step: Step) -> None:
        """Grow the arrays for the tokens of a step; a text beyond the limit keeps its last tokens."""
        self._free -= len(step.tokens)
        if self._free >= 0:
            return
        texts = self.state.texts
        longest, reach = int(texts.lengths.max()) + len(step.tokens), texts.reach
        if min(longest, 2 * reach) >= texts.tokens.shape[1]:
            texts = with_room(texts, len(texts.lengths), 1 + min(max(2 * longest, LEAST_ROOM), 2 * reach))
            self.state = self.state._replace(texts=texts)
        if longest > 2 * reach:
            for place, _, _, added in step.rows.tolist():
                length = int(texts.lengths[place])
                if place >= 0 and length + added > 2 * reach:
                    surplus = length - max(reach - added, 0)
                    kept = texts.tokens[place, surplus:length].copy()
                    self._begin(place, kept, int(texts.dropped[place]) + surplus)
        self._free = min(texts.tokens.shape[1] - 1, 2 * reach) - longest


def shared_batch(memory: DraftMemory, settings: tuple[int, bool, bool]) -> DraftBatch:
    """Return the batch that all drafters without sources share for this memory and these settings."""
    with memory.lock:
        batch: DraftBatch | None = memory.batches.get(settings)
        if batch is None:
            memory.batches[settings] = batch = DraftBatch(memory, *settings)
        return batch


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each entry, and its index in the row, given the number of entries of each row."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (counts.cumsum() - counts)[rows]


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of the array with twice its capacity; the new half is 0."""
    return np.concatenate([array, np.zeros_like(array)])
