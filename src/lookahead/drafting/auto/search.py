"""The search of `preset="auto"`: all sources propose, and the most probable continuation is added next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import TypedLoop, compiled, inner, loop_arrays, loop_tuple
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Origin
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.listed_paths import ListedArrays, ListedPaths, propose_listed
from lookahead.drafting.auto.ngram_entries import Entries, propose_known
from lookahead.drafting.auto.origins import origin_of
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
from lookahead.drafting.auto.recent_predictions import MOST_TRIED, RecentArrays, probability_of
from lookahead.drafting.auto.source import TokenPaths
from lookahead.drafting.auto.texts import (
    LONGEST,
    SEARCHED,
    ContextMatches,
    MatchArrays,
    allocate_followed,
    propose_matches,
)
from lookahead.drafting.auto.weights import SIBLINGS, Columns, estimate

LEAST_CHAINED = 0.001
"""A chain grows no further than to where it is accepted with this probability."""

SUREST = 0.999
"""Highest probability of a proposal."""


class Sources(NamedTuple):
    """The sources of proposals."""

    entries: Entries
    matches: MatchArrays
    listed: ListedArrays
    recent: RecentArrays
    columns: Columns


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
        self._weights, self._columns = weights.values, weights.columns
        self._size = LONGEST + nodes + 1
        self._names = [SIBLINGS, *sources]
        columns = [self._columns.siblings, *[-1] * len(sources)]
        at_a_node = ngrams.orders * ngrams.top_k + SEARCHED + (1 + len(columns)) * MOST_LISTED
        proposals = (nodes + 1) * at_a_node + MOST_TRIED
        self.nodes = allocate_nodes(self._size)
        self.proposals = allocate_proposals(proposals, at_a_node + MOST_TRIED, self._weights.shape[1])
        self._entries = ngrams.entries
        self.listed = ListedPaths(columns, self._size)
        self._followed = allocate_followed(self._size)
        self._queue = allocate_queue(proposals)
        self._context = np.zeros(LONGEST, dtype=np.int64)
        self._line = np.arange(-1, LONGEST)
        self._run = TypedLoop(_search_tree)
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
        arrays = map(loop_tuple, (self.nodes, self.proposals, sources, self._queue))
        own = loop_arrays(self._weights, self._context)
        told = (most, float(least), room, self.root, self._surest, self._chain, *own, *arrays)
        self._count = self._run(*told)
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


@inner
def read_path(node: int, nodes: Nodes, context: NDArray[np.int64]) -> int:
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
    size = read_path(node, nodes, context)
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
def _search_tree(
    most: int,
    least: float,
    room: int,
    root: int,
    surest: float,
    chain: int,
    weights: NDArray[np.float64],
    context: NDArray[np.int64],
    nodes: Nodes,
    proposals: Proposals,
    sources: Sources,
    queue: PathQueue,
) -> int:
    """Add the most probable unexplored continuation again and again, until there are `most` nodes; returns how many.

    Then the path that promises the most tokens grows by its most probable continuation, to `chain` levels.

    Args:
        most: Nodes to find.
        least: How probable the path to a node must be.
        room: Levels that fit below the root.
        root: The last node that is text.
        surest: Highest probability of a proposal.
        chain: Levels of the best path; 0 leaves the tree as it is.
        weights: See `Weights`.
        context: Room for the last tokens of a path, `[LONGEST]`.
        nodes: The tree.
        proposals: What may follow its nodes; its table belongs to none of them.
        sources: Where proposals come from.
        queue: What is waiting for its turn.
    """
    clear(queue)
    proposals.counts[0] = 0
    node = root
    nodes.depths[node] = 0
    nodes.probabilities[node] = 1.0
    count = 0
    chains = False
    while True:
        begin = begin_node(proposals)
        open_below = nodes.depths[node] < room
        nodes.starts[node] = begin
        nodes.known[node] = _propose(node, nodes, proposals, sources, context) if open_below else 0
        end = proposals.counts[0]
        nodes.starts[node + 1] = end
        estimate(begin, end, nodes.known[node], weights, proposals)
        for row in range(begin, end):
            probability = nodes.probabilities[node] * min(proposals.estimates[row], surest)
            queue.probabilities[row] = probability
            if not chains and probability >= least and is_useful(probability, most, queue):
                push(row, probability, queue)
        if node == root and open_below:
            _try_recent(root, least, proposals, sources, queue)
        if not chains and count < most and queue.counts[0] > 0:
            row = pop(queue)
        else:
            if not chains:
                node = _end_of_best_path(root, count, nodes)
                chains = True
            row = _likeliest(node, nodes, proposals, queue)
            if nodes.depths[node] >= min(chain, room) or row < 0:
                return count
            if queue.probabilities[row] < max(least, LEAST_CHAINED):
                return count
        count += 1
        node = root + count
        nodes.tokens[node] = proposals.tokens[row]
        nodes.parents[node] = proposals.nodes[row]
        nodes.depths[node] = nodes.depths[proposals.nodes[row]] + 1
        nodes.probabilities[node] = queue.probabilities[row]
