"""Entry points with a call per row: requests to an `Engine`, and calls from several threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from transformers import PreTrainedModel

from compared.calls import Answer, Prepared, call, prepare, prepared_answer
from compared.case import UNDO, Turn
from compared.changes import change
from lookahead import Engine, LookaheadConfig, RequestHandle

STEPS, SECONDS = 2000, 120.0
"""Limits in steps and seconds; a request unfinished by then counts as lost."""


@dataclass
class Served:
    """The result of a row.

    Attributes:
        answer: The answer or the exception.
        tokens: New tokens before the end, of a request.
        early: Whether the row ended before the model changed.
    """

    answer: Answer | Exception
    tokens: Sequence[int] = ()
    early: bool = False


class Doors(ExitStack):
    """Run the rows of turns with `model`, and change it and `reference`; later turns reuse the `Engine`.

    Changes are undone at the end.

    Args:
        model, reference: The models.
        seed: Seed of the changes.
        options: Options of the `Engine`. `kv_tokens` is the size of its KV cache in tokens.

    Attributes:
        counts: Counts of events in the `Engine`.
        flaws: Impossible values of its handles and its load.
    """

    def __init__(
        self, model: PreTrainedModel, reference: PreTrainedModel, seed: int, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.model, self.reference, self._seed = model, reference, seed
        self.counts: Counter[str] = Counter()
        self.flaws: list[str] = []
        self._options = options or {"max_rows": 3}
        self._room: int | None = None
        self._engine: Engine | None = None
        self._changes = ExitStack()
        self._threads = self.enter_context(ThreadPoolExecutor(4))
        self.callback(self._stop)

    def _stop(self) -> None:
        self._changes.close()
        if self._engine is not None and self._engine.started:
            self._engine.close(cancel=True)

    def change(self, name: str) -> None:
        """Change both models, or undo the change.

        Raises:
            CannotBuild: The change does not fit the model.
        """
        if name == UNDO:
            self._changes.close()
            return
        for model in (self.model, self.reference):
            self._changes.callback(change(model, name, self._seed))

    def serve(self, turn: Turn, rows: list[Turn] | None = None) -> list[Served]:
        """Return the results of the rows of `turn`, or of `rows` if not None; `turn` may change the models."""
        rows = turn.rows if rows is None else rows
        if turn.entry == "threads":
            return list(
                self._threads.map(lambda row: Served(_of_several(attempt(call, self.model, row, None, True))), rows)
            )
        prepared = [prepare(self.model, row, None) for row in rows]  # sets the image token of the model
        if self._engine is None:
            engine = attempt(self._make, turn)
            if isinstance(engine, Exception):
                return [Served(engine) for _ in rows]
            self._engine = engine
        if turn.entry == "started engine":
            self._engine.start()
            return list(self._threads.map(self._wait, rows, prepared))
        return self._step(turn, rows, prepared)

    def _make(self, turn: Turn) -> Engine:
        options = dict(self._options)
        tokens = options.pop("kv_tokens", None)
        if tokens is not None:
            self._room = options["kv_bytes"] = tokens * token_bytes(self.model)
        return Engine(self.model, LookaheadConfig(**turn.drafting), **options)

    def _submit(self, row: Turn, prepared: Prepared) -> RequestHandle:
        assert self._engine is not None
        read = {"input_ids" if name == "inputs" else name: value for name, value in prepared.read.items()}
        config = LookaheadConfig(**row.drafting)
        seed = row.settings.get("seed", 0)
        return self._engine.submit(**read, **prepared.values, **row.extras, seed=seed, lookahead_config=config)

    def _wait(self, row: Turn, prepared: Prepared) -> Served:
        handle = attempt(self._submit, row, prepared)
        if isinstance(handle, Exception):
            return Served(handle)
        ended = Event()
        handle.add_done_callback(ended.set)
        ended.wait(SECONDS)
        return self._ended(row, prepared, handle)

    def _step(self, turn: Turn, rows: list[Turn], prepared: list[Prepared]) -> list[Served]:
        assert self._engine is not None
        handles: dict[int, RequestHandle | Exception] = {}
        early: list[bool] = []
        for step in range(STEPS):
            for number, row in enumerate(rows):
                if row.arrival == step:
                    handles[number] = attempt(self._submit, row, prepared[number])
                elif row.cancelled is not None and row.arrival + row.cancelled == step:
                    handles[number].cancel()
            if step == turn.change_after:
                submitted = (handles.get(number) for number in range(len(rows)))
                # a request has the generation configuration of its submission
                kept = "generation configuration" in (turn.change or "")
                early = [isinstance(handle, RequestHandle) and (kept or handle.done) for handle in submitted]
                self.change(turn.change)
            with suppress(Exception):  # requests report the error
                self._engine.step()
            load = self._engine.load
            if self._room is not None and load.kv_bytes + load.prefix_bytes > self._room:
                self.flaws.append(f"{load.kv_bytes + load.prefix_bytes} bytes held where there are {self._room}")
            ended = all(isinstance(handle, Exception) or handle.done for handle in handles.values())
            if ended and len(handles) == len(rows) and step >= (turn.change_after or 0):
                break
        for name in ("preempted", "reused_tokens"):
            self.counts[name] += getattr(self._engine.statistics, name)
        served = []
        for number, row in enumerate(rows):
            handle = handles[number]
            failed = isinstance(handle, Exception)
            served.append(Served(handle) if failed else self._ended(row, prepared[number], handle))
        for one, before in zip(served, early, strict=False):
            one.early = before
        return served

    def _ended(self, row: Turn, prepared: Prepared, handle: RequestHandle) -> Served:
        if not handle.done:
            return Served(RuntimeError("the request never ended"), handle.tokens)
        answer = attempt(lambda: prepared_answer(self.model, prepared, handle.result()))
        self.counts["cancelled"] += handle.cancelled
        reasons: tuple[str, ...] = ("error",)
        if isinstance(answer, CancelledError):
            reasons = ("cancelled",)
        elif isinstance(answer, Answer):
            full = answer.new_tokens == row.settings["max_new_tokens"]
            reasons = ("length", "stop") if full else ("stop",)
            if answer.text != handle.tokens or handle.statistics.tokens != len(handle.tokens):
                self.flaws.append(f"its handle has the tokens {handle.tokens}")
        if handle.finish_reason not in reasons:
            self.flaws.append(f"a request ended for {handle.finish_reason!r}, and not for one of {reasons}")
        return Served(_of_several(answer), handle.tokens)


@torch.no_grad()
def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a token's keys and values in transformers' cache."""
    cache = model(torch.tensor([[1, 2]]), use_cache=True).past_key_values
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return max(sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // 2, 1)


def attempt(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `make`, or its exception."""
    try:
        return make(*args, **kwargs)
    except Exception as error:
        return error


def _of_several(answer: Any) -> Any:
    if isinstance(answer, Answer):
        answer.random_state = None
    return answer


def is_beginning(tokens: Sequence[int], answer: Answer) -> bool:
    """Return whether the new tokens of `answer`, which has one row, begin with `tokens`."""
    return answer.text[: len(tokens)] == list(tokens)
