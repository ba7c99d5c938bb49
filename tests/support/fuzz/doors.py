"""Calls of which each row is one of its own: requests to an `Engine`, and calls from several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

from transformers import PreTrainedModel

from fuzz.calls import Answer, Prepared, call, prepare, prepared_answer
from fuzz.case import UNDO, Turn
from fuzz.changes import change
from lookahead import Engine, LookaheadConfig, RequestHandle

STEPS, SECONDS = 2000, 120.0
"""After how many steps, or how much time, a request that has not ended counts as lost."""


@dataclass
class Served:
    """What became of a row.

    Attributes:
        answer: Its answer, or what was raised.
        tokens: Its new tokens before that, if it was a request.
        early: Whether it had ended before the model changed.
    """

    answer: Answer | Exception
    tokens: Sequence[int] = ()
    early: bool = False


class Doors(ExitStack):
    """How the rows of turns come to `model`, and changes to it and to `reference`; an `Engine` stays for later turns.

    Changes are taken back in the end.
    """

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel, seed: int) -> None:
        super().__init__()
        self.model, self.reference, self._seed = model, reference, seed
        self._engine: Engine | None = None
        self._changes = ExitStack()
        self._threads = self.enter_context(ThreadPoolExecutor(4))
        self.callback(self._stop)

    def _stop(self) -> None:
        self._changes.close()
        if self._engine is not None and self._engine.started:
            self._engine.close(cancel=True)

    def change(self, name: str) -> None:
        """Change both models, or undo that.

        Raises:
            CannotBuild: They cannot be changed so.
        """
        if name == UNDO:
            self._changes.close()
            return
        for model in (self.model, self.reference):
            self._changes.callback(change(model, name, self._seed))

    def serve(self, turn: Turn) -> list[Served]:
        """What becomes of each row of `turn`; the models change when it says so."""
        rows = turn.rows
        if turn.entry == "threads":
            return list(self._threads.map(lambda row: Served(attempt(_alone, self.model, row)), rows))
        prepared = [prepare(self.model, row, None) for row in rows]  # which sets the image token of the model
        if self._engine is None:
            engine = attempt(Engine, self.model, LookaheadConfig(**turn.drafting), max_rows=3)
            if isinstance(engine, Exception):
                return [Served(engine) for _ in rows]
            self._engine = engine
        if turn.entry == "started engine":
            self._engine.start()
            return list(self._threads.map(self._wait, rows, prepared))
        return self._step(turn, prepared)

    def _submit(self, row: Turn, prepared: Prepared) -> RequestHandle:
        assert self._engine is not None
        read = {"input_ids" if name == "inputs" else name: value for name, value in prepared.read.items()}
        config = LookaheadConfig(**row.drafting)
        seed = row.settings.get("seed", 0)
        return self._engine.submit(**read, **prepared.values, seed=seed, lookahead_config=config)

    def _wait(self, row: Turn, prepared: Prepared) -> Served:
        handle = attempt(self._submit, row, prepared)
        if isinstance(handle, Exception):
            return Served(handle)
        ended = Event()
        handle.add_done_callback(ended.set)
        ended.wait(SECONDS)
        return self._ended(prepared, handle)

    def _step(self, turn: Turn, prepared: list[Prepared]) -> list[Served]:
        assert self._engine is not None
        handles: list[RequestHandle | Exception] = []
        early: list[bool] = []
        for step in range(STEPS):
            while len(handles) < len(prepared) and step >= turn.gap * len(handles):
                number = len(handles)
                handles.append(attempt(self._submit, turn.rows[number], prepared[number]))
            if step == turn.change_after:
                early = [isinstance(handle, RequestHandle) and handle.done for handle in handles]
                self.change(turn.change)
            with suppress(Exception):  # of which its requests tell
                self._engine.step()
            ended = all(isinstance(handle, Exception) or handle.done for handle in handles)
            if ended and len(handles) == len(prepared) and step >= (turn.change_after or 0):
                break
        served = [
            Served(handle) if isinstance(handle, Exception) else self._ended(one, handle)
            for one, handle in zip(prepared, handles, strict=True)
        ]
        for one, before in zip(served, early, strict=False):
            one.early = before
        return served

    def _ended(self, prepared: Prepared, handle: RequestHandle) -> Served:
        if not handle.done:
            return Served(RuntimeError("the request never ended"), handle.tokens)
        answer = attempt(lambda: prepared_answer(self.model, prepared, handle.result()))
        return Served(_of_several(answer), handle.tokens)


def attempt(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `make` returns or raises."""
    try:
        return make(*args, **kwargs)
    except Exception as error:
        return error


def _alone(model: PreTrainedModel, row: Turn) -> Answer:
    return _of_several(call(model, row, None, ours=True))


def _of_several(answer: Any) -> Any:
    if isinstance(answer, Answer):
        answer.random_state = None
    return answer


def is_beginning(tokens: Sequence[int], answer: Answer) -> bool:
    """Whether `tokens` are the first new ones of `answer`, which has one row."""
    start = answer.sequences.shape[1] - answer.new_tokens
    return answer.sequences[0, start : start + len(tokens)].tolist() == list(tokens)
