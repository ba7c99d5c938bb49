"""A forked process that uses an inherited Engine gets an error at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from lookahead import Engine, InvalidArgumentError, RequestHandle
from model_zoo import build
from quick import diagonal

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
PROMPT = [3, 14, 15, 9, 2, 6]
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


def in_a_fork(act: Callable[[], object]) -> str:
    """Run `act` in a fork of this process; return its result, or the name and message of its error."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = repr(act())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 120
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return "no answer within two minutes"
        time.sleep(0.01)
    with os.fdopen(read) as answer:
        return answer.read()


async def _wait(handle: RequestHandle) -> None:
    await handle.wait()


async def _read(handle: RequestHandle) -> list[int]:
    return [token async for token in handle]


USES: dict[str, Callable[[Engine, RequestHandle], object]] = {
    "submit": lambda engine, handle: engine.submit(PROMPT, **OPTIONS),
    "step": lambda engine, handle: engine.step(),
    "run": lambda engine, handle: engine.run(),
    "start": lambda engine, handle: engine.start(),
    "close": lambda engine, handle: engine.close(),
    "result": lambda engine, handle: handle.result(),
    "tokens": lambda engine, handle: list(handle),
    "cancel": lambda engine, handle: handle.cancel(),
    "wait": lambda engine, handle: asyncio.run(_wait(handle)),
    "events": lambda engine, handle: asyncio.run(_read(handle)),
}


@pytest.mark.parametrize(("use", "held"), diagonal(USES, [False, True]))
def test_a_forked_process_cannot_use_the_engine(use: str, held: bool) -> None:
    engine, answers = Engine(build("llama")), list[str]()

    def ask(*_: object) -> None:
        act = lambda: USES[use](engine, handle)  # noqa: E731
        if not answers:
            answers.append(in_a_fork(lambda: _in_another_thread(act) if held else act()))

    handle = engine.submit(PROMPT, **OPTIONS, on_step=ask if held else None)
    if held:
        engine.step()  # as a thread of the parent's may hold locks, which no fork has
    else:
        ask()
    (answer,) = answers
    assert answer.startswith(InvalidArgumentError.__name__), answer
    assert f"process {os.getpid()}" in answer
    assert "spawn" in answer


def _in_another_thread(act: Callable[[], object]) -> object:
    """Run `act` in another thread, because this one holds the locks and could acquire them again."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result(60)


def test_finished_results_are_readable_and_the_parent_goes_on() -> None:
    with Engine(build("llama")) as engine:
        handle = engine.submit(PROMPT, **OPTIONS)
        text = handle.result()[0].tolist()
        assert in_a_fork(lambda: (handle.result()[0].tolist(), handle.tokens)) == repr((text, text[len(PROMPT) :]))
        assert in_a_fork(lambda: engine.__exit__(None, None, None)) == "None"
        assert engine.submit(PROMPT, **OPTIONS).result()[0].tolist() == text
