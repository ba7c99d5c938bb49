"""The paths of a batch: what the search for each of them found, in arrays that one loop goes through."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import inner
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.proposals import MOST_LISTED, Nodes, Proposals, allocate_proposals
from lookahead.drafting.auto.sources import ListedArrays
from lookahead.drafting.auto.texts import LONGEST, SEARCHED

_OF_EACH = ("tokens", "nodes", "estimates", "orders", "least", "features")
"""Arrays of proposals that each place has for itself."""


class PathStates(NamedTuple):
    """What is known of each path, `[places]` all of them.

    Attributes:
        roots: The node that is the last token of the text.
        drafted: Tokens drafted after it; -1 if none were looked for.
        promised: How many of them are to be accepted.
        agreed, compared: How many selected tokens were the model's likeliest, and of how many; see `Trust`.
    """

    roots: NDArray[np.int64]
    drafted: NDArray[np.int64]
    promised: NDArray[np.float64]
    agreed: NDArray[np.float64]
    compared: NDArray[np.float64]


class PathArrays(NamedTuple):
    """Arrays of a search, each with one row more in front: that of the place. What a search leaves behind is shared.

    Attributes:
        nodes: The last tokens of each text, and the path after them. The parent of each node is the one before it.
        proposals: What may follow them; `defaults`, `counts` and the tables are shared.
        listed: What may follow each text: what the model says after a token that was rejected there. `reached` and
            `columns` are shared.
        states: See there.
    """

    nodes: Nodes
    proposals: Proposals
    listed: ListedArrays
    states: PathStates


def allocate_paths(places: int, longest: int, memory: DraftMemory) -> PathArrays:
    """Room for paths of up to `longest` tokens."""
    ngrams, weights = memory.ngrams, memory.weights
    size = LONGEST + longest + 1
    at_a_node = ngrams.orders * ngrams.top_k + SEARCHED + MOST_LISTED
    tokens, depths, known, starts = (np.zeros((places, size + 1), dtype=np.int64) for _ in range(4))
    parents = np.tile(np.arange(-1, size), (places, 1))
    nodes = Nodes(tokens, parents, depths, np.zeros((places, size + 1)), known, starts)
    one = allocate_proposals((longest + 1) * at_a_node, at_a_node, weights.values.shape[1])
    own = {name: _of_each(places, getattr(one, name)) for name in _OF_EACH}
    proposals = one._replace(**own)
    heard, after, beside = (np.full((places, 1 + MOST_LISTED), -1, dtype=np.int64) for _ in range(3))
    reached, columns = np.full((1, size + 1), -1, dtype=np.int64), np.array([weights.columns.siblings], dtype=np.int64)
    listed = ListedArrays(heard, np.zeros(heard.shape), after, beside, reached, columns, *np.ones((2, 1)))
    roots, drafted = np.zeros((2, places), dtype=np.int64)
    states = PathStates(roots, drafted, np.zeros(places), np.ones(places), np.ones(places))
    return PathArrays(nodes, proposals, listed, states)


def _of_each(places: int, array: NDArray[Any]) -> NDArray[Any]:
    return np.empty((places, *array.shape), dtype=array.dtype)


@inner
def nodes_of(place: int, paths: PathArrays) -> Nodes:
    """Those of one path."""
    every = paths.nodes
    return Nodes(
        every.tokens[place],
        every.parents[place],
        every.depths[place],
        every.probabilities[place],
        every.known[place],
        every.starts[place],
    )


@inner
def proposals_of(place: int, paths: PathArrays) -> Proposals:
    """Those along one path."""
    every = paths.proposals
    return Proposals(
        every.tokens[place],
        every.nodes[place],
        every.estimates[place],
        every.orders[place],
        every.least[place],
        every.features[place],
        every.defaults,
        every.counts,
        every.table,
        every.table_nodes,
    )


@inner
def listed_of(place: int, paths: PathArrays) -> ListedArrays:
    """What may follow one text."""
    every = paths.listed
    return ListedArrays(
        every.tokens[place],
        every.logs[place],
        every.children[place],
        every.siblings[place],
        every.reached,
        every.columns,
        every.expected,
        every.accepted,
    )


@inner
def start_path(place: int, paths: PathArrays) -> None:
    """Nothing is known of a path yet."""
    states = paths.states
    states.drafted[place] = -1
    states.agreed[place] = states.compared[place] = 1.0
    paths.listed.children[place, 0] = -1
