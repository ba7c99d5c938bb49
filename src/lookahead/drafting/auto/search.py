"""The search of `preset="auto"`: all sources propose, and the most probable continuation is added next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled, inner, loop_tuple
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Origin
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.ngram_entries import Entries, propose_known
from lookahead.drafting.auto.origins import origin_of
from lookahead.drafting.auto.path_arrays import PathArrays, listed_of, nodes_of, proposals_of
from lookahead.drafting.auto.path_queue import PathQueue, allocate_queue, clear, is_useful, pop, push
from lookahead.drafting.auto.proposals import (
    MOST_LISTED,
    Nodes,
    Proposals,
    allocate_nodes,
    allocate_proposals,
    begin_node,
    is_proposed,
)
from lookahead.drafting.auto.source import TokenPaths
from lookahead.drafting.auto.sources import (
    MOST_TRIED,
    ListedArrays,
    ListedPaths,
    RecentArrays,
    probability_of,
    propose_listed,
)
from lookahead.drafting.auto.texts import (
    LONGEST,
    SEARCHED,
    ContextMatches,
    Followed,
    MatchArrays,
    TextArrays,
    allocate_followed,
    matches_of,
    propose_matches,
)
from lookahead.drafting.auto.weights import SIBLINGS, Columns, estimate

LEAST_CHAINED = 0.001
"""A chain grows no further than to where it is accepted with this probability."""

SUREST = 0.999
"""Highest probability of a proposal."""


class Wanted(NamedTuple):
    """Which nodes are wanted.

    Attributes:
        nodes: How many, the most probable ones; none where a chain alone is wanted.
        chain: Levels to which the best path grows beyond these; 0 leaves the tree as it is.
        least: How probable the path to a node must be.
        surest: Highest probability of a proposal.
    """

    nodes: int
    chain: int
    least: float
    surest: float


class Sources(NamedTuple):
    """The sources of proposals: what is known about one text, `matches` and `listed`, and what is known about all."""

    entries: Entries
    matches: MatchArrays
    listed: ListedArrays
    recent: RecentArrays
    columns: Columns


class Room(NamedTuple):
    """What every search uses: the weights, room for the last tokens of a path, `[LONGEST]`, and what is waiting for its
    turn."""

    weights: NDArray[np.float64]
    context: NDArray[np.int64]
    queue: PathQueue


class TreeSearch:
    """The search for one tree, in arrays that are reused from step to step.

    Nodes are numbered from 0; the first ones are the last tokens of the text, the last of these is the root.

    Args:
        nodes: Most nodes below the root.
        memory: What to draft from.
        sources: Names of the sources that list paths before each search, besides the rejected siblings.
        surest: Highest probability of a proposal.
        chain: Most levels that the best path is grown to, beyond these nodes.

    Attributes:
        nodes: The tree.
        proposals: What may follow its nodes.
        listed: What sources list, and their records.
        root: Its root.
    """

    def __init__(
        self,
        nodes: int,
        memory: DraftMemory,
        sources: Sequence[str],
        surest: float = SUREST,
        chain: int = 0,
    ) -> None:
        self._surest = surest
        self._chain = chain
        nodes += chain
        ngrams, weights = memory.ngrams, memory.weights
        self._columns = weights.columns
        self._size = LONGEST + nodes + 1
        self._names = [SIBLINGS, *sources]
        columns = [self._columns.siblings, *[-1] * len(sources)]
        at_a_node = ngrams.orders * ngrams.top_k + SEARCHED + (1 + len(columns)) * MOST_LISTED
        proposals = (nodes + 1) * at_a_node + MOST_TRIED
        self.nodes = allocate_nodes(self._size)
        self.proposals = allocate_proposals(proposals, at_a_node + MOST_TRIED, weights.values.shape[1])
        self._entries = ngrams.entries
        self.listed = ListedPaths(columns, self._size)
        self._followed = allocate_followed(self._size)
        self._room = allocate_room(weights.values, proposals)
        self._line = np.arange(-1, LONGEST)
        self._run = TypedLoop(search_tree)
        self.root = 0
        self._count = 0

    @property
    def path_probabilities(self) -> NDArray[np.float64]:
        """Probability that each node found is accepted, in the order of the search, which is descending."""
        return self.nodes.probabilities[self.root + 1 : self.root + 1 + self._count]

    def ask(self, matches: ContextMatches, paths: Sequence[TokenPaths], recent: RecentArrays) -> Sources:
        """What the sources have to say in this step.

        Args:
            matches: Earlier occurrences in the text.
            paths: What each of the listed sources lists, in their order.
            recent: What the model predicted lately.
        """
        texts = matches.arrays
        text = texts.tokens[0], texts.newest[0], texts.earlier[0]
        found = MatchArrays(*text, *self._followed, int(texts.lengths[0]))
        listed = self.listed.fill(paths)
        return Sources(self._entries, found, listed, recent, self._columns)

    def search(
        self, text: Sequence[int] | NDArray[np.int64], most: int, room: int, sources: Sources, least: float = 0.0
    ) -> int:
        """Search a new tree, the most probable continuation first.

        Args:
            text: The text so far, or its last tokens; at most `LONGEST`, at least one.
            most: Nodes to find, at most as many as the arrays were made for.
            room: Levels that fit below the root.
            sources: What `ask` gave.
            least: How probable a path must be to be found.

        Returns:
            How many nodes were found.
        """
        self.root = len(text) - 1
        self.nodes.tokens[: len(text)] = text
        self.nodes.parents[: len(text)] = self._line[: len(text)]
        self.proposals.table_nodes.fill(-1)
        wanted = Wanted(most, self._chain, float(least), self._surest)
        arrays = map(loop_tuple, (self.nodes, self.proposals, sources, self._room))
        self._count = self._run(self.root, room, wanted, *arrays)
        return self._count

    def found(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of the first nodes found, and their parents: 0 is the root, 1 the first node."""
        nodes = slice(self.root + 1, self.root + 1 + count)
        return self.nodes.tokens[nodes], self.nodes.parents[nodes] - self.root

    def add_to(self, tree: TokenTree, rows: NDArray[np.int64]) -> None:
        """Add nodes to `tree`, right after its root, which is its last node so far.

        Args:
            tree: Where they go.
            rows: 0 for the root, and the numbers of the nodes from 1 on, ascending; each with its parent.
        """
        tokens, parents = self.found(int(rows[-1]))
        places = np.zeros(len(tokens) + 1, dtype=np.int64)
        places[rows] = np.arange(tree.root, tree.root + len(rows))
        sent = rows[1:] - 1
        tree.add_new_candidates(tokens[sent].tolist(), places[parents[sent]].tolist())

    def origins(self, rows: NDArray[np.int64]) -> list[Origin]:
        """Where nodes come from; `rows` are their numbers from 1 on."""
        arrays = self.nodes, self.proposals, self.listed.arrays, self._columns, self._names
        return [origin_of(node, *arrays) for node in (self.root + rows).tolist()]


