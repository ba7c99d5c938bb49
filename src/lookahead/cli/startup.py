"""What happens to a model before its first step: named while it goes on, with the seconds that it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

from rich.console import Console
from transformers import PreTrainedModel

from lookahead.backends.session import open_session
from lookahead.cli.rendering import spinner
from lookahead.config import LookaheadConfig
from lookahead.core.compiled import on_first_compilation
from lookahead.drafting.warm_up import compile_loops


class StartUp:
    """The phases of a start, in their order.

    Args:
        notes: Where to say what goes on; nothing is said without.

    Attributes:
        seconds: Wall time of each phase.
    """

    def __init__(self, notes: Console | None = None) -> None:
        self._notes = Console(quiet=True) if notes is None else notes
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the name of a phase on a terminal until it is over."""
        start = perf_counter()
        with spinner(self._notes, name):
            yield
        self.seconds[name] = perf_counter() - start

    def tell(self) -> None:
        """Name all phases and their seconds on a terminal."""
        if self._notes.is_terminal:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
            self._notes.print(f"started in {sum(self.seconds.values()):.2f} s ({parts})", style="dim")

    def compile_drafting(self) -> None:
        """Have the drafting loops compiled before anything is timed; says so where none are kept from earlier."""
        announce = "compiling the drafting loops (once)"
        with self.phase("compilation"), on_first_compilation(lambda: self._notes.print(announce)):
            compile_loops()

    def check(self, model: PreTrainedModel) -> None:
        """Check the model, as its first call would.

        Raises:
            UnsupportedModelError: It cannot be run.
        """
        with self.phase("model check"):
            open_session(model).check()

    def prepare(self, model: PreTrainedModel, config: LookaheadConfig) -> None:
        """Make the module that runs the model, as its first call would, and try it.

        Raises:
            LookaheadError: The model cannot be run as `config` has it.
        """
        with self.engine(config):
            open_session(model).prepare(config)

    def engine(self, config: LookaheadConfig) -> AbstractContextManager[None]:
        """The phase in which what runs a model is made; most of it are trials where passes are to be invariant."""
        return self.phase("invariance trials" if config.invariant else "engine")
