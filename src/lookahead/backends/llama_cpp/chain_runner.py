"""Runs a llama.cpp model with running states, which cannot take back a token, on chains of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.backends.chain_rules import check_chain, has_room
from lookahead.backends.forward_result import ForwardResult
from lookahead.backends.llama_cpp.context import LlamaContext
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.core.token_tree import TokenTree

_TEXT, _SAVED = 0, 1
"""Sequence ids: the text, and the text as it was before a draft."""


class LlamaChainRunner(LlamaRunner):
    """One text on a recurrent or hybrid model.

    Before a draft a second sequence is let hold the text; llama.cpp copies a state that two sequences share when one of
    them goes on. If all of the draft is accepted, the new state stays. If not, the text is taken back from the second
    sequence, and the accepted tokens are sent again in front of the next draft, as pending tokens.

    Args:
        context: Where states, keys and values are; empty, with two sequence ids.
        last_length: See `LlamaRunner`.
    """

    def __init__(self, context: LlamaContext, last_length: int | None = None) -> None:
        super().__init__(context, 1, last_length)

    def resume(self, text: Sequence[int]) -> int:
        """Begin with what the context holds, if `text` goes on from the end of it; returns how many tokens that is."""
        known = self.llama_context.text
        if not 0 < len(known) < len(text) or list(text[: len(known)]) != known:
            self.llama_context.clear()
            return 0
        return super().resume(text)

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step, `text` being the text so far: its pending tokens.

        There is no room below a prompt, whose state would have to be computed again, nor below many pending tokens.
        """
        tree = super().begin_tree(row, text)
        if not has_room(self.rows[0].length, tree.root + 1):
            tree.limit(0)
        return tree

    def wants_draft(self, tree: TokenTree) -> bool:
        """Drafters are always asked; where nothing may be drafted, `tree` has no room."""
        return True

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[ForwardResult]:
        """Run the model on one chain; what it does to the state waits for `commit`.

        Raises:
            InvalidArgumentError: The tree has branches.
        """
        (tree,) = trees
        check_chain(tree)
        if not tree.is_chain:
            self._copy(_TEXT, _SAVED)
        return super().forward(trees, top_k)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the state if all nodes of the last tree are `kept`; else go back to that of before it."""
        assert self._sent[0] is not None
        tree = self._sent[0][0]
        if len(kept[0]) == len(tree):
            self.rows[0].length += len(tree)
        else:
            self._copy(_SAVED, _TEXT)

    def _copy(self, source: int, target: int) -> None:
        self.llama_context.remove(target, -1, -1)
        self.llama_context.copy(source, target, -1, -1)
