"""`--trace`, and `lookahead trace`: the page of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lookahead.cli.loading import LoadedModel
from lookahead.config import LookaheadConfig
from lookahead.trace import Trace


class Tracing:
    """Records what a command decodes, and writes it down.

    Args:
        path: Where to; nothing is recorded if it is not given.
        loaded: The model.
        notes: Where to say so.
    """

    def __init__(self, path: Path | None, loaded: LoadedModel, notes: Console) -> None:
        self._notes = notes
        facts = {"model": loaded.path.resolve().name, "type": loaded.dtype, "device": str(loaded.model.device)}
        self._trace = None if path is None else Trace(path, loaded.tokenizer, facts=facts)

    def config(self, config: LookaheadConfig) -> LookaheadConfig:
        """A configuration that records, if anything is to be."""
        if self._trace is None:
            return config
        self._trace.facts["preset"] = config.preset
        return replace(config, trace=self._trace)

    def write(self) -> None:
        """Write the page of all that was recorded so far. A second Ctrl-C meanwhile leaves what was there.

        Raises:
            InvalidArgumentError: It cannot be written.
        """
        if self._trace is None or not self._trace.texts:
            return
        path = self._trace.write()
        steps = sum(len(text.steps) for text in self._trace.texts)
        self._notes.print(f"{path}: {steps} steps, {path.stat().st_size / 1000:.0f} kB", style="dim")
