"""What stands before the application: what a request may ask for, keys, sizes and times, idle connections, the log."""

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

from lookahead.server.errors import CLIENT_LEFT, CLOSE, FAILED, ApiError, described
from lookahead.server.log import write_line

_PROBE = 0.1
"""Seconds in which a client that has gone says so to what it is sent."""

OPEN_PATHS = ("/health", "/", "/page/page.js", "/page/page.css", "/page/icon.svg")
"""What may be asked for without a key."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; any free one if 0.
        api_keys: Keys of which clients have to name one; none are asked for if there are none.
        cors_origin: Origins of web pages that may read answers, `*` for all.
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
        """Whether no other machine can reach it."""
        return self.host in ("127.0.0.1", "::1", "localhost")


class GuardedProtocol(H11Protocol):
    """Closes connections on which no request has begun for a while: its head must have arrived. uvicorn does so after a
    response alone, and up to the first byte of the next request. Ends those whose client does not read. Answers those
    whose client has ended its half of the connection.

    Args:
        patience: Seconds in which a client must have read what waits for it.
    """

    def __init__(self, *arguments: Any, patience: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patience = patience
        self._unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """See uvicorn: there is more to write than a client has read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        """See uvicorn."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """See asyncio. The client has gone, or sends no more and waits for its answer, which looks alike. It is told to
        go on, twice: a connection that it has left fails at the second time."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or cycle.scope["http_version"] != "1.1":
            return False  # also of a version in which there is nothing to be told before an answer
        cycle.keep_alive = False
        self._tell_to_go_on()
        self.loop.call_later(_PROBE, self._tell_to_go_on)
        return True

    def _tell_to_go_on(self) -> None:
        if not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

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


class Guard:
    """Lets a request through that names a key, and arrives whole, in time, and not too large.

    Args:
        settings: Keys and limits.
        refused: Told the status of each request that is not let through.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, refused: Callable[[int], None]) -> None:
        self._app, self._settings, self._refused = app, settings, refused
        self._keys = [_digest(key) for key in settings.api_keys]
        self._bytes = 0  # of bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number, begin, status = secrets.token_hex(8), time.perf_counter(), 0
        notes: dict[str, Any] = {}
        state = scope.setdefault("state", {})
        state.update(notes=notes, bytes=0, number=number)

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
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # its body is not sent
            await self._app(asked, _with_body(body, receive), answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except Exception as error:
            status = FAILED
            notes["error"] = described(error)
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
        """Refuse what a web page asks of this machine under a name of its own, which it has resolve to here (DNS
        rebinding): the browser would let it read the answer. Where a key is asked for, it has none."""
        host = Headers(scope=scope).get("host")  # none with HTTP/1.0, which browsers do not speak
        if host is None or self._keys or not self._settings.is_local or _is_loopback(host):
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
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, key) for key in self._keys]  # all of them: the time says nothing
        if scheme.lower() != "bearer" or not any(matches):
            message = "this server asks for an API key that it knows, as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request.

        Raises:
            ApiError: It is too large, or takes too long; or there is too much of others.
        """
        most, headers = self._settings.max_body_bytes, Headers(scope=scope)
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large", headers=CLOSE)
        length = int(headers.get("content-length", "0"))
        if length > most and (length > _READ_ON * most or "expect" in headers):
            raise too_large
        parts: list[bytes] = []
        size, deadline, more = 0, time.monotonic() + self._settings.read_timeout, True
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
            except asyncio.TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="timeout", headers=CLOSE) from None
            if message["type"] == "http.disconnect":
                raise ApiError(CLIENT_LEFT, "the client has gone before its request had arrived")
            part = message.get("body", b"")
            size, more = size + len(part), message.get("more_body", False)
            if size > _READ_ON * most:
                raise too_large
            if max(size, length) <= most:
                parts.append(part)
                self._count_bytes(scope, len(part))
        if size > most:
            raise too_large
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(
                415, f"the body is sent as {coding[:100]!r}; send it as it is", code="unsupported_media_type"
            )
        body = b"".join(parts)
        await asyncio.to_thread(_check_values, body)
        return body

    def _count_bytes(self, scope: Scope, size: int) -> None:
        """Count bytes of a body, which is in memory until its request has been answered."""
        self._bytes += size
        scope["state"]["bytes"] += size
        if self._bytes > _BODIES * self._settings.max_body_bytes:
            headers = {"Retry-After": "2"} | CLOSE
            raise ApiError(429, "other requests are too large; try again later", code="overloaded", headers=headers)


_BODIES = 32
"""Bodies of the largest size that are in memory at once, all bodies counted."""

_READ_ON = 8
"""Bodies of the largest size that are read, though not kept, of one that is larger: clients that still send do not see
what they are answered."""

_MOST_TEXTS = 2**16
"""Texts of a body, and lists and objects, each of which takes microseconds to check. Nothing else is done meanwhile."""

_MOST_NUMBERS = 2**18
"""Commas, of which a prompt of token ids has many."""


def _check_values(body: bytes) -> None:
    """Refuse a body whose parts would take long to read.

    Raises:
        ApiError: It has too many.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') <= 2 * _MOST_TEXTS:
        between = b"".join(unescaped.split(b'"')[::2])  # texts
        if between.count(b"[") + between.count(b"{") <= _MOST_TEXTS and between.count(b",") <= _MOST_NUMBERS:
            return
    said = (
        f"the body has more than {_MOST_TEXTS} texts, lists and objects, or {_MOST_NUMBERS} numbers; send less at once"
    )
    raise ApiError(400, said, code="too_many_values")


def _with_body(body: bytes, receive: Receive) -> Receive:
    """`receive` for a request whose body has arrived."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _is_loopback(host: str) -> bool:
    """Whether the value of a `Host` header names this machine alone."""
    with suppress(ValueError):  # a name, or nothing of the kind
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
