"""Measure servers with a public load generator: several concurrent users, each with one request after another.

guidellm sends prompts to `lookahead serve` with drafts, to the same with `--preset autoregressive`, and to
`transformers serve`, with the same model. Servers run one after another, each in its own process on the loop-back
interface, once per temperature and repeat. Requests stream, and have seed 0 if they are sampled; their number, length
and time are limited. A server gets no prompt twice. It has one core, and guidellm the others. Times are measured by the
client; `cpu_seconds` is the CPU time of the server's process.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

import lookahead
from cases import read_texts
from gpu_serving import START_SECONDS, free_address, wait_for
from lookahead.bench.rows import Row
from lookahead.demo import demo_model_path
from lookahead.errors import LookaheadError
from probe import Probe, Unit, option

PROMPT_CHARACTERS = 450
"""Length of a prompt of `own_prompts`, similar to prompts of HumanEval."""

GUIDELLM = {
    "latency_seconds": "request_latency",
    "first_token_ms": "time_to_first_token_ms",
    "per_token_ms": "time_per_output_token_ms",
}
"""Metrics from guidellm's report (medians), by field of the row."""

SERVERS = ("lookahead serve", "lookahead serve, no drafts", "transformers serve")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the probe."""

    guidellm: str = option("build/guidellm/bin/guidellm", "path of the load generator; `make bench-server` installs it")
    prompts: str = option("", "JSON lines with `id`, and `prompt` or `turns`; by default this library's source files")
    users: list[int] = option([1, 8, 32], "numbers of concurrent users")
    requests: list[int] = option([8, 24, 48], "number of requests for each number of users")
    max_tokens: int = option(48, "maximum tokens of an answer")
    temperatures: list[float] = option([0.0], "temperatures of sampling; 0: greedy")
    servers: list[str] = option(list(SERVERS), "servers to measure")
    seconds: int = option(60, "maximum seconds for each number of users")
    repeats: int = option(3, "number of measurements of each server")


def command_of(server: str, model: str, port: int) -> list[str]:
    """Command that starts a server."""
    if server == "transformers serve":
        program = [str(Path(sys.executable).with_name("transformers")), "serve", model]
        return [*program, "--port", str(port), "--dtype", "float32", "--device", "cpu"]
    drafts = ["--preset", "autoregressive"] if "no drafts" in server else []
    program = [sys.executable, "-m", "lookahead", "serve", "--model", model, "--dtype", "float32"]
    return [*program, "--port", str(port), "--max-rows", "32", *drafts]


@contextmanager
def running(server: str, model: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server, and yield its address and process.

    Raises:
        LookaheadError: The server did not start.
    """
    port, url = free_address()
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command_of(server, model, port), stdout=quiet, stderr=quiet) as process:
        try:
            wait_for(url, lambda: process.poll() is None)
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()


def pin(process: psutil.Process) -> None:
    """Pin a server to one core, and this process with its children to the others, if there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        for thread in process.threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores[:1])
        os.sched_setaffinity(0, cores[1:])


def own_prompts() -> list[str]:
    """Make prompts from the beginnings of this library's larger source files."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(lookahead.__file__).parent.rglob("*.py"))]
    return [text[:PROMPT_CHARACTERS] for text in texts if len(text) > 2 * PROMPT_CHARACTERS]


class Bench:
    """Load of prompts, and its measurement on a server."""

    def __init__(self, options: Options, model: str) -> None:
        self._options, self._model = options, model
        self._cores = os.sched_getaffinity(0)
        prompts = read_texts(Path(options.prompts)) if options.prompts else own_prompts()
        if len(prompts) <= sum(options.requests):
            raise LookaheadError(
                f"--prompts {options.prompts!r}: {len(prompts)} prompts; {sum(options.requests) + 1} are needed"
            )
        self._first, self._prompts = prompts[0], prompts[1:]

    def rows(self, server: str, temperature: float, repeat: int) -> Iterator[Row]:
        """Yield a row for each number of users."""
        name = self._model if server == "transformers serve" else Path(self._model).name
        os.sched_setaffinity(0, self._cores)
        with running(server, self._model) as (url, process):
            sampling = {"temperature": temperature, **({"seed": 0} if temperature else {})}
            request = {"model": name, "prompt": self._first, "max_tokens": 48, **sampling, "stream": False}
            for _ in range(2):
                httpx.post(f"{url}/v1/completions", json=request, timeout=START_SECONDS).raise_for_status()
            pin(process)
            start = 0
            for users, requests in zip(self._options.users, self._options.requests, strict=True):
                texts, start = self._prompts[start : start + requests], start + requests
                before = _seconds(process)
                with tempfile.TemporaryDirectory() as folder:
                    figures = self._load(url, name, texts, users, sampling, Path(folder))
                after = _seconds(process)
                row: Row = {
                    "kind": "run",
                    "server": server,
                    "temperature": temperature,
                    "repeat": repeat,
                    "users": users,
                }
                yield row | figures | {key: after[key] - before[key] for key in after}

    def _load(self, url: str, name: str, texts: Sequence[str], users: int, sampling: Row, folder: Path) -> Row:
        options = self._options
        prompts, report = folder / "prompts.jsonl", folder / "report.json"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        backend = {
            "kind": "openai_http",
            "target": url,
            "model": name,
            "request_format": "/v1/completions",
            "max_tokens": options.max_tokens,
            "extras": {"body": sampling},
        }
        command = [
            *(options.guidellm, "run", "--disable-console", "--backend", json.dumps(backend)),
            *("--profile", json.dumps({"kind": "concurrent", "streams": [users]})),
            *("--constraint", f"kind=max_requests,count={len(texts)}"),
            *("--constraint", f"kind=max_duration,seconds={options.seconds}"),
            *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"),
        ]
        home = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=home, check=True, capture_output=True)
        return self._figures(json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0])

    @staticmethod
    def _figures(benchmark: Any) -> Row:
        metrics, seconds = benchmark["metrics"], benchmark["duration"]
        counts = metrics.pop("request_totals")
        tokens = metrics["output_token_count"]["successful"]["total_sum"]
        row: Row = {
            "requests": counts["successful"],
            "not_completed": counts["errored"] + counts["incomplete"],
            "tokens": int(tokens),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            **{name: metrics[metric]["successful"]["median"] for name, metric in GUIDELLM.items()},
        }
        return row | ({"error": f"{counts['errored']} requests failed"} if counts["errored"] else {})


def _seconds(process: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of a server, and of the load generators."""
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu_seconds": sum(process.cpu_times()[:2]), "generator_cpu_seconds": times.ru_utime + times.ru_stime}


def probe(options: Options) -> Probe:
    """Make a unit for each repeat, temperature and server; servers alternate."""
    bench = Bench(options, str(demo_model_path()))
    units = [
        Unit(f"{server}, {temperature}, {repeat}", partial(bench.rows, server, temperature, repeat))
        for repeat in range(options.repeats)
        for temperature in options.temperatures
        for server in options.servers
    ]
    about = {"model": "demo", "dtype": "float32", "servers": list(options.servers), "max_tokens": options.max_tokens}
    return Probe(units, about)
