"""Engine: many requests that share the steps of one model."""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from threading import Condition, RLock, Thread, current_thread, get_ident
from typing import Any, NoReturn

import torch

from lookahead.backends.machine import autocast_here
from lookahead.backends.transformers.invariant import min_rows
from lookahead.backends.transformers.noise import TextNoise
from lookahead.backends.transformers.shared_clone import shell_of
from lookahead.config import LookaheadConfig
from lookahead.core.statistics import OnStep
from lookahead.errors import InvalidArgumentError, LookaheadError
from lookahead.serving.arguments import prepare_request
from lookahead.serving.drafting import predicted_texts
from lookahead.serving.handle import EngineLoad, RequestHandle
from lookahead.serving.loop import EngineLoop, check_engine_config
from lookahead.serving.refusals import ON_STEP, read_prompt
from lookahead.serving.request import Request
from lookahead.serving.scheduler import PATIENCE
from lookahead.values import check_callable, check_key, whole_number, yes_or_no

_MAX_SIZE = 2**63 - 1
_SEEDS = (-(2**63), 2**64 - 1)
"""Range of seeds of `torch.manual_seed`."""


class Engine:
    """Runs many requests with one model. Each gets exactly the tokens of its own `model.generate` call.

    Requests join and leave between steps. A step is one forward pass over the token trees of all running requests and
    parts of new prompts, without padding. As a context manager, or after `start`, the engine runs steps in its own
    thread. Otherwise the thread that waits for a request runs them.

    Args:
        model: Causal language model of transformers that supports token trees. With another attention than `"sdpa"`
            batches are padded, which is slower.
        config: Configuration of drafts. By default requests draft from the model's predictions for others
            (`memory="process"`). `preset="auto"` sends the likeliest candidates of all rows, up to
            `step_budget` nodes a step if it is set. Other methods draft for each row separately. If a drafter or source
            raises, its request continues without drafts, with a warning.
        max_rows: Largest number of requests that run at once. At least 1.
        kv_bytes: Limit for the bytes of keys and values, including trees and finished texts. If texts outgrow it, the
            last requests wait for others to end. If `None`, half of the free memory. On a GPU they are allocated at the
            start. For a GGUF model llama.cpp allocates them at the start in any case; finished texts
            take at most a quarter.
        prompt_tokens: Limit for the prompt tokens of a step, so that a long prompt does not delay other requests. At
            least 1.
        prefix_cache: Keep keys and values of finished texts, up to 1 GiB or the rest of `kv_bytes`. New requests start
            from the finished or running text with the longest common prefix.
        prefix_bytes: Another limit for the bytes of finished texts.

    Attributes:
        statistics: Counts since the engine was made.

    Raises:
        InvalidArgumentError: A size is out of range, or `model` is not a transformers model.
        UnsupportedArgumentError: Engines do not support a setting of `config`.
        UnsupportedModelError: The model does not support token trees, or several rows.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: LookaheadConfig | None = None,
        *,
        max_rows: int = 16,
        kv_bytes: int | None = None,
        prompt_tokens: int = 512,
        prefix_cache: bool = True,
        prefix_bytes: int | None = None,
    ) -> None:
        max_rows = whole_number("max_rows", max_rows, 1, _MAX_SIZE)
        prompt_tokens = whole_number("prompt_tokens", prompt_tokens, 1, _MAX_SIZE)
        kv_bytes = None if kv_bytes is None else whole_number("kv_bytes", kv_bytes, 1, _MAX_SIZE)
        prefix_bytes = None if prefix_bytes is None else whole_number("prefix_bytes", prefix_bytes, 1, _MAX_SIZE)
        yes_or_no("prefix_cache", prefix_cache)
        self._loop = EngineLoop(model, config, max_rows, kv_bytes, prompt_tokens, prefix_cache, prefix_bytes)
        self._loop.drafting(self._loop.config).release()  # fails early if the memory file is invalid
        self.statistics = self._loop.statistics
        self._arrivals: deque[Request] = deque()
        self._numbers = count()  # of requests, in order of arrival
        self._changed = Condition()  # protects `_arrivals`, and announces them
        self._stepping = RLock()  # permits one step at a time
        self._inside: int | None = None  # the thread that runs a step
        self._thread: Thread | None = None
        self._closing = False
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled, alone or with a request."""
        raise InvalidArgumentError("an Engine has a thread and cannot be copied or pickled; make another Engine(model)")

    def submit(  # noqa: PLR0913
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        seed: int | None = None,
        priority: int = 0,
        group: object = None,
        tenant: object = None,
        logprobs: int | None = None,
        prediction: torch.Tensor | Sequence[int] | None = None,
        lookahead_config: LookaheadConfig | None = None,
        on_step: OnStep | None = None,
        **kwargs: Any,
    ) -> RequestHandle:
        """Add a request.

        Args:
            input_ids: Token ids of the prompt: a list, or a tensor `[tokens]` or `[1, tokens]`.
            seed: Seed of sampling; random if not given. `model.generate` after `torch.manual_seed(seed)` selects the
                same tokens, regardless of other requests.
            priority: Larger priorities run first. A request waits for requests of the next higher priority only if they
                arrive at most 1,000 steps after it.
            group: Any hashable value, equal for requests of a group, for example the answers to one question. Each
                running request of a group lowers the priority of its other requests by one.
            tenant: Any hashable value. Requests of different tenants share neither predictions nor keys and values, so
                that the time of one does not depend on texts of another.
            logprobs: Return log-probabilities, and the given number of likeliest tokens at each index; see
                `RequestHandle.events`. At least 0.
            prediction: Token ids of the predicted output, for example a file to be edited. It is used for drafts, and
                changes only the number of steps.
            lookahead_config: Configuration of drafts for this request; the engine's if not given. Only the method and
                `step_budget`, its largest number of nodes in a step, have an effect.
            on_step: Function called after each step with a `StepRecord`, in the thread that runs the steps.
            **kwargs: Arguments of `model.generate`: lengths, sampling, processors, stopping criteria, `stop_strings`
                with `tokenizer`, `streamer`, `return_dict_in_generate`, ...

        Raises:
            LookaheadError: An argument is invalid or unsupported.
        """
        self.check_process()
        if self._closing:
            raise InvalidArgumentError("this Engine is closed; make another one")
        logprobs = None if logprobs is None else whole_number("logprobs", logprobs, 0)
        priority = whole_number("priority", priority)
        seed = None if seed is None else whole_number("seed", seed, *_SEEDS)
        if on_step is not None:
            check_callable("on_step", on_step, 1, ON_STEP)
        check_key("group", group)
        check_key("tenant", tenant)
        opening = self._loop.openings
        model, runner = self._loop.model, self._loop.runner
        config = self._loop.config
        if lookahead_config is not None:
            config = check_engine_config(lookahead_config, runner.most_nodes)
        ids = read_prompt(input_ids)
        shell = shell_of(model)  # `generate` may set attributes on it, which belong to this request only
        arguments = prepare_request(shell, ids.to(model.device, copy=True), kwargs)  # callers may reuse theirs
        try:
            self._loop.check(arguments, config)
        except LookaheadError:
            if not self._refreshed():
                raise
            self._loop.check(arguments, config)
        drafting = self._loop.drafting(config, tenant)
        predicted = predicted_texts(prediction, config, 1, model)[0]
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        noise = TextNoise(torch.Generator(model.device).manual_seed(seed))
        request = Request(arguments, drafting, noise, runner.last_length, predicted=predicted, logprobs=logprobs)
        handle = RequestHandle(self)
        handle.statistics.prompt_tokens = request.length
        handle.statistics.engine = runner.engine
        handle.statistics.invariant_rows = min_rows(runner.model) if runner.is_invariant else 0
        request.group, request.tenant, request.opening = group, tenant, opening
        request.serve(handle, (self.statistics.steps - PATIENCE * priority, next(self._numbers)), on_step)
        with self._changed:
            self._arrivals.append(request)
            self._changed.notify_all()
        return handle

    def step(self) -> int:
        """Run one step.

        Returns:
            Number of unfinished requests.

        Raises:
            Exception: The model raised it; the requests of the step end with it.
            LookaheadError: The model has changed and is not supported any more; all requests end with it.
        """
        self.check_waiting()
        with self._stepping, torch.no_grad():
            with self._changed:
                arrivals = list(self._arrivals)
                self._arrivals.clear()
            self._inside = get_ident()
            try:
                self._loop.step(arrivals, is_continuous=current_thread() is self._thread)
            finally:
                self._inside = None
            return self._unfinished

    def run(self) -> None:
        """Run steps until all requests are finished."""
        while self.step():
            pass

    def start(self) -> None:
        """Start the engine's own thread, unless it runs. The thread runs steps as long as there are requests.

        Raises:
            InvalidArgumentError: The engine is closed.
        """
        self.check_process()
        with self._changed:
            if self._closing:
                raise InvalidArgumentError("this Engine is closed; make another one")
            if self._thread is None:
                mode = autocast_here(self._loop.model.device)
                self._thread = Thread(target=self._serve, args=(mode,), name="lookahead-engine", daemon=True)
                self._thread.start()
                atexit.register(self._end)

    def _end(self) -> None:
        """End the thread before Python ends, which would abort the process if a thread is inside of torch."""
        if os.getpid() == self._process:
            self.close(cancel=True)

    def close(self, cancel: bool = False) -> None:
        """Refuse new requests, finish the others, and end the thread.

        Args:
            cancel: Whether to cancel unfinished requests instead.

        Raises:
            InvalidArgumentError: `cancel` is neither `True` nor `False`, or a callback of a request called this.
        """
        yes_or_no("cancel", cancel)
        self.check_waiting()
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify_all()
        if cancel:
            with self._stepping:
                for request in [*self._arrivals, *self._loop.scheduler.requests]:
                    request.handle.cancel()
        if thread is not None:
            thread.join()
            self._thread = None
            atexit.unregister(self._end)
        self.run()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() == self._process:  # a forked process has nothing to close
            self.close(cancel=error is not None)

    @property
    def started(self) -> bool:
        """Whether the engine's own thread runs the steps."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def load(self) -> EngineLoad:
        """Current load."""
        running = list(self._loop.scheduler.running)
        waiting = len(self._arrivals) + len(self._loop.scheduler.waiting)
        memory = self._loop.memory
        used = memory.used_bytes(running)
        return EngineLoad(waiting, len(running), used, memory.prefix_tokens * memory.token_bytes, memory.limit_bytes)

    @property
    def longest_text(self) -> int | None:
        """Largest number of tokens of a text that fits beside the engine's largest draft; unlimited if `None`."""
        tokens, block = self._loop.memory.tokens, self._loop.memory.block
        return None if tokens is None else max(tokens // block * block - self._loop.config.max_nodes, 0)

    def check_process(self) -> None:
        """Refuse to run in a forked process, which lacks the engine's thread.

        Raises:
            InvalidArgumentError: This process is a fork.
        """
        if os.getpid() != self._process:
            raise InvalidArgumentError(
                f"this Engine belongs to process {self._process}, and process {os.getpid()} is a fork without its "
                "thread; make an Engine in a process that was started by 'spawn'"
            )

    def check_waiting(self) -> None:
        """Refuse to wait for steps in a forked process, and within a step: it would wait for itself.

        Raises:
            InvalidArgumentError: This process is a fork, or a callback of a request runs.
        """
        self.check_process()
        if self._inside == get_ident():
            raise InvalidArgumentError(
                "this Engine runs a step now, which called this function (on_step, a streamer, a processor or a "
                "criterion); wait for requests, step or close the Engine in another thread"
            )

    def wake(self) -> None:
        """Wake the thread after a change."""
        with self._changed:
            self._changed.notify_all()

    def _refreshed(self) -> bool:
        """Reopen the model of an idle engine if it has changed; return whether it has."""
        if self._inside == get_ident():
            return False
        with self._stepping, torch.no_grad():
            return self._loop.refresh()

    @property
    def _unfinished(self) -> int:
        return len(self._arrivals) + self._loop.unfinished

    def _serve(self, mode: AbstractContextManager[object]) -> None:
        with mode:
            self._serve_requests()

    def _serve_requests(self) -> None:
        while True:
            with self._changed:
                while not self._unfinished:
                    if self._closing:
                        return
                    self._changed.wait()
            try:
                self.step()
            except BaseException:  # the requests of the step have it, and others go on
                continue
