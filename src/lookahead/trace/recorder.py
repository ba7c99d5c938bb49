"""The recorder: handed over in a configuration, read afterwards, and written as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lookahead.core.watching import StepWatcher, WatchedStep
from lookahead.errors import InvalidArgumentError
from lookahead.trace.output import check_path, write_whole
from lookahead.trace.page import make_page
from lookahead.trace.traced import TracedStep, TracedText


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
        """A text begins with these tokens; returns what is called after each of its steps."""
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
