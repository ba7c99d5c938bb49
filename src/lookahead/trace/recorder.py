"""The recorder: handed over in a configuration, read afterwards, and written as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Any

from lookahead.core.files import replaced
from lookahead.core.statistics import Seconds
from lookahead.core.token_tree import NodeKind
from lookahead.core.watching import Origin, StepWatcher, WatchedStep
from lookahead.errors import InvalidArgumentError
from lookahead.trace.page import make_page

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


class Trace:
    """Records the steps of all calls that its configuration is used in. It changes no text.

    As a context manager it writes its page at the end, whatever ended it:

        with lookahead.Trace("trace.html", tokenizer) as trace:
            config = lookahead.LookaheadConfig(trace=trace)
            lookahead.generate(model, input_ids, lookahead_config=config, max_new_tokens=200)

    Args:
        path: Where the page goes; `write` takes one as well.
        tokenizer: Names the tokens on the page, which shows their ids without one.
        title: Heading of the page.
        facts: What else the page is to say about the run, by name.

    Attributes:
        texts: What was recorded: one for each row of each call, in the order in which they began.

    Raises:
        InvalidArgumentError: Nothing can be written to `path`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        title: str = "Lookahead decoding, step by step",
        facts: dict[str, str] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.tokenizer = tokenizer
        self.title = title
        self.facts = dict(facts or {})
        self.texts: list[TracedText] = []
        if self.path is not None:
            check_path(self.path)

    def begin(self, prompt: Sequence[int]) -> StepWatcher:
        """Begin a text with this prompt; returns the function to call after each of its steps."""
        text = TracedText(list(prompt))
        self.texts.append(text)

        def keep(step: WatchedStep) -> None:
            text.steps.append(TracedStep.of(step))

        return keep

    def write(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the page: one HTML file, which needs no network. It is whole at any time, or as it was.

        Args:
            path: Where to; `self.path` if not given.

        Raises:
            InvalidArgumentError: There is no path, or it cannot be written.
        """
        chosen = self.path if path is None else Path(path)
        if chosen is None:
            raise InvalidArgumentError("path is not given; say where to write the page, as in write('trace.html')")
        write_whole(chosen, make_page(self.texts, self.tokenizer, self.title, self.facts))
        return chosen

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is not None and (self.texts or error is None):
            self.write()

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return self  # copies of a configuration record to the same place


def check_path(path: Path) -> None:
    """Refuse a path that nothing can be written to.

    Raises:
        InvalidArgumentError: The message says why.
    """
    if path.is_dir():
        raise InvalidArgumentError(f"trace: {path} is a folder; give the name of a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise InvalidArgumentError(f"trace: {path} may not be written; choose another file")
    if not path.exists() or path.is_file():
        try:
            with NamedTemporaryFile(dir=Path(os.path.realpath(path)).parent, prefix=f".{path.name}."):
                pass
        except OSError as error:
            raise _refusal(path, error) from error


def write_whole(path: Path, page: str) -> None:
    """Write a file that is there whole or not at all; what is no regular file, such as a pipe, gets it as it comes.

    Raises:
        InvalidArgumentError: It cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(page, encoding="utf-8")
            return
        with replaced(path) as file:
            file.write(page)
    except OSError as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(f"trace: {path} cannot be written: {error.strerror or error}; choose another file")
