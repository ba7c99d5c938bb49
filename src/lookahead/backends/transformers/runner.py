"""Runners of a transformers model for the trees of some texts: layout, inputs, pass, results; then commit.

`ModelRunner` is for models that support trees, for the rows of a call or of an engine. `ChainRunner` is for models with
running states, which cannot take back a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from lookahead.backends.base import Runner, TextRow, check_chain, vocabulary_size
from lookahead.backends.forward_result import Listed, PassResult, TreeResult, pass_result
from lookahead.backends.machine import upload
from lookahead.backends.transformers.attention import INVARIANT_ROWS, PACKED_ROWS
from lookahead.backends.transformers.cache_names import cache_name
from lookahead.backends.transformers.chain_cache import (
    ChainRow,
    is_encoder_decoder,
    is_forgetful,
    reads_whole,
    row_of_batch,
)
from lookahead.backends.transformers.layouts import Inputs, Packed, Padded, PassPlan
from lookahead.backends.transformers.limits import limits_of, shortest
from lookahead.backends.transformers.masks import PACKED_MASKS, MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.backends.transformers.rows import PackedCache, PaddedCache
from lookahead.backends.transformers.tree_cache import Row, TreeCache, adopt_cache
from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.forest import Forest
from lookahead.core.results import CommittedNodes, JoinedOutputs
from lookahead.core.roots import Roots
from lookahead.core.token_tree import TokenTree

LONGEST_DRAFTED_PREFILL = 1024
"""Largest number of pending tokens in a step with a draft. Longer prompts need no dense mask without one."""

LARGE = 64
"""Nodes of the largest tree that shares a padded pass with others."""

SHORT = 64
"""Tokens of the longest chain that counts as a draft, and not as a prompt."""

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels for dense masks, without cuDNN's, which plans for each new shape."""

_LENGTH = attrgetter("cache.length")
_NO_TREES = Forest(())
_FIRST = np.zeros(1, dtype=np.int64)
_UNREAD = Listed(np.full((1, 0), -1), np.zeros((1, 0), dtype=np.float32), np.array([-1]))
"""Result of an idle tree."""


