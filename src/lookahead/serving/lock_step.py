"""Rows that go on together, place by place, as in transformers: for processors and criteria of which nobody knows that
they treat each row by itself and keep no state."""

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
"""Most padding tokens that a row which has ended sends in a step."""


class LockStep(Backend):
    """A backend whose rows accept equally many tokens in each step.

    Processors and criteria are called as transformers calls them: once for each place of the text, with all rows. So
    they may hold a rule or a state for each row, compare rows, count their calls, and draw random numbers. A row that
    has ended goes on with padding, of which they get the logits, too; nobody else hears of it.

    Args:
        runner: Runs the trees of all rows.
        arguments: What the call asks for.
        sequences: The texts. Where they end is decided here.
        pad_token: Fills up rows that have ended; `None` where they go on until all have.
    """

    def __init__(
        self, runner: Any, arguments: Arguments, sequences: Sequence[TextSequence], pad_token: int | None
    ) -> None:
        self._runner, self._arguments, self._pad_token = runner, arguments, pad_token
        config = arguments.config
        self._ids = arguments.prompts.input_ids.long()
        self._left = torch.ones(len(sequences), dtype=torch.bool, device=self._ids.device)
        self._scores: tuple[torch.Tensor, ...] | None = None
        if config.return_dict_in_generate and config.output_scores:
            self._scores = ()
        self._last_length = min(text.last_length or sys.maxsize for text in sequences)
        self._sequences = sequences
        self._texts: dict[int, list[int]] = {}  # of rows that have ended, with their padding
        self._padded: dict[int, TokenTree] = {}  # trees of their padding in this step
        self._paths: dict[int, list[int]] = {}  # nodes of these that are kept
        for sequence in sequences:
            sequence.stop = lambda text: False
        self.prefill, self.complete, self.serving = runner.prefill, runner.complete, runner.serving

    def idle_tree(self) -> TokenTree:
        """See `Backend`."""
        tree: TokenTree = self._runner.idle_tree()
        return tree

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """See `Backend`."""
        tree: TokenTree = self._runner.begin_tree(row, text)
        return tree

    def wants_draft(self, tree: TokenTree) -> bool:
        """See `Backend`."""
        return bool(self._runner.wants_draft(tree))

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> ForestOutputs:
        """Run the trees of all rows, with padding for those that have ended; see `Backend`."""
        self._padded = {row: self._padding(row) for row in self._texts}
        sent = [self._padded.get(row, tree) for row, tree in enumerate(trees)]
        outputs: ForestOutputs = self._runner.forward(sent, top_k)
        return outputs

    def _padding(self, row: int) -> TokenTree:
        """The tree of a row that has ended."""
        text = self._texts[row]
        tree = self.begin_tree(row, text)
        if self.wants_draft(tree):
            tree.limit(max(self._sequences[row].most_tokens - len(text) - 1, 0))
            tree.add_certain([self._pad_token or 0] * min(_PADDING, self._runner.most_nodes - 1))
        return tree

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep `kept`, and the padding of rows that have ended; see `Backend`."""
        padded = {row: [*range(tree.root + 1), *self._paths[row]] for row, tree in self._padded.items()}
        self._runner.commit([padded.get(row, nodes) for row, nodes in enumerate(kept)])

    def walk(self, sequences: Sequence[TextSequence], forest: Forest, outputs: Sequence[Any]) -> Walks:
        """Walk the trees of all rows together, as far as each of them holds what is selected and no row ends."""
        trees = [self._padded.get(row, tree) for row, tree in enumerate(forest)]
        walks = [Walk([], [], False) for _ in trees]
        nodes: list[int | None] = [tree.root for tree in trees]
        left = self._left
        while self._left.equal(left) and None not in nodes and not self._is_over:
            for walk, tree, node in zip(walks, trees, nodes, strict=True):
                if node is not None and node > tree.root:
                    walk.path.append(node)
            pairs = zip(outputs, nodes, strict=True)
            tokens = self._select(torch.cat([output.logits_after(node).to(left.device) for output, node in pairs]))
            for row, (walk, token) in enumerate(zip(walks, tokens, strict=True)):
                walk.tokens.append(token)
                if row in self._texts:
                    self._texts[row].append(token)
                else:
                    sequences[row].append(token)
            rows = zip(trees, nodes, tokens, strict=True)
            nodes = [tree.child(node, token) for tree, node, token in rows if node is not None]
        return self._settled(walks, Walks(forest))

    def _settled(self, walks: Sequence[Walk], settled: Walks) -> Walks:
        """The walks of a step, without rows that ended before; from now on there is padding for those that end."""
        if self._is_over and bool(self._left.any()):
            warn_of_last_position(self._ids.shape[1])
        for row, (walk, goes_on) in enumerate(zip(walks, self._left.tolist(), strict=True)):
            ends = self._is_over or (self._pad_token is not None and not goes_on)
            if row in self._texts:
                self._paths[row] = walk.path
            else:
                settled.set(row, walk._replace(stopped=ends))
            if ends:
                self._texts.setdefault(row, list(self._sequences[row].tokens))
        return settled

    @property
    def _is_over(self) -> bool:
        """Whether all rows are complete, or the model has no position for a further token of one."""
        return not bool(self._left.any()) or self._ids.shape[1] >= self._last_length

    def _select(self, logits: torch.Tensor) -> list[int]:
        """The next token of each row, given their logits `[rows, vocabulary]` float32, as transformers' `_sample` finds
        it; and which rows end with it."""
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
            tokens = torch.where(self._left, tokens, self._pad_token)
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        self._left = self._left & ~arguments.criteria(self._ids, self._scores)
        return tokens.tolist()
