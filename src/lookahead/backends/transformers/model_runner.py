"""Runs an unmodified transformers model on token trees."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.forward_result import ForwardResult, OneNodeResult, forward_result
from lookahead.backends.transformers.cache_exchange import leave_out_hidden
from lookahead.backends.transformers.forward_arguments import forward_arguments
from lookahead.backends.transformers.invariant.attention import LEAST_NODES
from lookahead.backends.transformers.invariant.attention import NAME as INVARIANT
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import same_values, state_of
from lookahead.backends.transformers.position_limit import PositionLimit
from lookahead.backends.transformers.slot_limit import SlotLimit
from lookahead.backends.transformers.static_steps import StaticSteps
from lookahead.backends.transformers.tree_attention.interface import BY_POSITION
from lookahead.backends.transformers.tree_attention.interface import NAME as TREE_ATTENTION
from lookahead.backends.transformers.tree_cache import TreeCache
from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.token_tree import ONE_NODE, Layout, TokenTree, lay_out

LONGEST_DRAFTED_PREFILL = 1024
"""Pending tokens up to which a step may also draft. A longer prompt is sent alone, with no mask of ours, as
transformers sends it: a dense mask grows with the square of its length."""


_PACKED = (TREE_ATTENTION, INVARIANT, BY_POSITION)
"""Attention that reads packed masks, or what is made of them."""


def _limits(model: PreTrainedModel, positions_end: bool) -> tuple[MaskBuilder, PositionLimit, SlotLimit]:
    """What the configuration says of masks, positions and places; kept for the next call."""
    values, state = vars(model.config), state_of(model)
    kept = state.limits.get(positions_end)
    if kept is None or not same_values(kept[0], values):
        config = model.config
        limits = MaskBuilder(config), PositionLimit(config, positions_end), SlotLimit(config)
        kept = state.limits[positions_end] = (copy.deepcopy(values), limits)
    return kept[1]


class ModelRunner:
    """One batch of sequences on one model: its cache, and the way in and out of it.

    Args:
        model: Any transformers causal language model that `check_model` accepts.
        batch_size: Sequences that run together.
        cache: Keys and values of the beginning of each text; an empty cache if not given, whose sliding layers forget
            what no later token sees.
        before: Per sequence, how many tokens of the cache come before the text that `begin_tree` will be given.
        padding: Per sequence, how many padding tokens its prompt had; they count where transformers counts them.
        device: Where inputs go if the model cannot say, because its weights are loaded when they are needed.
        steps: Runs trees of up to a certain size over fixed buffers; `cache` is copied into its own. Larger trees,
            such as a prompt, are run as they are without it, unless its passes are of one size only.
        most_nodes: Nodes, the root included, that a draft makes of a tree at most.
        positions_end: See `PositionLimit`.

    Attributes:
        context, last_length, broken_after: See `PositionLimit`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int,
        cache: TreeCache | None = None,
        before: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        device: torch.device | None = None,
        steps: StaticSteps | None = None,
        most_nodes: int = MOST_CHOSEN_NODES,
        positions_end: bool = True,
    ) -> None:
        self.model = model
        self._masks, self._limit, self._slots = _limits(model, positions_end)
        if cache is None:
            cache = TreeCache(self._masks.windows)
        if steps is not None or model.config._attn_implementation in _PACKED:
            cache.keep_all()  # packed masks and static buffers are of all columns
        self.cache = cache
        self._own_cache = self.cache
        self._steps = steps
        if steps is not None:
            steps.begin(self.cache)
            self.cache = steps.cache
        self._chunk = (steps.chunk if steps is not None else None) or LONGEST_DRAFTED_PREFILL
        self._shifts = [0] * batch_size
        self._batch_size = batch_size
        self.before = list(before) if before is not None else [0] * batch_size
        self._padding = list(padding) if padding is not None else [0] * batch_size
        on_meta = model.device.type == "meta"
        self._device = (device or torch.device("cpu")) if on_meta else model.device
        self._on_cpu = self._device.type == "cpu"
        self.context, self.last_length = self._limit.context, self._limit.last_length
        self.broken_after = self._limit.broken_after
        self._most_nodes = most_nodes
        self._least_nodes: int = getattr(model, LEAST_NODES, 1)
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        # Places would have to be on the device of the last layer, where hooks do not bring them.
        self._is_spread = hasattr(model, "hf_device_map")
        self._is_plain = steps is None and self._keeps_logits and self._least_nodes == 1 and not self.is_invariant
        self._layouts: list[Layout] = []

    @property
    def is_invariant(self) -> bool:
        """Whether the bits of a node depend on its own text alone; see `LookaheadConfig.invariant`."""
        return self.model.config._attn_implementation in (INVARIANT, BY_POSITION)

    @property
    def _nodes(self) -> int:
        """Nodes of each row of the pass, padding included."""
        largest = max(len(layout.order) for layout in self._layouts)
        return max(largest, -(-self._least_nodes // self._batch_size))

    @property
    def changes_after(self) -> int | None:
        """Longest text of which rows of a batch may be at different places, if longer ones are read otherwise."""
        return min((text for text in (self._limit.changes_after, self._slots.first) if text is not None), default=None)

    def counts_hidden_after(self, between: bool) -> int | None:
        """Longest text, hidden tokens included, in which the model counts no hidden token; `None` for any.

        Args:
            between: Whether some are hidden between others, and not only before the first that counts.
        """
        reach = self._masks.shortest_reach if between else None
        return min((length for length in (self._slots.first, reach) if length is not None), default=None)

    def idle_tree(self) -> TokenTree:
        """What a row that is finished sends while others go on: a token that nobody reads, at position 0.

        Behind its text it might stand where the model has no position, or has other ones.
        """
        tree = TokenTree([0])
        tree.needs_logits[tree.root] = False
        return tree

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step of sequence `row`, whose text so far is `text`: its pending tokens."""
        cached, before = self.cache.lengths(self._batch_size)[row], self.before[row]
        if self._limit.recompute_at is not None and not before:
            recompute_at = self._limit.recompute_at - self._padding[row]
            if cached < recompute_at <= len(text):
                self.cache.forget(row)
                cached = 0
        shift = self._shifts[row]
        deepest = self._limit.deepest(before + len(text) - 1 + shift)
        return TokenTree(text[cached - before :], None if deepest is None else deepest - shift - cached)

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Send long texts ahead in chunks, so that the first step has few pending tokens.

        Args:
            texts: The text of each sequence.
            chunk_size: Tokens of each text in one pass. `None` for what the engine finds right: a single text
                goes in one pass, which needs no mask of ours; a batch in chunks, as its mask grows with them.

        Returns:
            The number of forward passes it took.
        """
        size = chunk_size or (None if len(texts) == 1 and not self.is_invariant else self._chunk)
        passes = 0
        while size is not None:
            trees = [self.begin_tree(row, text) for row, text in enumerate(texts)]
            if max(len(tree) for tree in trees) <= size:
                break
            # A text that is through, but for its last token, sends that and keeps nothing of it.
            chunks = [TokenTree(tree.tokens[: min(size, max(len(tree) - 1, 1))]) for tree in trees]
            self._send(chunks, [len(tree) > 1 for tree in trees])
            passes += 1
        return passes

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """Send all of each text but its last token, so that the cache holds what plain decoding leaves there."""
        ends = [before + len(text) - 1 for before, text in zip(self.before, texts, strict=True)]
        while True:
            lengths = self.cache.lengths(self._batch_size)
            behind = [cached < end for cached, end in zip(lengths, ends, strict=True)]
            if not any(behind):
                return
            chunks = [
                TokenTree(self.begin_tree(row, text[:-1]).tokens[: self._chunk]) if behind[row] else self.idle_tree()
                for row, text in enumerate(texts)
            ]
            self._send(chunks, behind)

    def _send(self, trees: Sequence[TokenTree], keep: Sequence[bool]) -> None:
        """Run chains of tokens, and keep those of rows that say so."""
        self.forward(trees)
        self.commit([range(len(tree) if kept else 0) for tree, kept in zip(trees, keep, strict=True)])

    @property
    def prompt_cache(self) -> TreeCache:
        """See `PromptReader`."""
        return self._own_cache

    def plain_step(self, model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
        """See `PromptReader`."""
        logits: torch.Tensor = model(**inputs, return_dict=True).logits[:, -1].float()
        self._own_cache.crop(-1)
        return logits

    def try_step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `PromptReader`."""
        results = self.forward([TokenTree([token]) for token in tokens])
        return torch.cat([result.logits_after(0) for result in results])

    def take_prompt(self, outputs: object, mask: torch.Tensor, shifts: Sequence[int]) -> None:
        """See `PromptReader`."""
        leave_out_hidden(self._own_cache, mask)
        if self._steps is not None:
            self._steps.begin(self._own_cache)
        self._shifts = list(shifts)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Whether anything should be drafted onto `tree`.

        Not if it is a prompt too long to be sent with a mask, or the model would go by the draft's places in the cache.
        """
        start = max(self.cache.lengths(self._batch_size))
        return tree.root < LONGEST_DRAFTED_PREFILL and self._slots.allows(start, tree.root + self._most_nodes)

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[ForwardResult | OneNodeResult]:
        """Run the model on one tree for each sequence; their keys and values wait in the cache for `commit`.

        Args:
            trees: One for each sequence.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.
        """
        if self._runs_alone(trees):
            return [self._forward_one(trees[0].tokens[0], top_k)]
        self._layouts = [lay_out(tree) for tree in trees]
        if self._steps is not None:
            results = self._steps.forward(self.model, self._layouts, top_k, self._shifts)
            if results is not None:
                return results
        # Trees of a batch are padded to the largest; reads are the union over its rows.
        reads = [layout.read_slots for layout in self._layouts]
        keep = reads[0] if len(reads) == 1 else np.unique(np.concatenate(reads))
        self.cache.drop()  # before the masks are made
        inputs = self._inputs(trees)
        if self._keeps_logits:
            nodes = self._nodes
            # A number keeps the last ones, without the copy that picking them takes.
            tail = len(keep) > 0 and nodes - int(keep[0]) == len(keep)
            if tail:
                inputs["logits_to_keep"] = len(keep)
            elif not self._is_spread:
                inputs["logits_to_keep"] = torch.from_numpy(keep.copy()).to(self._device)
        with self.cache.scratch():
            logits = self.model(**inputs, use_cache=True, return_dict=True).logits  # [batch, keep or nodes, vocabulary]
        if "logits_to_keep" not in inputs:
            logits = logits[:, torch.from_numpy(keep.copy()).to(logits.device)]
        # transformers chooses tokens from float32 logits whatever the model's own type
        logits = logits.float()
        return [_result(layout, logits[row], keep, top_k) for row, layout in enumerate(self._layouts)]

    def _runs_alone(self, trees: Sequence[TokenTree]) -> bool:
        """Whether this is a step of plain decoding of one sequence."""
        if len(trees) != 1 or len(trees[0]) != 1 or not self._is_plain or self._shifts[0]:
            return False
        return trees[0].needs_logits[0]

    def _forward_one(self, token: int, top_k: int) -> OneNodeResult:
        """`forward` for a step of plain decoding, which has little time for anything beside the pass."""
        self._layouts = [ONE_NODE]
        self.cache.drop()
        place = self.cache.lengths(1)[0]
        both = torch.tensor([[[token]], [[place]]], device=self._device)
        positions = both[1]
        with self.cache.scratch(positions[0] if self._on_cpu else None):
            logits = self.model(
                input_ids=both[0],
                position_ids=positions,
                past_key_values=self.cache,
                logits_to_keep=1,
                use_cache=True,
                return_dict=True,
            ).logits  # [1, 1, vocabulary]
        return OneNodeResult(logits[0].float(), top_k)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of `kept`, for each sequence a path of nodes from its tree's first one
        downwards, and forget the other nodes."""
        if len(kept) == 1 and len(kept[0]) == 1 and self._layouts[0] is ONE_NODE:
            self.cache.commit_one()
            return
        slots = [
            (layout.slots[list(nodes)].tolist() if len(nodes) > 1 else [int(layout.slots[nodes[0]])]) if nodes else []
            for nodes, layout in zip(kept, self._layouts, strict=True)
        ]
        self.cache.commit(slots)

    def _inputs(self, trees: Sequence[TokenTree]) -> dict[str, object]:
        layouts, device = self._layouts, self._device
        nodes = self._nodes
        lengths = self.cache.lengths(self._batch_size)
        tokens = np.zeros((len(layouts), nodes), dtype=np.int64)
        positions = np.zeros_like(tokens)
        for row, layout in enumerate(layouts):
            tokens[row, : len(layout.order)] = layout.tokens
            start = lengths[row] if len(layout.read_slots) else 0  # an idle row has no position
            positions[row, : len(layout.order)] = start + layout.depths
        inputs: dict[str, object] = {
            "input_ids": torch.from_numpy(tokens).to(device),
            "position_ids": torch.from_numpy(positions).to(device),
            "past_key_values": self.cache,
        }
        # Plain decoding of one sequence needs no mask of ours: transformers' own fast path applies.
        if len(trees) > 1 or not trees[0].is_chain or self.is_invariant:
            inputs["attention_mask"] = self._mask(lengths, positions)
        if any(self._shifts):
            shifted = positions + np.array([self._shift(row) for row in range(len(layouts))])[:, None]
            inputs["position_ids"] = torch.from_numpy(shifted).to(device)
        return inputs

    def _shift(self, row: int) -> int:
        """What is added to places in the text to have positions; an idle row has none."""
        return self._shifts[row] if len(self._layouts[row].read_slots) else 0

    def _mask(self, lengths: list[int], positions: NDArray[np.int64]) -> object:
        batch, nodes = positions.shape
        attention = self.model.config._attn_implementation
        if attention in _PACKED:
            ancestors = np.zeros((batch, nodes, nodes), dtype=np.bool_)
            for row, layout in enumerate(self._layouts):
                ancestors[row, : len(layout.order), : len(layout.order)] = layout.ancestor_mask()
            return self._masks.pack(ancestors, lengths, positions, self._device, paths=attention == BY_POSITION)
        scratch = max(lengths)
        visible = np.zeros((batch, nodes, scratch + nodes), dtype=np.bool_)
        # A padding node sees itself alone, so that no row of the softmax is empty.
        visible[:, np.arange(nodes), scratch + np.arange(nodes)] = True
        for row, layout in enumerate(self._layouts):
            own = len(layout.order)
            visible[row, :own, : lengths[row]] = True  # all that is cached, and no scratch of longer rows
            visible[row, :own, scratch : scratch + own] = layout.ancestor_mask()
        cached = np.broadcast_to(np.arange(scratch), (batch, scratch))
        keys = np.concatenate([cached, positions], axis=1)
        return self._masks.build(visible, positions, keys, self.model.dtype, self._device, self.cache.dropped)


def _result(layout: Layout, logits: torch.Tensor, keep: NDArray[np.int64], top_k: int) -> ForwardResult:
    """What the logits `[keep, vocabulary]` of one row of the batch say about the nodes of its tree."""
    rows = None if keep is layout.read_slots else np.searchsorted(keep, layout.read_slots)
    return forward_result(len(layout.order), layout.order[layout.read_slots], logits, top_k, rows)