class TransformersRunner(Runner):
    """Runner of a transformers model.

    Args:
        model: Module that runs the trees.
        positions_end: See `Limits`.
        device: Device of the inputs if the model is on `meta`, because its weights are loaded on demand.

    Attributes:
        model: The argument `model`.
        positions_end: The argument `positions_end`.
        rows: See `Runner`.
    """

    _chunk: int | None = LONGEST_DRAFTED_PREFILL
    _takes_positions = True
    _caches_know_lengths = True
    _tokens_name = "input_ids"

    def __init__(self, model: PreTrainedModel, positions_end: bool = True, device: torch.device | None = None) -> None:
        super().__init__()
        self.model = model
        self.positions_end = positions_end
        self.vocabulary = vocabulary_size(model)
        self._cache_name = cache_name(model)
        self._device = model.device
        if self._device.type == "meta":
            self._device = device or torch.device("cpu")
        self.is_asynchronous = self._device.type == "cuda"
        self._limits = limits = limits_of(model, positions_end)
        self.context = limits.context
        self.last_length = limits.last_length
        self.broken_after = limits.broken_after
        grows_after = None if self._caches_know_lengths else limits.grows_after
        self.changes_after = shortest(limits.changes_after, limits.picks_after, limits.columns_after, grows_after)
        self._forest = _NO_TREES

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult | JoinedOutputs:
        """See `Runner`."""
        self._forest = forest = Forest.of(trees)
        groups = self._groups(forest)
        if len(groups) == 1:
            return self._pass(self.rows, forest, top_k)
        results: dict[int, TreeResult] = {}
        for places in groups:
            rows = [self.rows[place] for place in places]
            results.update(zip(places, self._pass(rows, forest.take(places), top_k), strict=True))
        return JoinedOutputs([results[place] for place in range(forest.rows)])

    def _pass(self, rows: Sequence[Any], forest: Forest, top_k: int) -> PassResult:
        """Run one pass over the trees of some rows."""
        logits, inputs = self._run(rows, self._plan(rows, forest))
        if "logits_to_keep" not in inputs.arguments:
            logits = logits[:, upload(logits.device, inputs.keep.copy())[0]]
        # transformers selects tokens from float32 logits for any type of the model
        return pass_result(forest, logits.flatten(0, 1).float(), top_k, inputs.rows)

    def _call(self, model: PreTrainedModel, inputs: Inputs, cache: dict[str, Any]) -> Any:
        """Call the model."""
        positions = {"position_ids": inputs.positions} if self._takes_positions else {}
        tokens = {self._tokens_name: inputs.tokens}
        is_dense = "attention_mask" in inputs.arguments and model.config._attn_implementation == "sdpa"
        with sdpa_kernel(WITHOUT_PLANS) if is_dense and self._device.type == "cuda" else nullcontext():
            return model(**tokens, **positions, **cache, **inputs.arguments, use_cache=True, return_dict=True)

    def _groups(self, forest: Forest) -> list[list[int]]:
        """Return the rows of each pass, ascending."""
        return [list(range(forest.rows))]

    def _plan(self, rows: Sequence[Any], forest: Forest) -> PassPlan:
        """Plan a pass over the trees of some rows; an idle row has position 0."""
        starts = lengths = np.array(self.lengths_of(rows), dtype=np.int64)
        shifts = [row.shift for row in rows]
        if self._idle in forest.objects:
            idle = [tree is self._idle for tree in forest]
            starts = np.where(idle, 0, lengths)
            shifts = [0 if rests else shift for rests, shift in zip(idle, shifts, strict=True)]
        return PassPlan(forest, lengths, starts, np.array(shifts, dtype=np.int64) if any(shifts) else None)

    def _run(self, rows: Sequence[Any], plan: PassPlan) -> tuple[torch.Tensor, Inputs]:
        """Return the logits of a pass, `[rows, nodes, vocabulary]`, or of only the nodes to read, and its inputs."""
        raise NotImplementedError

    def _deepest(self, position: int, shift: int) -> int | None:
        return self._limits.deepest(position, shift)

    def take_prompt(self, cache: Any, mask: torch.Tensor, shifts: Sequence[int]) -> None:
        """Continue from the model's own prefill.

        Args:
            cache: The model's cache.
            mask: Mask of its columns, `[rows, columns]` bool.
            shifts: Position id minus index in the text, for each row.
        """
        raise NotImplementedError

    def try_step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run a pass over one token of each row, drop the tokens, and return the logits `[rows, vocabulary]`."""
        results = self.forward([TokenTree([token]) for token in tokens])
        self.commit([[] for _ in tokens])
        return torch.cat([result.logits_after(0) for result in results])

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """See `Runner`."""
        size = chunk_size or self._prefill_size(len(texts))
        return 0 if size is None else self._advance(texts, size, size)

    def _prefill_size(self, texts: int) -> int | None:
        """Return the largest number of pending tokens without chunks; unlimited if `None`."""
        return None

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """See `Runner`."""
        self._advance([text[:-1] for text in texts], self._chunk)

    def _advance(self, texts: Sequence[Sequence[int]], size: int | None, remainder: int = 0) -> int:
        """Run pending tokens in chunks of `size` until no text has more than `remainder`; return the passes."""
        passes = 0
        while True:
            pending = [self._pending(row, text) for row, text in zip(self.rows, texts, strict=True)]
            sends = [len(tokens) > remainder for tokens in pending]
            if not any(sends):
                return passes
            rows = zip(pending, sends, strict=True)
            self._send([TokenTree(tokens[:size]) if sent else self.idle_tree() for tokens, sent in rows], sends)
            passes += 1

    def _send(self, trees: Sequence[TokenTree], keep: Sequence[bool]) -> None:
        """Run chains of tokens, and keep them for the rows in `keep`."""
        self.forward(trees)
        self.commit([range(len(tree) if stays else 0) for tree, stays in zip(trees, keep, strict=True)])


class ModelRunner(TransformersRunner):
    """Runner of a model that supports trees.

    Each row has its own memory. With packed attention several rows share a pass without copies; otherwise they are
    padded, with copies of all keys and values for each pass.

    Args:
        model: Transformers causal language model that passes `check_model`.
        batch_size: Number of rows that the runner has; 0 if rows are arguments of `serving`.
        device: See `TransformersRunner`.
        most_nodes: Largest number of nodes of a tree with a draft, root included.
        positions_end: See `Limits`.
        together: Whether rows of different lengths may share a padded pass in an engine.

    Attributes:
        packed: Whether rows of a pass are packed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int = 0,
        device: torch.device | None = None,
        most_nodes: int = MOST_CHOSEN_NODES,
        positions_end: bool = True,
        together: bool = True,
    ) -> None:
        super().__init__(model, positions_end, device)
        attention = model.config._attn_implementation
        self._masks = MaskBuilder(model.config)
        self._drafted = most_nodes
        self._together = together
        self.packed = attention in (PACKED_ROWS, INVARIANT_ROWS)
        self._layout = (Packed if self.packed else Padded)(model, self._masks, self._device)
        self.is_invariant = self._layout.is_invariant
        # Packed masks and padded passes need all columns.
        self._forgets = batch_size == 1 and attention not in PACKED_MASKS
        self._forgets &= any(self._masks.windows)
        windows = self._masks.windows if self._forgets else ()
        shift = self._limits.first_position
        self.rows: list[Any] = [Row(TreeCache(windows), shift=shift) for _ in range(batch_size)]

    def new_row(self, block: int | None = None) -> TextRow:
        """See `Runner`."""
        return Row(block=block, shift=self._limits.first_position)

    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token, from a pass over one."""
        return self.run_token().cache.token_bytes

    def run_token(self) -> Row:
        """A new row after a pass over one token."""
        row = Row()
        with self.serving([row]):
            self.forward([TokenTree([0])])
        return row

    @property
    def texts(self) -> list[Row]:
        """The rows of a call, in memory that no later call uses."""
        return self.rows

    def take_prompt(self, cache: Any, mask: torch.Tensor, shifts: Sequence[int]) -> None:
        """See `TransformersRunner`."""
        self.begin(adopt_cache(cache, mask))
        for row, shift in zip(self.rows, shifts, strict=True):
            row.shift = shift

    def begin(self, texts: Sequence[Row]) -> None:
        """Go on from what these rows hold, which are used no more."""
        for row, text in zip(self.rows, texts, strict=True):
            if self._forgets:
                row.cache = text.cache
            else:
                row.adopt(text)

    def lengths_of(self, rows: Sequence[Any]) -> list[int]:
        """See `Runner`."""
        return list(map(_LENGTH, rows))

    def counts_hidden_after(self, between: bool) -> int | None:
        """Return the longest text, hidden tokens included, before the model counts hidden ones; `None` if unlimited.

        Args:
            between: Whether tokens are hidden after the first visible one.
        """
        reach = self._masks.shortest_reach if between else None
        return shortest(self._limits.columns_after, self._limits.picks_after, reach)

    def begin_step(self, texts: Sequence[Sequence[int] | None]) -> Roots:
        """Begin a step; see `Backend`. Rows with one pending token need no separate tree if drafts are allowed."""
        lengths = self.lengths_of(self.rows)
        drafts = self.packed or self._limits.allows(max(lengths), self._drafted)
        if not drafts or self._limits.recompute_at is not None or None in texts:
            return super().begin_step(texts)
        trees = list[TokenTree | None]()
        last = list[int]()
        positions = list[int]()
        shifts = list[int]()
        for number, (row, text, length) in enumerate(zip(self.rows, texts, lengths, strict=True)):
            assert text is not None
            size = row.before + len(text)
            trees.append(None if size == length + 1 else self.begin_tree(number, text))
            last.append(text[-1])
            positions.append(size - 1 + row.shift)
            shifts.append(row.shift)
        return Roots(trees, last, partial(self._limits.rooms, positions, shifts), self.vocabulary)

    def _pending(self, row: Any, text: Sequence[int]) -> Sequence[int]:
        recompute_at = self._limits.recompute_at
        if recompute_at is not None and not row.before and row.length < recompute_at - row.padding <= len(text):
            row.crop(0)
        return text[row.length - row.before :]

    def wants_draft(self, tree: TokenTree) -> bool:
        """Return whether to draft onto `tree`.

        A chunk of a text gets no draft. Neither does a padded row with a long prompt, which would need a large mask, or
        a model with an effect of the draft's columns in the cache.
        """
        if self.packed or not tree.reads_root:
            return tree.reads_root
        start = max([row.length for row in self.rows])
        return tree.root < LONGEST_DRAFTED_PREFILL and self._limits.allows(start, tree.root + self._drafted)

    def _groups(self, forest: Forest) -> list[list[int]]:
        if self.packed or forest.rows == 1:
            return [list(range(forest.rows))]
        counts = forest.counts.tolist()
        together = [place for place, count in enumerate(counts) if self._together and count <= LARGE]
        alone = [[place] for place in range(len(counts)) if place not in together]
        return [together, *alone] if together else alone

    def _plan(self, rows: Sequence[Any], forest: Forest) -> PassPlan:
        plan = super()._plan(rows, forest)
        if self._forgets:
            self.rows[0].cache.drop()  # before the masks are made
            plan.dropped = self.rows[0].cache.dropped
        return plan

    def _run(self, rows: Sequence[Any], plan: PassPlan) -> tuple[torch.Tensor, Inputs]:
        cache = self._cache(rows, plan)
        inputs = self._layout.inputs(plan, cache)
        return self._call(self.model, inputs, {self._cache_name: cache}).logits, inputs

    def _cache(self, rows: Sequence[Any], plan: PassPlan) -> Any:
        """Return the cache argument of the model for some rows."""
        if self.packed:
            return PackedCache(rows, plan.forest.counts.tolist())
        return rows[0].cache if len(rows) == 1 else PaddedCache(rows, plan.forest.counts.tolist())

    def next_logits(self, text: Sequence[int]) -> torch.Tensor | None:
        """Run a pass over the pending tokens of the only text, without a tree or a mask; `keep_text` keeps the states.

        Returns:
            Logits after the text, `[1, vocabulary]` float32; `None` if this needs a tree or a mask.
        """
        arguments = self._layout.plain_arguments
        if arguments is None or self._limits.recompute_at is not None:
            return None
        row = self.rows[0]
        cache = row.cache
        if self._forgets:
            cache.drop()
        pending = np.array([text[cache.length - row.before :]])
        first = cache.length + row.shift
        tokens, positions = upload(self._device, pending, np.arange(first, first + pending.shape[1])[None])
        inputs = Inputs(tokens, positions, _FIRST, arguments=arguments)
        logits: torch.Tensor = self._call(self.model, inputs, {self._cache_name: cache}).logits
        return logits[:, -1].float()

    def keep_text(self, tokens: int) -> None:
        """Keep the states of the first tokens of the only text."""
        row = self.rows[0]
        row.cache.set_length(row.before + tokens)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """See `Runner`."""
        paths = CommittedNodes.of(self._forest, paths)
        rows, slots, targets = paths.misplaced()
        for row in set(rows.tolist()):
            self.rows[row].cache.move(slots[rows == row], targets[rows == row])
        # Last, so that an interruption leaves a shorter text, and never one with wrong states.
        for row, count in zip(self.rows, paths.counts.tolist(), strict=True):
            if count:
                row.cache.set_length(row.cache.length + count)

    def _prefill_size(self, texts: int) -> int | None:
        # A single text needs no dense mask; a batch does, which grows with the chunk.
        return None if texts == 1 and not self.is_invariant else self._chunk


class ChainRunner(TransformersRunner):
    """Runner of a model with running states, which cannot take back a token. Each row has its own pass.

    If all of a draft is accepted, the states after its pass stay. Otherwise the earlier states are restored, and the
    accepted tokens are sent again before the next draft, as pending tokens.

    Args:
        model: Causal language model of transformers that `runs_on_chains`.
        rows: Initial state of each text; one empty text if not given.
        device: See `Runner`.
        positions_end: See `Limits`.
        engine: Module for chains of at most `SHORT` tokens; the model if not given.
        drafts: Whether drafts are exact. Otherwise a text advances by single tokens after a prompt in one pass.
    """

    chains = True
    shares_beginnings = False
    _chunk = None

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[ChainRow] | None = None,
        device: torch.device | None = None,
        positions_end: bool = True,
        engine: PreTrainedModel | None = None,
        drafts: bool = True,
    ) -> None:
        super().__init__(model, positions_end, device)
        self._drafts = drafts
        self._uncounted: int | None = None
        # Columns of the cache have no effect on chains.
        self.changes_after = shortest(self._limits.changes_after, self._limits.picks_after)
        self._takes_positions = "position_ids" in forward_arguments(model)
        if is_encoder_decoder(model):
            self._takes_positions = False
            self._tokens_name = "decoder_input_ids"
            self._uncounted = model.config.get_text_config(decoder=True).pad_token_id
        elif reads_whole(model):
            self._takes_positions = False
        self._engine = model if engine is None else engine
        self.rows = [ChainRow(model)] if rows is None else list(rows)
        self._layout = Padded(model, None, self._device)

    def new_row(self, block: int | None = None) -> ChainRow:
        """See `Runner`."""
        return ChainRow(self.model)

    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token, from passes over two lengths."""
        row = self.new_row()
        sizes = []
        with self.serving([row]):
            for count in (2, 1):
                self._send([TokenTree([0] * count)], [True])
                sizes.append(row.bytes)
        return max(sizes[1] - sizes[0], 1)

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """See `Runner`."""
        if self._drafts:
            return super().begin_tree(row, text)
        pending = self._pending(self.rows[row], text)
        return TokenTree(pending, len(pending) - 1)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Return whether to draft onto `tree`: not onto a chunk of a text."""
        return self._drafts and tree.reads_root

    @torch.no_grad()
    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult | JoinedOutputs:
        """See `Runner`.

        Raises:
            InvalidArgumentError: A tree has branches.
        """
        for row, tree in zip(self.rows, trees, strict=True):
            check_chain(tree)
            if not tree.is_chain:
                row.save()
        return super().forward(trees, top_k)

    def _groups(self, forest: Forest) -> list[list[int]]:
        return [[place] for place in range(forest.rows)]

    def _pass(self, rows: Sequence[Any], forest: Forest, top_k: int) -> PassResult:
        if forest[0] is self._idle:
            return PassResult(forest, torch.empty(0), np.array([-1]), lambda: _UNREAD)
        return super()._pass(rows, forest, top_k)

    def _run(self, rows: Sequence[Any], plan: PassPlan) -> tuple[torch.Tensor, Inputs]:
        inputs = self._layout.inputs(plan)
        row = rows[0]
        count = inputs.tokens.shape[1]
        module = self._engine if count <= SHORT or (row.length and is_forgetful(self.model)) else self.model
        inputs.tokens = row.input(inputs.tokens)
        parts = self._parts(inputs) if row.length else [inputs]
        logits = []
        for part in parts:
            outputs = self._call(module, part, row.arguments())
            row.keep(outputs)
            logits.append(outputs.logits[:, -count:])
        return (logits[0], inputs) if len(parts) == 1 else (torch.cat(logits, dim=1), parts[0])

    def _parts(self, inputs: Inputs) -> list[Inputs]:
        """Split a pass after each padding token.

        Some decoders (M2M-100) skip padding tokens in the positions of a pass, but count them in plain decoding.
        """
        if self._uncounted is None or not bool((inputs.tokens[0, :-1] == self._uncounted).any()):
            return [inputs]
        ends = ((inputs.tokens[0, :-1] == self._uncounted).nonzero()[:, 0] + 1).tolist()
        bounds = zip([0, *ends], [*ends, inputs.tokens.shape[1]], strict=True)
        return [
            Inputs(inputs.tokens[:, start:end], inputs.positions[:, start:end], inputs.keep) for start, end in bounds
        ]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the states of rows whose nodes are all in `paths`, and restore the others."""
        for row, count, nodes in zip(self.rows, self._forest.counts.tolist(), paths, strict=True):
            row.settle(count, len(nodes))

    def try_step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `TransformersRunner`."""
        for row in self.rows:
            row.save()
        return super().try_step(tokens)

    def take_prompt(self, cache: Any, mask: torch.Tensor, shifts: Sequence[int]) -> None:
        """See `TransformersRunner`."""
        alone = len(self.rows) == 1 and bool(mask.all())
        for place, (row, counted, shift) in enumerate(zip(self.rows, mask, shifts, strict=True)):
            row.content = cache if alone else row_of_batch(cache, place, counted)
            row.length = int(counted.sum())
            row.shift = shift
