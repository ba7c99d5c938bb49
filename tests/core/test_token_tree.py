"""Positions and masks of trees, against the paper's figure and against a walk over the parents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.core.forest import lay_out
from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.drafting import JacobiWindow, NGramPool, PaperDrafter
from lookahead.errors import InvalidArgumentError

# Fig. 2(b) of the paper, W=5, N=4, G=2, with nodes in the order of their addition: the input token, two
# candidates a and b of three tokens, then the window: orange 1-4, green 1-5, red 2-6.
FIGURE_2B = """
    0 aaa bbb oooo ggggg rrrrr
0   # ... ... .... ..... .....
a1  # #.. ... .... ..... .....
a2  # ##. ... .... ..... .....
a3  # ### ... .... ..... .....
b1  # ... #.. .... ..... .....
b2  # ... ##. .... ..... .....
b3  # ... ### .... ..... .....
o1  # ... ... #... ..... .....
o2  # ... ... ##.. ..... .....
o3  # ... ... ###. ..... .....
o4  # ... ... #### ..... .....
g1  # ... ... .... #.... .....
g2  # ... ... #... .#... .....
g3  # ... ... ##.. ..#.. .....
g4  # ... ... ###. ...#. .....
g5  # ... ... #### ....# .....
r2  # ... ... .... #.... #....
r3  # ... ... #... .#... .#...
r4  # ... ... ##.. ..#.. ..#..
r5  # ... ... ###. ...#. ...#.
r6  # ... ... #### ....# ....#
"""


def figure_2b_tree() -> TokenTree:
    """Return the tree of a paper step with a full window (W=5, N=4) and two n-grams (G=2) for the input token 0."""
    window, pool = JacobiWindow(5, 4, seed=0), NGramPool(4, 2)
    window.start([100])
    for _ in range(2):  # until it has all rows
        window.propose(tree := TokenTree([0]))
        window.observe(StepResult(tree, np.arange(len(tree)), [], [0]))
    pool.add((0, 51, 52, 53))
    pool.add((0, 41, 42, 43))
    tree = TokenTree([0])
    PaperDrafter(window, pool).propose(tree)
    return tree


def test_mask_and_positions_of_figure_2b() -> None:
    layout = lay_out(figure_2b_tree())
    nodes = layout.slots  # in the order of addition; the window is sent depth first
    rows = FIGURE_2B.strip().splitlines()[1:]
    expected = np.array([[mark == "#" for mark in "".join(row.split()[1:])] for row in rows])
    assert expected.shape == (21, 21)
    np.testing.assert_array_equal(layout.ancestor_mask()[np.ix_(nodes, nodes)], expected)
    assert layout.depths[nodes].tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert layout.tokens[nodes].tolist()[:7] == [0, 41, 42, 43, 51, 52, 53]
    # Logits are needed after the input, after all candidates, and after the last row of the window.
    assert sorted(layout.order[layout.read_slots]) == [0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20]


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)))
    candidates = [tree.root]
    window = [tree.root]
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.booleans()):
            path = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
            candidates += tree.add_candidates(path, draw(st.sampled_from(candidates)))
        else:
            window.append(tree.add_window_node(9, draw(st.sampled_from(window)), needs_logits=draw(st.booleans())))
    return tree


def ancestors(tree: TokenTree, node: int) -> set[int]:
    """Return a node and its ancestors, by walking up."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = tree.parents[node]
    return seen


@given(trees())
def test_mask_and_positions_equal_a_walk_over_parents(tree: TokenTree) -> None:
    layout = lay_out(tree)
    assert sorted(layout.order.tolist()) == list(range(len(tree)))
    assert layout.slots[layout.order].tolist() == list(range(len(tree)))
    mask = layout.ancestor_mask()
    for slot, node in enumerate(layout.order.tolist()):
        above = ancestors(tree, node)
        assert set(layout.order[mask[slot]].tolist()) == above
        assert layout.depths[slot] == len(above) - 1
        assert layout.tokens[slot] == tree.tokens[node]
        assert (slot in layout.read_slots) == tree.needs_logits[node]


@given(trees())
def test_layout_keeps_first_paths_contiguous_behind_the_root(tree: TokenTree) -> None:
    layout = lay_out(tree)
    kinds = [tree.kinds[node] for node in layout.order.tolist()]
    assert kinds == sorted(kinds)
    assert layout.order.tolist()[: tree.root + 1] == list(range(tree.root + 1))
    # Along first-added children from the root, slots increase by one.
    node, slot = tree.root, tree.root
    while True:
        children = [n for n in range(len(tree)) if tree.parents[n] == node and tree.kinds[n] is NodeKind.CANDIDATE]
        if not children:
            break
        node, slot = children[0], slot + 1
        assert layout.slots[node] == slot


def test_candidates_share_their_beginnings() -> None:
    tree = TokenTree([1])
    first = tree.add_candidates([2, 3, 4])
    second = tree.add_candidates([2, 3, 5])
    assert first[:2] == second[:2]
    assert len(tree) == 5
    assert tree.child(tree.root, 2) == first[0]
    assert tree.child(first[1], 5) == second[2]
    assert tree.child(first[1], 9) is None


def test_window_nodes_are_never_found_by_the_walk() -> None:
    tree = TokenTree([1])
    tree.add_window_node(2, tree.root, needs_logits=True)
    assert tree.child(tree.root, 2) is None
    assert tree.add_candidates([2]) == [2], "a candidate beside an equal window node is a node of its own"


def test_max_depth_cuts_candidates_and_refuses_window_nodes() -> None:
    tree = TokenTree([1, 2], max_depth=3)
    assert tree.room == 2
    path = tree.add_candidates([3, 4, 5])
    assert [tree.depths[node] for node in path] == [2, 3]
    with pytest.raises(InvalidArgumentError, match="deepest"):
        tree.add_window_node(6, path[-1], needs_logits=False)


def test_a_tree_needs_a_root() -> None:
    with pytest.raises(InvalidArgumentError, match="root"):
        TokenTree([])


def test_many_candidates_are_added_as_one_by_one() -> None:
    one, many = TokenTree([7, 8], max_depth=3), TokenTree([7, 8], max_depth=3)
    parents = [1, 1, 2, 3]
    for token, parent in zip([4, 5, 4, 6], parents, strict=True):
        one.add_candidates([token], parent)
    many.add_new_candidates([4, 5, 4, 6], parents)
    assert (one.tokens, one.parents, one.kinds, one.depths, one.needs_logits) == (
        many.tokens,
        many.parents,
        many.kinds,
        many.depths,
        many.needs_logits,
    )
    assert many.child(2, 4) == 4


@pytest.mark.parametrize("pending", [1, 2])
def test_certain_tokens_are_counted_as_far_as_there_is_room(pending: int) -> None:
    tree = TokenTree(range(pending))
    tree.limit(2)
    tree.add_certain([7, 8, 9])
    assert tree.certain == 2
    assert tree.tokens == [*range(pending), 7, 8]
