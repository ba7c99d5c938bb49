"""Rows that come and go in one context of llama.cpp, for an engine."""

from __future__ import annotations

import weakref
from typing import Any

from lookahead.backends.llama_cpp.context import MOST_SEQUENCES
from lookahead.backends.llama_cpp.model import LlamaModel
from lookahead.backends.llama_cpp.rows import LlamaRow
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.errors import InvalidArgumentError


class LlamaRowsRunner(LlamaRunner):
    """The rows of many requests. Each has sequence ids of its own; all of them share the cells of one context.

    Args:
        llama: The model.
        model: What stands for it in transformers' interface.
        cells: Tokens whose keys and values are held at most.
        max_rows: Most rows of a step.

    Attributes:
        model: As given.
        chains, shares_beginnings, keeps_apart: See `RowsRunner`.
        most_nodes: Nodes that the tree of each row may have, so that there are sequence ids for all leaves.
        cells: Tokens whose keys and values are held at most.

    Raises:
        InvalidArgumentError: There are not enough sequence ids for the rows, or no memory for the cells.
    """

    is_invariant = chains = False
    keeps_apart = shares_beginnings = True
    broken_after = changes_after = None

    def __init__(self, llama: LlamaModel, model: Any, cells: int, max_rows: int) -> None:
        if max_rows > MOST_SEQUENCES:
            raise InvalidArgumentError(
                f"max_rows={max_rows} is too many: llama.cpp has {MOST_SEQUENCES} sequences; choose at most that"
            )
        super().__init__(llama.acquire(cells, MOST_SEQUENCES), 0, llama.last_length)
        weakref.finalize(self, llama.release, self.llama_context)
        self.model = model
        self.context = llama.last_length
        self.most_nodes = MOST_SEQUENCES // max_rows + 1
        self.cells = self.llama_context.cells
        self._bytes = llama.token_bytes

    def new_row(self, block: int = 1) -> LlamaRow:
        """An empty row. Cells are taken one by one, whatever `block` says."""
        return LlamaRow(self._ids)

    def token_bytes(self) -> int:
        """Bytes that keys and values of a token take."""
        return self._bytes
