"""Decoding without a model: a backend that plays recorded predictions, and a sampler that selects recorded tokens.

Predictions come from a `Script`, so that drafters read the same numbers on every processor. `VLLMLoop` replaces vLLM
for its proposer in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import Backend
from lookahead.core.sequence import SequenceState
from lookahead.core.token_tree import TokenTree

try:
    from lookahead.core.step import Batch, step
except ModuleNotFoundError:  # its name in version 0.1, which `worth` compares with
    from lookahead.core.decoder import Batch, step

if TYPE_CHECKING:
    from lookahead.core.results import NodeOutputs
    from lookahead.core.statistics import Statistics

Listed = tuple[NDArray[np.int64], NDArray[np.float32]]
"""The likeliest tokens after a node, likeliest first, and their probabilities; `[listed]` both."""


class Script(Protocol):
    """Source of predictions after the nodes of one text."""

    def listed(self, cached: int, tree: TokenTree) -> dict[int, Listed]:
        """Return the likeliest next tokens of nodes with logits, by node.

        Args:
            cached: Number of tokens of the text before the tree.
            tree: The tree.
        """


def paths(tree: TokenTree, cached: int) -> dict[int, tuple[int, tuple[int, ...]]]:
    """For each node of a tree, return the number of text tokens before it, and the drafted tokens after them, its own
    included."""
    by_node: dict[int, tuple[int, tuple[int, ...]]] = {}
    for node, token in enumerate(tree.tokens):
        if node <= tree.root:
            by_node[node] = cached + node + 1, ()
        else:
            length, path = by_node[tree.parents[node]]
            by_node[node] = length, (*path, token)
    return by_node


class TextScript:
    """Predict the next token of a recorded text on its path, with probability 1, and nothing on other paths.

    Args:
        text: Prompt and answer.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def listed(self, cached: int, tree: TokenTree) -> dict[int, Listed]:
        """Return the next token of the recorded text after nodes on its path."""
        by_node: dict[int, Listed] = {}
        for node, (length, path) in paths(tree, cached).items():
            end = length + len(path)
            if end < len(self._text) and tuple(self._text[length:end]) == path:
                by_node[node] = np.array([self._text[end]]), np.ones(1, dtype=np.float32)
        return by_node


@dataclass(frozen=True)
class PlayedOutputs:
    """Predictions of a script after the nodes of a tree (`NodeOutputs`)."""

    predictions: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_probabilities: NDArray[np.float32]

    def logits_after(self, node: int) -> Any:
        """Raise an error, as recordings have no logits."""
        raise NotImplementedError("recordings have no logits")


class PlayedPass(list[PlayedOutputs]):
    """Outputs for all trees of a step; its attributes are their arrays, concatenated (`ForestOutputs`)."""

    def __getattr__(self, name: str) -> NDArray[Any]:
        return np.concatenate([getattr(of_tree, name) for of_tree in self])


@dataclass
class PlayedRow:
    """A row of a backend.

    Attributes:
        script: Source of its predictions.
        cached: Number of tokens of its text in the cache.
    """

    script: Script
    cached: int = 0


class PlayedBackend(Backend):
    """Run trees with scripts instead of a model (`Backend`).

    Args:
        rows: One row for each sequence; they may change between two steps.
        resends: Whether a step with a rejected node adds nothing to the cache, as in models with a running state.
    """

    def __init__(self, rows: Sequence[PlayedRow] = (), resends: bool = False) -> None:
        self.rows = rows
        self._resends = resends
        self._sizes: list[int] = []

    def idle_tree(self) -> TokenTree:
        """See `Backend`."""
        return TokenTree([0])

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """See `Backend`."""
        return TokenTree(text[self.rows[row].cached :])

    def wants_draft(self, tree: TokenTree) -> bool:
        """See `Backend`."""
        return True

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PlayedPass:
        """See `Backend`."""
        self._sizes = list(map(len, trees))
        return PlayedPass([self._read(row, tree, top_k) for row, tree in zip(self.rows, trees, strict=True)])

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """See `Backend`."""
        for row, nodes, size in zip(self.rows, kept, self._sizes, strict=True):
            row.cached += 0 if self._resends and len(nodes) < size else len(nodes)

    def _read(self, row: PlayedRow, tree: TokenTree, top_k: int) -> PlayedOutputs:
        size = len(tree)
        predictions, ids = np.full(size, -1, dtype=np.int64), np.full((size, top_k), -1, dtype=np.int64)
        probabilities = np.zeros((size, top_k), dtype=np.float32)
        for node, (tokens, likely) in row.script.listed(row.cached, tree).items():
            if tree.needs_logits[node]:
                listed = min(len(tokens), top_k)
                predictions[node] = tokens[0]
                ids[node, :listed], probabilities[node, :listed] = tokens[:listed], likely[:listed]
        return PlayedOutputs(predictions, ids, probabilities)


