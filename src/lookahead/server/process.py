"""Running the application in this process: its socket, and signals."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn

from lookahead.errors import InvalidArgumentError
from lookahead.server.app import create_app
from lookahead.server.guard import GuardedProtocol, ServerSettings
from lookahead.server.log import patient_stderr, write_line
from lookahead.server.served_model import ServedModel
from lookahead.server.tracing import Tracing

_BACKLOG = 2048
"""Connections that may wait to be accepted: uvicorn's default."""

_MAX_FILES = 10240
"""Limit of open files that macOS enforces without reporting it."""

_GRACE = 5.0
"""Seconds for clients to read the error after the second signal."""


class Server(uvicorn.Server):
    """Server that ends in three steps, with exit code 0.

    The first signal drains it. The second one fails running requests with status 503. The third one stops at once.

    Args:
        config: Configuration of uvicorn.
        fail_all: Called to fail all running requests.
    """

    def __init__(self, config: uvicorn.Config, fail_all: Callable[[], None]) -> None:
        super().__init__(config)
        self._fail_all = fail_all
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal."""
        self._signals += 1
        self.should_exit = True
        if self._signals > 2:
            self._force()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, or for the second signal."""
        waiting = asyncio.create_task(self._await_second_signal())
        await super().shutdown(sockets)
        waiting.cancel()

    async def _await_second_signal(self) -> None:
        while self._signals < 2:
            await asyncio.sleep(0.05)
        self._fail_all()
        await asyncio.sleep(_GRACE)
        self._force()

    def _force(self) -> None:
        self.force_exit = True
        logging.getLogger("uvicorn.error").disabled = True  # it would report the cancelled requests


def serve(
    models: Sequence[ServedModel], settings: ServerSettings, listener: socket.socket, tracing: Tracing | None = None
) -> None:
    """Serve models until SIGTERM or SIGINT, as `Server` describes; `listener` is the socket from `bind`."""
    listener.listen(_BACKLOG)  # before the address is printed: clients may connect at once
    with patient_stderr():
        _serve(models, settings, listener, tracing)


def _serve(
    models: Sequence[ServedModel], settings: ServerSettings, listener: socket.socket, tracing: Tracing | None
) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    _raise_file_limit()
    if (message := warning(settings)) is not None:
        write_line(f"warning: {message}")
    if limit := sum(served.engine.load.kv_limit_bytes or 0 for served in models):
        write_line(f"keys and values take {limit / 2**30:.2f} GiB at most")
    write_line(f"serving {', '.join(served.name for served in models)} at http://{address}:{port}")
    app = create_app(models, settings, tracing)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.read_timeout),  # longer than most clients keep theirs (5 s)
        http=partial(GuardedProtocol, patience=settings.timeout),  # type: ignore[arg-type]  # a class to uvicorn
        lifespan="on",
    )
    Server(config, app.state.service.stop).run(sockets=[listener])


def warning(settings: ServerSettings) -> str | None:
    """Return the warning about a public server without API keys, if it applies."""
    if settings.is_local or settings.api_keys:
        return None
    return f"{settings.host} can be reached from other machines without an API key; give --api-key-file"


def _raise_file_limit() -> None:
    """Raise the limit of open files, and so of connections, to the system's."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, _MAX_FILES):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, soft), hard))
            return


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the address of a server without listening yet. It fails before a model is loaded.

    Raises:
        InvalidArgumentError: The address is in use, or not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        # On Windows SO_REUSEADDR lets two programs listen at one address.
        reuse = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        listener.setsockopt(socket.SOL_SOCKET, reuse, 1)
        listener.bind(address)
    except OSError as error:
        raise InvalidArgumentError(
            f"--host {settings.host} --port {settings.port}: no server can listen there: {error}; choose another port, "
            "or an address of this machine"
        ) from error
    return listener
