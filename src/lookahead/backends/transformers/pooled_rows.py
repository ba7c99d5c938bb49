"""Rows of a call or of an engine in pages of one memory, so that a pass over any of them can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.forward_result import PassResult, pass_result
from lookahead.backends.machine import SHARE, PausingClock, Staged, free_bytes, upload
from lookahead.backends.transformers.fixed_passes import FIXED_ROWS, PAYS_FROM, FixedPasses, pass_sizes, rounded
from lookahead.backends.transformers.layouts import Inputs, Padded, PassPlan
from lookahead.backends.transformers.masks import PACKED_MASKS, MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.backends.transformers.row_pool import LayerShape, PooledRow, RowPool
from lookahead.backends.transformers.runner import LONGEST_DRAFTED_PREFILL, ModelRunner
from lookahead.backends.transformers.tree_attention import Pages
from lookahead.backends.transformers.tree_cache import Integers, Row, whole_blocks
from lookahead.core.compiled import at_once
from lookahead.core.forest import Forest
from lookahead.core.page_inputs import write_inputs
from lookahead.core.results import CommittedNodes
from lookahead.core.tree_masks import BITS, WORD, MaskedTrees, packed_masks, packed_width, write_masks

MOST_RECORDED = 256
"""Nodes of the largest recorded pass that keeps all logits."""

PROMPT_SIZES = 512, 768, 1024
"""Nodes of recorded passes with parts of prompts. They keep the logits after `MOST_RECORDED` nodes."""

PAGE = 64
"""Tokens of a page of a call."""

LISTED = 8
"""Likeliest tokens that passes of an engine list: the default of drafters. For more, a pass is recorded again."""

FIRST_TOKENS = 1024
"""Initial capacity of a row in tokens, if the device refuses this fraction."""


class PooledInputs:
    """Inputs of passes of one size: packed nodes of all texts, then padding.

    Padding nodes are token 0 at position 0, see only nodes of their column, and are in page 0.

    Args:
        masks: Masks of the model.
        pool: Memory of the texts.
        sizes: See `FixedPasses`.
        nodes: Nodes of a pass.
        reads: Number of nodes whose logits are kept; 0 for all.

    Attributes:
        columns: Columns of the nodes in the pool, `[nodes]` int32.
        packed: For each kind of layer `[nodes, 3 + words]` int32.
    """

    def __init__(
        self, masks: MaskBuilder, pool: RowPool, sizes: tuple[int, int, int], nodes: int, reads: int = 0
    ) -> None:
        texts, width, largest = sizes
        mask = (nodes, packed_width(max(nodes, largest)))
        shapes = [(1, nodes), (1, nodes), (nodes,), (reads,), (texts + 2,), (texts + 1, width)]
        shapes += [mask] * len(masks.kinds)
        self._staged = Staged(pool.device, shapes)
        self._masks = masks
        self.nodes = nodes
        self.columns = self._staged.there[2]
        self.packed = self._staged.there[6:]
        slots = np.arange(nodes) % pool.block  # of padding
        self._alone = np.zeros(mask, dtype=np.int32)  # its masks
        self._alone[np.arange(nodes), BITS + slots // WORD] = (1 << slots % WORD).astype(np.uint32).view(np.int32)

    def arguments(self, model: PreTrainedModel, pool: RowPool) -> dict[str, Any]:
        """Return the arguments of the model beside its cache."""
        tokens, positions, _, read, starts, table = self._staged.there[:6]
        pages = None if pool.is_slice else Pages(table, starts, pool.block)
        keys = pool.capacity - pool.first_visible
        mask = self._masks.of_packed([packed[None, None] for packed in self.packed], keys, model.dtype, pages=pages)
        arguments = {"input_ids": tokens.long(), "position_ids": positions.long(), "attention_mask": mask}
        if pages is not None and model.config._attn_implementation in PACKED_MASKS:
            arguments["pages"] = pages
        if len(read):
            arguments["logits_to_keep"] = read.long()
        return arguments

    def stage(self, pool: RowPool, numbers: Integers, plan: PassPlan, part: int = 0) -> None:
        """Upload the inputs of a pass over some texts of a pool, or of a part of it: `nodes` slots of all trees."""
        tokens, positions, columns, read, starts, table, *packed = self._staged.here
        forest = plan.forest
        begin = part * self.nodes
        pages = pool.page_table, pool.block, pool.is_slice
        buffers = tokens[0], positions[0], columns, starts, table
        trees = forest.firsts, forest.rows_of_slots, forest.slot_tokens, plan.positions
        used = write_inputs(begin, trees, (numbers, plan.lengths), pages, buffers)
        if len(read):
            read[: len(forest.read_slots)] = forest.read_slots
        masked = MaskedTrees(forest.firsts, forest.parent_slots, plan.lengths, plan.places)
        for kind, buffer in zip(self._masks.kinds, packed, strict=True):
            window, chunk = self._masks.reach(kind)
            if used == len(plan.places):
                at_once(write_masks)(masked, window or 0, chunk or 0, buffer)
            else:
                buffer[:used] = packed_masks(masked, window, chunk, len(buffer[0]))[begin : begin + used]
            buffer[used:] = self._alone[: self.nodes - used]
        self._staged.send()


class PooledRunner(ModelRunner):
    """Runner of the rows of a pool, all rows of a step in one pass.

    Passes have a few sizes, by the nodes of all rows. Each size is recorded once; larger passes are not recorded.
    Those with parts of prompts keep a fixed number of logits. Recorded passes stay valid when rows join or leave.
    Invariant passes have one size, and process larger trees in parts.

    Args:
        model: The model.
        shapes: Shapes of keys and values in each layer.
        clock: Clock of steps that is paused during recording.
        positions_end: See `Limits`.
        records: Whether to record passes.
        is_trial: See `FixedPasses`.

    Attributes:
        passes: The passes, with the pool as their cache.
    """

    shares_pages = True

    _caches_know_lengths = False

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape | None],
        clock: PausingClock,
        positions_end: bool = True,
        records: bool = True,
        is_trial: bool = False,
    ) -> None:
        super().__init__(model, positions_end=positions_end)
        self._shapes = tuple(shapes)
        self._new_passes = partial(FixedPasses, model, clock=clock, is_trial=is_trial)
        self.engine = "static" if records else "dynamic"
        keeps_logits = "logits_to_keep" in forward_arguments(model)
        self._prompt_sizes = PROMPT_SIZES if records and keeps_logits and not is_trial else ()
        self._last: int | None = None
        self.packed = True
        self._numbers: Integers = np.empty(0, dtype=np.int64)  # of the rows of the pass

    @torch.no_grad()
    def take_memory(self, tokens: int | None, block: int, rows: int, nodes: int) -> None:
        """Allocate the pool; see `Runner`.

        Unlimited memory is the usual fraction of the free memory, as growth would record passes again. If the device
        refuses it, it starts with `FIRST_TOKENS` for each row, and grows. More rows than `rows` need new recordings.
        """
        new_pool = partial(RowPool, self._shapes, block=block, device=self._device)
        try:
            share = free_bytes(self._device) // SHARE // self.token_bytes()
            pool = new_pool(max(share, 1) if tokens is None else tokens)
        except torch.cuda.OutOfMemoryError:
            if tokens is not None:
                raise
            pool = new_pool(rows * FIRST_TOKENS)
        self._open(self._new_passes(cache=pool, lists=LISTED), rows, nodes)
        self._fit(rows, 0)
        nothing = PassPlan(Forest(()), self._numbers, self._numbers)
        for size in (*self.pass_sizes, *self._prompt_sizes):
            self.passes.run(size, 0, self._new_inputs, pool, self._numbers, nothing)

    def begin_call(
        self, rows: int, nodes: int, tokens: int, last: int | None = None, passes: FixedPasses | None = None
    ) -> None:
        """Allocate the rows of a call.

        Args:
            rows: Number of rows.
            nodes: Largest number of nodes of a tree.
            tokens: Initial capacity of a row.
            last: Largest number of tokens of the texts; unlimited if `None`. With fewer than `PAYS_FROM` remaining, no
                pass is recorded.
            passes: Passes of an earlier call, to be used again.
        """
        tokens = whole_blocks(tokens, PAGE)
        if passes is None:
            pool = RowPool(self._shapes, rows * tokens, PAGE, self._device, is_slice=rows == 1)
            passes = self._new_passes(cache=pool)
        else:
            for buffer in passes.cache.buffers:
                buffer.zero_()  # an earlier text may have left NaN, which a weight of 0 does not remove
        self._open(passes, rows, nodes)
        self._last = last
        self._prompt_sizes = ()
        self._drafted = nodes
        self.packed = rows > 1
        self._fit(rows, tokens // PAGE)
        self.rows = [self.new_row() for _ in range(rows)]

    def end_call(self) -> FixedPasses:
        """Free the rows of a call, and return its passes."""
        for row in self.rows:
            self._pool.shorten(row.number, 0)
        return self.passes

    def _open(self, passes: FixedPasses, rows: int, nodes: int) -> None:
        self.passes = passes
        self.recorded = passes.recorded
        sizes = (FIXED_ROWS,) if self.is_invariant else pass_sizes(max(rows, min(rows * nodes, MOST_RECORDED)))
        self.pass_sizes = sizes if self.engine == "static" else ()

    @property
    def _pool(self) -> RowPool:
        return self.passes.cache

    @property
    def texts(self) -> list[Row]:
        """Copies of the rows of a call."""
        return [row.copied() for row in self.rows]

    def grow(self, tokens: int) -> int:
        """See `Runner`."""
        pool = self._pool
        missing = whole_blocks(tokens, pool.block) // pool.block + 1 - pool.capacity // pool.block
        if missing > 0:
            self.passes.serve(None)  # frees the memory of recorded passes, which become stale
            pool.add_pages(missing)
        return pool.capacity - pool.block

    def new_row(self, block: int | None = None) -> PooledRow:
        """Return an empty row."""
        return PooledRow(self._pool, self._limits.first_position)

    def next_logits(self, text: Sequence[int]) -> None:
        """Return `None`: rows have no cache of their own, and the inputs of a pass refer to pages."""

    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token."""
        shapes = [shape for shape in self._shapes if shape is not None]
        return sum(shape.heads * (shape.key_size + shape.value_size) * shape.dtype.itemsize for shape in shapes)

    def _plan(self, rows: Sequence[Any], forest: Forest) -> PassPlan:
        self._numbers = numbers = np.array([row.number for row in rows], dtype=np.int64)
        if self._idle in forest.objects:
            return super()._plan(rows, forest)
        lengths = self._pool.text_lengths[numbers]
        shifts = [row.shift for row in rows]
        return PassPlan(forest, lengths, lengths, np.array(shifts, dtype=np.int64) if any(shifts) else None)

    def _pass(self, rows: Sequence[Any], forest: Forest, top_k: int) -> PassResult:
        plan = self._plan(rows, forest)
        pool = self._pool
        passes = self.passes
        nodes = len(forest.tokens)
        read = forest.read_slots
        size = next((size for size in self.pass_sizes if size >= nodes), None)
        parts = 1
        if size is None and self.is_invariant:
            size = FIXED_ROWS
            parts = -(-nodes // size)
        elif size is None and len(read) <= MOST_RECORDED:
            size = next((size for size in self._prompt_sizes if size >= nodes), None)
        pool.reserve(self._numbers, plan.lengths + forest.counts)
        self._fit(len(self.rows), int(pool.page_counts[self._numbers].max()), nodes if parts > 1 else 0)
        pays = self._last is None or self._last - int(plan.lengths.max()) >= PAYS_FROM
        if size is None or not (pays or passes.has(size, top_k)):
            return super()._pass(rows, forest, top_k)
        run = partial(passes.run, size, top_k, self._new_inputs, pool, self._numbers, plan)
        if parts == 1:
            logits, listed = run()
        else:  # the next part overwrites the results of the last one
            results = [[output.clone() for output in run(part)] for part in range(parts)]
            logits, listed = map(torch.cat, zip(*results, strict=True))
        listed_at = None if size in self._prompt_sizes else read
        return pass_result(forest, logits, top_k, listed_at, borrowed=True, listed=listed)

    def _fit(self, texts: int, pages: int, nodes: int = 0) -> None:
        """Enlarge the sizes of inputs on demand. Passes recorded for other sizes are dropped."""
        passes = self.passes
        block = self._pool.block
        most, width, largest = passes.sizes
        if pages > width or not width:
            tokens = max([pages * block, *self.pass_sizes, *self._prompt_sizes])  # fits padding
            width = whole_blocks(rounded(tokens), block) // block
        passes.sizes = max(most, texts), width, max(largest, nodes)
        passes.serve((passes.sizes, self._pool.moves))

    def _new_inputs(self, nodes: int) -> PooledInputs:
        reads = MOST_RECORDED if nodes in self._prompt_sizes else 0
        return PooledInputs(self._masks, self._pool, self.passes.sizes, nodes, reads)

    def _run(self, rows: Sequence[Any], plan: PassPlan) -> tuple[torch.Tensor, Inputs]:
        """Run an unrecorded pass. A prompt of a single row runs without a mask, in its own cache."""
        pool = self._pool
        if pool.is_slice and plan.forest.is_plain and not plan.lengths.any() and not self.is_invariant:
            prompt = Row()
            inputs = Padded(self.model, self._masks, self._device).inputs(plan)
            logits = self._call(self.model, inputs, {self._cache_name: prompt.cache}).logits
            prompt.cache.set_length(len(plan.forest.tokens))
            self.rows[0].adopt(prompt)
            self.rows[0].length = 0  # until the commit
            return logits, inputs
        staged = PooledInputs(self._masks, pool, self.passes.sizes, len(plan.forest.tokens))
        staged.stage(pool, self._numbers, plan)
        keep = plan.forest.read_slots
        with pool.written_at(staged.columns.long()):
            arguments = staged.arguments(self.model, pool)
            if "logits_to_keep" in forward_arguments(self.model):
                arguments["logits_to_keep"] = upload(self._device, keep)[0]
            inputs = Inputs(arguments.pop("input_ids"), arguments.pop("position_ids"), keep, arguments=arguments)
            return self._call(self.model, inputs, {self._cache_name: pool}).logits, inputs

    def _prefill_size(self, texts: int) -> int | None:
        # A mask has a column for each token of all rows, but the beginning of a single text needs none.
        needs_mask = texts > 1 or self.is_invariant or self.rows[0].length > 0
        chunk = FIXED_ROWS if self.is_invariant else LONGEST_DRAFTED_PREFILL
        return max(chunk // texts, 1) if needs_mask else None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """See `Runner`."""
        pool = self._pool
        numbers = self._numbers
        paths = CommittedNodes.of(self._forest, paths)
        rows, sources, targets = paths.misplaced()
        if len(rows):
            texts = numbers[rows]
            lengths = pool.text_lengths[texts]
            columns = pool.columns_of(texts, lengths + sources), pool.columns_of(texts, lengths + targets)
            pool.move(*columns)
        pool.text_lengths[numbers] += paths.counts

    def shared_tokens(self, rows: Sequence[Any], with_others: bool = False) -> int:
        """See `Runner`."""
        numbers = np.array([row.number for row in rows], dtype=np.int64)
        return self._pool.shared(numbers, with_others) * self._pool.block

    def lengths_of(self, rows: Sequence[Any]) -> list[int]:
        """See `Runner`."""
        lengths: list[int] = self._pool.text_lengths[[row.number for row in rows]].tolist()
        return lengths
