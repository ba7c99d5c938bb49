"""Middleware before the application: hosts, API keys, limits of size and time, idle connections, the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
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

from lookahead.server.errors import CLIENT_CLOSED_REQUEST, CLOSE, FAILED, ApiError, error_summary
from lookahead.server.log import write_line

_PROBE = 0.1
"""Seconds until a closed connection rejects a probe."""

OPEN_PATHS = ("/health", "/", "/page/page.js", "/page/page.css", "/page/icon.svg")
"""Paths that need no API key."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; any free port if 0.
        api_keys: Valid API keys; clients need none if it is empty.
        memory_per_key: Whether each API key is a tenant of the engines.
        cors_origin: Origins of web pages that may read answers; `*` for all.
        max_prompt_tokens: Largest number of tokens of a prompt; the model's context if `None`.
        max_new_tokens: Default of `max_tokens`, and its largest value.
        image_host: Hosts of image addresses that the server may fetch.
        max_image_bytes: Largest number of bytes of a fetched image.
        max_body_bytes: Largest number of bytes of a request body.
        queue: Number of answers that may wait, beside running ones. Further ones are refused with status 429.
        timeout: Seconds until a request is cancelled.
        read_timeout: Seconds until a request must have arrived.
        max_rows: Largest number of answers that run at once.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    memory_per_key: bool = False
    cors_origin: Sequence[str] | None = None
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
        """Whether only this machine can reach the server."""
        return self.host in ("127.0.0.1", "::1", "localhost")


