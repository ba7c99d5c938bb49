"""Rows of an engine in pages of one memory, so that a pass over any of them can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.base import TextRow
from lookahead.backends.forward_result import PassResult, pass_result
from lookahead.backends.machine import SHARE, PausingClock, Staged, free_bytes, upload
from lookahead.backends.transformers.fixed_passes import FixedPasses, pass_sizes, rounded
from lookahead.backends.transformers.layouts import PassPlan
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.backends.transformers.rows import LayerShape, PackedRows, StaticTreeCache
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.tree_attention.packed_mask import Pages
from lookahead.backends.transformers.tree_cache import Integers, Row, whole_blocks
from lookahead.core.compiled import at_once
from lookahead.core.forest import Forest
from lookahead.core.results import CommittedNodes
from lookahead.core.tree_masks import BITS, WORD, MaskedTrees, packed_width, write_masks
from lookahead.errors import LookaheadError

MOST_RECORDED = 256
"""Nodes of the largest recorded pass that keeps all logits."""

PROMPT_SIZES = 512, 768, 1024
"""Nodes of recorded passes with parts of prompts. They keep the logits after `MOST_RECORDED` nodes."""

LISTED = 8
"""Likeliest tokens that recorded passes list: the default of drafters. For more, a pass is recorded again."""

FIRST_TOKENS = 1024
"""Initial capacity of a row in tokens, if the device refuses this fraction."""


class RowPool(StaticTreeCache):
    """Keys and values of many texts in pages of one memory, a single row of all pages.

    Page 0 is for padding nodes. Each text has a number, the index of its length and its pages in arrays. Texts with a
    common beginning share its pages: only the end of a text is written, and its last page is its own.

    Args:
        shapes: Shapes of keys and values in each layer.
        tokens: Initial capacity in tokens; it grows on demand.
        block: Tokens of a page.
        device: Device of the memory.

    Attributes:
        free: Free pages.
        uses: Number of texts that hold each page, `[pages]`.
        text_lengths: Tokens of each text, `[texts]`.
        page_counts: Number of pages of each text, `[texts]`.
        page_table: Pages of each text in the order of its tokens, `[texts, pages]` int32.
    """

    def __init__(self, shapes: Sequence[LayerShape | None], tokens: int, block: int, device: torch.device) -> None:
        pages = 1 + -(-tokens // block)
        super().__init__(shapes, 1, pages * block, device)
        self.block = block
        self.free = list(range(pages - 1, 0, -1))
        self.uses = np.zeros(pages, dtype=np.int64)
        self.text_lengths, self.page_counts = np.zeros((2, 0), dtype=np.int64)
        self.page_table = np.zeros((0, 1), dtype=np.int32)
        self._numbers: list[int] = []  # of no text

    def grow(self, capacity: int) -> None:
        """Move to larger buffers; all columns count as text."""
        super().grow(capacity)
        self.set_lengths([capacity])

    def add_text(self) -> int:
        """Add an empty text, and return its number."""
        if not self._numbers:
            before = len(self.text_lengths)
            more = max(before, 8)
            self.text_lengths = np.append(self.text_lengths, np.zeros(more, dtype=np.int64))
            self.page_counts = np.append(self.page_counts, np.zeros(more, dtype=np.int64))
            self.page_table = np.pad(self.page_table, ((0, more), (0, 0)))
            self._numbers = list(range(before + more - 1, before - 1, -1))
        number = self._numbers.pop()
        self.text_lengths[number] = self.page_counts[number] = 0
        return number

    def remove_text(self, number: int) -> None:
        """Free the number of a text, and the pages that no other text holds."""
        self.shorten(number, 0)
        self._numbers.append(number)

    def begin(self, number: int, source: int, tokens: int) -> None:
        """Begin an empty text with the first tokens of another one.

        Whole pages are shared and the rest is copied, unless there is no free page for it.
        """
        self.shorten(number, 0)
        whole = tokens // self.block
        pages = self.page_table[source, :whole]
        self.page_table[number, :whole] = pages
        self.page_counts[number] = whole
        self.uses[pages] += 1
        places = np.arange(whole * self.block, tokens if self.free else whole * self.block)
        if len(places):
            self.reserve(np.array([number]), np.array([tokens]))
            self.move(np.zeros_like(places), self.columns_of(source, places), self.columns_of(number, places))
        self.text_lengths[number] = whole * self.block + len(places)

    def shorten(self, number: int, tokens: int) -> None:
        """Keep the first tokens of a text, or fewer: no part of a page that other texts hold."""
        whole = tokens // self.block
        if tokens % self.block and self.uses[self.page_table[number, whole]] > 1:
            tokens = whole * self.block
        pages = -(-tokens // self.block)
        self._release(self.page_table[number, pages : self.page_counts[number]])
        self.page_counts[number] = pages
        self.text_lengths[number] = tokens

    def _release(self, pages: NDArray[np.int32]) -> None:
        """Let a text give up pages."""
        self.uses[pages] -= 1
        self.free += pages[self.uses[pages] == 0].tolist()

    def shared(self, numbers: Integers, with_others: bool) -> int:
        """Return the number of repeated pages of some texts; see `Runner.shared_tokens`."""
        tables = self.page_table[numbers]
        held = tables[np.arange(tables.shape[1]) < self.page_counts[numbers][:, None]]
        uses = self.uses
        counts = np.bincount(held, minlength=len(uses))
        own = (counts == uses) & (counts > 0) if with_others else counts > 0
        return len(held) - int(np.count_nonzero(own))

    def reserve(self, numbers: Integers, tokens: Integers) -> None:
        """Reserve pages for a number of tokens of each text."""
        for place in np.flatnonzero(tokens > self.page_counts[numbers] * self.block).tolist():
            number = int(numbers[place])
            begin = int(self.page_counts[numbers[place]])
            end = whole_blocks(int(tokens[place]), self.block) // self.block
            if end > self.page_table.shape[1]:
                self.page_table = np.pad(self.page_table, ((0, 0), (0, end)))
            self.page_table[number, begin:end] = taken = self._take(end - begin)
            self.uses[taken] = 1
            self.page_counts[number] = end

    def _take(self, count: int) -> list[int]:
        """Take free pages, and grow the pool if there are too few."""
        if count > len(self.free) and not self.add_pages(count - len(self.free)):
            raise LookaheadError(
                f"the device has too little memory for the keys and values of {count * self.block} more tokens of a "
                "text; use shorter texts, or a model of a smaller number type"
            )
        return [self.free.pop() for _ in range(count)]

    def add_pages(self, count: int) -> bool:
        """Add at least `count` free pages, by at least half if there is memory; return whether there is enough."""
        before = self.capacity // self.block
        for more in sorted({max(count, before // 2), count}, reverse=True):
            with suppress(torch.cuda.OutOfMemoryError):
                self.grow((before + more) * self.block)
                self.free[:0] = range(before + more - 1, before - 1, -1)
                self.uses = np.append(self.uses, np.zeros(more, dtype=np.int64))
                return True
        return False

    def columns_of(self, numbers: Integers | int, places: Integers) -> Integers:
        """Return the columns of tokens, given their texts and indices."""
        pages: Integers = self.page_table[numbers, places // self.block].astype(np.int64)
        return pages * self.block + places % self.block


class PooledRow(TextRow):
    """One text in a pool; `number` is its number there."""

    def __init__(self, pool: RowPool) -> None:
        self._pool = pool
        self.number = pool.add_text()

    def __del__(self) -> None:
        self._pool.remove_text(self.number)

    @property
    def length(self) -> int:
        """Tokens with keys and values."""
        return int(self._pool.text_lengths[self.number])

    @length.setter
    def length(self, tokens: int) -> None:
        self._pool.text_lengths[self.number] = tokens

    @property
    def capacity(self) -> int:
        """Capacity in tokens."""
        return int(self._pool.page_counts[self.number]) * self._pool.block

    def copy_start(self, other: PooledRow, tokens: int) -> None:
        """Share the pages of the first `tokens` tokens of another row; see `RowPool.begin`."""
        self._pool.begin(self.number, other.number, tokens)

    def crop(self, tokens: int) -> None:
        """Remove all but the first `tokens` tokens, or a few more: see `RowPool.shorten`."""
        if tokens < self.length:
            self._pool.shorten(self.number, tokens)

    def adopt(self, text: Row) -> None:
        """Copy a row with its own cache."""
        self._pool.reserve(np.array([self.number]), np.array([text.length]))
        places = np.arange(text.length)
        columns = upload(self._pool.buffers[0].device, self._pool.columns_of(self.number, places))[0]
        for layer, pooled in zip(text.cache.layers, self._pool.layers, strict=False):
            if layer.is_initialized:
                count = text.length - layer.dropped
                pooled.keys.index_copy_(2, columns[layer.dropped :], layer.keys.narrow(2, 0, count))
                pooled.values.index_copy_(2, columns[layer.dropped :], layer.values.narrow(2, 0, count))
        self.length = text.length


class PooledInputs:
    """Inputs of passes of one size: packed nodes of all texts, then padding.

    Padding nodes are token 0 at position 0, see only themselves, and are in page 0.

    Args:
        masks: Masks of the model.
        nodes: Nodes of a pass.
        texts: Largest number of texts.
        width: Largest number of pages of a text.
        block: Tokens of a page.
        device: Device of the model.
        reads: Number of nodes whose logits are kept; 0 for all.

    Attributes:
        columns: Columns of the nodes in the pool, `[nodes]` int32.
    """

    def __init__(
        self, masks: MaskBuilder, nodes: int, texts: int, width: int, block: int, device: torch.device, reads: int = 0
    ) -> None:
        mask = (nodes, packed_width(nodes))
        shapes = [(1, nodes), (1, nodes), (nodes,), (reads,), (texts + 2,), (texts + 1, width)]
        shapes += [mask] * len(masks.kinds)
        self._staged = Staged(device, shapes)
        self._masks = masks
        self.nodes = nodes
        self._block = block
        self.columns = self._staged.there[2]
        slots = np.arange(nodes)
        self._alone = np.zeros(mask, dtype=np.int32)  # masks of padding
        self._alone[slots, BITS + slots // WORD] = (1 << slots % WORD).astype(np.uint32).view(np.int32)

    def arguments(self, model: PreTrainedModel, cache: StaticTreeCache) -> dict[str, Any]:
        """Return the arguments of the model beside its cache."""
        tokens, positions, _, read, starts, table, *packed = self._staged.there
        masks = {kind: mask[None, None] for kind, mask in zip(self._masks.kinds, packed, strict=True)}
        rows = PackedRows([], masks, self._masks.layers, cache, Pages(table, starts, self._block))
        kept = {"logits_to_keep": read.long()} if len(read) else {}
        return {"input_ids": tokens.long(), "position_ids": positions.long(), "packed_rows": rows, **kept}

    def stage(self, pool: RowPool, numbers: Integers, plan: PassPlan) -> None:
        """Upload the inputs of a pass over some texts of a pool."""
        tokens, positions, columns, read, starts, table, *packed = self._staged.here
        forest = plan.forest
        places = plan.places
        used = len(places)
        starts[:-1], starts[-1] = used, self.nodes
        starts[: len(numbers)] = forest.firsts[:-1]
        tokens[0, :used], tokens[0, used:] = forest.slot_tokens, 0
        positions[0, :used], positions[0, used:] = plan.positions, 0
        rows = forest.rows_of_slots
        slots = np.arange(used) - forest.firsts[rows]
        columns[:used] = pool.columns_of(numbers[rows], plan.lengths[rows] + slots)
        columns[used:] = np.arange(used, self.nodes) % self._block
        if len(read):
            read[: len(forest.read_slots)] = forest.read_slots
        width = min(len(table[0]), pool.page_table.shape[1])
        table[: len(numbers), :width] = pool.page_table[numbers, :width]
        trees = MaskedTrees(forest.firsts, forest.parent_slots, plan.lengths, places)
        for kind, buffer in zip(self._masks.kinds, packed, strict=True):
            window, chunk = self._masks.reach(kind)
            at_once(write_masks)(trees, window or 0, chunk or 0, buffer)
            buffer[used:] = self._alone[: self.nodes - used]
        self._staged.send()


class PooledRunner(ModelRunner):
    """Runner of the rows of a pool, all rows of a step in one pass.

    Passes have a few sizes, by the nodes of all rows. Each size is recorded once; larger passes are not recorded.
    Those with parts of prompts keep a fixed number of logits. Recorded passes stay valid when rows join or leave.

    Args:
        rows: Runner of packed rows with separate caches.
        shapes: Shapes of keys and values in each layer.
        records: Whether to record passes.
        clock: Clock of steps that is paused during recording.
        is_trial: See `FixedPasses`.
    """

    shares_pages = True

    def __init__(
        self,
        rows: ModelRunner,
        shapes: Sequence[LayerShape | None],
        records: bool,
        clock: PausingClock,
        is_trial: bool = False,
    ) -> None:
        super().__init__(rows.model, positions_end=rows.positions_end)
        self._shapes = tuple(shapes)
        self._new_passes = partial(FixedPasses, rows.model, clock=clock, lists=LISTED, is_trial=is_trial)
        self._keeps_logits = "logits_to_keep" in forward_arguments(rows.model)
        self._prompt_sizes = PROMPT_SIZES if records and self._keeps_logits and not is_trial else ()
        self.engine = "static" if records else "dynamic"
        self._texts = self._width = 0
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
            self._pool = new_pool(max(share, 1) if tokens is None else tokens)
        except torch.cuda.OutOfMemoryError:
            if tokens is not None:
                raise
            self._pool = new_pool(rows * FIRST_TOKENS)
        self._passes = self._new_passes(cache=self._pool)
        self.recorded = self._passes.recorded
        most = max(rows, min(rows * nodes, MOST_RECORDED))
        self.pass_sizes = pass_sizes(most) if self.engine == "static" else ()
        self._texts = rows
        self._make_room(0)
        nothing = PassPlan(Forest(()), self._numbers, self._numbers)
        for size in (*self.pass_sizes, *self._prompt_sizes):
            self._passes.run(size, 0, self._new_inputs, self._pool, self._numbers, nothing)

    def grow(self, tokens: int) -> int:
        """See `Runner`."""
        pool = self._pool
        missing = whole_blocks(tokens, pool.block) // pool.block + 1 - pool.capacity // pool.block
        if missing > 0:
            self._passes.serve(None)  # frees the memory of recorded passes, which become stale
            pool.add_pages(missing)
        return pool.capacity - pool.block

    def new_row(self, block: int | None = None) -> PooledRow:
        """Return an empty row."""
        return PooledRow(self._pool)

    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token."""
        shapes = [shape for shape in self._shapes if shape is not None]
        return sum(shape.heads * (shape.key_size + shape.value_size) * shape.dtype.itemsize for shape in shapes)

    def _plan(self, places: Sequence[int], forest: Forest) -> PassPlan:
        self._numbers = numbers = np.array([row.number for row in self.rows], dtype=np.int64)
        lengths = self._pool.text_lengths[numbers]
        shifts = [row.shift for row in self.rows]
        return PassPlan(forest, lengths, lengths, np.array(shifts, dtype=np.int64) if any(shifts) else None)

    def _pass(self, places: Sequence[int], forest: Forest, top_k: int) -> PassResult:
        plan = self._plan(places, forest)
        pool = self._pool
        pool.reserve(self._numbers, plan.lengths + forest.counts)
        self._make_room(int(pool.page_counts[self._numbers].max()))
        nodes = len(forest.tokens)
        read = forest.read_slots
        size = next((size for size in self.pass_sizes if size >= nodes), None)
        if size is None and len(read) <= MOST_RECORDED:
            size = next((size for size in self._prompt_sizes if size >= nodes), None)
        if size is None:
            return pass_result(forest, self._run_once(plan), top_k)
        logits, listed = self._passes.run(size, top_k, self._new_inputs, pool, self._numbers, plan)
        rows = None if size in self._prompt_sizes else read
        return pass_result(forest, logits, top_k, rows, borrowed=True, listed=listed)

    def _make_room(self, pages: int) -> None:
        """Make inputs large enough for the rows of the step. Passes recorded for other sizes are dropped."""
        self._texts = max(self._texts, len(self.rows))
        if pages > self._width or not self._width:
            block = self._pool.block
            self._width = whole_blocks(rounded(max(pages * block, PROMPT_SIZES[-1])), block) // block  # fits padding
        self._passes.serve((self._texts, self._width, self._pool.moves))

    def _new_inputs(self, nodes: int) -> PooledInputs:
        reads = MOST_RECORDED if nodes in self._prompt_sizes else 0
        return PooledInputs(self._masks, nodes, self._texts, self._width, self._pool.block, self._device, reads)

    def _run_once(self, plan: PassPlan) -> torch.Tensor:
        """Run an unrecorded pass, and return float32 logits after the nodes to read."""
        inputs = PooledInputs(
            self._masks, len(plan.forest.tokens), self._texts, self._width, self._pool.block, self._device
        )
        inputs.stage(self._pool, self._numbers, plan)
        (slots,) = upload(self._device, plan.forest.read_slots)
        arguments = {"logits_to_keep": slots} if self._keeps_logits else {}
        with self._pool.written_at(inputs.columns.long()):
            arguments |= inputs.arguments(self.model, self._pool)
            outputs = self.model(**arguments, **{self._cache_name: self._pool}, use_cache=True, return_dict=True)
        logits: torch.Tensor = outputs.logits[0] if "logits_to_keep" in arguments else outputs.logits[0, slots]
        return logits.float()

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
            pool.move(np.zeros_like(rows), *columns)
        pool.text_lengths[numbers] += paths.counts

    def shared_tokens(self, rows: Sequence[Any], with_others: bool = False) -> int:
        """See `Runner`."""
        numbers = np.array([row.number for row in rows], dtype=np.int64)
        return self._pool.shared(numbers, with_others) * self._pool.block

    def lengths_of(self, rows: Sequence[Any]) -> list[int]:
        """See `Runner`."""
        lengths: list[int] = self._pool.text_lengths[[row.number for row in rows]].tolist()
        return lengths
