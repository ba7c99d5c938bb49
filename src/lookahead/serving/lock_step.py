"""Lock step: rows that advance together, token by token, for processors and criteria with rules across rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from lookahead.backends.transformers.sampler import TextSequence
from lookahead.core.forest import Forest
from lookahead.core.protocols import Backend
from lookahead.core.results import ForestOutputs, Walk, Walks
from lookahead.core.token_tree import TokenTree
from lookahead.serving.arguments import Arguments
from lookahead.serving.selecting import warn_of_last_position

_PADDING = 8
"""Largest number of padding tokens of an ended row in a step."""


class LockStep(Backend):
    """Backend that accepts the same number of tokens for each row of a step.

    Processors and criteria are called as in transformers: once for each token of the text, with all rows. They may
    therefore keep a state, compare rows, count calls, and draw random numbers. An ended row continues with padding,
    including its logits; only processors and criteria see it.

    Args:
        runner: Runner of all rows.
        arguments: Arguments of the call.
        sequences: The texts. This class decides when they end.
        pad_token: Padding of ended rows; `None` if all rows continue to the end.
    """

    def __init__(
        self, runner: Any, arguments: Arguments, sequences: Sequence[TextSequence], pad_token: int | None
    ) -> None:
        self._runner = runner
        self._arguments = arguments
        self._pad_token = pad_token
        config = arguments.config
        self._ids = arguments.prompts.input_ids.long()
        self._active = torch.ones(len(sequences), dtype=torch.bool, device=self._ids.device)
        self._scores: tuple[torch.Tensor, ...] | None = None
        if config.return_dict_in_generate and config.output_scores:
            self._scores = ()
        self._last_length = min(text.last_length or sys.maxsize for text in sequences)
        self._sequences = sequences
        self._texts: dict[int, list[int]] = {}  # ended rows, with their padding
        self._padded: dict[int, TokenTree] = {}  # trees of their padding in this step
        self._paths: dict[int, list[int]] = {}  # accepted nodes of these trees
        for sequence in sequences:
            sequence.stop = lambda text: False
        self.prefill, self.complete, self.serving = runner.prefill, runner.complete, runner.serving

    def idle_tree(self) -> TokenTree:
        """Return the runner's tree of a finished row."""
        tree: TokenTree = self._runner.idle_tree()
        return tree

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """Return the tree of pending tokens, from the runner."""
        tree: TokenTree = self._runner.begin_tree(row, text)
        return tree

    def wants_draft(self, tree: TokenTree) -> bool:
        """Return whether the runner accepts a draft for `tree`."""
        return bool(self._runner.wants_draft(tree))

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> ForestOutputs:
        """Run the trees of all rows, with trees of padding for ended rows."""
        self._padded = {row: self._padding(row) for row in self._texts}
        forest = [self._padded.get(row, tree) for row, tree in enumerate(trees)]
        outputs: ForestOutputs = self._runner.forward(forest, top_k)
        return outputs

    def _padding(self, row: int) -> TokenTree:
        """Return the tree of an ended row."""
        text = self._texts[row]
        tree = self.begin_tree(row, text)
        if self.wants_draft(tree):
            tree.limit(max(self._sequences[row].most_tokens - len(text) - 1, 0))
            tree.add_certain([self._pad_token or 0] * min(_PADDING, self._runner.most_nodes - 1))
        return tree

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the nodes in `paths`, and the padding of ended rows."""
        padded = {row: [*range(tree.root + 1), *self._paths[row]] for row, tree in self._padded.items()}
        self._runner.commit([padded.get(row, nodes) for row, nodes in enumerate(paths)])

    def walk(
        self, sequences: Sequence[TextSequence], forest: Forest, outputs: Sequence[Any], early: Sequence[Any] = ()
    ) -> Walks:
        """Walk the trees of all rows together, until a tree lacks its selected token or a row ends."""
        trees = [self._padded.get(row, tree) for row, tree in enumerate(forest)]
        walks = [Walk([], [], False) for _ in trees]
        nodes: list[int | None] = [tree.root for tree in trees]
        active = self._active
        while self._active.equal(active) and None not in nodes and not self._is_complete:
            for walk, tree, node in zip(walks, trees, nodes, strict=True):
                if node is not None and node > tree.root:
                    walk.path.append(node)
            pairs = zip(outputs, nodes, strict=True)
            tokens = self._select(torch.cat([output.logits_after(node).to(active.device) for output, node in pairs]))
            for row, (walk, token) in enumerate(zip(walks, tokens, strict=True)):
                walk.tokens.append(token)
                if row in self._texts:
                    self._texts[row].append(token)
                else:
                    sequences[row].append(token)
            rows = zip(trees, nodes, tokens, strict=True)
            nodes = [tree.child(node, token) for tree, node, token in rows if node is not None]
        return self._finish(walks, Walks(forest))

    def _finish(self, walks: Sequence[Walk], result: Walks) -> Walks:
        """Return the walks of a step without rows that ended before, and start the padding of rows that end now."""
        if self._is_complete and bool(self._active.any()):
            warn_of_last_position(self._ids.shape[1])
        for row, (walk, active) in enumerate(zip(walks, self._active.tolist(), strict=True)):
            ends = self._is_complete or (self._pad_token is not None and not active)
            if row in self._texts:
                self._paths[row] = walk.path
            else:
                result.set(row, walk._replace(stopped=ends))
            if ends:
                self._texts.setdefault(row, list(self._sequences[row].tokens))
        for row, sequence in enumerate(self._sequences if self._is_complete else ()):
            sequence.ids = self._ids[row : row + 1]  # processors and criteria may have written into it
        return result

    @property
    def _is_complete(self) -> bool:
        """Whether all rows are complete, or a row has reached the model's last position."""
        return not bool(self._active.any()) or self._ids.shape[1] >= self._last_length

    def _select(self, logits: torch.Tensor) -> list[int]:
        """Select the next token of each row as transformers' `_sample` does, from logits `[rows, vocabulary]`."""
        arguments = self._arguments
        scores = arguments.processors(self._ids, logits.clone())
        if self._scores is not None:
            self._scores = (*self._scores, scores)
        for row, sequence in enumerate(self._sequences):
            if row not in self._texts:
                sequence.sampler.keep(logits[row : row + 1], scores[row : row + 1])
        if arguments.config.do_sample:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            tokens = torch.multinomial(probabilities, num_samples=1)[:, 0]
        else:
            tokens = scores.argmax(dim=-1)
        if self._pad_token is not None:
            tokens = torch.where(self._active, tokens, self._pad_token)
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        self._active = self._active & ~arguments.criteria(self._ids, self._scores)
        return tokens.tolist()
