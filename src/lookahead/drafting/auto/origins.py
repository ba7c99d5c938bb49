"""What spoke for the nodes of a draft, in words: asked afterwards, where somebody watches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.core.watching import Origin
from lookahead.drafting.auto.texts import LONGEST, MATCH_CLASSES


def origins_of(nodes: NDArray[np.void], names: Sequence[str]) -> list[Origin]:
    """What named the tokens of some nodes, `NODE`s; `names` are those of the sources that list paths."""
    return [Origin(_evidence(node, names), float(node["probability"])) for node in nodes]


def _evidence(node: np.void, names: Sequence[str]) -> tuple[str, ...]:
    """What spoke for a node, what knew the longest context first."""
    order, match, source = int(node["order"]), int(node["match"]), int(node["source"])
    found: list[tuple[float, str]] = []
    if order:
        found.append((order + 0.5, f"n-gram memory, {_tokens(order)}"))
    if match >= 0:
        found.append((MATCH_CLASSES[match], f"context match, {_match_length(match)}"))
    if source >= 0:
        found.append((0.5, names[source]))
    if not found:
        found.append((0.5, "rejected sibling" if node["listed"] > 0 else "recent prediction"))
    return tuple(name for _, name in sorted(found, key=lambda pair: -pair[0]))


def _match_length(index: int) -> str:
    """The lengths of a class of matches."""
    least = MATCH_CLASSES[index]
    if least == LONGEST:
        return f"{least} tokens or more"
    most = MATCH_CLASSES[index + 1] - 1
    return _tokens(least) if most == least else f"{least} to {most} tokens"


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"
