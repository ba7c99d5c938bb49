"""The protocol of engines that run token trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lookahead.core.outputs import NodeOutputs
from lookahead.core.token_tree import TokenTree


class Backend(Protocol):
    """Runs the trees of a batch on a model, and keeps the keys and values of each row's text."""

    def idle_tree(self) -> TokenTree:
        """What a finished row sends while others continue: a token whose output is not used."""

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step of sequence `row`, whose text so far is `text`: its pending tokens.

        Of many it may be the first ones alone; the last of these is then not read.
        """

    def wants_draft(self, tree: TokenTree) -> bool:
        """Whether anything should be drafted onto `tree`."""

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Sequence[NodeOutputs]:
        """Run the model on one tree for each sequence; what it computed of their nodes waits for `commit`.

        Args:
            trees: One for each sequence.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.
        """

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep `kept`, for each sequence a path of nodes from its tree's first one downwards; forget the others."""
