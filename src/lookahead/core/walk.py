"""Verification: a walk down each tree along the tokens that are selected.

Drafts are deterministic, so accepting a drafted token exactly when it is selected gives the distribution of the paper's
Algorithms 3 and 4. Tokens are selected one after another, each once and in order, as plain decoding does: the same
random state gives the same ones.

One compiled loop walks all rows that end by length or by a token, and whose tokens are known: the likeliest ones, or
tokens that were sampled for all rows together. Other rows are walked one by one: their sampler or stop rule is Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, typed
from lookahead.core.forest import Forest, Integers
from lookahead.core.results import CommittedNodes, EarlyTokens, NodeOutputs, Walk, Walks
from lookahead.core.sequence import SequenceState
from lookahead.core.token_tree import TokenTree
from lookahead.errors import not_of_signal

_NO_ROWS = frozenset[int]()


def walk_trees(
    sequences: Sequence[SequenceState], forest: Forest, outputs: Any, early: Sequence[EarlyTokens] = ()
) -> Walks:
    """Walk the tree of each sequence, and add the selected tokens to its text.

    A sequence does not go on if it is finished, if it fails, or if it still has prompt tokens to send.

    Args:
        sequences: The texts.
        forest: The tree of each.
        outputs: A `ForestOutputs`.
        early: Tokens that were selected before.
    """
    walks = Walks(forest)
    reads = [True] * forest.rows  # trees without objects are read
    if any(forest.objects):
        reads = forest.reads[forest.firsts[:-1] + forest.roots].tolist()
    roots = forest.roots.tolist()
    counts = forest.counts.tolist()
    sampled, selected = _early_rows(forest, early) if early else (_NO_ROWS, forest.tokens)
    greedy = []
    together = []
    for row, (sequence, is_read) in enumerate(zip(sequences, reads, strict=True)):
        if not is_read or sequence.finished:
            continue
        if sequence.end_tokens is not None:
            if not sequence.sampler.needs_logits:
                greedy.append(row)
                continue
            if row in sampled:
                together.append(row)
                continue
        try:
            take = partial(take_token, sequence, outputs[row])
            if roots[row] + 1 == counts[row]:  # nothing was drafted
                walks.set(row, plain_walk(*take(roots[row])))
            else:
                walks.set(row, follow(forest[row], take))
        except BaseException as error:
            sequence.fail(not_of_signal(error))
    if greedy:
        _walk_rows(greedy, sequences, forest, outputs.predictions, walks)
    if together:
        _walk_rows(together, sequences, forest, selected, walks)
        for row in together:
            sequences[row].sampler.advance(int(walks.counts[row]))
    return walks


def _early_rows(forest: Forest, early: Sequence[EarlyTokens]) -> tuple[Set[int], Integers]:
    """Return the rows with known tokens, and the token after each node, `[nodes]`."""
    rows: set[int] = set()
    selected = np.full(len(forest.tokens), -1, dtype=np.int64)
    for some, nodes, read in early:
        tokens = read()
        selected[nodes] = tokens
        rows.update(some)
        if tokens.min() < 0:  # invalid probabilities, which their own walk reports
            rows.difference_update(forest.rows_of_slots[nodes[tokens < 0]].tolist())
    return rows, selected


def plain_walk(token: int, stopped: bool) -> Walk:
    """The walk of a tree without candidates."""
    return Walk([], [token], stopped)


def follow(tree: TokenTree, take: Callable[[int], tuple[int, bool]]) -> Walk:
    """Walk `tree` to the end.

    Args:
        tree: The tree that was sent.
        take: Selects the token after a node and adds it to the text; returns it, and whether the text is complete with
            it. Called once for each token of the output, in order.
    """
    node = tree.root
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token, stopped = take(node)
        tokens.append(token)
        child = None if stopped else tree.child(node, token)
        if child is None:
            return Walk(path, tokens, stopped)
        path.append(child)
        node = child


def take_token(sequence: SequenceState, outputs: NodeOutputs, node: int) -> tuple[int, bool]:
    """Select the token after `node` and add it to the text; returns it, and whether the text is complete with it."""
    sampler = sequence.sampler
    token = sampler.select(sequence, outputs, node) if sampler.needs_logits else int(outputs.predictions[node])
    return token, sequence.append(token)


def _walk_rows(
    rows: list[int], sequences: Sequence[SequenceState], forest: Forest, selected: Integers, walks: Walks
) -> None:
    """Walk rows along the selected token after each node, and write their walks."""
    if forest.rows == 1 and forest.is_plain:  # Python takes one token in less time
        text = sequences[0]
        token = int(selected[forest.roots[0]])
        text.tokens.append(token)
        walks.tokens[0] = token
        walks.counts[0] = 1
        walks.stopped[0] = len(text.tokens) >= text.most_tokens or token in (text.end_tokens or ())
        return
    kinds: dict[tuple[int, ...], int] = {}
    plan: list[tuple[int, int, int]] = []
    for row in rows:
        text = sequences[row]
        kind = kinds.setdefault(text.end_tokens or (), len(kinds))
        plan.append((row, text.most_tokens - len(text.tokens), kind))
    trees = (forest.firsts, forest.roots, forest.tokens, forest.parents, forest.in_window)
    walked = walks.tokens, walks.paths
    after = np.array(selected, dtype=np.int64)  # outputs of any backend
    _walk(np.array(plan, dtype=np.int64), _padded_ends(tuple(kinds)), trees, after, walked, walks.counts, walks.stopped)
    tokens = walks.tokens.tolist()
    firsts = forest.firsts.tolist()
    counts = walks.counts.tolist()
    for row in rows:
        sequences[row].tokens += tokens[firsts[row] : firsts[row] + counts[row]]


@lru_cache(maxsize=64)
def _padded_ends(kinds: tuple[tuple[int, ...], ...]) -> Integers:
    """Return the tokens that complete texts as an array `[kinds, tokens]`, padded by -1."""
    padded = np.full((len(kinds), max(map(len, kinds))), -1, dtype=np.int64)
    for row, ends in enumerate(kinds):
        padded[row, : len(ends)] = ends
    return padded


def compile_walk(forest: Forest) -> None:
    """Run the compiled loops once, on arrays of the types that steps have."""
    walks = Walks(forest)
    plan = np.zeros((forest.rows, 3), dtype=np.int64)
    trees = (forest.firsts, forest.roots, forest.tokens, forest.parents, forest.in_window)
    results = (walks.tokens, walks.paths), walks.counts, walks.stopped
    _walk(plan, _padded_ends(((),)), trees, forest.tokens, *results)
    CommittedNodes(forest, walks.counts, walks.paths).misplaced()


@typed
def _walk(
    plan: Integers,
    end_tokens: Integers,
    trees: tuple[Integers, Integers, Integers, Integers, NDArray[np.bool_]],
    tokens_after: Integers,
    walked: tuple[Integers, Integers],
    counts: Integers,
    stops: NDArray[np.bool_],
) -> None:
    """Walk some rows along selected tokens.

    Args:
        plan: For each: which tree, tokens until its text is complete, row of `end_tokens`, `[rows, 3]`.
        end_tokens: Tokens that complete a text, padded by -1, `[kinds, tokens]`.
        trees: `firsts`, `roots`, `tokens`, `parents` and `in_window` of a `Forest`.
        tokens_after: The selected token after each node.
        found, counts, stops: `tokens` and `paths`, `counts` and `stopped` of a `Walks`, to be written.
    """
    firsts, roots, tokens, parents, in_window = trees
    selected, paths = walked
    for index in range(len(plan)):
        row = plan[index, 0]
        begin = firsts[row]
        remaining = plan[index, 1]
        ends = end_tokens[plan[index, 2]]
        end = firsts[row + 1] - begin
        node = roots[row]
        count = FIRST
        stopped = False
        while node >= 0:
            token = tokens_after[begin + node]
            selected[begin + count] = token
            count += 1
            stopped = count >= remaining
            for one in ends:
                stopped = stopped or one == token
            before = node
            node = FIRST - 1
            for child in range(before + 1, end):
                at = begin + child
                if not stopped and parents[at] == before and tokens[at] == token and not in_window[at]:
                    node = child
                    paths[begin + count - 1] = child
                    break
        counts[row] = count
        stops[row] = stopped
