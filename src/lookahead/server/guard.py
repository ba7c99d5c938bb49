"""What stands before the application: what a request may ask for, keys, sizes and times, idle connections, the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lookahead.server.errors import CLIENT_LEFT, CLOSE, ApiError

OPEN_PATHS = ("/health", "/", "/page/page.js", "/page/page.css", "/page/icon.svg")
"""What may be asked for without a key."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; any free one if 0.
        api_keys: Keys of which clients have to name one; none are asked for if there are none.
        max_prompt_tokens: Most tokens of a prompt; the model's context if `None`.
        max_new_tokens: Most tokens of an answer that names no number, and of one that names a larger one.
        image_host: Hosts that images may be fetched from.
        max_image_bytes: Most bytes of an image that is fetched.
        max_body_bytes: Most bytes of a request.
        queue: Most answers that wait for their turn, beside those that run. More are refused with status 429.
        timeout: Seconds after which a request is given up.
        read_timeout: Seconds in which a request must have arrived.
        max_rows: Answers that are made at once.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 16384
    image_host: Sequence[str] | None = None
    max_image_bytes: int = 8 * 2**20
    max_body_bytes: int = 8 * 2**20
    queue: int = 128
    timeout: float = 600.0
    read_timeout: float = 30.0
    max_rows: int = 16

    @property
    def is_local(self) -> bool:
        """Whether no other machine can reach it."""
        return self.host in ("127.0.0.1", "::1", "localhost")


class GuardedProtocol(H11Protocol):
    """Closes connections on which no request has begun for a while: its head must have arrived. uvicorn does so after a
    response alone, and up to the first byte of the next request."""

    def connection_made(self, transport: Any) -> None:
        """See uvicorn."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """See uvicorn."""
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if waiting is None:
            return
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_task = waiting
        else:
            waiting.cancel()


def write_line(text: str) -> None:
    """Write a line, unless the disk is full, or whoever read the log has gone."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


class Guard:
    """Lets a request through that names a key, and arrives whole, in time, and not too large.

    Args:
        settings: Keys and limits.
        refused: Told the status of each request that is not let through.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, refused: Callable[[int], None]) -> None:
        self._app, self._settings, self._refused = app, settings, refused
        self._keys = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number, begin, status = secrets.token_hex(8), time.perf_counter(), 0
        notes: dict[str, Any] = {}
        scope.setdefault("state", {})["notes"] = notes

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", number.encode())]
            await send(message)

        try:
            self._check_host(scope)
            self._check_key(scope)
            await self._app(scope, self._limited(scope, receive), answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        finally:
            if status >= 400:
                self._refused(status)
            seconds = round(time.perf_counter() - begin, 4)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = {"time": stamp, "id": number, "method": scope["method"], "path": scope["path"], "status": status}
            write_line(json.dumps({**entry, "seconds": seconds, **notes}))

    def _check_host(self, scope: Scope) -> None:
        """Refuse what a web page asks of this machine under a name of its own, which it has resolve to here (DNS
        rebinding): the browser would let it read the answer. Where a key is asked for, it has none."""
        host = Headers(scope=scope).get("host", "")
        if self._keys or not self._settings.is_local or _is_loopback(host):
            return
        raise ApiError(
            403,
            f"Host: {host[:100]!r} is no name of this machine; ask for http://127.0.0.1, or start the server with "
            "--api-key-file, with which any name will do",
            code="invalid_host",
        )

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, key) for key in self._keys]  # all of them: the time says nothing
        if scheme.lower() != "bearer" or not any(matches):
            headers = {"WWW-Authenticate": "Bearer"}
            message = "this server asks for an API key that it knows, as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """`receive` for a body that must not be too large, or take too long: else it raises an `ApiError`.

        Raises:
            ApiError: The body is said to be too large.
        """
        most, length = self._settings.max_body_bytes, Headers(scope=scope).get("content-length", "0")
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large", headers=CLOSE)
        if not length.isdigit() or int(length) > most:
            raise too_large
        size, deadline, arrived = 0, time.monotonic() + self._settings.read_timeout, False

        async def limited() -> Message:
            nonlocal size, arrived
            try:
                wait = None if arrived else max(deadline - time.monotonic(), 0.001)
                message = await asyncio.wait_for(receive(), wait)
            except asyncio.TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="timeout", headers=CLOSE) from None
            if message["type"] == "http.disconnect" and not arrived:
                raise ApiError(CLIENT_LEFT, "the client has gone before its request had arrived")
            size += len(message.get("body", b""))
            arrived = not message.get("more_body", False)
            if size > most:
                raise too_large
            return message

        return limited


def _is_loopback(host: str) -> bool:
    """Whether the value of a `Host` header names this machine alone."""
    with suppress(ValueError):  # a name, or nothing of the kind
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
