"""`lookahead serve` in a separate process, and models to serve in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

from lookahead import Engine, LookaheadConfig
from preloaded import Command


class ServerProcess:
    """A server on a free port; a context manager that ends it.

    Args:
        options: Of the command.
        from_scratch: Start Python anew, as users do, which takes seconds, rather than copy a process that has imported
            everything.
        environment: Environment variables of a server with `from_scratch`; this process's by default.

    Attributes:
        url: Address of the server.
        lines: Lines of its standard error.
        process: The process.
        running: All running servers.
    """

    running: ClassVar[list[ServerProcess]] = []

    def __init__(
        self, *options: str | Path, from_scratch: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        arguments = ["serve", "--port", "0", *map(str, options)]
        ours, theirs = os.pipe()
        self.process: Any
        if from_scratch:
            command = [sys.executable, "-m", "lookahead", *arguments]
            self.process = subprocess.Popen(command, stderr=theirs, env=environment)
        else:
            self.process = Command(arguments, {2: theirs})
        os.close(theirs)
        self._stderr = open(ours, encoding="utf-8")  # noqa: SIM115  # a thread reads it to the end
        self.lines: list[str] = []
        self.url = self._read_url()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self.running.append(self)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.running.remove(self)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(600)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self._reader.join(600)

    def _read_url(self) -> str:
        for line in self._stderr:
            self.lines.append(line)
            if " at http" in line:
                return line.rsplit(" ", 1)[1].strip()
        raise AssertionError(f"the server did not start: {''.join(self.lines)}")

    def _read(self) -> None:
        for line in self._stderr:
            self.lines.append(line)


def served_model(name: str, model: Any, tokenizer: Any) -> Any:
    """Return a model for `create_app`."""
    from lookahead.server.served_model import ServedModel  # imported late, as the server's packages are optional

    engine = Engine(model, kv_bytes=2**28)
    named = {"name": name, "engine": engine, "config": LookaheadConfig(), "max_length": 2048}
    return ServedModel(Path(name), model, tokenizer, **named)
