"""Splitting a tree among ranks: no node is lost, all ancestors are present, and loads are even."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.drafting import JacobiWindow, StepResult
from lookahead.parallel.runner import Split, split_tree


def paper_tree(window_size: int, ngram_size: int, guesses: int, seed: int = 0, steps: int | None = None) -> TokenTree:
    """Return the tree of a step of the paper's method with `guesses` candidates, after warm-up or after `steps`."""
    import numpy as np

    random = Random(seed)
    window = JacobiWindow(window_size, ngram_size, seed)
    window.start([1, 2, 3])
    tree = TokenTree([7])
    for _ in range(1 + (ngram_size - 2 if steps is None else steps)):
        tree = TokenTree([7])
        for _ in range(guesses):
            tree.add_candidates([random.randrange(50) for _ in range(ngram_size - 1)])
        window.propose(tree)
        predictions = np.array([random.randrange(50) for _ in range(len(tree))])
        before = window.rows
        window.observe(StepResult(tree, predictions, [], [7]))
    assert before is not None
    return tree


def loads(split: Split, pending: list[int]) -> list[int]:
    """Return the number of nodes of each rank."""
    return [own + len(nodes) for own, nodes in zip(pending, split.nodes_by_rank, strict=True)]


def check(tree: TokenTree, split: Split) -> None:
    """Check the invariants of a split."""
    nodes_by_rank = [set(nodes) for nodes in split.nodes_by_rank]
    for nodes in nodes_by_rank:
        for node in nodes:
            assert node > tree.root
            assert tree.parents[node] == tree.root or tree.parents[node] in nodes, "an ancestor is missing"
    for node in range(len(tree)):
        if not tree.needs_logits[node]:
            assert split.owners[node] == -1
        elif node <= tree.root:
            assert split.owners[node] == 0
        else:
            assert node in nodes_by_rank[split.owners[node]], "the owner does not run it"
    for node in range(tree.root + 1, len(tree)):
        if tree.kinds[node] is NodeKind.CANDIDATE:
            assert any(node in nodes for nodes in nodes_by_rank), "candidates are run"


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Any tree of candidates and window nodes, after a few pending tokens."""
    tree = TokenTree(list(range(draw(st.integers(1, 4)))))
    window = [tree.root]
    for _ in range(draw(st.integers(0, 40))):
        if draw(st.booleans()):
            candidates = [n for n in range(tree.root, len(tree)) if tree.kinds[n] is not NodeKind.WINDOW]
            tree.add_candidates([draw(st.integers(0, 5))], draw(st.sampled_from(candidates)))
        else:
            window.append(tree.add_window_node(0, draw(st.sampled_from(window)), draw(st.booleans())))
    return tree


@given(tree=trees(), pending=st.lists(st.integers(0, 6), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_tree_is_covered_with_its_ancestors(tree: TokenTree, pending: list[int]) -> None:
    pending = [tree.root + 1 + extra for extra in pending]
    check(tree, split_tree(tree, pending))


def test_a_large_branch_is_cut() -> None:
    tree = TokenTree([1])
    for first in range(3):
        for second in range(4):
            tree.add_candidates([9, 9, first, second, 0, 0])
    split = split_tree(tree, [1, 1, 1])
    check(tree, split)
    assert max(loads(split, [1, 1, 1])) <= len(tree) / 3 + 3


@given(
    ranks=st.integers(1, 8),
    window_size=st.integers(1, 30),
    ngram_size=st.integers(2, 7),
    guesses=st.integers(0, 30),
    steps=st.integers(0, 8),
    seed=st.integers(0, 100),
)
@settings(max_examples=100, deadline=None)
def test_the_papers_trees_are_covered(
    ranks: int, window_size: int, ngram_size: int, guesses: int, steps: int, seed: int
) -> None:
    tree = paper_tree(window_size, ngram_size, guesses, seed, steps)
    check(tree, split_tree(tree, [1] * ranks))


def best_load(tree: TokenTree, ranks: int) -> int:
    """Return the smallest possible largest load, by trying all assignments of branches and columns."""
    branches: dict[int, set[int]] = {}
    columns = []
    for node in range(tree.root + 1, len(tree)):
        chain = [node]
        while tree.parents[chain[-1]] > tree.root:
            chain.append(tree.parents[chain[-1]])
        if tree.kinds[node] is NodeKind.CANDIDATE:
            branches.setdefault(chain[-1], set()).add(node)
        elif tree.needs_logits[node]:
            columns.append(set(chain))
    pieces = [*branches.values(), *columns]
    best = len(tree)
    for dealt in product(range(ranks), repeat=len(pieces)):
        nodes_by_rank: list[set[int]] = [set() for _ in range(ranks)]
        for rank, piece in zip(dealt, pieces, strict=True):
            nodes_by_rank[rank] |= piece
        best = min(best, max(map(len, nodes_by_rank)) + 1)
    return best


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_loads_are_nearly_as_even_as_can_be(ranks: int, seed: int) -> None:
    random = Random(seed)
    window_size, ngram_size = random.randint(1, 5), random.randint(2, 4)
    tree = paper_tree(window_size, ngram_size, random.randint(0, 4), seed)
    largest = max(loads(split_tree(tree, [1] * ranks), [1] * ranks))
    assert largest <= best_load(tree, ranks) + 1


@pytest.mark.parametrize(("ranks", "most"), [(1, 120), (2, 62), (3, 45), (4, 34), (8, 22)])
def test_the_papers_sizes(ranks: int, most: int) -> None:
    """W = G = 15, N = 5, 120 nodes: the largest load of a rank."""
    assert max(loads(split_tree(paper_tree(15, 5, 15), [1] * ranks), [1] * ranks)) <= most


def test_a_rank_with_more_pending_tokens_gets_fewer_nodes() -> None:
    split = split_tree(paper_tree(15, 5, 15), [1, 5, 5, 5])
    assert max(loads(split, [1, 5, 5, 5])) <= 37
    assert len(split.nodes_by_rank[0]) > max(map(len, split.nodes_by_rank[1:]))


def test_the_likeliest_candidates_are_on_rank_0() -> None:
    tree = paper_tree(15, 5, 15)
    split = split_tree(tree, [1] * 4)
    assert split.owners[tree.root + 1] == 0


def test_every_rank_finds_the_same_split() -> None:
    first, second = (split_tree(paper_tree(9, 4, 9), [1, 3, 2]) for _ in range(2))
    assert first.nodes_by_rank == second.nodes_by_rank
    assert first.owners.tolist() == second.owners.tolist()
