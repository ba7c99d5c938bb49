"""Running the application in this process: the socket, and the signals that end it."""

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
"""Connections that may wait to be taken, as many as uvicorn has by default."""

_MOST_FILES = 10240
"""Open files of a process that macOS allows where it reports no limit."""

_GRACE = 5.0
"""Seconds in which clients have to take what they are told when their answers are broken off."""


class Server(uvicorn.Server):
    """Drains at the first signal; at the second it answers what still runs with status 503, and stops; at the third it
    stops at once. In each case the process ends by itself, with exit code 0.

    Args:
        config: Of uvicorn.
        break_off: Has all requests answered at once.
    """

    def __init__(self, config: uvicorn.Config, break_off: Callable[[], None]) -> None:
        super().__init__(config)
        self._break_off = break_off
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        self._signals += 1
        self.should_exit = True
        if self._signals > 2:
            self._force()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        waiting = asyncio.create_task(self._stop_waiting())
        await super().shutdown(sockets)
        waiting.cancel()

    async def _stop_waiting(self) -> None:
        """Wait for the second signal."""
        while self._signals < 2:
            await asyncio.sleep(0.05)
        self._break_off()
        await asyncio.sleep(_GRACE)
        self._force()

    def _force(self) -> None:
        self.force_exit = True
        logging.getLogger("uvicorn.error").disabled = True  # what is broken off is no error to be told


def serve(
    models: Sequence[ServedModel], settings: ServerSettings, listener: socket.socket, tracing: Tracing | None = None
) -> None:
    """Serve models until SIGTERM or SIGINT ends it, see `Server`, on a `listener` that is bound to its address, see
    `bind`."""
    listener.listen(_BACKLOG)  # before its address is told: whoever reads it may connect at once
    with patient_stderr():
        _serve(models, settings, listener, tracing)


def _serve(
    models: Sequence[ServedModel], settings: ServerSettings, listener: socket.socket, tracing: Tracing | None
) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _raise_file_limit()
    if (warned := warning(settings)) is not None:
        write_line(f"warning: {warned}")
    if most := sum(served.engine.load.most_kv_bytes or 0 for served in models):
        write_line(f"keys and values take {most / 2**30:.2f} GiB at most")
    write_line(f"serving {', '.join(served.name for served in models)} at http://{shown}:{port}")
    app = create_app(models, settings, tracing)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.read_timeout),  # clients close theirs first, most after 5 s
        http=partial(GuardedProtocol, patience=settings.timeout),  # type: ignore[arg-type]  # a class to uvicorn
        lifespan="on",
    )
    Server(config, app.state.service.stop).run(sockets=[listener])


def warning(settings: ServerSettings) -> str | None:
    """What whoever starts a server with these settings should know, if anything."""
    if settings.is_local or settings.api_keys:
        return None
    return f"{settings.host} can be reached from other machines, and no key is asked for; give --api-key-file"


def _raise_file_limit() -> None:
    """Allow as many connections as the system does: each takes a file descriptor."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (hard, _MOST_FILES):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))
            return


def bind(settings: ServerSettings) -> socket.socket:
    """The address of a server, taken before the model is loaded: it may be in use. Nobody can connect yet.

    Raises:
        InvalidArgumentError: It cannot be had.
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
