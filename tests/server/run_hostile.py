"""Send hostile and random requests to a server process: `make test-hostile`.

Each part prints its result. The exit status is 1 if the server failed, grew beyond its bound, or stopped serving
other clients. `--only` runs some parts: names of functions here, or paths of routes.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from server_process import ServerProcess

MOST_GROWTH = 300 * 10**6
"""Largest growth of a server, in bytes; a stored body of 100 MB would exceed it."""

WEIGHTS = {
    "/v1/chat/completions": 8,
    "/v1/completions": 8,
    "/v1/responses": 8,
    "/v1/messages": 8,
    "/v1/messages/count_tokens": 2,
    "/tokenize": 4,
    "/detokenize": 2,
    "/v1/models/{name}": 1,
}
"""Shares of the random requests. Paths without input get one request."""

REQUEST = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}


class Target:
    """A server, with a check that it still serves."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.http = httpx.Client(base_url=process.url, timeout=60)
        self.expected = self.serve()
        self._before = self.memory

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.process.process.pid).memory_info().rss)

    @property
    def grown(self) -> int:
        return self.memory - self._before

    def serve(self) -> str:
        """Return the text for a well-behaved client."""
        answer = self.http.post("/v1/completions", json=REQUEST)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    def connect(self) -> socket.socket:
        address = urlsplit(self.process.url)
        return socket.create_connection((address.hostname, address.port), timeout=60)


def large_body(target: Target) -> None:
    """100 MB, with and without a Content-Length."""
    assert target.http.post("/v1/completions", content=b"x" * 100_000_000).status_code == 413
    parts = (b"x" * 1_000_000 for _ in range(100))
    with suppress(httpx.TransportError):  # closed on the way
        assert target.http.post("/v1/completions", content=parts).status_code == 413


def many_stops(target: Target) -> None:
    """A million stop strings, within the size of a body."""
    body = json.dumps(REQUEST | {"stop": []})[:-2] + ",".join(['"a"'] * 1_000_000) + "]}"
    answer = target.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "too_many_values"


def bad_bytes(target: Target) -> None:
    """Bytes that are no UTF-8, deep nesting, huge numbers, lone surrogates."""
    numbers = b'{"model": "demo", "prompt": "x", "seed": ' + b"9" * 5000 + b"}"
    surrogate = b'{"model": "demo", "prompt": "\\ud800", "max_tokens": 1}'
    for body in (b'{"model": "\xff\xfe"}', b"[" * 1_000_000, b'{"a":' * 100_000, numbers, b"\x00" * 1000, surrogate):
        answer = target.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400), (body[:40], answer.text[:200])


def silent_connections(target: Target) -> None:
    """1,000 connections that send nothing."""
    silent = [target.connect() for _ in range(1000)]
    assert target.serve() == target.expected
    time.sleep(6)
    closed = sum(connection.recv(1) == b"" for connection in silent)
    assert closed == len(silent)
    for connection in silent:
        connection.close()


def slow_readers(target: Target) -> None:
    """Clients that read one byte a second."""
    body = json.dumps(REQUEST | {"max_tokens": 64, "stream": True, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    readers = [target.connect() for _ in range(4)]
    for reader in readers:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.sendall(head.encode() + b"\r\n\r\n" + body)
    for _ in range(8):
        for reader in readers:
            assert reader.recv(1)
        time.sleep(1)
    assert target.serve() == target.expected
    for reader in readers:
        reader.close()


def many_at_once(target: Target) -> None:
    """64 clients at once, each with the same text as by itself."""
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(target.serve())) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [target.expected] * 64


def random_requests(target: Target, cases: int, only: Collection[str]) -> None:
    """Requests made from the server's own OpenAPI document: none may cause a server error."""
    schema = schemathesis.openapi.from_url(f"{target.process.url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    shares = sum(WEIGHTS.get(operation.path, 0) for operation in operations)
    for operation in operations:
        if only and operation.path not in only:
            continue
        begin, statuses = time.monotonic(), Counter[int]()
        _try_operation(operation, max(-(-cases * WEIGHTS.get(operation.path, 0) // shares), 1), statuses)
        summary = f"{sum(statuses.values())} in {time.monotonic() - begin:.0f} s, {dict(sorted(statuses.items()))}"
        print(f"  {operation.method.upper()} {operation.path}: {summary}", flush=True)


def _try_operation(operation: Any, examples: int, statuses: Counter[int]) -> None:
    chooser = random.Random(0)

    @seed(0)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body and chooser.random() < 0.9:
            case.body["model"] = "demo"
        status = case.call(timeout=120).status_code
        statuses[status] += 1
        assert status < 500, case.as_curl_command()

    check()


def main() -> int:
    """Run all parts against one server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000, help="random requests (3000)")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="names of parts, or paths of routes")
    arguments = parser.parse_args()
    cases, only = arguments.cases, arguments.only
    failed = 0
    memory = ("--kv-bytes", str(2**27))  # without a bound, cached prefixes may take 1 GiB
    options = ("--dtype", "float32", "--read-timeout", "4", "--max-new-tokens", "64", "--step-budget", "8", *memory)
    with ServerProcess(*options, from_scratch=True) as process:
        target = Target(process)
        parts: list[Callable[[Target], None]] = [large_body, many_stops, bad_bytes, silent_connections, slow_readers]
        parts = [part for part in (*parts, many_at_once) if not only or part.__name__ in only]
        if not only or any(name.startswith("/") for name in only):
            parts.append(lambda target: random_requests(target, cases, only))
        for part in parts:
            name = (part.__doc__ or "Random requests.").strip().splitlines()[0]
            try:
                part(target)
                assert target.serve() == target.expected
                assert target.grown < MOST_GROWTH, f"grew by {target.grown} bytes"
                print(f"ok: {name} Memory {target.grown / 2**20:+.0f} MiB", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED: {name} {type(error).__name__}: {error}", flush=True)
        log = "".join(line for line in process.lines if not line.startswith("{"))
        if "Traceback" in log:
            failed += 1
            print(f"FAILED: there are errors in the log:\n{log[-5000:]}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
