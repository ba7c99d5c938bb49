"""`lookahead serve` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread


class ServerProcess:
    """A server on a free port; a context manager that ends it.

    Attributes:
        url: Where it listens.
        lines: What it has written to standard error.
        process: The process.
    """

    def __init__(self, *options: str | Path) -> None:
        command = [sys.executable, "-m", "lookahead", "serve", "--port", "0", *map(str, options)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = self._read_url()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(600)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self._reader.join(600)

    def _read_url(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if " at http" in line:
                return line.rsplit(" ", 1)[1].strip()
        raise AssertionError(f"the server did not start: {''.join(self.lines)}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
