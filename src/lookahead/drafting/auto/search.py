"""Growing a tree best-first: the inner loop of drafting, compiled where numba is installed."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp, frexp, log

import numpy as np
from numpy.typing import NDArray

from lookahead.core.token_tree import TokenTree
from lookahead.drafting.auto.context_matches import LONGEST, SEARCHED, ContextMatches, find_matches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.embedding_neighbours import (
    NEAREST,
    EmbeddingNeighbours,
    add_shares,
    follow_neighbours,
    rank_shares,
)
from lookahead.drafting.auto.ngram_memory import (
    FIRST_FACTOR,
    FIRST_PRIME,
    LEAST_LOG_PROBABILITY,
    SECOND_FACTOR,
    SECOND_PRIME,
    NGramMemory,
    entry_of,
)
from lookahead.drafting.auto.scorer import MATCH_CLASSES, Acceptance
from lookahead.drafting.compiled import compiled, loop_arrays

MOST_RECENT = 64
"""Most tokens that are tried after the root when nothing better is left."""

KNOWN_SHARE = 0.25
"""What a recent prediction counts if the memory knows what comes after it already."""

MOST_BORROWED = 16
"""Most proposals of neighbours after a node, and most of rejected-sibling continuations after the root."""

LEAST_LENDING = 0.3
"""How likely a node must be for neighbours to be looked for, which takes as long as growing several nodes; asking for
less likely ones as well brought nothing."""

UNBORROWED_LOG = -7.0
"""Logarithm of the probability of a token that neighbours or rejected-sibling continuations do not name."""

_POWERS = 64
"""Powers of two of probabilities that are told apart."""

_SEEN = 512
"""Places in the little hash table that tells which tokens a node has been proposed already."""


class TreeSearch:
    """A tree while it grows, in arrays that are used again from step to step.

    Nodes are numbered from 0; the first ones are the last tokens of the text, the last of these is the root.

    Args:
        nodes: Most nodes that are grown below the root.
        ngrams: The memory that will be grown from, for its sizes.
        acceptance: What will weigh the proposals, for its sizes.
        neighbours: Which tokens resemble each other; none do if not given.
    """

    def __init__(
        self, nodes: int, ngrams: NGramMemory, acceptance: Acceptance, neighbours: EmbeddingNeighbours | None = None
    ) -> None:
        size = LONGEST + nodes + 1
        own_proposals = ngrams.orders * ngrams.top_k + SEARCHED + 2 * MOST_BORROWED
        proposals = (nodes + 1) * own_proposals + MOST_RECENT
        # Of each node: its token, its parent, its depth below the root, the estimated probability that it is accepted,
        # the length of the longest context of it that the memory knows, and where its proposals begin.
        self._tokens = np.zeros(size, dtype=np.int64)
        self._parents = np.arange(-1, size - 1)
        self._depths = np.zeros(size, dtype=np.int64)
        self._gains = np.zeros(size)
        self._longest = np.zeros(size, dtype=np.int64)
        self._starts = np.zeros(size + 1, dtype=np.int64)
        # Of each proposal: its token, the probability that it was given after its node, what spoke for it, that node.
        self._proposed = np.zeros(proposals, dtype=np.int64)
        self._estimates = np.zeros(proposals)
        self._features = np.zeros((proposals, acceptance.features))
        self._holders = np.zeros(proposals, dtype=np.int64)
        # Of each node: the occurrences that its path follows, how many tokens agree there, how many occurrences.
        self._places = np.zeros((size, SEARCHED), dtype=np.int64)
        self._lengths = np.zeros((size, SEARCHED), dtype=np.int64)
        self._found = np.zeros(size, dtype=np.int64)
        # For the work at one node.
        self._seen = np.zeros(_SEEN, dtype=np.int64)
        self._seen_by = np.zeros(_SEEN, dtype=np.int64)
        self._context = np.zeros(LONGEST, dtype=np.int64)
        self._agreeing = np.zeros(own_proposals, dtype=np.int64)
        self._unlisted = np.zeros(ngrams.orders)
        self._neighbours = EmbeddingNeighbours(np.zeros((0, 0), dtype=np.float32)) if neighbours is None else neighbours
        self._nearest = np.zeros(NEAREST)
        self._nearest_slots = np.zeros(NEAREST, dtype=np.int64)
        self._followers = np.zeros(NEAREST * ngrams.top_k, dtype=np.int64)
        self._shares = np.zeros(NEAREST * ngrams.top_k)
        self._likely = np.zeros(_POWERS, dtype=np.int64)
        self._root = 0
        self._count = 0

    @property
    def path_probabilities(self) -> NDArray[np.float64]:
        """Probability that each grown node is accepted, in the order of growth, which is descending."""
        return self._gains[self._root + 1 : self._root + 1 + self._count]

    def search(
        self,
        text: Sequence[int],
        most: int,
        room: int,
        memory: DraftMemory,
        matches: ContextMatches,
        recent: NDArray[np.int64],
        recent_probabilities: NDArray[np.float64],
        continuations: tuple[NDArray[np.int64], NDArray[np.float64]],
    ) -> int:
        """Grow a new tree, the most probable continuation first.

        Args:
            text: The text so far, or its last tokens; at most `LONGEST`, at least one.
            most: Nodes to grow, at most as many as the arrays were made for.
            room: Levels that fit below the root.
            memory: What to draft from.
            matches: Earlier occurrences in the text.
            recent: Tokens that the model thought of lately, the latest first. The memory may know those that are near
                to a token which it does not know.
            recent_probabilities: The probability that each of the first of them is given to follow the root if nobody
                knows anything better, at most `MOST_RECENT` numbers; `KNOWN_SHARE` of it if the memory knows the token.
            continuations: Tokens that may follow the root, by what the model said after those that stood in its place,
                and their probabilities; at most `MOST_BORROWED`.

        Returns:
            How many nodes were grown.
        """
        self._root = len(text) - 1
        self._tokens[: len(text)] = text
        self._parents[: len(text)] = range(-1, self._root)
        ngrams = memory.ngrams
        self._seen_by.fill(-1)
        own = loop_arrays(
            self._tokens,
            self._parents,
            self._depths,
            self._gains,
            self._longest,
            self._starts,
            self._proposed,
            self._estimates,
            self._features,
            self._holders,
            self._places,
            self._lengths,
            self._found,
        )
        entries = loop_arrays(ngrams.tags, ngrams.ids, ngrams.logs, ngrams.floors)
        counts = loop_arrays(ngrams.lookups, ngrams.hits)
        (known_text,) = loop_arrays(matches.tokens)
        index = loop_arrays(matches.newest, matches.earlier)
        rest = loop_arrays(memory.acceptance.weights, recent, recent_probabilities)
        scratch = loop_arrays(self._seen, self._seen_by, self._context, self._agreeing, self._unlisted)
        alike = loop_arrays(self._neighbours.codes, self._neighbours.lengths)
        borrowing = loop_arrays(self._nearest, self._nearest_slots, self._followers, self._shares, *continuations)
        arguments = [*own, *entries, ngrams.sets, *counts, known_text, matches.length, *index, *rest, *scratch]
        arguments += [*alike, *borrowing, *loop_arrays(self._likely)]
        self._count = _search_tree(len(text), most, room, *arguments)
        return self._count

    def add_to(self, tree: TokenTree, count: int) -> None:
        """Add the first `count` grown nodes to `tree`, right after its root, which is its last node so far."""
        first = self._root + 1
        tokens = self._tokens[first : first + count].tolist()
        parents = (self._parents[first : first + count] - self._root + tree.root).tolist()
        tree.add_new_candidates(tokens, parents)

    def continuations(
        self, before: int, top_ids: NDArray[np.int64], top_probabilities: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What the model says after the nodes that follow one: each node counts as much as it was thought likely.

        Args:
            before: Which node they follow: 0 for the root, 1 for the first that was grown, ...
            top_ids: The likeliest tokens after the root and each of the nodes that were sent, `[1 + sent, top_k]`.
            top_probabilities: Their probabilities, likewise.

        Returns:
            The likeliest tokens, `MOST_BORROWED` at most, and their shares.
        """
        first = self._root + 1
        told = loop_arrays(self._parents[first:], self._gains[first:], top_ids, top_probabilities)
        count = _follow_continuations(self._root + before, *told, *loop_arrays(self._followers, self._shares))
        return self._followers[: min(count, MOST_BORROWED)].copy(), self._shares[: min(count, MOST_BORROWED)].copy()

    def teach(
        self,
        acceptance: Acceptance,
        top_ids: NDArray[np.int64],
        top_probabilities: NDArray[np.float32],
        counts: NDArray[np.float64],
        drawn: float,
    ) -> None:
        """Let `acceptance` learn what came of the proposals.

        Args:
            acceptance: What weighed them.
            top_ids: The likeliest tokens after the root and each of the nodes that were sent, `[1 + sent, top_k]`.
            top_probabilities: Their probabilities, likewise.
            counts: How much each of these nodes counts, `[1 + sent]`.
            drawn: How far the target draws from these probabilities instead of naming the likeliest, from 0 to 1.
        """
        starts = self._starts[self._root : self._root + len(counts) + 1]
        asked = np.flatnonzero(np.diff(starts))
        begin, end = starts[0], starts[-1]
        outcomes = np.empty(end - begin)
        proposals = (self._proposed[begin:end], self._holders[begin:end])
        _compare(self._root, drawn, *loop_arrays(*proposals, top_ids, top_probabilities, outcomes))
        acceptance.learn(
            self._features[begin:end],
            self._estimates[begin:end],
            outcomes,
            starts[asked] - begin,
            self._longest[self._root + asked],
            counts[asked],
        )