def allocate_room(weights: NDArray[np.float64], proposals: int) -> Room:
    """Room for searches with these weights, and so many proposals."""
    return Room(weights, np.zeros(LONGEST, dtype=np.int64), allocate_queue(proposals))


@inner
def _read_path(node: int, nodes: Nodes, context: NDArray[np.int64]) -> int:
    """Write the last tokens of the path to a node to `context`, the very last one first; returns how many."""
    size = 0
    while node >= 0 and size < len(context):
        context[size] = nodes.tokens[node]
        node = nodes.parents[node]
        size += 1
    return size


@inner
def _propose(node: int, nodes: Nodes, proposals: Proposals, sources: Sources, context: NDArray[np.int64]) -> int:
    """Let each source propose what may follow a node. A new source that has to be asked at each node is a line here.

    Returns:
        Length of the longest context of the node that the memory knows.
    """
    size = _read_path(node, nodes, context)
    known = propose_known(node, context, size, proposals, sources.entries, sources.columns.memory)
    propose_matches(node, context, size, nodes, proposals, sources.matches, sources.columns.matches)
    propose_listed(node, nodes, proposals, sources.listed)
    return known


@inner
def _try_recent(root: int, least: float, proposals: Proposals, sources: Sources, queue: PathQueue) -> None:
    """Queue recent predictions after the root, behind all that is better; these are no proposals to learn from."""
    recent = sources.recent
    for index in range(min(len(recent.tokens), len(recent.probabilities))):
        token = recent.tokens[index]
        probability = probability_of(index, recent, sources.entries)
        if probability >= least and not is_proposed(token, root, proposals):
            row = len(proposals.tokens) - 1 - index
            proposals.tokens[row] = token
            proposals.nodes[row] = root
            push(row, probability, queue)


@inner
def _end_of_best_path(root: int, count: int, nodes: Nodes) -> int:
    """The last node of the path that promises the most tokens."""
    best, most = root, 0.0
    for node in range(root + 1, root + count + 1):
        expected, at = 0.0, node
        while at > root:
            expected += nodes.probabilities[at]
            at = nodes.parents[at]
        if expected > most:
            best, most = node, expected
    return best


@inner
def _likeliest(node: int, nodes: Nodes, proposals: Proposals, queue: PathQueue) -> int:
    """The proposal after a node whose path is the most probable; -1 if there is none."""
    likeliest = -1
    for row in range(nodes.starts[node], nodes.starts[node + 1]):
        if likeliest < 0 or queue.probabilities[row] > queue.probabilities[likeliest]:
            likeliest = row
    return likeliest


