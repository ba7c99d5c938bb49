"""Clients that stream from `lookahead serve` with a scripted model, which runs in another process."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import httpx

from cases import Case
from lookahead import Engine, LookaheadConfig
from lookahead.bench.rows import Row
from lookahead.errors import LookaheadError
from models import load_tokenizer
from scripted import scripted, scripted_model

START_SECONDS = 300


def serve(device: str, shapes: str, config: LookaheadConfig, cases: Sequence[Case], port: int) -> None:
    """Serve a model that writes these texts, in the ids of the demo model's tokenizer."""
    from lookahead.server.guard import ServerSettings
    from lookahead.server.process import bind
    from lookahead.server.process import serve as serve_models
    from lookahead.server.served_model import ServedModel

    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # the server's log
    tokenizer = load_tokenizer("demo")
    model, _ = scripted(scripted_model(shapes, "bfloat16", device), cases, len(tokenizer))
    engine = Engine(model, config, max_rows=len(cases))
    served = ServedModel(
        path=Path("scripted"), model=model, tokenizer=tokenizer, name="scripted", engine=engine, config=config
    )
    settings = ServerSettings(port=port, max_rows=len(cases))
    serve_models([served], settings, bind(settings))


def free_address() -> tuple[int, str]:
    """Return a free port of this machine, and the address of a server that listens there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return port, f"http://127.0.0.1:{port}"


def wait_for(url: str, is_running: Callable[[], bool]) -> None:
    """Wait until a server answers.

    Args:
        url: Its address.
        is_running: Whether its process still runs.

    Raises:
        LookaheadError: It did not start.
    """
    end = perf_counter() + START_SECONDS
    while perf_counter() < end and is_running():
        try:
            httpx.get(f"{url}/health").raise_for_status()
            return
        except httpx.HTTPError:
            sleep(0.2)
    raise LookaheadError(f"the server at {url} did not start")


def stream(url: str, case: Case) -> tuple[int, float, float]:
    """Stream an answer, and return its tokens, the seconds to the first event with a choice, and all seconds."""
    request = {"model": "scripted", "prompt": list(case.prompt), "max_tokens": len(case.answer), "temperature": 0}
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    begin, first, tokens = perf_counter(), 0.0, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=START_SECONDS) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                first = first or perf_counter() - begin
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return tokens, first, perf_counter() - begin


def stream_rows(
    device: str, shapes: str, name: str, config: LookaheadConfig, read: Callable[[], list[Case]]
) -> Iterator[Row]:
    """Yield figures of one client for each text, all at once, three times.

    Raises:
        LookaheadError: The server did not start.
    """
    cases = read()
    _, renamed = scripted(scripted_model("tiny", "float32", "cpu"), cases, len(load_tokenizer("demo")))
    port, url = free_address()
    arguments: tuple[Any, ...] = (device, shapes, config, cases, port)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
    process.start()
    try:
        wait_for(url, process.is_alive)
        with ThreadPoolExecutor(len(cases)) as clients:
            for repeat in range(3):
                begin = perf_counter()
                answers = list(clients.map(partial(stream, url), renamed))
                seconds = perf_counter() - begin
                tokens, first, whole = zip(*answers, strict=True)
                yield {
                    "kind": "serve",
                    "method": name,
                    "clients": len(cases),
                    "repeat": repeat,
                    "tokens": sum(tokens),
                    "seconds": seconds,
                    "first_token_ms": 1000 * median(first),
                    "max_first_token_ms": 1000 * max(first),
                    "answer_seconds": median(whole),
                }
    finally:
        process.terminate()
        process.join(START_SECONDS)
