"""Watching the steps of a sequence: what was sent, where each node came from, and what became of it.

Nothing here runs where nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.core.protocols import StepResult
from lookahead.core.statistics import Seconds
from lookahead.core.token_tree import NodeKind, TokenTree

WINDOW = "lookahead window"

CERTAIN = "certain"
"""Source of a node that is sent because what is accepted of its like does not depend on the model."""


@dataclass(frozen=True)
class Origin:
    """Where a node comes from.

    Attributes:
        evidence: Everything that named its token; the first is its source, the one that knew the longest context. What
            stands before a comma is the kind of source.
        probability: How likely its drafter took the path to the node to be accepted, if it says so.
    """

    evidence: tuple[str, ...]
    probability: float | None = None


@dataclass(frozen=True)
class Explanation:
    """What a drafter says about what it proposed.

    Attributes:
        origins: Of each node below the root, in the order of the nodes.
        entries: Entries of what it draws on, a memory or a pool, when it proposed; `None` if it has none.
    """

    origins: Sequence[Origin] = ()
    entries: int | None = None


StepWatcher = Callable[[StepResult, Explanation, Seconds, bool], None]
"""Called after a step of a sequence: with what it showed, where each node below the root came from, the time of each
part of the step, of all rows of the batch together and without watching, and whether the text is complete with it."""


def explain(drafter: Any, tree: TokenTree) -> Explanation:
    """Where the nodes of a tree come from, as far as its drafter says: all of this library have a method `explain`,
    called between `propose` and `observe`; one of a user's own need not."""
    explanation: Explanation = getattr(drafter, "explain", lambda _: Explanation())(tree)
    kinds = tree.kinds[tree.root + 1 :]
    if len(explanation.origins) == len(kinds):
        return explanation
    origins = [Origin((WINDOW if kind is NodeKind.WINDOW else "draft",)) for kind in kinds]
    return Explanation(origins, explanation.entries)
