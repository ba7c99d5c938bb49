"""A local Hub: repositories made of folders; some are slow, gated, or break off."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_CHUNK = 1 << 16


@dataclass
class Repository:
    """A repository with one commit.

    Attributes:
        files: Contents by name.
        branches: Names of its commit.
        gated: Whether all downloads are refused.
        pause: Seconds before each chunk of 64 kB.
        breaks: Number of downloads that break off in the middle of a file of several chunks; then the server is down.
        down: Whether downloads get a server error.
    """

    files: dict[str, bytes]
    branches: tuple[str, ...] = ("main",)
    gated: bool = False
    pause: float = 0.0
    breaks: int = 0
    down: bool = False

    @property
    def commit(self) -> str:
        """Hash of the contents."""
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@dataclass
class Hub:
    """A server while it runs.

    Attributes:
        url: Where it listens.
        repositories: Repositories by name; other commits as `NAME@BRANCH`.
        requested: Paths of all requests.
    """

    url: str
    repositories: dict[str, Repository]
    requested: list[str] = field(default_factory=list)


@contextmanager
def hub_server(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serve repositories at a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", repositories)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> Hub:
        hub = self.server.hub  # type: ignore[attr-defined]
        assert isinstance(hub, Hub)
        return hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self._hub.requested.append(path)
        of_api = path.startswith("/api/models/")
        name, _, rest = path.removeprefix("/api/models/").strip("/").partition("/resolve/" if not of_api else "\0")
        if of_api:
            parts = name.split("/")
            name, rest = "/".join(parts[:2]), "/".join(parts[2:])
        kind, _, revision = rest.partition("/") if of_api else ("", "", rest.partition("/")[0])
        commits = [commit for key, commit in self._hub.repositories.items() if key.partition("@")[0] == name]
        repository = next((one for one in commits if (revision or "main") in (*one.branches, one.commit)), None)
        if repository is None:
            self._fail(404 if commits else 401, "RevisionNotFound" if commits else "RepoNotFound")
        elif of_api:
            self._describe(name, repository, kind)
        else:
            self._give(repository, rest.partition("/")[2], first)

    def _describe(self, name: str, repository: Repository, kind: str) -> None:
        if kind == "tree":
            entries = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in repository.files.items()
            ]
            self._send_json(entries)
        else:
            siblings = [{"rfilename": file} for file in repository.files]
            self._send_json({"id": name, "sha": repository.commit, "siblings": siblings, "gated": repository.gated})

    def _give(self, repository: Repository, file: str, first: int) -> None:
        content = repository.files.get(file)
        if content is None:
            self._fail(404, "EntryNotFound")
        elif repository.gated:
            self._fail(403, "GatedRepo")
        elif repository.down:
            self._fail(503, "")
        else:
            self._send_file(repository, content, first)

    def _send_file(self, repository: Repository, content: bytes, first: int) -> None:
        part = content[first:]
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        breaks = repository.breaks > 0 and len(part) > _CHUNK
        if breaks:
            repository.breaks -= 1
            repository.down = repository.breaks == 0
            part = part[: len(part) // 2]
        for begin in range(0, len(part), _CHUNK):
            time.sleep(repository.pause)
            self.wfile.write(part[begin : begin + _CHUNK])
        if breaks:
            self.close_connection = True

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""
