"""What spoke for the nodes of a draft, in words: asked afterwards, where somebody watches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.core.watching import Origin
from lookahead.drafting.auto.texts import MATCH_CLASSES


def origin_of(node: np.void, names: Sequence[str]) -> Origin:
    """What named the token of a `NODE`, what knew the longest context first; `names` are those of the sources that list
    paths."""
    order, match, source = int(node["order"]), int(node["match"]), int(node["source"])
    found: list[tuple[float, str]] = []
    if order:
        found.append((order + 0.5, f"n-gram memory, {order} token{'s' if order > 1 else ''}"))
    if match >= 0:
        found.append((MATCH_CLASSES[match], f"context match, {MATCH_CLASSES[match]} tokens or more"))
    if source >= 0:
        found.append((0.5, names[source]))
    if not found:
        found.append((0.5, "rejected sibling" if node["listed"] > 0 else "recent prediction"))
    evidence = tuple(name for _, name in sorted(found, key=lambda pair: -pair[0]))
    return Origin(evidence, float(node["probability"]))
