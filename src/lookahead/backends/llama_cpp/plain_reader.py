"""Plain decoding: logits after texts that grow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from lookahead.backends.llama_cpp.model import LlamaModel
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.core.token_tree import TokenTree

_ROOM = 256


class PlainReader:
    """Reads rows of text, each time only what is new of them.

    Args:
        model: The model.
        texts: Token ids of each row, of the texts that come first.
    """

    def __init__(self, model: LlamaModel, texts: Sequence[Sequence[int]]) -> None:
        self._cells = 2 * _cells(texts) + _ROOM
        self._runner = LlamaRunner(model.acquire(self._cells, len(texts)), len(texts), model.last_length)
        self._has_states = model.has_states
        self._texts: list[list[int]] = [[] for _ in texts]

    def fits(self, texts: Sequence[Sequence[int]]) -> bool:
        """Whether there is room for `texts`."""
        return len(texts) == len(self._texts) and _cells(texts) <= self._cells

    def read(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits after the last token of each text, `[rows, vocabulary]` float32."""
        for row, text in enumerate(texts):
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, self._texts[row], strict=False)))
            same = min(same, len(text) - 1)
            if self._has_states and same < self._runner.rows[row].length:
                same = 0  # a state cannot take back a token
            self._runner.rewind(row, same)
            self._texts[row] = list(text)
        trees: list[TokenTree] = [self._runner.begin_tree(row, text) for row, text in enumerate(texts)]
        results = self._runner.forward(trees)
        self._runner.commit([range(len(tree)) for tree in trees])
        return torch.cat([result.logits_after(tree.root) for result, tree in zip(results, trees, strict=True)])


def _cells(texts: Sequence[Sequence[int]]) -> int:
    return sum(len(text) for text in texts)
