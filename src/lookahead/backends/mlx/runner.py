"""Run models of mlx-lm on token trees, or on chains of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache

from lookahead.backends.base import Runner, TextRow, check_chain
from lookahead.backends.forward_result import Listed, PassResult, pass_result
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
from lookahead.core.sequence import common_start
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

    def copy_start(self, other: MLXRow, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row."""
        self.caches = first_tokens(other.caches, tokens)
        self.length = tokens

    def crop(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens."""
        keep_nodes(self.caches, 0, range(tokens))
        self.length = tokens


class MLXResult(PassResult):
    """Result of a pass, with MLX's own arrays. Predictions are the likeliest tokens of mlx-lm's log-probabilities.

    Args:
        forest: The trees.
        raw: Logits after nodes that were read, in the model's number type, `[rows, vocabulary]`; `None` without rows.
        top_k: Number of likeliest tokens to list after each node.

    Attributes:
        raw: See above.
        logprobs: Log-probabilities, as mlx-lm computes them, `[rows, vocabulary]`.
    """

    def __init__(self, forest: Forest, raw: Any, top_k: int) -> None:
        self.raw = self.logprobs = raw
        best = np.empty(0, dtype=np.int64)
        wide = np.empty((0, 1), dtype=np.float32)
        if raw is not None:
            self.logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
            likeliest, logits = mx.argmax(self.logprobs, axis=-1), raw.astype(mx.float32)
            mx.eval(likeliest, logits)
            best, wide = np.array(likeliest).astype(np.int64), np.array(logits, copy=False)
        result = pass_result(forest, torch.from_numpy(wide), top_k)
        rows = result.logit_rows
        predictions = np.where(rows < 0, -1, best[rows]) if len(best) else np.full(len(rows), -1)
        listed = Listed(result.top_ids, result.top_probabilities, predictions)
        super().__init__(forest, result.logits, rows, lambda: listed)


class MLXRunner(Runner):
    """Run rows of text, each in a pass of its own.

    Args:
        module: Model of mlx-lm.
        caches: Caches of the rows of a call.
        model: The model with the interface of transformers.
        way: Kind of its passes. On chains, states that cannot be taken back are restored after a rejection.
        vocabulary: Number of token ids.
    """

    shares_beginnings: bool

    def __init__(
        self,
        module: Any,
        caches: Sequence[Caches] = (),
        model: Any = None,
        way: Way = "trees",
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        self._module = module
        self.model = model
        self._way = way
        self.chains = way == "chains" or not all(map(are_plain, caches)) or not are_plain(make_prompt_cache(module))
        self.shares_beginnings = not self.chains
        self.rows = [MLXRow(caches_of_row) for caches_of_row in caches]
        if vocabulary is not None:
            self.vocabulary = vocabulary
        self._sent: list[Layout | None] = []
        self._restore: list[Callable[[], None] | None] = []
        self._lengths: list[int] = []  # before the last pass

    def new_row(self, block: int | None = None) -> MLXRow:
        """Return an empty row. `block` is ignored, as mlx-lm's caches grow by their own step."""
        return MLXRow(make_prompt_cache(self._module))

    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token, measured in a pass over one token."""
        caches = make_prompt_cache(self._module)
        self._module(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        return max(sum(_bytes_of_token(cache) for cache in caches), 1)

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """Return the tree of pending tokens of `row`. Like mlx-lm, read the last token of a prompt alone."""
        state = self.rows[row]
        pending = len(text) + state.before - state.length
        begins = state.length == state.before
        room = PREFILL_TOKENS
        if state.last_chain is not None and not begins:
            room = max(state.last_chain - state.length, 1)
        if pending > min(MOST_PENDING if self.chains and not begins else 1, room):
            tree = TokenTree(self._pending(state, text)[: min(pending - 1, room, PREFILL_TOKENS)])
            tree.needs_logits[tree.root] = False
            return tree
        tree = super().begin_tree(row, text)
        tree.limit(max(room - pending, 0))
        return tree

    def wants_draft(self, tree: TokenTree) -> bool:
        """Return whether a prediction follows the tree."""
        return tree.reads_root

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

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """Read all tokens of each text but the last one, as plain decoding does."""
        self.prefill(texts, None)

    def leave(self, text: Sequence[int]) -> None:
        """Leave the whole `text` in the caches of the only row, also if the last step accepted more tokens."""
        row = self.rows[0]
        if row.length > row.before + len(text):
            if not self.chains:
                row.crop(row.before + len(text))
            elif self._restore[0] is not None:
                self._restore[0]()
                row.length = self._lengths[0]
        if pending := self._pending(row, text):
            self._read(row, pending)

    def _read(self, row: MLXRow, tokens: Sequence[int]) -> None:
        """Read decided tokens without their predictions."""
        self._module(mx.array(list(tokens))[None], cache=row.caches)
        mx.eval([cache.state for cache in row.caches])
        row.length += len(tokens)

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> MLXResult:
        """Run the tree of each row. Keys and values of its nodes wait for `commit`."""
        forest = Forest.of(trees)
        self._sent = []
        self._restore = []
        self._lengths = [row.length for row in self.rows]
        read = []
        for number, (row, tree) in enumerate(zip(self.rows, forest, strict=True)):
            layout = None if tree is self._idle else forest.layout(number)
            self._sent.append(layout)
            self._restore.append(None)
            if layout is None:
                continue
            if self.chains and not layout.is_chain:
                check_chain(tree)
                self._restore[-1] = restorer(row.caches)
            logits = self._run(row, layout)
            if not len(layout.read_slots):
                mx.eval([cache.state for cache in row.caches])
            elif len(layout.read_slots) == len(logits):
                read.append(logits)
            else:
                read.append(logits[mx.array(layout.read_slots)])
        raw = None if not read else read[0] if len(read) == 1 else mx.concatenate(read)
        return MLXResult(forest, raw, top_k)

    def _run(self, row: MLXRow, layout: Layout) -> Any:
        """Return the logits after the nodes of one tree, `[nodes, vocabulary]`, to be evaluated."""
        if self.chains or layout.is_chain:
            return self._module(mx.array(layout.tokens.astype(np.int32))[None], cache=row.caches)[0]
        caches = TreePass(row.length, layout, self._way == "grouped trees").caches(row.caches)
        return self._module(mx.array(layout.tokens.astype(np.int32))[:, None], cache=caches)[:, 0]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of the last trees. A state that has read others is restored."""
        for row, layout, restore, path in zip(self.rows, self._sent, self._restore, paths, strict=True):
            if layout is None:
                continue
            if restore is not None and len(path) < len(layout.order):
                restore()
                continue
            if not self.chains:
                keep_nodes(row.caches, row.length, layout.slots[list(path)].tolist())
            row.length += len(path)


def _bytes_of_token(cache: Any) -> int:
    """Return the bytes of keys and values of one token in a cache that has read one token."""
    keys = getattr(cache, "keys", None)
    if keys is None:  # running states do not grow
        return 0
    return sum(part.shape[1] * part.shape[3] * part.dtype.size for part in (keys, cache.values))


class MLXPlainReader:
    """Read rows of text in plain decoding, and compute only new tokens.

    Args:
        module: Model of mlx-lm.
        rows: Number of texts.

    Attributes:
        texts: Token ids of the texts that were read last.
    """

    def __init__(self, module: Any, rows: int) -> None:
        self._runner = MLXRunner(module, [make_prompt_cache(module) for _ in range(rows)])
        self.texts: list[list[int]] = [[] for _ in range(rows)]

    def read(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits after the last token of each text, `[rows, vocabulary]` float32."""
        runner = self._runner
        for place, (row, text) in enumerate(zip(runner.rows, texts, strict=True)):
            common = common_start(self.texts[place], list(text[:-1]))
            if runner.chains and common < row.length:  # running states cannot drop a token
                runner.rows[place] = runner.new_row()
            elif row.length:
                row.crop(common)
            self.texts[place] = list(text)
        runner.prefill(texts, None)
        trees = [runner.begin_tree(row, text) for row, text in enumerate(texts)]
        results = runner.forward(trees)
        runner.commit([range(len(tree)) for tree in trees])
        return torch.cat([result.logits_after(tree.root) for result, tree in zip(results, trees, strict=True)])
