"""What whoever starts the server chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from lookahead.server.plan import Limits


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; any free one if 0.
        api_keys: Keys of which clients have to name one; none are asked for if there are none.
        limits: What a request may ask for.
        body_bytes: Most bytes of a request.
        queue: Most answers that wait for their turn, beside those that run. More are refused with status 429.
        timeout: Seconds after which a request is given up.
        read_timeout: Seconds in which a request must have arrived.
        rows: Answers that are made at once.
        open_paths: What may be asked for without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    body_bytes: int = 8 * 2**20
    queue: int = 128
    timeout: float = 600.0
    read_timeout: float = 30.0
    rows: int = 16
    open_paths: tuple[str, ...] = ("/health", "/", "/page/page.js", "/page/page.css")

    @property
    def is_local(self) -> bool:
        """Whether no other machine can reach it."""
        return self.host in ("127.0.0.1", "::1", "localhost")
