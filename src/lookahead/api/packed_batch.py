"""The rows of one call without padding between them, where that gives the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers import equivalence
from lookahead.backends.transformers.model_state import draft_account
from lookahead.backends.transformers.packed_rows import PackedRowsRunner, Row
from lookahead.backends.transformers.packed_rows.model import packed_clone
from lookahead.config import LookaheadConfig
from lookahead.core.decoder import Batch, step
from lookahead.core.shared_budget import SharedBudget
from lookahead.core.token_tree import TokenTree
from lookahead.serving.prepared import Arguments

LONGEST_PART = 1024
"""Tokens of a prompt in a pass, at most."""


class PackedBatch:
    """Runs the rows of a call as an `Engine` runs requests: packed into one row of tokens, those that end leave.

    Args:
        clone: What runs them; see `packed_clone`.
        arguments: What the call asks for.
        config: How to draft.

    Attributes:
        shared: Which nodes they send.
    """

    def __init__(self, clone: PreTrainedModel, arguments: Arguments, config: LookaheadConfig) -> None:
        self._runner = PackedRowsRunner(clone, equivalence(arguments.model).holds("positions_end"))
        self._rows = [Row() for _ in range(arguments.prompts.rows)]
        self._temperature = arguments.temperature
        accounts = partial(draft_account, clone, config)
        self.shared = SharedBudget(accounts) if config.chooses_nodes else None

    @torch.no_grad()
    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Send long texts ahead in parts, so that the first step has few pending tokens; returns how many passes."""
        size, passes = chunk_size or LONGEST_PART, 0
        while long := [place for place, text in enumerate(texts) if len(text) - self._rows[place].length > size]:
            self._runner.rows = [self._rows[place] for place in long]
            parts = [texts[place][row.length :][:size] for place, row in zip(long, self._runner.rows, strict=True)]
            self._runner.forward([TokenTree(part) for part in parts])
            self._runner.commit([range(len(part)) for part in parts])
            passes += 1
        return passes

    def decode(self, batch: Batch) -> None:
        """Decode until all sequences of `batch` are finished."""
        everyone = list(batch.sequences)
        batch.times = self.shared
        batch.share_out = None if self.shared is None else self.shared.share_out
        batch.packed = True
        while left := [place for place, sequence in enumerate(everyone) if not sequence.finished]:
            self._runner.rows = [self._rows[place] for place in left]
            batch.sequences = [everyone[place] for place in left]
            if self.shared is not None:
                rows = zip(batch.sequences, self._runner.rows, strict=True)
                timed = all(len(sequence.tokens) - row.length == 1 for sequence, row in rows)
                self.shared.begin(len(left), self._temperature, timed)
            step(self._runner, batch)
        batch.sequences = everyone


def packed_batch(arguments: Arguments, config: LookaheadConfig) -> PackedBatch | None:
    """What runs the rows of a call packed; `None` where they are padded.

    A cache that a call takes or leaves has padded rows. On a GPU a call for each row takes longer than
    padding does. Of packed weights there is one copy for a model, which calls of one prompt have.
    """
    model, prompts, generation_config = arguments.model, arguments.prompts, arguments.config
    leaves_cache = generation_config.return_dict_in_generate and generation_config.use_cache
    if prompts.rows == 1 or prompts.cache is not None or prompts.inputs or leaves_cache:
        return None
    if config.engine != "dynamic" or config.invariant or config.pack_weights:
        return None
    if model.device.type != "cpu":
        return None
    clone = packed_clone(model, pack_weights=False, invariant=False)
    return None if isinstance(clone, str) else PackedBatch(clone, arguments, config)
