"""Verification: a walk down the tree in which the target model names every token.

Drafts are deterministic, so accepting a drafted token exactly when the target names it has the law of the
paper's Algorithms 3 and 4. And as the target names one token after another, each once and in order, just as
plain decoding does, sampling draws the very same tokens from the same random state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lookahead.token_tree import TokenTree


@dataclass(frozen=True)
class Walk:
    """What verification accepted.

    Attributes:
        path: Accepted candidate nodes, from below the root downwards.
        tokens: The tokens the target named: those of `path`, and one more, the root of the next step. Without
            the one more if the target declined to name it.
        stopped: Whether generation is over.
    """

    path: list[int]
    tokens: list[int]
    stopped: bool

    @property
    def declined(self) -> bool:
        """Whether the target declined to name the token after the path."""
        return len(self.tokens) == len(self.path)


def walk(tree: TokenTree, choose: Callable[[int], int | None], append: Callable[[int], bool]) -> Walk:
    """Follow the target from the root of `tree` for as long as it names drafted tokens.

    Args:
        tree: The tree that was sent.
        choose: Gives the token that the target names after a node, or `None` to decline, which ends the walk.
            Called once per token of the output, in order, each time after the token before it was appended.
        append: Adds a token to the text; true when the text is complete with it.
    """
    node = tree.root
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(node)
        if token is None:
            return Walk(path, tokens, stopped=False)
        tokens.append(token)
        stopped = append(token)
        child = None if stopped else tree.child(node, token)
        if child is None:
            return Walk(path, tokens, stopped)
        path.append(child)
        node = child


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Changes scores `[1, vocabulary]` given the text `[1, tokens]`, as transformers' logits processors do."""


class Target:
    """Names the next token as plain decoding would, from the logits after a node.

    Processors run only at nodes on the walked path, with the exact text before the token, so those that look
    at the text (repetition penalty, minimal length, ...) are exact.

    Args:
        processor: Applied to the logits first, if given.
        sample: Draw the token from the scores' softmax, instead of taking the likeliest. Draws come from the
            default generator, one `torch.multinomial` a token.
        keep_logits: Collect the raw logits of each token in `logits`, `[1, vocabulary]` float32 each.
        keep_scores: Collect the processed scores of each token in `scores`, likewise.
    """

    def __init__(
        self,
        processor: Processor | None = None,
        sample: bool = False,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ) -> None:
        self._processor = processor
        self._sample = sample
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self._sample

    @property
    def is_argmax(self) -> bool:
        """Whether the likeliest token of the raw logits is all that is wanted, so that nobody reads the logits."""
        return self._processor is None and not self._sample and self.logits is None and self.scores is None

    @property
    def keeps(self) -> bool:
        """Whether raw logits or processed scores are collected."""
        return self.logits is not None or self.scores is not None

    def choose(self, text: torch.Tensor, logits: torch.Tensor) -> int:
        """The token after `text` `[1, tokens]`, given its `logits` `[1, vocabulary]` float32."""
        if self.logits is not None:
            self.logits.append(logits.clone())
        # processors may write into what they get
        scores = self._processor(text, logits.clone()) if self._processor else logits
        if self.scores is not None:
            self.scores.append(scores.clone())
        if self._sample:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            return int(torch.multinomial(probabilities, num_samples=1))
        return int(scores.argmax(dim=-1))
