"""Verification: a walk down the tree along the tokens that the sampler selects.

Drafts are deterministic, so accepting a drafted token exactly when the sampler selects it gives the distribution of the
paper's Algorithms 3 and 4. Tokens are selected one after another, each once and in order, as in plain decoding, so the
same random state gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from lookahead.core.token_tree import TokenTree


class Walk:
    """A walk from the root of a tree along drafted tokens that are selected.

    The caller selects the token after `node` and passes it to `take`, until `done`. A walk can be suspended in between,
    for example for the walks of other sequences.

    Args:
        tree: The tree that was sent.

    Attributes:
        node: The node after which a token is to be selected next.
        path: Accepted candidate nodes, from below the root downwards.
        tokens: The tokens selected: those of `path`, and one more, the root of the next step.
        stopped: Whether the text is complete.
        done: Whether the walk is over.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        self.node = tree.root
        self.path: list[int] = []
        self.tokens: list[int] = []
        self.stopped = False
        self.done = False

    def take(self, token: int, stopped: bool) -> None:
        """Note the token after `node`, and whether the text is complete with it; go on to the child that holds it."""
        self.tokens.append(token)
        self.stopped = stopped
        child = None if stopped else self.tree.child(self.node, token)
        if child is None:
            self.done = True
        else:
            self.path.append(child)
            self.node = child


def follow(tree: TokenTree, select: Callable[[int], int], append: Callable[[int], bool]) -> Walk:
    """Walk `tree` to the end.

    Args:
        tree: The tree that was sent.
        select: Gives the token after a node. Called once for each token of the output, in order, each time after the
            token before it was appended.
        append: Adds a token to the text; true when the text is complete with it.
    """
    walk = Walk(tree)
    while not walk.done:
        token = select(walk.node)
        walk.take(token, append(token))
    return walk