@compiled
def search_tree(
    root: int, room: int, wanted: Wanted, nodes: Nodes, proposals: Proposals, sources: Sources, using: Room
) -> int:
    """Add the most probable unexplored continuation again and again, until there are enough nodes; returns how many.

    Then the path that promises the most tokens grows by its most probable continuation.

    Args:
        root: The last node that is text.
        room: Levels that fit below the root.
        wanted: See there.
        nodes: The tree.
        proposals: What may follow its nodes; its table belongs to none of them.
        sources: Where proposals come from.
        using: See `Room`.
    """
    queue = using.queue
    chains = wanted.nodes == 0
    if not chains:
        clear(queue)
    proposals.counts[0] = 0
    node = root
    nodes.depths[node] = 0
    nodes.probabilities[node] = 1.0
    count = 0
    while True:
        begin = begin_node(proposals)
        open_below = nodes.depths[node] < room
        nodes.starts[node] = begin
        nodes.known[node] = _propose(node, nodes, proposals, sources, using.context) if open_below else 0
        end = proposals.counts[0]
        nodes.starts[node + 1] = end
        estimate(begin, end, nodes.known[node], using.weights, proposals)
        for row in range(begin, end):
            probability = nodes.probabilities[node] * min(proposals.estimates[row], wanted.surest)
            queue.probabilities[row] = probability
            if not chains and probability >= wanted.least and is_useful(probability, wanted.nodes, queue):
                push(row, probability, queue)
        if node == root and open_below and not chains:
            _try_recent(root, wanted.least, proposals, sources, queue)
        if not chains and count < wanted.nodes and queue.counts[0] > 0:
            row = pop(queue)
        else:
            if not chains:
                node = _end_of_best_path(root, count, nodes)
                chains = True
            row = _likeliest(node, nodes, proposals, queue)
            if nodes.depths[node] >= min(wanted.chain, room) or row < 0:
                return count
            if queue.probabilities[row] < (wanted.least if node == root else max(wanted.least, LEAST_CHAINED)):
                return count
        count += 1
        node = root + count
        nodes.tokens[node] = proposals.tokens[row]
        nodes.parents[node] = proposals.nodes[row]
        nodes.depths[node] = nodes.depths[proposals.nodes[row]] + 1
        nodes.probabilities[node] = queue.probabilities[row]


class Evidences(NamedTuple):
    """What is known about all texts; see `Sources`. `followed` is room for the occurrences that each node follows."""

    entries: Entries
    followed: Followed
    recent: RecentArrays
    columns: Columns


@compiled
def find_paths(
    rows: NDArray[np.int64],
    wanted: Wanted,
    most_tokens: int,
    worth: float,
    texts: TextArrays,
    paths: PathArrays,
    known: Evidences,
    using: Room,
    drafts: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> float:
    """Draft a chain after the texts in some places; returns how much drafted tokens lack of what they cost, in all.

    Args:
        rows: The place of each row, `[rows]`; -1 where no draft is wanted.
        wanted, texts, paths, known, using: See there.
        most_tokens: Most tokens of a text; one token more than its draft has to fit.
        worth: How likely a token has to be to bring what it costs.
        drafts: Gets the drafts, `[at least rows, longest]`.
        counts: Gets their lengths, `[at least rows]`.
    """
    lost = 0.0
    for row in range(len(rows)):
        counts[row] = 0
        place = rows[row]
        if place < 0:
            continue
        room = min(wanted.chain, most_tokens - texts.dropped[place] - texts.lengths[place] - 1)
        count = _find_path(place, max(room, 0), wanted, texts, paths, known, using)
        root, promised = paths.states.roots[place], 0.0
        for index in range(count):
            drafts[row, index] = paths.nodes.tokens[place, root + 1 + index]
            probability = paths.nodes.probabilities[place, root + 1 + index]
            promised += probability
            lost += max(worth - probability, 0.0)
        counts[row] = count
        paths.states.drafted[place], paths.states.promised[place] = count, promised
        paths.listed.children[place, 0] = -1  # what was said after a token that was rejected is of use once
    return lost


@inner
def _find_path(
    place: int, room: int, wanted: Wanted, texts: TextArrays, paths: PathArrays, known: Evidences, using: Room
) -> int:
    """Draft after one text; returns how many tokens."""
    nodes, proposals = nodes_of(place, paths), proposals_of(place, paths)
    matches = matches_of(place, texts, known.followed)
    size = min(matches.length, LONGEST)
    for index in range(size):
        nodes.tokens[index] = matches.text[matches.length - size + index]
    for index in range(len(proposals.table_nodes)):
        proposals.table_nodes[index] = -1
    paths.states.roots[place] = size - 1
    sources = Sources(known.entries, matches, listed_of(place, paths), known.recent, known.columns)
    return search_tree(size - 1, room, wanted, nodes, proposals, sources, using)
