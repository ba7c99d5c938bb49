"""`generate` and `chat` with a model that `lookahead serve` serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from http.client import HTTPException
from time import perf_counter
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from lookahead.cli import process
from lookahead.cli.chat import Turn
from lookahead.cli.inputs import read_api_keys
from lookahead.cli.rendering import Consoles, TextPrinter, counts_line, print_json
from lookahead.cli.settings import DRAWING, ChatSettings, DecodingSettings, GenerateSettings
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, LookaheadError

_SENT = (
    *("argv", "server", "api_key_file", "prompt", "file", "system", "json", "no_color", "config"),
    *("sample", *DRAWING, "sampling_seed", "repetition_penalty", "stop", "max_new_tokens"),
)
"""Settings that mean something to a server, or to what is printed."""


@dataclass
class RemoteAnswer:
    """What came of a request.

    Attributes:
        text: The text so far.
        steps: Steps so far.
        tokens: Tokens so far.
        seconds: Wall time.
        complete: Whether it came to its end.
    """

    text: str = ""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    complete: bool = False

    @property
    def line(self) -> str:
        """One line about it."""
        return f"{counts_line(self.tokens, self.steps, self.seconds)}, {self.seconds:.2f} s"

    def report(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        compression = self.tokens / max(self.steps, 1)
        return {**asdict(self), "step_compression": compression, "tokens_per_second": self.tokens / self.seconds}


class Remote:
    """The server that the settings name.

    Raises:
        InvalidArgumentError: There are options about this machine, or those that say where it is cannot be right.
        LookaheadError: It cannot be reached.
    """

    def __init__(self, settings: GenerateSettings | ChatSettings) -> None:
        for field in fields(settings):
            if field.name not in _SENT and getattr(settings, field.name) != field.default:
                name = "--" + field.name.replace("_", "-")
                raise InvalidArgumentError(f"{name} is about a model on this machine; leave it out with --server")
        config = settings.config
        plain = LookaheadConfig(config.preset, config.step_budget)
        if replace(config, memory=plain.memory) != plain or config.memory not in ("request", "process"):
            raise InvalidArgumentError(
                "with --server only --preset and --step-budget say how to draft; leave the others out"
            )
        url = settings.server or ""
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError(f"--server {url}: must begin with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        for key in read_api_keys(settings.api_key_file)[:1]:
            self._headers["Authorization"] = f"Bearer {key}"
        with self._open("/v1/models", None) as found:
            self.model = str(json.load(found)["data"][0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer as they come."""
        with self._open(path, json.dumps(body | {"model": self.model, "stream": True}).encode()) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if line.startswith(b"data: ") and data != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise InvalidArgumentError(f"--server {self._url}: {event['error']['message']}")
                    yield event

    @contextmanager
    def _open(self, path: str, body: bytes | None) -> Iterator[Any]:
        try:
            with urlopen(Request(self._url + path, body, self._headers)) as answer:
                yield answer
        except HTTPError as error:
            message = error.read().decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):  # of a server that has other errors
                message = json.loads(message)["error"]["message"]
            raise InvalidArgumentError(f"--server {self._url}: {message}") from error
        except (HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            raise LookaheadError(f"--server {self._url}: cannot be reached, or went away: {reason}") from error


def request_body(settings: DecodingSettings) -> dict[str, Any]:
    """What the settings ask a server for."""
    drafting = {"preset": settings.config.preset, "step_budget": settings.config.step_budget, "steps": True}
    body = {"temperature": 0} if settings.sampling is None else settings.sampling
    body |= {"seed": settings.sampling_seed, "max_tokens": settings.max_new_tokens, "lookahead": drafting}
    return body | {"repetition_penalty": settings.repetition_penalty, "stop": settings.stop}


def answer(remote: Remote, path: str, body: dict[str, Any], consoles: Consoles | None) -> RemoteAnswer:
    """Ask, and print the answer as it comes if there are consoles. Ctrl-C ends it."""
    made, start = RemoteAnswer(), perf_counter()
    printer = None if consoles is None else TextPrinter(consoles.out)
    try:
        for event in remote.stream(path, body):
            made.steps += "lookahead" in event
            made.tokens += event.get("lookahead", {}).get("tokens", 0)
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                made.text += piece
                if printer is not None:
                    printer.show(piece)
                made.complete |= choice["finish_reason"] is not None
    except KeyboardInterrupt:
        made.complete = False
    made.seconds = perf_counter() - start
    if printer is not None:
        printer.finish()
    return made


def generate(settings: GenerateSettings, text: str) -> int:
    """`lookahead generate --server`."""
    consoles = Consoles.create(no_color=settings.no_color)
    remote = Remote(settings)
    process.raise_on_interrupt()
    body = request_body(settings) | {"prompt": text}
    made = answer(remote, "/v1/completions", body, None if settings.json else consoles)
    if settings.json:
        print_json(consoles.out, {"prompt": text, "server": settings.server, "model": remote.model} | made.report())
    else:
        consoles.notes.print(made.line if made.complete else f"interrupted: {made.line}", style="dim")
    return process.OK if made.complete else process.INTERRUPTED


class RemotePartner:
    """A server; see `chat.Partner`.

    Args:
        settings: Which one, and what to ask it for.
    """

    def __init__(self, settings: ChatSettings) -> None:
        self._remote, self._body = Remote(settings), request_body(settings)
        self._begin = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        self.name = self._remote.model
        self.reset()
        process.raise_on_interrupt()

    def reset(self) -> None:
        """See `chat.Partner`."""
        self._messages = list(self._begin)

    def turn(self, text: str, consoles: Consoles | None) -> Turn:
        """See `chat.Partner`."""
        said = [*self._messages, {"role": "user", "content": text}]
        made = answer(self._remote, "/v1/chat/completions", self._body | {"messages": said}, consoles)
        self._messages = [*said, {"role": "assistant", "content": made.text}]
        return Turn({"prompt": text} | made.report(), made.line, not made.complete)
