"""A user-defined drafter, whose trees are checked before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lookahead.core.protocols import Drafter, StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, explain
from lookahead.drafting.best_first import first_path
from lookahead.errors import InvalidArgumentError

MEMBERS = ("top_k", "start", "propose", "observe", "statistics")


class CheckedDrafter:
    """Passes everything on to a drafter.

    Args:
        make: Makes the drafter, which serves one sequence.
        most: Nodes of a step at most, the root included.
        vocabulary: Tokens that the model knows; any are, if not given.
        chain: For a model that runs chains alone: of the tree its likeliest path is sent, of the nodes after each the
            one added first, up to so many nodes, the root included. `StepResult.tree` is what was sent.

    Raises:
        InvalidArgumentError: What `make` made lacks a member of `Drafter`.
    """

    def __init__(
        self, make: Callable[[], Any], most: int, vocabulary: int | None = None, chain: int | None = None
    ) -> None:
        drafter = make()
        missing = [member for member in MEMBERS if not hasattr(drafter, member)]
        if missing:
            raise InvalidArgumentError(
                f"drafter made {drafter!r}, which lacks {', '.join(missing)}; a drafter has {', '.join(MEMBERS)}"
            )
        self._drafter: Drafter = drafter
        self._most = most
        self._vocabulary = vocabulary
        self._chain = chain
        self.start: Callable[[Sequence[int]], None] = drafter.start
        self.observe: Callable[[StepResult], None] = drafter.observe
        self.statistics: Callable[[], dict[str, Any]] = drafter.statistics

    @property
    def top_k(self) -> int:
        """See `Drafter`."""
        return self._drafter.top_k

    def propose(self, tree: TokenTree) -> None:
        """See `Drafter`.

        Raises:
            InvalidArgumentError: The tree has become too large, or has a token that the model does not know.
        """
        before = len(tree)
        self._drafter.propose(tree)
        if len(tree) - tree.root > self._most:
            raise InvalidArgumentError(
                f"drafter={self._drafter!r} proposed {len(tree) - before} nodes, but a step may have {self._most}, the "
                "root included; propose fewer, or choose a larger step_budget"
            )
        for token in tree.tokens[before:]:
            if token < 0 or (self._vocabulary is not None and token >= self._vocabulary):
                raise InvalidArgumentError(
                    f"drafter={self._drafter!r} proposed token {token}, which the model does not know; its tokens are "
                    f"0 to {'...' if self._vocabulary is None else self._vocabulary - 1}"
                )
        if self._chain is not None:
            path = first_path(range(before, len(tree)), tree.parents[before:], tree.root)
            tree.keep_path(path[: self._chain - 1])

    def explain(self, tree: TokenTree) -> Explanation:
        """What the drafter says, if it says anything."""
        return explain(self._drafter, tree)
