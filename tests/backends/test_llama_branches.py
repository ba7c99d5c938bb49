"""Token trees as llama.cpp's sequences: a node must see exactly its ancestors."""

import numpy as np
import pytest

from lookahead.backends.llama_cpp.runner import branches
from lookahead.core.token_tree import TokenTree


def random_tree(draws: np.random.Generator) -> TokenTree:
    """Return a tree with pending tokens, candidates and window nodes in random order."""
    tree = TokenTree(draws.integers(0, 9, draws.integers(1, 5)).tolist())
    for _ in range(draws.integers(0, 20)):
        parent = int(draws.integers(tree.root, len(tree)))
        if draws.random() < 0.6 and tree.kinds[parent] != 2:
            tree.add_candidates(draws.integers(0, 9, draws.integers(1, 4)).tolist(), parent)
        else:
            tree.add_window_node(int(draws.integers(0, 9)), parent, needs_logits=True)
    return tree


@pytest.mark.parametrize("seed", range(50))
def test_a_node_sees_its_ancestors(seed: int) -> None:
    tree = random_tree(np.random.default_rng(seed))
    below = branches(tree)
    layout = below.layout
    assert sorted(layout.order.tolist()) == list(range(len(tree)))
    assert layout.order[layout.slots].tolist() == list(range(len(tree)))
    for node in range(len(tree)):
        # llama.cpp shows the cells of a token's first sequence, up to its position.
        sequence = below.first[layout.slots[node]]
        seen = {
            other
            for other in range(len(tree))
            if below.first[layout.slots[other]] <= sequence <= below.last[layout.slots[other]]
            and tree.depths[other] <= tree.depths[node]
        }
        ancestors = {node}
        while tree.parents[min(ancestors)] >= 0:
            ancestors.add(tree.parents[min(ancestors)])
        assert seen == ancestors


@pytest.mark.parametrize("seed", range(20))
def test_there_is_a_sequence_for_each_leaf(seed: int) -> None:
    tree = random_tree(np.random.default_rng(seed))
    leaves = set(range(len(tree))) - set(tree.parents)
    below = branches(tree)
    layout = below.layout
    assert below.leaves == len(leaves)
    own = [below.first[layout.slots[leaf]] for leaf in leaves]
    assert sorted(own) == list(range(len(leaves)))
    # Parents come before children, as llama.cpp requires ascending positions in a sequence.
    assert all(layout.slots[tree.parents[node]] < layout.slots[node] for node in range(1, len(tree)))
