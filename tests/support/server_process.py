"""`lookahead serve` in a process of its own, and models to serve in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import IO, Any

from lookahead import Engine, LookaheadConfig
from lookahead.cli import main
from preloaded import preloaded


class PreloadedCommand:
    """A command of the library in a process that has imported everything, with what `subprocess.Popen` has."""

    def __init__(self, arguments: list[str]) -> None:
        context = preloaded()
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.stderr: IO[str] | None = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended.
        """
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("lookahead", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def _run(arguments: list[str], stderr: Connection) -> None:
    os.dup2(stderr.fileno(), 2)
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115  # till the end
    sys.exit(main(arguments))


class ServerProcess:
    """A server on a free port; a context manager that ends it.

    Args:
        options: Of the command.
        from_scratch: Start Python anew, as users do, which takes seconds, rather than copy a process that has imported
            everything.

    Attributes:
        url: Where it listens.
        lines: What it has written to standard error.
        process: The process.
    """

    def __init__(self, *options: str | Path, from_scratch: bool = False) -> None:
        arguments = ["serve", "--port", "0", *map(str, options)]
        self.process: Any
        if from_scratch:
            command = [sys.executable, "-m", "lookahead", *arguments]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        else:
            self.process = PreloadedCommand(arguments)
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


def served_model(name: str, model: Any, tokenizer: Any) -> Any:
    """A model that `create_app` serves."""
    from lookahead.server.served_model import ServedModel  # late: what serves may not be installed

    engine = Engine(model, kv_bytes=2**28)
    named = {"name": name, "engine": engine, "config": LookaheadConfig(), "max_length": 2048}
    return ServedModel(Path(name), model, tokenizer, **named)
