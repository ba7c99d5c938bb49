"""What spoke for the nodes of a draft, in words: asked afterwards, where somebody watches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lookahead.core.watching import Origin
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.proposals import Nodes
from lookahead.drafting.auto.search import UNLISTED_LOG
from lookahead.drafting.auto.sources import ListedArrays
from lookahead.drafting.auto.texts import LONGEST, MATCH_CLASSES
from lookahead.drafting.auto.weights import Columns

_RECENT, _SIBLING = "recent prediction", "rejected sibling"


def origins_of(
    rows: Sequence[int], place: int, batch: DraftBatch, columns: Columns, names: Sequence[str]
) -> list[Origin]:
    """Which sources named the tokens of some nodes.

    Args:
        rows: Their numbers in the draft.
        place: That of the text.
        batch: Where it is.
        columns: Where the features of each source are.
        names: Those of the sources that list paths.
    """
    nodes, listed = Nodes(*(array[place] for array in batch.nodes)), batch.listed.arrays
    found = []
    for node in rows:
        evidence = [*_evidence(node, nodes, columns), *((0.5, name) for name in _listing(node, nodes, listed, names))]
        named = tuple(name for _, name in sorted(evidence, key=lambda each: -each[0]))
        found.append(Origin(named or (_RECENT,), float(nodes.probabilities[node])))
    return found


def _evidence(node: int, nodes: Nodes, columns: Columns) -> Iterator[tuple[float, str]]:
    """What spoke for a node, each with the length of the context that it knew."""
    features, order = nodes.features[node], int(nodes.orders[node])
    if order:
        yield order + 0.5, f"n-gram memory, {_tokens(order)}"
    for index, least in enumerate(MATCH_CLASSES):
        if features[columns.matches + index] > 0:
            yield least, f"context match, {_match_length(index)}"
    if nodes.parents[node] == 0 and UNLISTED_LOG < features[columns.siblings] < 0:
        yield 0.5, _SIBLING


def _listing(node: int, nodes: Nodes, listed: ListedArrays, names: Sequence[str]) -> Iterator[str]:
    """The sources that list the token of a node after its parent."""
    for source, name in enumerate(names):
        place = int(listed.reached[source, nodes.parents[node]])
        place = int(listed.children[place]) if place >= 0 else -1
        while place >= 0 and listed.tokens[place] != nodes.tokens[node]:
            place = int(listed.siblings[place])
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