@dataclass
class RecordedTokens:
    """Select the tokens of a recorded text (`Sampler`).

    Attributes:
        text: Prompt and answer.
        samples: Whether the answer was sampled.
    """

    text: Sequence[int]
    samples: bool = False
    needs_logits = True

    def foresee(self, tokens: int) -> None:
        """Do nothing, as no random numbers are recorded."""

    @classmethod
    def look_ahead_rows(cls, *arguments: Any) -> Sequence[Any]:
        """Select nothing in advance."""
        return ()

    def advance(self, tokens: int) -> None:
        """Do nothing, as no tokens are selected before a walk."""

    def select(self, sequence: Any, outputs: NodeOutputs, node: int) -> int:
        """See `Sampler`."""
        return self.text[len(sequence.tokens)]


def played_sequence(
    prompt: Sequence[int], answer: Sequence[int], drafter: Any, samples: bool = False, **more: Any
) -> SequenceState:
    """Make a sequence that ends with the recorded answer; `samples` marks it as sampled."""
    text = [*prompt, *answer]
    sampler = RecordedTokens(text, samples)
    return SequenceState(
        prompt, drafter, sampler, lambda sequence: len(sequence.tokens) >= len(text), most_tokens=len(text), **more
    )


def play_text(prompt: Sequence[int], answer: Sequence[int], drafter: Any) -> Statistics:
    """Decode one recorded answer, which is all that the drafter learns from, and return the statistics."""
    text = [*prompt, *answer]
    batch = Batch([played_sequence(prompt, answer, drafter)])
    backend = PlayedBackend([PlayedRow(TextScript(text))])
    while not batch.finished:
        step(backend, batch)
    assert batch.sequences[0].tokens == text
    return batch.statistics


def vllm_config(vocabulary: int, drafted: int, requests: int, room: int, **settings: Any) -> SimpleNamespace:
    """Stand-in for vLLM's configuration; by default the proposer drafts the most tokens, without using the clock."""
    model = SimpleNamespace(model="m", revision=None, max_model_len=room, get_vocab_size=lambda: vocabulary)
    return SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        additional_config={"lookahead": {"adaptive": False, **settings}},
    )


class VLLMLoop:
    """Stand-in for vLLM's loop: verify drafts by the recorded text, and add one more token.

    Args:
        proposer: The proposer of drafts.
        room: Most tokens of a text.
        read: Function called before each step with the texts and drafts of all rows, to compute logits.
    """

    def __init__(
        self, proposer: Any, room: int, read: Callable[[list[list[int]], list[list[int]]], None] | None = None
    ) -> None:
        self._proposer, self._room, self._read = proposer, room, read
        self.steps: list[list[tuple[list[int], int]]] = []
        """For each step and row, the verified draft and the number of its accepted tokens."""

    def run(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Serve requests that start together until all of them are complete."""
        complete = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        texts = [list(prompt) for prompt in prompts]
        drafts: list[list[int]] = [[] for _ in prompts]
        while texts:
            if self._read is not None:
                self._read(texts, drafts)
            added = [self._verified(*row) for row in zip(texts, complete, drafts, strict=True)]
            self.steps.append([(draft, len(new) - 1) for draft, new in zip(drafts, added, strict=True)])
            texts = [text + new for text, new in zip(texts, added, strict=True)]
            tokens = np.zeros((len(texts), self._room), dtype=np.int32)
            for row, text in enumerate(texts):
                tokens[row, : len(text)] = text
            drafts = self._proposer.propose(added, np.array([len(text) for text in texts]), tokens)
            left = [row for row, text in enumerate(texts) if len(text) < len(complete[row])]
            texts, complete = [texts[row] for row in left], [complete[row] for row in left]
            drafts = [drafts[row] for row in left]

    @staticmethod
    def _verified(text: list[int], complete: list[int], draft: list[int]) -> list[int]:
        ahead = complete[len(text) :]
        pairs = enumerate(zip(draft, ahead, strict=False))
        agreed = next((at for at, (token, right) in pairs if token != right), min(len(draft), len(ahead)))
        return ahead[: agreed + 1]