class GuardedProtocol(H11Protocol):
    """HTTP protocol of uvicorn with four changes.

    A connection is closed unless the head of a request arrives in time; uvicorn waits only after a response, and only
    for one byte. A client that stops reading is disconnected. A client that closed its sending half gets its answer.
    The state of a request has `send_part`, a short way for parts of streams.

    Args:
        patience: Seconds until a client must have read the sent data.
    """

    def __init__(self, *arguments: Any, patience: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patience = patience
        self.app_state = {**self.app_state, "send_part": self.send_part}
        self._unread: asyncio.TimerHandle | None = None
        self._has_ended = False  # whether the client closed its sending half

    def send_part(self, make: Callable[[], bytes]) -> bool:
        """Make and send a part of a chunked body, unless the client does not read; return whether it was made."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        if data := make():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def pause_writing(self) -> None:
        """Start the timer when the write buffer is full."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer when the client has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio declares it
        """Probe the connection: a client that disconnected and one that waits for its answer look alike.

        The probe is `100 Continue`, sent twice; a closed connection fails at the second one.
        """
        if self._has_ended:  # each time that reading resumes
            return True
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or cycle.scope["http_version"] != "1.1":
            return False  # HTTP/1.0 has no 100 Continue
        self._has_ended = True
        self._probe_twice()
        return True

    def on_response_complete(self) -> None:
        """Answer the next request that has arrived; close the connection if a closed sending half sends no other."""
        super().on_response_complete()
        if self._has_ended and (self.cycle.response_complete or self.cycle.more_body):
            self.transport.close()
        elif self._has_ended:
            self._probe_twice()

    def _probe_twice(self) -> None:
        self.cycle.keep_alive = bool(self.conn.trailing_data[0])  # further requests
        self._probe()
        self.loop.call_later(_PROBE, self._probe)

    def _probe(self) -> None:
        if not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Stop the timer only when a request has begun."""
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if waiting is None:
            return
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_task = waiting
        else:
            waiting.cancel()


class Guard:
    """ASGI middleware that checks the API key, host, size and arrival time of a request, and writes the log.

    Args:
        settings: Keys and limits.
        refused: Called with the status of each failed request.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, refused: Callable[[int], None]) -> None:
        self._app = app
        self._settings = settings
        self._refused = refused
        self._keys = [_digest(key) for key in settings.api_keys]
        self._bytes = 0  # bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, and pass it on with its whole body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number, begin, status = secrets.token_hex(8), time.perf_counter(), 0
        notes: dict[str, Any] = {}
        state = scope.setdefault("state", {})
        state.update(notes=notes, bytes=0, number=number, tenant=None)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", number.encode())]
            await send(message)

        try:
            self._check_host(scope)
            self._check_key(scope)
            body = await self._body(scope, receive)
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # uvicorn sends no body
            await self._app(inner, _with_body(body, receive), answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except Exception as error:
            status = FAILED
            notes["error"] = error_summary(error)
            raise
        finally:
            self._bytes -= state["bytes"]
            if "error" not in notes:
                notes.pop("stage", None)
            if status >= 400:
                self._refused(status)
            seconds = round(time.perf_counter() - begin, 4)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = {"time": stamp, "id": number, "method": scope["method"], "path": scope["path"], "status": status}
            write_line(json.dumps({**entry, "seconds": seconds, **notes}))

    def _check_host(self, scope: Scope) -> None:
        """Refuse foreign host names on a local server without keys: DNS rebinding would let a web page read answers."""
        host = Headers(scope=scope).get("host")  # missing in HTTP/1.0, which no browser uses
        if host is None or self._keys or not self._settings.is_local or _is_loopback(host):
            return
        raise ApiError(
            403,
            f"Host: {host[:100]!r} is not a local address; use http://127.0.0.1, or start the server with "
            "--api-key-file, which permits any host",
            code="invalid_host",
        )

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, valid) for valid in self._keys]  # compare all, in constant time
        if scheme.lower() != "bearer" or not any(matches):
            message = "a valid API key is needed: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self._settings.memory_per_key:
            scope["state"]["tenant"] = matches.index(True)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Receive the whole body.

        Raises:
            ApiError: It is too large or too slow, or the bodies of all requests are too large together.
        """
        headers = Headers(scope=scope)
        limit = self._settings.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large", headers=CLOSE)
        length = int(headers.get("content-length", "0"))
        if length > limit and (length > _DISCARDED * limit or "expect" in headers):
            raise too_large
        parts: list[bytes] = []
        size, deadline, more = 0, time.monotonic() + self._settings.read_timeout, True
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
            except asyncio.TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="timeout", headers=CLOSE) from None
            if message["type"] == "http.disconnect":
                raise ApiError(CLIENT_CLOSED_REQUEST, "the client disconnected before its request had arrived")
            part = message.get("body", b"")
            size, more = size + len(part), message.get("more_body", False)
            if size > _DISCARDED * limit:
                raise too_large
            if max(size, length) <= limit:
                parts.append(part)
                self._count_bytes(scope, len(part))
        if size > limit:
            raise too_large
        if (coding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise ApiError(
                415,
                f"Content-Encoding: {coding[:100]!r} is not supported; send the body uncompressed",
                code="unsupported_media_type",
            )
        body = b"".join(parts)
        await asyncio.to_thread(_check_values, body)
        return body

    def _count_bytes(self, scope: Scope, size: int) -> None:
        """Count bytes of a body, which stays in memory until its answer is complete."""
        self._bytes += size
        scope["state"]["bytes"] += size
        if self._bytes > _BODIES * self._settings.max_body_bytes:
            headers = {"Retry-After": "2"} | CLOSE
            message = "the bodies of all requests are too large together; try again later"
            raise ApiError(429, message, code="overloaded", headers=headers)


_BODIES = 32
"""Limit for the bodies of all requests in memory, in bodies of the largest size."""

_DISCARDED = 8
"""Part of a too large body that is read and discarded, in largest sizes: clients read no answer while they send."""

_MAX_TEXTS = 2**16
"""Strings, lists and objects of a body. Each takes microseconds to check, while nothing else runs."""

_MAX_NUMBERS = 2**18
"""Commas outside strings; a prompt of token ids has many."""


def _check_values(body: bytes) -> None:
    """Refuse a body with too many values, which would block other requests while it is parsed.

    Raises:
        ApiError: It has too many values.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') <= 2 * _MAX_TEXTS:
        outside = b"".join(unescaped.split(b'"')[::2])  # without strings
        if outside.count(b"[") + outside.count(b"{") <= _MAX_TEXTS and outside.count(b",") <= _MAX_NUMBERS:
            return
    limits = f"{_MAX_TEXTS} texts, lists and objects, or {_MAX_NUMBERS} numbers"
    raise ApiError(400, f"the body has more than {limits}; split it into several requests", code="too_many_values")


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body first."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _is_loopback(host: str) -> bool:
    """Return whether a `Host` header names a loop-back address."""
    with suppress(ValueError):  # another name, or an invalid header
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
