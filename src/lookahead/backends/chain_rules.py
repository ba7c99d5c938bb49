"""What every backend holds to that runs chains of tokens on a model with running states."""

from __future__ import annotations

from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

_MOST_PENDING = 16
"""Pending tokens up to which a step may also draft; a step with more settles them."""


def has_room(cached: int, pending: int) -> bool:
    """Whether a step may draft: not below a prompt, whose states would have to be computed again, nor below many
    pending tokens.

    Args:
        cached: Tokens that the states have read.
        pending: Tokens that they have not.
    """
    return cached > 0 and pending <= _MOST_PENDING


def check_chain(tree: TokenTree) -> None:
    """Refuse a tree in which a node does not follow the one before it.

    Raises:
        InvalidArgumentError: The tree has branches.
    """
    if tree.parents != list(range(-1, len(tree) - 1)):
        raise InvalidArgumentError("trees has one with branches; a model with running states runs chains alone")
