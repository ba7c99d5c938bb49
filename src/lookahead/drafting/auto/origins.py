"""What spoke for the nodes of a draft, in words: asked afterwards, where somebody watches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lookahead.core.watching import Origin
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.sources import ListedArrays
from lookahead.drafting.auto.texts import LONGEST, MATCH_CLASSES

_RECENT, _SIBLING = "recent prediction", "rejected sibling"


def origins_of(rows: Sequence[int], place: int, batch: DraftBatch, names: Sequence[str]) -> list[Origin]:
    """Which sources named the tokens of some nodes.

    Args:
        rows: Their numbers in the draft.
        place: That of the text.
        batch: Where it is.
        names: Those of the sources that list paths.
    """
    nodes, listed = batch.nodes[place], batch.listed.arrays
    found = []
    for row in rows:
        evidence = [*_evidence(nodes[row]), *((0.5, name) for name in _listing(row, nodes, listed, names))]
        if not evidence and nodes["listed"][row] > 0:
            evidence = [(0.5, _SIBLING)]
        named = tuple(name for _, name in sorted(evidence, key=lambda each: -each[0]))
        found.append(Origin(named or (_RECENT,), float(nodes["probability"][row])))
    return found


def _evidence(node: np.void) -> Iterator[tuple[float, str]]:
    """What spoke for a node, each with the length of the context that it knew."""
    order, match = int(node["order"]), int(node["match"])
    if order:
        yield order + 0.5, f"n-gram memory, {_tokens(order)}"
    if match >= 0:
        yield MATCH_CLASSES[match], f"context match, {_match_length(match)}"


def _listing(row: int, nodes: NDArray[np.void], listed: ListedArrays, names: Sequence[str]) -> Iterator[str]:
    """The sources that list the token of a node after its parent."""
    for source, name in enumerate(names):
        place = int(listed.reached[source, nodes["parent"][row]])
        place = int(listed.tokens["child"][place]) if place >= 0 else -1
        while place >= 0 and listed.tokens["token"][place] != nodes["token"][row]:
            place = int(listed.tokens["sibling"][place])
        if place >= 0:
            yield name


def _match_length(index: int) -> str:
    """The lengths of a class of matches."""
    least = MATCH_CLASSES[index]
    if least == LONGEST:
        return f"{least} tokens or more"
    most = MATCH_CLASSES[index + 1] - 1
    return _tokens(least) if most == least else f"{least} to {most} tokens"


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"
