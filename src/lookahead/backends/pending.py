"""What every backend holds to: how many pending tokens a step sends, and where it may draft below them."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError

_MOST_PENDING = 16
"""Pending tokens up to which a step may also draft; a step with more settles them."""


def part_of_prompt(pending: Sequence[int], most: int | None) -> TokenTree | None:
    """A tree of the first `most` pending tokens, of which nothing is read; `None` if there are no more than that."""
    if most is None or len(pending) <= most:
        return None
    part = TokenTree(pending[:most])
    part.needs_logits[part.root] = False
    return part


def has_room(cached: int, pending: int) -> bool:
    """Whether a step may draft on a model with running states: not below a prompt, which would have to be computed
    again, nor below many pending tokens.

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
