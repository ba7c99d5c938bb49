"""The command of the examples with Ray, and their load run: several clients with one request after another each, and
one replica that is killed in the middle.

Every request must end in an answer or a clear error before its timeout; other requests count as hanging.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
from ray import serve

from lookahead.bench.rows import kept_lines
from lookahead.demo import demo_model_path

PROMPTS = (
    "def quicksort(items):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\n\ndef read_lines(path):\n",
    "def test_addition():\n",
)


@dataclass(frozen=True)
class Answer:
    """The end of a request (`"answered"`, `"error"` or `"hanging"`), its HTTP status, seconds, and content or error."""

    ended: str
    status: int
    seconds: float
    body: Any


def ask(port: int, path: str, body: dict[str, Any], headers: dict[str, str], timeout: float) -> Answer:
    """Send one request."""
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read()
        seconds = time.monotonic() - begin
        if response.status != 200:
            return Answer("error", response.status, seconds, text.decode(errors="replace")[:300])
        return Answer("answered", 200, seconds, json.loads(text))
    except TimeoutError:
        return Answer("hanging", 0, time.monotonic() - begin, "no answer before the timeout")
    except (OSError, http.client.HTTPException) as error:
        return Answer("error", 0, time.monotonic() - begin, repr(error))
    finally:
        connection.close()


def replicas_of(deployment: str) -> list[int]:
    """Return the process ids of a deployment's replicas on this machine, oldest first; their titles name it."""
    replicas = []
    for process in psutil.process_iter(["pid", "cmdline", "create_time", "uids"]):
        title = " ".join(process.info["cmdline"] or ())
        if title.startswith("ray::ServeReplica:") and deployment in title and process.info["uids"].real == os.getuid():
            replicas.append((process.info["create_time"], process.info["pid"]))
    return [pid for _, pid in sorted(replicas)]


def run(
    send: Callable[[int], Answer], kill: Callable[[], int], requests: int, clients: int, kill_after: int
) -> tuple[list[Answer], int]:
    """Send requests 0, 1, ... from several clients, and kill a replica after `kill_after` answers; return its id."""
    numbers, lock, killed = count(), threading.Lock(), []
    answers: list[Answer] = []

    def client() -> None:
        while (number := next(numbers)) < requests:
            answer = send(number)
            with lock:
                answers.append(answer)
                if len(answers) == kill_after:
                    killed.append(kill())

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, killed[0]


def kill_one(deployment: str) -> int:
    """Kill the oldest replica of a deployment, like a crash; return its process id."""
    pid = replicas_of(deployment)[0]
    os.kill(pid, signal.SIGKILL)
    return pid


def summary(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Return counts and latencies."""
    times = sorted(answer.seconds for answer in answers)
    row: dict[str, Any] = {"kind": "run", "requests": len(answers), "seconds": round(seconds, 2)}
    row |= {ended: sum(answer.ended == ended for answer in answers) for ended in ("answered", "error", "hanging")}
    row |= {"median_seconds": round(median(times), 3), "p99_seconds": round(times[int(0.99 * len(times))], 3)}
    row |= {"longest_seconds": round(times[-1], 3)}
    errors = [f"{answer.status}: {answer.body}" for answer in answers if answer.ended == "error"]
    row["errors"] = sorted({one.split(" (Request ID")[0][:200] for one in errors})
    return row


def main(
    about: str, name: str, address: str, start: Callable[[str], None], measure: Callable[[int, int], dict[str, Any]]
) -> None:
    """Run the command of an example.

    Args:
        about: Description in the help.
        name: Name of the example in its rows.
        address: Address of the server.
        start: Function that starts Ray and the deployments for a model folder.
        measure: Function that makes a load run with these numbers of requests and clients.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.output:  # refuse other files before the work
        kept_lines(options.output, lambda row: row.get("example") == name, restart=True)
    start(options.model)
    try:
        if not options.load:
            print(f"serving on {address}, Ctrl-C ends it")
            while True:
                time.sleep(1)
        row = {"example": name, **measure(options.requests, options.clients)}
        print(json.dumps(row, indent=1))
        if options.output:
            options.output.write_text(json.dumps(row) + "\n", encoding="utf-8")
    finally:
        serve.shutdown()
        ray.shutdown()
