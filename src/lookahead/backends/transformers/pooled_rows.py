"""Rows that come and go in pages of one memory, so that a pass over any of them can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.base import TextRow
from lookahead.backends.forward_result import ForwardResult, forward_results
from lookahead.backends.machine import PausingClock, Staged, free_bytes, upload
from lookahead.backends.transformers.fixed_passes import FixedPasses, pass_sizes, rounded
from lookahead.backends.transformers.layouts import PackedStep, Step, ancestors, in_a_row, padded
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.backends.transformers.rows import LayerShape, StaticTreeCache
from lookahead.backends.transformers.runner import LARGE, ModelRunner
from lookahead.backends.transformers.tree_attention.packed_mask import BITS, SCRATCH, WORD, Pages, packed_width
from lookahead.backends.transformers.tree_cache import Integers, Row, whole_blocks
from lookahead.core.token_tree import TokenTree

MOST_RECORDED = 256
"""Nodes of the largest pass that is recorded: with more, as with a part of a prompt, products take longer than reading
the weights does, and launches are hidden behind them."""

LISTED = 8
"""Likeliest tokens that recorded passes list, as drafters ask for by default; for more a pass is recorded anew."""

FIRST_TOKENS = 1024
"""Tokens of each row that memory is taken for at first where it is not limited, and that a text may come to."""


class RowPool(StaticTreeCache):
    """Keys and values of many texts in pages of one memory, which is one row of all pages.

    Page 0 is for nodes of no text.

    Args:
        shapes: What each layer keeps of a token.
        tokens: How many there is room for; it grows where that is not enough.
        block: Tokens of a page.
        device: Where it is.

    Attributes:
        free: Pages that no text has.
    """

    def __init__(self, shapes: Sequence[LayerShape | None], tokens: int, block: int, device: torch.device) -> None:
        pages = 1 + -(-tokens // block)
        super().__init__(shapes, 1, pages * block, device)
        self.block = block
        self.free = list(range(pages - 1, 0, -1))

    def grow(self, capacity: int) -> None:
        """See `StaticTreeCache.grow`. All columns count as text: whoever writes to some knows which are."""
        super().grow(capacity)
        self._set_lengths([capacity])

    def take(self, count: int) -> list[int]:
        """Take so many pages."""
        if count > len(self.free):
            before = self.capacity // self.block
            pages = before + max(count - len(self.free), before // 2)
            self.grow(pages * self.block)
            self.free[:0] = range(pages - 1, before - 1, -1)
        return [self.free.pop() for _ in range(count)]


class PooledRow(TextRow):
    """One text in a pool.

    Attributes:
        pages: Its pages, in the order of its tokens, `[pages]` int32.
        length: Tokens that are kept.
    """

    def __init__(self, pool: RowPool) -> None:
        self._pool = pool
        self.pages = np.empty(0, dtype=np.int32)
        self.length = 0

    def __del__(self) -> None:
        self._pool.free.extend(self.pages.tolist())

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return len(self.pages) * self._pool.block

    def reserve(self, tokens: int) -> None:
        """Have room for so many tokens."""
        if tokens > self.capacity:
            count = whole_blocks(tokens - self.capacity, self._pool.block) // self._pool.block
            self.pages = np.append(self.pages, np.array(self._pool.take(count), dtype=np.int32))

    def columns(self, places: Integers) -> Integers:
        """Where tokens lie in the pool, given their places in the text."""
        block = self._pool.block
        return self.pages[places // block].astype(np.int64) * block + places % block

    def copy_start(self, other: PooledRow, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row, which has them."""
        self.reserve(tokens)
        places = np.arange(tokens)
        self._pool.move(np.zeros_like(places), other.columns(places), self.columns(places))
        self.length = tokens

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens."""
        self.length = min(self.length, tokens)

    def adopt(self, text: Row) -> None:
        """Begin with all that a row with a cache of its own has."""
        self.reserve(text.length)
        columns = upload(self._pool.buffers[0].device, self.columns(np.arange(text.length)))[0]
        for layer, pooled in zip(text.cache.layers, self._pool.layers, strict=False):
            if layer.is_initialized:
                count = text.length - layer.dropped
                pooled.keys.index_copy_(2, columns[layer.dropped :], layer.keys.narrow(2, 0, count))
                pooled.values.index_copy_(2, columns[layer.dropped :], layer.values.narrow(2, 0, count))
        self.length = text.length


class PooledInputs:
    """The inputs of passes of one size: nodes of all texts one behind another, then nodes of none.

    These are token 0 at position 0, see themselves alone, and lie in page 0.

    Args:
        masks: Which kinds of layers the model has.
        nodes: Nodes of a pass.
        texts: Texts that share it, at most.
        width: Pages of a text, at most.
        block: Tokens of a page.
        device: Where the model is.

    Attributes:
        columns: Columns of the pool where the nodes go, `[nodes]` int32.
    """

    def __init__(
        self, masks: MaskBuilder, nodes: int, texts: int, width: int, block: int, device: torch.device
    ) -> None:
        mask = (nodes, packed_width(nodes))
        shapes = [(1, nodes), (1, nodes), (nodes,), (texts + 2,), (texts + 1, width), *[mask] * len(masks.kinds)]
        self._staged = Staged(device, shapes)
        self._masks, self.nodes, self._block = masks, nodes, block
        self.columns = self._staged.there[2]
        slots = np.arange(nodes)
        self._alone = np.zeros(mask, dtype=np.int32)  # what nodes of no text see
        self._alone[slots, BITS + slots // WORD] = (1 << slots % WORD).astype(np.uint32).view(np.int32)

    def arguments(self, model: PreTrainedModel, cache: StaticTreeCache) -> dict[str, Any]:
        """What the model takes, beside its cache."""
        tokens, positions, _, starts, table, *packed = self._staged.there
        masks = {kind: mask[None, None] for kind, mask in zip(self._masks.kinds, packed, strict=True)}
        step = PackedStep([], masks, self._masks.layers, cache, Pages(table, starts, self._block))
        return {"input_ids": tokens.long(), "position_ids": positions.long(), "packed_rows": step}

    def stage(self, rows: Sequence[PooledRow], step: Step) -> None:
        """Bring one step of some rows to the device."""
        tokens, positions, columns, starts, table, *packed = self._staged.here
        counts, used = step.counts, sum(step.counts)
        firsts = np.cumsum([0, *counts])
        starts[: len(rows)], starts[len(rows) : -1], starts[-1] = firsts[:-1], used, self.nodes
        tokens[0, used:], positions[0, used:] = 0, 0
        columns[used:] = np.arange(used, self.nodes) % self._block
        if rows:
            tokens[0, :used], positions[0, :used], _ = in_a_row(step)
        for place, (row, first, count) in enumerate(zip(rows, firsts, counts, strict=False)):
            table[place, : len(row.pages)] = row.pages
            columns[first : first + count] = row.columns(row.length + np.arange(count))
        for buffer in packed:
            buffer[:used, BITS:] = 0
            buffer[used:] = self._alone[: self.nodes - used]
        # Small trees are packed together, and parts of prompts, whose masks are large, each alone.
        small = [place for place, count in enumerate(counts) if count <= LARGE]
        for places in [small, *([place] for place, count in enumerate(counts) if count > LARGE)]:
            if places:
                self._pack(step, places, firsts, packed)
        self._staged.send()

    def _pack(self, step: Step, places: Sequence[int], firsts: Integers, packed: Sequence[NDArray[np.int32]]) -> None:
        """Write the masks of some rows, each of which has columns of its own."""
        lengths = [step.lengths[place] for place in places]
        part = Step([step.layouts[place] for place in places], lengths, [step.starts[place] for place in places])
        counts, size = part.counts, max(part.counts)
        seen, positions = ancestors(part, len(places), size), padded(part, len(places), size)[1]
        for buffer, of_kind in zip(packed, self._masks.sights(seen, lengths, positions).values(), strict=True):
            mask = of_kind.packed()
            mask[..., SCRATCH] = np.array(lengths)[:, None, None]
            for place, count, of_row in zip(places, counts, mask[:, 0], strict=True):
                buffer[firsts[place] : firsts[place] + count, : mask.shape[3]] = of_row[:count]


class PooledRunner(ModelRunner):
    """Runs rows of a pool, those of a step in one pass: of a few sizes, by the nodes of all rows, each of which is
    recorded once; larger ones as they are. Rows that join or leave change nothing of what was recorded.

    Args:
        rows: Runs rows that have keys and values of their own, packed.
        shapes: What each layer keeps of a token.
        records: Whether passes are recorded; else they are run as they are.
        clock: The clock for steps; it stands still while passes are recorded.
    """

    def __init__(
        self, rows: ModelRunner, shapes: Sequence[LayerShape | None], records: bool, clock: PausingClock
    ) -> None:
        super().__init__(rows.model, positions_end=rows.positions_end)
        self._shapes, self._records, self._clock = tuple(shapes), records, clock
        self._keeps_logits = "logits_to_keep" in forward_arguments(rows.model)
        self.engine = "static" if records else "dynamic"
        self._texts = self._width = 0

    @torch.no_grad()
    def take_memory(self, tokens: int | None, block: int, rows: int, nodes: int) -> None:
        """See `Runner`. If any number of tokens may come, there is room for some of each row, and it grows; for more
        rows passes are recorded anew."""
        first = min(rows * FIRST_TOKENS, free_bytes(self._device) // 2 // self.token_bytes())
        self._pool = RowPool(self._shapes, first if tokens is None else tokens, block, self._device)
        self._passes = FixedPasses(self.model, self._pool, self._clock, LISTED)
        self.recorded = self._passes.recorded
        self.pass_sizes = pass_sizes(max(rows, min(rows * nodes, MOST_RECORDED))) if self._records else ()
        self._texts = rows
        self._make_room(0)
        for size in self.pass_sizes:
            self._passes.run(size, 0, self._new_inputs, (), Step((), (), ()))

    def new_row(self, block: int | None = None) -> PooledRow:
        """An empty row."""
        return PooledRow(self._pool)

    def token_bytes(self) -> int:
        """Bytes that keys and values of a token take."""
        shapes = [shape for shape in self._shapes if shape is not None]
        return sum(shape.heads * (shape.key_size + shape.value_size) * shape.dtype.itemsize for shape in shapes)

    def _pass(self, places: Sequence[int], trees: Sequence[TokenTree], top_k: int) -> Sequence[ForwardResult]:
        rows, step = cast(list[PooledRow], self.rows), self._step(places, trees)
        for row, count in zip(rows, step.counts, strict=True):
            row.reserve(row.length + count)
        self._make_room(max(len(row.pages) for row in rows))
        nodes, firsts = sum(step.counts), np.cumsum([0, *step.counts])
        reads = [first + layout.read_slots for first, layout in zip(firsts, step.layouts, strict=False)]
        size = next((size for size in self.pass_sizes if size >= nodes), None)
        if size is None:
            logits = self._run_once(nodes, np.concatenate(reads), step)
            return forward_results(step.counts, step.nodes_read, logits, top_k)
        logits, listed = self._passes.run(size, top_k, self._new_inputs, rows, step)
        return forward_results(step.counts, step.nodes_read, logits, top_k, reads, borrowed=True, listed=listed)

    def _make_room(self, pages: int) -> None:
        """See that inputs are large enough for the rows of the step; what was recorded of other ones is forgotten."""
        self._texts = max(self._texts, len(self.rows))
        if pages > self._width or not self._width:
            self._width = rounded(max(pages * self._pool.block, FIRST_TOKENS)) // self._pool.block
        self._passes.serve((self._texts, self._width, self._pool.capacity))

    def _new_inputs(self, nodes: int) -> PooledInputs:
        return PooledInputs(self._masks, nodes, self._texts, self._width, self._pool.block, self._device)

    def _run_once(self, nodes: int, keep: Integers, step: Step) -> torch.Tensor:
        """Logits of a pass with more nodes than those that are recorded, of the nodes `keep` alone, float32."""
        inputs = self._new_inputs(nodes)
        inputs.stage(cast(list[PooledRow], self.rows), step)
        (kept,) = upload(self._device, keep)
        arguments = {"logits_to_keep": kept} if self._keeps_logits else {}
        with self._pool.written_at(inputs.columns.long()):
            arguments |= inputs.arguments(self.model, self._pool)
            given = self.model(**arguments, **{self._cache_name: self._pool}, use_cache=True, return_dict=True)
        logits: torch.Tensor = given.logits[0] if "logits_to_keep" in arguments else given.logits[0, kept]
        return logits.float()

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """See `Runner`."""
        rows, moves = list(zip(cast(list[PooledRow], self.rows), self._slots_of(kept), strict=True)), []
        for row, slots in rows:
            if misplaced := [(slot, target) for target, slot in enumerate(slots) if slot != target]:
                moves.append(row.columns(row.length + np.array(misplaced)))
        if moves:
            sources, targets = np.concatenate(moves).T
            self._pool.move(np.zeros_like(sources), sources, targets)
        for row, slots in rows:
            row.length += len(slots)
