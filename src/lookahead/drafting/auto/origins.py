"""What spoke for the nodes of a tree that was searched, in words: asked afterwards, where somebody watches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lookahead.core.watching import Origin
from lookahead.drafting.auto.proposals import Nodes, Proposals
from lookahead.drafting.auto.sources import ListedArrays
from lookahead.drafting.auto.texts import LONGEST, MATCH_CLASSES
from lookahead.drafting.auto.weights import FURTHER_MATCHES, SIBLINGS, Columns

RECENT = "recent prediction"

_SHOWN = {SIBLINGS: "rejected sibling"}


def origin_of(
    node: int, nodes: Nodes, proposals: Proposals, listed: ListedArrays, columns: Columns, names: Sequence[str]
) -> Origin:
    """Which sources named the token of a node.

    Args:
        node: The node, below the root.
        nodes: The tree.
        proposals: Those of its search.
        listed: The paths of sources that list them.
        columns: Where the features of each source are.
        names: Those of these sources.
    """
    probability = float(nodes.probabilities[node])
    begin, end = nodes.starts[nodes.parents[node]], nodes.starts[nodes.parents[node] + 1]
    found = np.flatnonzero(proposals.tokens[begin:end] == nodes.tokens[node])
    if not len(found):  # no proposal of a source: it was tried
        return Origin((RECENT,), probability)
    evidence = [
        *_evidence(int(begin + found[0]), proposals, columns),
        *((0.5, _SHOWN.get(name, name)) for name in _listing(node, nodes, listed, names)),
    ]
    named = sorted(evidence, key=lambda each: -each[0])
    return Origin(tuple(name for _, name in named) or (RECENT,), probability)


def _evidence(row: int, proposals: Proposals, columns: Columns) -> Iterator[tuple[float, str]]:
    """What spoke for a proposal at its node, each with the length of the context that it knew."""
    features, order = proposals.features[row], int(proposals.orders[row])
    if order:
        yield order + 0.5, f"n-gram memory, {_tokens(order)}"
    for index, least in enumerate(MATCH_CLASSES):
        if features[columns.matches + index] > 0:
            further = int(2 * features[columns.matches + len(MATCH_CLASSES)])
            yield least, f"context match, {_match_length(index)}"
            if further:
                yield 0.25, FURTHER_MATCHES


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