@compiled
def _compare(
    root: int,
    drawn: float,
    proposed: NDArray[np.int64],
    holders: NDArray[np.int64],
    top_ids: NDArray[np.int64],
    top_probabilities: NDArray[np.float32],
    outcomes: NDArray[np.float64],
) -> None:
    """Write the probability that each proposal turned out to have to `outcomes`; see `TreeSearch.teach`."""
    for proposal in range(len(proposed)):
        node = holders[proposal] - root
        outcome = 1.0 if top_ids[node, 0] == proposed[proposal] else 0.0
        if drawn > 0:
            share = 0.0
            for rank in range(top_ids.shape[1]):
                if top_ids[node, rank] == proposed[proposal]:
                    share = top_probabilities[node, rank]
                    break
            outcome += drawn * (share - outcome)
        outcomes[proposal] = outcome


@compiled
def _follow_continuations(
    before: int,
    parents: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    top_ids: NDArray[np.int64],
    top_probabilities: NDArray[np.float32],
    followers: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> int:
    """Write what the model says after the grown nodes whose parent is `before`; returns how many tokens these are."""
    count = 0
    for index in range(top_ids.shape[0] - 1):
        if parents[index] == before:
            row = index + 1
            count = add_shares(row, probabilities[index], top_ids, top_probabilities, False, count, followers, shares)
    total = 0.0
    for index in range(count):
        total += shares[index]
    rank_shares(count, total, followers, shares)
    return count


@compiled
def _place_of(
    token: int, node: int, total: int, proposed: NDArray[np.int64], seen: NDArray[np.int64], seen_by: NDArray[np.int64]
) -> int:
    """Which proposal of `node` the token is; a new one, number `total`, if it was not proposed there yet."""
    place = token % _SEEN
    while seen_by[place] == node and proposed[seen[place]] != token:
        place = (place + 1) % _SEEN
    if seen_by[place] != node:
        seen_by[place] = node
        seen[place] = total
        proposed[total] = token
    return int(seen[place])


@compiled
def _begin_features(row: int, known: int, unlisted: NDArray[np.float64], features: NDArray[np.float64]) -> None:
    """What speaks for a new proposal: so far only that the `known` shortest contexts do not list it."""
    for column in range(features.shape[1]):
        features[row, column] = unlisted[column] if column < known else 0.0


@compiled
def _search_tree(
    tail: int,
    most: int,
    room: int,
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
    depths: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    known_orders: NDArray[np.int64],
    starts: NDArray[np.int64],
    proposed: NDArray[np.int64],
    estimates: NDArray[np.float64],
    features: NDArray[np.float64],
    holders: NDArray[np.int64],
    places: NDArray[np.int64],
    lengths: NDArray[np.int64],
    found: NDArray[np.int64],
    tags: NDArray[np.int64],
    ids: NDArray[np.int32],
    logs: NDArray[np.float32],
    floors: NDArray[np.float32],
    sets: int,
    lookups: NDArray[np.int64],
    hits: NDArray[np.int64],
    text: NDArray[np.int64],
    end: int,
    newest: NDArray[np.int32],
    earlier: NDArray[np.int32],
    weights: NDArray[np.float64],
    recent: NDArray[np.int64],
    recent_probabilities: NDArray[np.float64],
    seen: NDArray[np.int64],
    seen_by: NDArray[np.int64],
    context: NDArray[np.int64],
    agreeing: NDArray[np.int64],
    unlisted: NDArray[np.float64],
    codes: NDArray[np.int8],
    code_lengths: NDArray[np.float32],
    nearest: NDArray[np.float64],
    nearest_slots: NDArray[np.int64],
    followers: NDArray[np.int64],
    shares: NDArray[np.float64],
    continuations: NDArray[np.int64],
    stand_in_shares: NDArray[np.float64],
    likely: NDArray[np.int64],
) -> int:
    """Add the most probable unexplored continuation to the tree again and again, until there are `most` nodes.

    Args:
        tail: How many nodes at the beginning are text.
        most: Nodes to grow.
        room: Levels that fit below the root.
        tokens, parents, depths, probabilities, known_orders, starts, proposed, estimates, features, holders, places,
            lengths, found: The arrays of `TreeSearch`.
        tags, ids, logs, floors, sets, lookups, hits: Those of `NGramMemory`.
        text, end, newest, earlier: Those of `ContextMatches`.
        weights: Those of `Acceptance`.
        recent, recent_probabilities: See `TreeSearch.grow`.
        seen, seen_by, context, agreeing, unlisted: Room for the work at one node; `seen_by` is -1 everywhere.
        codes, code_lengths: Those of `EmbeddingNeighbours`.
        nearest, nearest_slots, followers, shares: Room for `follow_neighbours`.
        continuations, stand_in_shares: See `TreeSearch.grow`.
        likely: Room to count proposals by how likely they are.

    Returns:
        How many nodes were grown.
    """
    orders = len(lookups)
    top_k = ids.shape[1]
    matches_at = orders
    repeated = orders + len(MATCH_CLASSES)
    borrowed = repeated + 1
    stood_in = repeated + 2
    node = tail - 1
    probabilities[node] = 1.0
    depths[node] = 0
    found[node] = 0
    queue = [(1.0, -1)]
    heappop(queue)
    total = 0
    count = 0
    useless = len(likely) - 1
    pushed = 0
    for power in range(len(likely)):
        likely[power] = 0
    while True:
        # Propose what may follow `node`.
        begin = total
        starts[node] = begin
        longest = 0
        if depths[node] < room:
            size = 0
            at = node
            while at >= 0 and size < LONGEST:
                context[size] = tokens[at]
                at = parents[at]
                size += 1
            first = 1
            second = 1
            for order in range(min(orders, size)):
                token = context[order]
                first = (first * FIRST_FACTOR + token + 1) % FIRST_PRIME
                second = (second * SECOND_FACTOR + token + 1) % SECOND_PRIME
                slot = entry_of(first, second, order, sets, tags)
                lookups[order] += 1
                unlisted[order] = 0.0
                if slot < 0:
                    continue
                hits[order] += 1
                longest = order + 1
                unlisted[order] = max(floors[slot], LEAST_LOG_PROBABILITY)
                for row in range(begin, total):
                    features[row, order] = unlisted[order]
                for rank in range(top_k):
                    token = int(ids[slot, rank])  # one type for all tokens, or what follows is compiled for two
                    if token < 0:
                        break
                    row = _place_of(token, node, total, proposed, seen, seen_by)
                    if row == total:
                        _begin_features(row, order, unlisted, features)
                        agreeing[row - begin] = 0
                        total += 1
                    features[row, order] = max(logs[slot, rank], LEAST_LOG_PROBABILITY)
            # Occurrences that the path has followed so far; when there are none left, others are looked for.
            matching = 0
            if node >= tail:
                parent = parents[node]
                for match in range(found[parent]):
                    place = places[parent, match]
                    if text[place] == tokens[node] and place + 1 < end:
                        places[node, matching] = place + 1
                        lengths[node, matching] = min(lengths[parent, match] + 1, LONGEST)
                        matching += 1
            if matching == 0:
                matching = find_matches(context, size, text, end, newest, earlier, places, lengths, node)
            found[node] = matching
            for match in range(matching):
                row = _place_of(text[places[node, match]], node, total, proposed, seen, seen_by)
                if row == total:
                    _begin_features(row, longest, unlisted, features)
                    agreeing[row - begin] = 0
                    total += 1
                if agreeing[row - begin] > 0:
                    features[row, repeated] += 0.5
                agreeing[row - begin] = max(agreeing[row - begin], lengths[node, match])
            # What is borrowed: from the neighbours of an unknown token, and from what stood in the place of the root.
            lent = 0
            if longest == 0 and probabilities[node] >= LEAST_LENDING:
                lent = follow_neighbours(
                    tokens[node],
                    recent,
                    codes,
                    code_lengths,
                    tags,
                    ids,
                    logs,
                    sets,
                    nearest,
                    nearest_slots,
                    followers,
                    shares,
                )
            lent = min(lent, MOST_BORROWED)
            if lent > 0:
                for row in range(begin, total):
                    features[row, borrowed] = UNBORROWED_LOG
            for index in range(lent):
                row = _place_of(followers[index], node, total, proposed, seen, seen_by)
                if row == total:
                    _begin_features(row, longest, unlisted, features)
                    agreeing[row - begin] = 0
                    total += 1
                features[row, borrowed] = max(log(shares[index]), UNBORROWED_LOG)
            if node == tail - 1 and len(continuations) > 0:
                for row in range(begin, total):
                    features[row, stood_in] = UNBORROWED_LOG
                for index in range(len(continuations)):
                    row = _place_of(continuations[index], node, total, proposed, seen, seen_by)
                    if row == total:
                        _begin_features(row, longest, unlisted, features)
                        features[row, borrowed] = UNBORROWED_LOG if lent > 0 else 0.0
                        agreeing[row - begin] = 0
                        total += 1
                    features[row, stood_in] = max(log(stand_in_shares[index]), UNBORROWED_LOG)
        else:
            found[node] = 0
        known_orders[node] = longest
        nothing = weights[longest, features.shape[1]]
        top = nothing
        for row in range(begin, total):
            score = features[row, repeated] * weights[longest, repeated]
            score += features[row, borrowed] * weights[longest, borrowed]
            score += features[row, stood_in] * weights[longest, stood_in]
            for order in range(longest):
                score += features[row, order] * weights[longest, order]
            if agreeing[row - begin] > 0:
                kind = 0
                while kind + 1 < len(MATCH_CLASSES) and agreeing[row - begin] >= MATCH_CLASSES[kind + 1]:
                    kind += 1
                features[row, matches_at + kind] = 1.0
                score += weights[longest, matches_at + kind]
            estimates[row] = score
            top = max(top, score)
        mass = exp(nothing - top)
        for row in range(begin, total):
            estimates[row] = exp(estimates[row] - top)
            mass += estimates[row]
        for row in range(begin, total):
            estimates[row] /= mass
            holders[row] = node
            probability = probabilities[node] * estimates[row]
            # Of no use is what `most` others are likelier than; they are counted by its power of two.
            power = min(-frexp(probability)[1], len(likely) - 1)
            if power > useless:
                continue
            likely[power] += 1
            pushed += 1
            while pushed - likely[useless] >= most and useless > 0:
                pushed -= likely[useless]
                useless -= 1
            heappush(queue, (-probability, row))
        starts[node + 1] = total
        if node == tail - 1 and room > 0:
            # What is tried when nothing better is left; these are no proposals to learn from.
            for index in range(min(len(recent), len(recent_probabilities))):
                token = recent[index]
                if _place_of(token, node, total, proposed, seen, seen_by) == total:
                    # What the model says after it is worth more where that is not known yet.
                    first = (FIRST_FACTOR + token + 1) % FIRST_PRIME
                    probability = recent_probabilities[index]
                    if entry_of(first, (SECOND_FACTOR + token + 1) % SECOND_PRIME, 0, sets, tags) >= 0:
                        probability *= KNOWN_SHARE
                    extra = len(proposed) - 1 - index
                    proposed[extra] = token
                    holders[extra] = node
                    heappush(queue, (-probability, extra))
        if count == most or len(queue) == 0:
            break
        negative, row = heappop(queue)
        node = tail + count
        count += 1
        tokens[node] = proposed[row]
        parents[node] = holders[row]
        depths[node] = depths[holders[row]] + 1
        probabilities[node] = -negative
    return count
