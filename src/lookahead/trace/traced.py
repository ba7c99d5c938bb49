"""What a trace holds: the steps of each text."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookahead.core.statistics import Seconds
from lookahead.core.token_tree import NodeKind
from lookahead.core.watching import Origin, WatchedStep

MOST_LISTED = 5
"""Likeliest tokens that are kept after each node of the accepted path."""


@dataclass(frozen=True)
class TracedStep:
    """One step of one text. Nodes are counted from the root, which is node 0.

    Attributes:
        tokens: Token of each node; the root's is the last one of the text so far.
        parents: Parent of each node; -1 for the root.
        window: The nodes of a lookahead window, which are read and never accepted.
        origins: Where each node below the root came from.
        path: The accepted nodes, downwards.
        added: The tokens that the step added to the text: those of the path, and the model's own behind it.
        predictions: The model's likeliest token after each node; -1 where it was not read.
        certainties: The probability of that token, 0 where it is not known.
        likeliest: For the root and each accepted node the model's likeliest tokens with their probabilities; empty
            for methods that do not ask for them.
        entries: Entries of the memory or the pool before the step; `None` where there is none.
        learned: Predictions that it was shown by the step.
        seconds: Time of each part of the step, of all rows of a batch together.
        finished: Whether the text was complete with it.
    """

    tokens: list[int]
    parents: list[int]
    window: list[int]
    origins: list[Origin]
    path: list[int]
    added: list[int]
    predictions: list[int]
    certainties: list[float]
    likeliest: list[list[tuple[int, float]]]
    entries: int | None
    learned: int
    seconds: Seconds
    finished: bool

    @classmethod
    def of(cls, step: WatchedStep) -> TracedStep:
        """What is kept of a step, in lists of its own."""
        result, tree = step.result, step.result.tree
        root = tree.root
        ids, probabilities = result.top_ids, result.top_probabilities
        listed = ids.shape[-1] > 0 and len(ids) == len(tree)
        likeliest = []
        for node in result.selected_after if listed else []:
            pairs = zip(ids[node, :MOST_LISTED].tolist(), probabilities[node, :MOST_LISTED].tolist(), strict=True)
            likeliest.append([(token, share) for token, share in pairs if token >= 0])
        return cls(
            tokens=tree.tokens[root:],
            parents=[-1, *(parent - root for parent in tree.parents[root + 1 :])],
            window=[node - root for node, kind in enumerate(tree.kinds) if kind is NodeKind.WINDOW],
            origins=list(step.explanation.origins),
            path=[node - root for node in result.path],
            added=list(result.tokens),
            predictions=result.predictions[root:].tolist(),
            certainties=probabilities[root:, 0].tolist() if listed else [0.0] * (len(tree) - root),
            likeliest=likeliest,
            entries=step.explanation.entries,
            learned=int((result.predictions >= 0).sum()),
            seconds=step.seconds,
            finished=step.record.finished,
        )


@dataclass
class TracedText:
    """One text: a row of a call.

    Attributes:
        prompt: Token ids that it begins with.
        steps: Its steps so far.
    """

    prompt: list[int]
    steps: list[TracedStep] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens that were generated."""
        return [token for step in self.steps for token in step.added]

    @property
    def nodes(self) -> int:
        """Nodes that all steps sent, roots included."""
        return sum(len(step.tokens) for step in self.steps)

    @property
    def step_compression(self) -> float:
        """S, tokens per step."""
        return len(self.tokens) / len(self.steps) if self.steps else 0.0
