"""Running the application in this process: the socket, and the signals that end it."""

from __future__ import annotations

import resource
import socket
import sys
from types import FrameType

import uvicorn

from lookahead.errors import InvalidArgumentError
from lookahead.server.app import create_app
from lookahead.server.connection import guarded_protocol
from lookahead.server.served_model import ServedModel
from lookahead.server.settings import ServerSettings

_BACKLOG = 2048
"""Connections that may wait to be taken, as many as uvicorn has by default."""


class Server(uvicorn.Server):
    """Drains at the first signal, stops at the second. Either way the process ends by itself, with exit code 0."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(served: ServedModel, settings: ServerSettings) -> None:
    """Serve a model until a signal ends it.

    SIGTERM and SIGINT let running requests finish and take no further ones; a second signal stops at once.

    Raises:
        InvalidArgumentError: The address cannot be listened on.
    """
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _raise_file_limit()
    if (warned := warning(settings)) is not None:
        print("warning:", warned, file=sys.stderr)
    print(f"serving {served.name} at http://{shown}:{port}", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        create_app(served, settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        http=guarded_protocol(settings.read_timeout),
        lifespan="on",
    )
    Server(config).run(sockets=[listener])


def warning(settings: ServerSettings) -> str | None:
    """What whoever starts a server with these settings should know, if anything."""
    if settings.is_local or settings.api_keys:
        return None
    return f"{settings.host} can be reached from other machines, and no key is asked for; give --api-key-file"


def _raise_file_limit() -> None:
    """Allow as many connections as the system does: each takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(settings: ServerSettings) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # so that whoever reads the address may connect at once
    except OSError as error:
        raise InvalidArgumentError(f"--host {settings.host} --port {settings.port}: {error}") from error
    listener.set_inheritable(True)
    return listener
