"""A backend without a model: it says the recorded token wherever the recorded text goes, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import NodeOutputs
from lookahead.core.sequence import SequenceState
from lookahead.core.shaping import Shaping
from lookahead.core.token_tree import TokenTree
from lookahead.errors import UnsupportedArgumentError


@dataclass(frozen=True)
class RecordedOutputs:
    """What a recorded text says of the nodes of a tree (`NodeOutputs`)."""

    predictions: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_probabilities: NDArray[np.float32]

    def logits_after(self, node: int) -> Any:
        """See `NodeOutputs`.

        Raises:
            UnsupportedArgumentError: Always.
        """
        raise UnsupportedArgumentError("a recorded text has no logits")


class RecordedTokens:
    """The sampler of recorded texts: their tokens (`Sampler`)."""

    samples = False
    needs_logits = False
    shaping = Shaping()

    def select(self, sequence: Any, outputs: NodeOutputs, node: int) -> int:
        """See `Sampler`."""
        return int(outputs.predictions[node])


class ReplayBackend:
    """Answers trees from recorded texts (`Backend`), one for each row.

    Args:
        texts: Prompt and answer of each row, as token ids.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._cached = [0] * len(texts)

    def idle_tree(self) -> TokenTree:
        """See `Backend`."""
        return TokenTree([0])

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """See `Backend`."""
        return TokenTree(text[self._cached[row] :])

    def wants_draft(self, tree: TokenTree) -> bool:
        """See `Backend`."""
        return True

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[RecordedOutputs]:
        """See `Backend`: the token that follows is all there is to list, with probability 1."""
        return [self._read(*row, top_k) for row in zip(self._texts, self._cached, trees, strict=True)]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """See `Backend`."""
        for row, nodes in enumerate(kept):
            self._cached[row] += len(nodes)

    def _read(self, text: Sequence[int], cached: int, tree: TokenTree, top_k: int) -> RecordedOutputs:
        predictions = np.full(len(tree), -1, dtype=np.int64)
        node: int | None = tree.root
        while node is not None:
            place = cached + tree.depths[node] + 1
            predictions[node] = text[place] if place < len(text) else -1
            node = tree.child(node, int(predictions[node]))
        ids = np.full((len(tree), top_k), -1, dtype=np.int64)
        probabilities = np.zeros((len(tree), top_k), dtype=np.float32)
        if top_k:
            ids[:, 0], probabilities[:, 0] = predictions, predictions >= 0
        return RecordedOutputs(predictions, ids, probabilities)


def replayed_sequence(prompt: Sequence[int], answer: Sequence[int], drafter: Any) -> SequenceState:
    """A sequence that is complete with the recorded answer."""
    most = len(prompt) + len(answer)
    return SequenceState(prompt, drafter, RecordedTokens(), lambda own: len(own.tokens) >= most, most_tokens=most)
