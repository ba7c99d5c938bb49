"""Observation of the steps of a sequence: the nodes sent, the source of each node, and its outcome.

Nothing here runs unless a watcher is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.core.results import StepResult
from lookahead.core.statistics import Seconds
from lookahead.core.token_tree import NodeKind, TokenTree

WINDOW = "lookahead window"

CERTAIN = "certain"
"""Source of a node that is sent because the accepted path does not depend on the model."""


@dataclass(frozen=True)
class Origin:
    """Source of a node.

    Attributes:
        evidence: Sources that proposed the token; the first has the longest context. The text before a comma is the
            kind of source.
        probability: Probability that the path to the node is accepted, as the drafter estimates it; `None` if unknown.
    """

    evidence: tuple[str, ...]
    probability: float | None = None


@dataclass(frozen=True)
class Explanation:
    """Explanation of a drafter's proposals.

    Attributes:
        origins: Source of each node below the root, in the order of the nodes.
        entries: Entries of the drafter's memory or pool at the time of the proposal; `None` if it has none.
    """

    origins: Sequence[Origin] = ()
    entries: int | None = None


StepWatcher = Callable[[StepResult, Explanation, Seconds, bool], None]
"""Called after a step of a sequence with four arguments: the result, the explanation of its nodes, the seconds of each
part of the step (over all rows, without watching), and whether the text is complete."""


def explain(drafter: Any, tree: TokenTree) -> Explanation:
    """Return the sources of a tree's nodes, from the drafter's method `explain` if it has one.

    Every drafter of this library has this method, called between `propose` and `observe`; a user's drafter may lack it.
    """
    explanation: Explanation = getattr(drafter, "explain", lambda _: Explanation())(tree)
    kinds = tree.kinds[tree.root + 1 :]
    if len(explanation.origins) == len(kinds):
        return explanation
    origins = [Origin((WINDOW if kind is NodeKind.WINDOW else "draft",)) for kind in kinds]
    return Explanation(origins, explanation.entries)
