"""Verification: a walk down each tree along the tokens that are selected.

Drafts are deterministic, so accepting a drafted token exactly when it is selected gives the distribution of the paper's
Algorithms 3 and 4. Tokens are selected one after another, each once and in order, as plain decoding does: the same
random state gives the same ones.

One compiled loop walks all greedy rows of raw logits that end by length or by a token. Other rows are walked one by
one: their sampler or stop rule is Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, at_once, compiled
from lookahead.core.forest import Forest, Integers
from lookahead.core.protocols import NodeOutputs, Walk
from lookahead.core.sequence import SequenceState
from lookahead.core.token_tree import TokenTree


def walk_trees(sequences: Sequence[SequenceState], trees: Sequence[TokenTree], outputs: Any) -> list[Walk | None]:
    """Walk the tree of each sequence, and add the selected tokens to its text.

    Args:
        sequences: The texts.
        trees: The tree of each; a `Forest`, as the outputs are.
        outputs: A `ForestOutputs`.

    Returns:
        The walks; `None` for a sequence that is finished, that failed, or that still has prompt tokens to send.
    """
    walks: list[Walk | None] = [None] * len(trees)
    plain, together = list[int](), len(trees) > 1 or not trees[0].is_chain  # one token is as quick in Python
    for row, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        if sequence.finished or not tree.reads_root:
            continue
        if together and sequence.end_tokens is not None and not sequence.sampler.needs_logits:
            plain.append(row)
            continue
        try:
            walks[row] = follow(tree, partial(take_token, sequence, outputs[row]))
        except Exception as error:
            sequence.fail(error)
    if plain:
        _walk_plain_rows(plain, sequences, Forest.of(trees), outputs.predictions, walks)
    return walks


def follow(tree: TokenTree, take: Callable[[int], tuple[int, bool]]) -> Walk:
    """Walk `tree` to the end.

    Args:
        tree: The tree that was sent.
        take: Selects the token after a node and adds it to the text; returns it, and whether the text is complete with
            it. Called once for each token of the output, in order.
    """
    node, path, tokens = tree.root, list[int](), list[int]()
    while True:
        token, stopped = take(node)
        tokens.append(token)
        child = None if stopped else tree.child(node, token)
        if child is None:
            return Walk(tree, path, tokens, stopped)
        path.append(child)
        node = child


def take_token(sequence: SequenceState, outputs: NodeOutputs, node: int) -> tuple[int, bool]:
    """Select the token after `node` and add it to the text; returns it, and whether the text is complete with it."""
    sampler = sequence.sampler
    token = sampler.select(sequence, outputs, node) if sampler.needs_logits else int(outputs.predictions[node])
    return token, sequence.append(token)


def _walk_plain_rows(
    rows: list[int], sequences: Sequence[SequenceState], forest: Forest, predictions: Integers, walks: list[Walk | None]
) -> None:
    """Walk rows that need no Python, and write their walks."""
    texts, kinds, planned = [sequences[row] for row in rows], dict[tuple[int, ...], int](), []
    for row, text in zip(rows, texts, strict=True):
        ends = text.end_tokens or ()
        planned.append((row, text.remaining, kinds.setdefault(ends, len(kinds))))
    plan = np.array(planned, dtype=np.int64)
    end_tokens = np.full((len(kinds), max(map(len, kinds))), -1, dtype=np.int64)
    for ends, kind in kinds.items():
        end_tokens[kind, : len(ends)] = ends
    found = np.empty((2, len(forest.tokens)), dtype=np.int64)
    results = np.empty((2, len(rows)), dtype=np.int64)
    tree = (forest.firsts, forest.roots, forest.tokens, forest.parents, forest.in_window)
    at_once(_walk)(plan, end_tokens, tree, predictions, found, results)
    tokens, paths = found.tolist()
    firsts = forest.firsts.tolist()
    for row, text, count, stopped in zip(rows, texts, *results.tolist(), strict=True):
        begin = firsts[row]
        selected = tokens[begin : begin + count]
        text.extend(selected)
        walks[row] = Walk(forest[row], paths[begin : begin + count - 1], selected, bool(stopped))


def compile_walk(forest: Forest) -> None:
    """Run the compiled loop once, on arrays of the types that steps have."""
    plan, found = np.zeros((len(forest), 3), dtype=np.int64), np.empty((2, len(forest.tokens)), dtype=np.int64)
    tree = (forest.firsts, forest.roots, forest.tokens, forest.parents, forest.in_window)
    _walk(
        plan, np.zeros((1, 0), dtype=np.int64), tree, forest.tokens, found, np.empty((2, len(forest)), dtype=np.int64)
    )


@compiled
def _walk(
    plan: Integers,
    end_tokens: Integers,
    trees: tuple[Integers, Integers, Integers, Integers, NDArray[np.bool_]],
    predictions: Integers,
    found: Integers,
    results: Integers,
) -> None:
    """Walk some rows along the likeliest tokens.

    Args:
        plan: For each: which tree, tokens until its text is complete, row of `end_tokens`, `[rows, 3]`.
        end_tokens: Tokens that complete a text, padded by -1, `[kinds, tokens]`.
        trees: `firsts`, `roots`, `tokens`, `parents` and `in_window` of a `Forest`.
        predictions: The likeliest token after each node.
        found: Gets the tokens selected, and the nodes of the path, from the first node of each tree on, `[2, nodes]`.
        results: Gets the number of tokens of each row, and whether its text is complete, `[2, rows]`.
    """
    firsts, roots, tokens, parents, in_window = trees
    for row in range(len(plan)):
        begin, remaining, ends = firsts[plan[row, 0]], plan[row, 1], end_tokens[plan[row, 2]]
        end, node, count = firsts[plan[row, 0] + 1] - begin, roots[plan[row, 0]], FIRST
        stopped = False
        while node >= 0:
            token = predictions[begin + node]
            found[0, begin + count] = token
            count += 1
            stopped = count >= remaining
            for one in ends:
                stopped = stopped or one == token
            before, node = node, FIRST - 1
            for child in range(before + 1, end):
                at = begin + child
                if not stopped and parents[at] == before and tokens[at] == token and not in_window[at]:
                    node = child
                    found[1, begin + count - 1] = child
                    break
        results[0, row], results[1, row] = count, 1 if stopped else 0
