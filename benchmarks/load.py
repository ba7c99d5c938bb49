"""Measure servers with a public load generator: so many users at once, each with one request after another.

guidellm sends the prompts to `lookahead serve` with drafts, to the same with `--preset autoregressive`, and to
`transformers serve`, which runs on the same model. Servers follow each other, each in a process of its own on the
loop-back interface; requests are greedy, stream, and are bounded in number, length and time. Times are those that users
see, so they are as quiet as the machine is; `cpu_seconds` is what the server's process took for all of its loads.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from lookahead.bench.rows import Row
from lookahead.demo import demo_model_path
from lookahead.errors import LookaheadError
from probe import Probe, Unit, option, prompts_of

START_SECONDS = 300
SERVERS = ("lookahead serve", "lookahead serve, no drafts", "transformers serve")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    guidellm: str = option("build/guidellm/bin/guidellm", "the load generator; `make build/guidellm` installs it")
    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    users: tuple[int, ...] = option((1, 8, 32), "users at once")
    requests: tuple[int, ...] = option((8, 24, 48), "requests of each of these loads")
    max_tokens: int = option(48, "tokens of an answer at most")
    seconds: int = option(40, "longest time of a load")


def command_of(server: str, model: str, port: int) -> list[str]:
    """What starts a server."""
    if server == "transformers serve":
        program = [str(Path(sys.executable).with_name("transformers")), "serve", model]
        return [*program, "--port", str(port), "--dtype", "float32", "--device", "cpu"]
    drafts = ["--preset", "autoregressive"] if "no drafts" in server else []
    program = [sys.executable, "-m", "lookahead", "serve", "--model", model, "--dtype", "float32"]
    return [*program, "--port", str(port), "--max-rows", "32", *drafts]


@contextmanager
def running(server: str, model: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address and its process.

    Raises:
        LookaheadError: It did not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command_of(server, model, port), stdout=quiet, stderr=quiet) as process:
        try:
            _wait(url, process)
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise LookaheadError(f"the server at {url} did not start")


class Bench:
    """The load, and what a server makes of it."""

    def __init__(self, options: Options, model: str) -> None:
        self._options, self._model = options, model

    def rows(self, server: str) -> Iterator[Row]:
        """A row for each number of users."""
        name = self._model if server == "transformers serve" else Path(self._model).name
        with running(server, self._model) as (url, process), tempfile.TemporaryDirectory() as folder:
            asked = {"model": name, "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "stream": False}
            httpx.post(f"{url}/v1/completions", json=asked, timeout=START_SECONDS).raise_for_status()
            before = sum(process.cpu_times()[:2])
            report = self._load(url, name, Path(folder))
            seconds = sum(process.cpu_times()[:2]) - before
        for benchmark, users in zip(report["benchmarks"], self._options.users, strict=True):
            yield self._row(server, users, benchmark, seconds)

    def _load(self, url: str, name: str, folder: Path) -> Any:
        options, prompts, report = self._options, folder / "prompts.jsonl", folder / "report.json"
        texts = [prompt.text for prompt in prompts_of(Path(options.prompts))]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        backend = {"kind": "openai_http", "target": url, "model": name, "request_format": "/v1/completions"}
        backend |= {"max_tokens": options.max_tokens, "extras": {"body": {"temperature": 0}}}
        limits = {"kind": "max_requests", "count": list(options.requests)}
        command = [options.guidellm, "run", "--disable-console", "--backend", json.dumps(backend)]
        command += ["--profile", json.dumps({"kind": "concurrent", "streams": list(options.users)})]
        command += ["--constraint", json.dumps(limits), "--constraint", f"kind=max_duration,seconds={options.seconds}"]
        command += ["--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"]
        home = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=home, check=True, capture_output=True)
        return json.loads(report.read_text(encoding="utf-8"))

    def _row(self, server: str, users: int, benchmark: Any, seconds: float) -> Row:
        told, counts = benchmark["metrics"], benchmark["metrics"]["request_totals"]

        def of(name: str, figure: str = "median") -> float:
            return float(told[name]["successful"][figure])

        tokens = of("output_token_count", "total_sum")
        row: Row = {"kind": "run", "server": server, "users": users, "requests": counts["successful"]}
        row |= {"not_completed": counts["errored"] + counts["incomplete"], "tokens": int(tokens)}
        row |= {"seconds": benchmark["duration"], "tokens_per_second": tokens / benchmark["duration"]}
        row |= {"first_token_ms": of("time_to_first_token_ms"), "per_token_ms": of("time_per_output_token_ms")}
        row |= {"latency_seconds": of("request_latency"), "cpu_seconds_of_all_loads": seconds}
        if counts["errored"]:
            row["error"] = f"{server}, {users} users: {counts['errored']} requests failed"
        return row


def probe(options: Options) -> Probe:
    """The units: each server."""
    model = str(demo_model_path())
    bench = Bench(options, model)
    units = [Unit(server, partial(bench.rows, server)) for server in SERVERS]
    about = {"model": "demo", "dtype": "float32", "servers": list(SERVERS), "max_tokens": options.max_tokens}
    return Probe(units, about)
