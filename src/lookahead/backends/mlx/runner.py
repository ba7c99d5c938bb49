"""Run models of mlx-lm on token trees, or on chains of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from lookahead.backends.base import Runner, TextRow, check_chain
from lookahead.backends.forward_result import PassResult, pass_result
from lookahead.backends.mlx.caches import (
    Caches,
    TreePass,
    are_plain,
    cached_tokens,
    first_tokens,
    keep_nodes,
    longest_chain,
    restorer,
)
from lookahead.core.forest import Forest, Layout
from lookahead.core.token_tree import TokenTree

PREFILL_TOKENS = 2048
"""Tokens of a prompt in a pass, mlx-lm's own default."""

Way = Literal["trees", "grouped trees", "chains"]
"""Kind of passes that a model runs exactly; see `TreePass.grouped`."""

MOST_PENDING = 16
"""Maximum number of pending tokens in a step that drafts on a chain; fewer tokens stay pending after a rejection."""


class MLXRow(TextRow):
    """Caches of one text.

    Args:
        caches: One for each layer, with the text's beginning if they are not empty.

    Attributes:
        caches: See above.
        before: Number of tokens that they held at the beginning.
        last_chain: Longest text that chains read as single tokens do; `None` without a limit.
    """

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.last_chain = longest_chain(caches)
        self.length = self.before = cached_tokens(caches)

    @property
    def state(self) -> list[Any]:
        """Arrays of the caches."""
        return [cache.state for cache in self.caches]

    def copy_start(self, other: MLXRow, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row."""
        self.caches = first_tokens(other.caches, tokens)
        self.length = tokens

    def crop(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens."""
        keep_nodes(self.caches, 0, range(tokens))
        self.length = tokens


class MLXRunner(Runner):
    """Run rows of text. Trees of several rows may share a pass; each prompt, and each row on chains, has its own.

    Args:
        module: Model of mlx-lm.
        caches: Caches of the rows of a call.
        model: The model with the interface of transformers.
        way: Kind of its passes. On chains, states that cannot be taken back are restored after a rejection.
        joins: Whether rows share passes; by default where that saves time.
    """

    shares_beginnings: bool

    def __init__(
        self, module: Any, caches: Sequence[Caches], model: Any = None, way: Way = "trees", joins: bool | None = None
    ) -> None:
        super().__init__()
        self._module = module
        self.model = model
        self._way = way
        self._joins = joins
        self.chains = way == "chains" or not all(map(are_plain, caches)) or not are_plain(make_prompt_cache(module))
        self.shares_beginnings = not self.chains
        self.rows = [MLXRow(caches_of_row) for caches_of_row in caches]
        if model is not None:
            self.vocabulary = model.vocabulary
        self._sent: list[Layout | None] = []
        self._restore: dict[int, Callable[[], None]] = {}
        self._lengths: list[int] = []  # before the last pass
        self._is_open = False  # whether the last pass waits for `commit`

    def new_row(self, block: int | None = None) -> MLXRow:
        """Return an empty row. `block` is ignored, as mlx-lm's caches grow by their own step."""
        return MLXRow(make_prompt_cache(self._module))

    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token."""
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> int:
        row = self.new_row()
        sizes = []
        for _ in range(2):  # running states do not grow
            self._read(row, [0])
            sizes.append(_bytes(row.state))
        return max(sizes[1] - sizes[0], 1)

    @cached_property
    def _weight_bytes(self) -> int:
        return _bytes(self._module.parameters())

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """Return the tree of pending tokens of `row`. Like mlx-lm, read the last token of a prompt alone."""
        state = self.rows[row]
        pending = len(text) + state.before - state.length
        begins = state.length == state.before
        room = PREFILL_TOKENS if state.last_chain is None else max(state.last_chain - state.length, 1)
        longest = PREFILL_TOKENS if begins else room  # mlx-lm reads any prompt in long passes
        if pending > min(MOST_PENDING if self.chains and not begins else 1, longest):
            tree = TokenTree(self._pending(state, text)[: min(pending - 1, longest, PREFILL_TOKENS)])
            tree.needs_logits[tree.root] = False
            return tree
        tree = super().begin_tree(row, text)
        tree.limit(max(room - pending, 0))
        return tree

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Read all tokens of each text but the last one, in parts."""
        passes = 0
        for row, text in zip(self.rows, texts, strict=True):
            pending = self._pending(row, text)
            while len(pending) > 1:
                part = pending[: min(chunk_size or PREFILL_TOKENS, len(pending) - 1)]
                self._read(row, part)
                pending = pending[len(part) :]
                passes += 1
        return passes

    def leave(self, text: Sequence[int]) -> None:
        """Leave the whole `text` in the caches of the only row.

        The last step may have accepted more tokens, or have been interrupted before its `commit`.
        """
        row = self.rows[0]
        if self._is_open and (layout := self._sent[0]) is not None:
            is_undone = 0 in self._restore or not self.chains
            self.commit([() if is_undone else range(len(layout.order))])
        if row.length > row.before + len(text):
            if not self.chains:
                row.crop(row.before + len(text))
            elif 0 in self._restore:
                self._restore[0]()
                row.length = self._lengths[0]
        if pending := self._pending(row, text):
            self._read(row, pending)

    def _read(self, row: MLXRow, tokens: Sequence[int]) -> None:
        """Read decided tokens without their predictions."""
        self._module(mx.array(list(tokens))[None], cache=row.caches)
        mx.eval(row.state)
        row.length += len(tokens)

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult:
        """Run the tree of each row. Keys and values of its nodes wait for `commit`."""
        forest = Forest.of(trees)
        self._sent = [None if tree is self._idle else forest.layout(row) for row, tree in enumerate(forest)]
        self._restore = {}
        self._is_open = True
        self._lengths = [row.length for row in self.rows]
        parts: dict[int, Any] = {}
        states = []
        for rows in self._passes():
            logits = self._run(rows, trees)
            begin = 0
            for row in rows:
                layout = forest.layout(row)
                end = begin + len(layout.order)
                if not len(layout.read_slots):
                    states.append(self.rows[row].state)
                elif len(layout.read_slots) == end - begin:
                    parts[row] = logits[begin:end]
                else:
                    parts[row] = logits[mx.array(begin + layout.read_slots)]
                begin = end
        read = [logits for _, logits in sorted(parts.items())]
        raw = None if not read else read[0] if len(read) == 1 else mx.concatenate(read)
        return _result(forest, raw, states, top_k)

    def _passes(self) -> list[list[int]]:
        """Return the rows of each pass. Prompts have their own passes."""
        sent = [(row, layout) for row, layout in enumerate(self._sent) if layout is not None]
        joint = [row for row, layout in sent if not self.chains and (len(layout.order) == 1 or not layout.is_chain)]
        joins = self._joins
        if joins is None:  # A joint pass copies the keys of each node, and reads the weights once.
            nodes = sum(len(layout.order) for row, layout in sent if row in joint)
            width = max((self.rows[row].length for row in joint), default=0)
            joins = 2 * nodes * width * self._token_bytes <= (len(joint) - 1) * self._weight_bytes
        if len(joint) < 2 or not joins:
            return [[row] for row, _ in sent]
        return [joint, *([row] for row, _ in sent if row not in joint)]

    def _run(self, rows: Sequence[int], trees: Sequence[TokenTree]) -> Any:
        """Return the logits after the nodes of a pass, `[nodes, vocabulary]`, to be evaluated."""
        layouts = [layout for row in rows if (layout := self._sent[row]) is not None]
        caches = [self.rows[row].caches for row in rows]
        if len(rows) == 1 and (self.chains or layouts[0].is_chain):
            if not layouts[0].is_chain:
                check_chain(trees[rows[0]])
                self._restore[rows[0]] = restorer(caches[0])
            return self._module(mx.array(layouts[0].tokens.astype(np.int32))[None], cache=caches[0])[0]
        nodes = TreePass(caches, layouts, self._way == "grouped trees")
        return self._module(nodes.tokens, cache=nodes.caches)[:, 0]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of the last trees. A state that has read others is restored."""
        self._is_open = False
        for number, (row, layout, path) in enumerate(zip(self.rows, self._sent, paths, strict=True)):
            if layout is None:
                continue
            if number in self._restore and len(path) < len(layout.order):
                self._restore[number]()
                continue
            if not self.chains:
                keep_nodes(row.caches, row.length, layout.slots[list(path)].tolist())
            row.length += len(path)


def _bytes(arrays: Any) -> int:
    """Return the bytes of all arrays in lists and dictionaries."""
    return sum(int(leaf.nbytes) for _, leaf in tree_flatten(arrays) if isinstance(leaf, mx.array))


def _result(forest: Forest, raw: Any, states: Sequence[Any], top_k: int) -> PassResult:
    """Evaluate and return the result of a pass. Predictions are the likeliest of mlx-lm's log-probabilities.

    Args:
        forest: The trees.
        raw: Logits after nodes that were read, in the model's number type, `[rows, vocabulary]`; `None` without rows.
        states: Further arrays to evaluate: the caches of prompts.
        top_k: Number of likeliest tokens to list after each node.

    Returns:
        The result, with logits and log-probabilities as `native`.
    """
    if raw is None:
        mx.eval(states)
        return pass_result(forest, torch.empty((0, 1)), top_k)
    logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
    likeliest, logits = mx.argmax(logprobs, axis=-1), raw.astype(mx.float32)
    mx.eval(likeliest, logits, states)
    predictions = np.array(likeliest).astype(np.int64)
    result = pass_result(forest, torch.from_numpy(np.array(logits, copy=False)), top_k, predictions=predictions)
    result.native = raw, logprobs
    return result
