"""The engine: requests come, share steps, and go."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from threading import Condition, RLock, Thread
from typing import Any

import torch

from lookahead.backends.transformers.invariant.modules import least_rows
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.shared_clone import shell_of
from lookahead.config import LookaheadConfig
from lookahead.core.statistics import OnStep, Statistics
from lookahead.errors import InvalidArgumentError, LookaheadError, ModelChangedError
from lookahead.serving.arguments import Arguments, hand_over, unknown_token
from lookahead.serving.drafting import predicted_texts
from lookahead.serving.engine_model import EngineModel, ModelMoved
from lookahead.serving.handle import EngineLoad, EngineStatistics, RequestHandle
from lookahead.serving.refusals import ON_STEP, read_prompt
from lookahead.serving.request import Request
from lookahead.serving.scheduler import PATIENCE, Scheduler
from lookahead.values import check_callable, whole_number, yes_or_no

_MOST_SIZE = 2**63 - 1
_SEEDS = (-(2**63), 2**64 - 1)
"""Those that `torch.manual_seed` takes."""


class Engine:
    """Serves many requests with one model, each with exactly the tokens that `model.generate` gives it alone.

    Requests join and leave between two steps. A step is one forward pass: the token trees of all running requests and
    parts of new prompts, one after another, without padding. Use it as a context manager, or `start` it, for a thread
    of its own; without one, whoever waits for a request runs the steps.

    Args:
        model: A causal language model of transformers that token trees run on; the faster with `"sdpa"` attention,
            without which batches are padded.
        config: How to draft; if not given, the default configuration with `memory="process"`, so that requests draft
            from what the model predicted for others. `preset="auto"` sends the likeliest candidates of all rows, as
            many as pay; with a `step_budget` so many nodes a step over all rows. Other methods send theirs for each
            row. A drafter or source that raises costs its request the drafts, with a warning.
        max_rows: Most requests that run at once. At least 1.
        kv_bytes: Most bytes of keys and values that are held at once, those of trees and of finished texts included;
            any number if `None`. For a GGUF model llama.cpp takes them at once, but for a quarter at most that
            finished texts may take.
        prompt_tokens: Most tokens of prompts in one step, so that a long prompt does not hold up the others. At
            least 1.
        prefix_cache: Keep keys and values of finished texts, up to 1 GiB or what `kv_bytes` leaves, and start requests
            from the text, finished or running, with the longest common prefix.
        prefix_bytes: Most bytes of finished texts, instead of that.

    Attributes:
        statistics: Counts since the engine was made.

    Raises:
        InvalidArgumentError: A size is out of range, or `model` is no model of transformers.
        UnsupportedArgumentError: A setting of `config` is not supported by engines.
        UnsupportedModelError: The model cannot be run on token trees, or not with several rows.
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
        max_rows = whole_number("max_rows", max_rows, 1, _MOST_SIZE)
        prompt_tokens = whole_number("prompt_tokens", prompt_tokens, 1, _MOST_SIZE)
        kv_bytes = None if kv_bytes is None else whole_number("kv_bytes", kv_bytes, 1, _MOST_SIZE)
        prefix_bytes = None if prefix_bytes is None else whole_number("prefix_bytes", prefix_bytes, 1, _MOST_SIZE)
        yes_or_no("prefix_cache", prefix_cache)
        self._model = EngineModel(model, config, max_rows, kv_bytes, prefix_cache, prefix_bytes)
        self._model.drafting(self._model.config).release()  # its memory file may be none
        self._memory = self._model.memory
        self.statistics = EngineStatistics(graphs=self._model.runner.recorded)
        self._scheduler = Scheduler(max_rows, self._memory, prompt_tokens, self.statistics)
        self._arrivals: deque[Request] = deque()
        self._numbers = count()  # of requests, as they come
        self._changed = Condition()  # held for the arrivals, and by who waits for some
        self._stepping = RLock()  # one step at a time
        self._thread: Thread | None = None
        self._closing = False
        self._process = os.getpid()

    def submit(  # noqa: PLR0913
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        seed: int | None = None,
        priority: int = 0,
        group: object = None,
        logprobs: int | None = None,
        prediction: torch.Tensor | Sequence[int] | None = None,
        lookahead_config: LookaheadConfig | None = None,
        on_step: OnStep | None = None,
        **kwargs: Any,
    ) -> RequestHandle:
        """Add a request.

        Args:
            input_ids: Token ids of the prompt: a list, or a tensor `[tokens]` or `[1, tokens]`.
            seed: Seed of its random draws. The tokens are those of `model.generate` after `torch.manual_seed(seed)`,
                whatever other requests there are. Drawn from torch's default generator if not given.
            priority: Requests of a larger one are served first. A request waits for those of the next priority that
                come up to 1,000 steps after it, and for no later ones.
            group: Any value, equal for requests of one group, such as the answers to one question. Each counts as of
                one priority less for every other one of its group that runs.
            logprobs: Return per-token log-probabilities, and this many of the likeliest tokens with each; see
                `RequestHandle.events`. At least 0.
            prediction: Token ids of a text that is expected to come, such as a file of which a part is to be edited.
                It is drafted from, and changes nothing but the number of steps.
            lookahead_config: How to draft for this request; the engine's configuration if not given. The method counts,
                and `step_budget` as the most nodes that it sends in a step; weights are the engine's.
            on_step: Called after each step with a `StepRecord`, in the thread that runs the steps.
            **kwargs: As for `model.generate`: lengths, sampling, processors, stopping criteria, `stop_strings` with
                `tokenizer`, `streamer`, `return_dict_in_generate`, ...

        Raises:
            LookaheadError: An argument cannot work, or is not supported.
        """
        self.check_process()
        if self._closing:
            raise InvalidArgumentError("this Engine is closed; make another one")
        logprobs = None if logprobs is None else whole_number("logprobs", logprobs, 0)
        priority = whole_number("priority", priority)
        seed = None if seed is None else whole_number("seed", seed, *_SEEDS)
        if on_step is not None:
            check_callable("on_step", on_step, 1, ON_STEP)
        config = self._model.config_of(lookahead_config)
        model, runner = self._model.model, self._model.runner
        ids = read_prompt(input_ids)
        shell = shell_of(model)  # `generate` may note things on it, which are of this request alone
        arguments: Arguments = hand_over(shell, ids.to(model.device), kwargs, lambda read: read, checked=True)
        self._model.check(arguments, config)
        drafting = self._model.drafting(config)
        expected = predicted_texts(prediction, config, 1, model)[0]
        seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        noise = SamplingNoise(generator=torch.Generator(model.device).manual_seed(seed))
        request = Request(arguments, drafting, noise, runner.last_length, predicted=expected, logprobs=logprobs)
        handle = RequestHandle(self)
        handle.statistics.prompt_tokens = request.length
        handle.statistics.engine = runner.engine
        handle.statistics.invariant_rows = least_rows(runner.model) if runner.is_invariant else 0
        request.group = group
        request.serve(handle, (self.statistics.steps - PATIENCE * priority, next(self._numbers)), on_step)
        with self._changed:
            self._arrivals.append(request)
            self._changed.notify_all()
        return handle

    def step(self) -> int:
        """Run one step for the requests whose turn it is.

        Returns:
            How many requests are not finished yet.

        Raises:
            Exception: What the model raised; the requests of the step end with it.
            LookaheadError: The model has changed, and cannot be run as it is now; all requests end with it.
        """
        self.check_process()
        with self._stepping, torch.no_grad():
            self._update()
            requests = self._scheduler.plan()
            self._read_inputs(requests)
            if requests:
                self._run(requests)
            self._scheduler.end_step()
            return self._unfinished

    def run(self) -> None:
        """Run steps until all requests are finished."""
        while self.step():
            pass

    def start(self) -> None:
        """Begin to run steps in a thread of its own, whenever there are requests. Starting twice does no harm.

        Raises:
            InvalidArgumentError: It is closed.
        """
        self.check_process()
        with self._changed:
            if self._closing:
                raise InvalidArgumentError("this Engine is closed; make another one")
            if self._thread is None:
                self._thread = Thread(target=self._serve, name="lookahead-engine", daemon=True)
                self._thread.start()

    def close(self, cancel: bool = False) -> None:
        """Take no further requests, finish those that there are, and end the thread.

        Args:
            cancel: Give them up instead.

        Raises:
            InvalidArgumentError: `cancel` is neither `True` nor `False`.
        """
        yes_or_no("cancel", cancel)
        self.check_process()
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify_all()
        if cancel:
            with self._stepping:
                for request in [*self._arrivals, *self._scheduler.requests]:
                    request.handle.cancel()
        if thread is not None:
            thread.join()
            self._thread = None
        self.run()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() == self._process:  # a fork that leaves the block has nothing to close
            self.close(cancel=error is not None)

    @property
    def started(self) -> bool:
        """Whether a thread of its own runs the steps."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def load(self) -> EngineLoad:
        """The engine's current load."""
        running, size = list(self._scheduler.running), self._memory.token_bytes
        waiting = len(self._arrivals) + len(self._scheduler.waiting)
        held = sum(request.row.capacity for request in running)
        return EngineLoad(waiting, len(running), held * size, self._memory.kept * size, self._memory.most_bytes)

    @property
    def longest_text(self) -> int | None:
        """Most tokens that a text may come to beside the largest draft of the engine's own; any number if `None`."""
        tokens, block = self._memory.tokens, self._memory.block
        return None if tokens is None else max(tokens // block * block - self._model.config.max_nodes, 0)

    def check_process(self) -> None:
        """Refuse to run in a forked process, which has neither the engine's thread nor the holders of its locks.

        Raises:
            InvalidArgumentError: This process is one.
        """
        if os.getpid() != self._process:
            raise InvalidArgumentError(
                f"this Engine is of process {self._process}, and process {os.getpid()} is a fork of it, which has "
                "neither its threads nor its locks; make an Engine in a process that was started by 'spawn'"
            )

    def wake(self) -> None:
        """Let the thread look at what has changed."""
        with self._changed:
            self._changed.notify_all()

    @property
    def _unfinished(self) -> int:
        return len(self._arrivals) + len(self._scheduler.requests)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._unfinished:
                    if self._closing:
                        return
                    self._changed.wait()
            try:
                self.step()
            except Exception:  # of which those have been told whose step it was
                continue

    def _update(self) -> None:
        """Queue new requests, remove cancelled ones, and follow the model if it has changed."""
        with self._changed:
            while self._arrivals:
                request = self._arrivals.popleft()
                request.row = self._memory.new_row()  # of the runner that there is now
                self._scheduler.add(request)
        for request in self._scheduler.requests:
            if request.handle.cancelled:
                self._leave(request)
        idle = not self._scheduler.running  # who is served one after another does not wait for this in between
        if self._scheduler.requests and (
            self._model.has_changed(thorough=True) if idle else self._model.changed_before_pass()
        ):
            self._follow_model()

    def _run(self, requests: list[Request]) -> None:
        """One step. Its requests are taken out of the list: an error keeps its callers' variables, and so this list."""
        try:
            counts = Statistics()
            self._model.steps.run(requests, counts)
            self.statistics.steps += 1
            self.statistics.rows += len(requests)
            self.statistics.nodes += sum(counts.nodes_per_step)
            self.statistics.tokens += counts.tokens
        except ModelMoved:
            self._follow_model()
        except BaseException as error:
            if isinstance(error, Exception) and self._model.has_changed():  # which is why it could not run
                self._follow_model()
                return
            self._leave_all(requests, error)
            raise
        else:
            self._leave_all([one for one in requests if one.sequence.finished])
        finally:
            requests.clear()

    def _read_inputs(self, requests: list[Request]) -> None:
        """Let the model read prompts with images. What it refuses is an error of its own request."""
        for request in [one for one in requests if one.reads_inputs and not one.cached]:
            try:
                self._model.read_inputs(request)
            except Exception as error:
                requests.remove(request)
                self._leave(request, error)

    def _follow_model(self) -> None:
        """Begin anew with what the model is now: nothing of before may go into a text.

        Raises:
            LookaheadError: It cannot be run as it is now; all requests have ended with that.
        """
        for request in self._scheduler.requests:
            if request.sequence.steps:
                error = ModelChangedError(
                    f"the model changed after {len(request.handle.tokens)} tokens of this text, whose rest would be "
                    "that of another model; submit the request again"
                )
                self._leave(request, error)
        self._memory.forget()
        try:
            self._model.reopen()
        except LookaheadError as error:
            self._leave_all(self._scheduler.requests, error)
            raise
        self.statistics.graphs = self._model.runner.recorded
        for request in self._scheduler.requests:
            self._memory.drop(request)
            if (largest := max(request.sequence.tokens)) >= self._model.runner.vocabulary:
                self._leave(request, unknown_token(largest, self._model.runner.vocabulary))
                continue
            request.arguments = replace(request.arguments, model=shell_of(self._model.model))

    def _leave_all(self, requests: list[Request], error: BaseException | None = None) -> None:
        for request in requests:
            self._leave(request, error)

    def _leave(self, request: Request, error: BaseException | None = None) -> None:
        self._scheduler.remove(request)
        if error is None:
            self._memory.keep(request, self._scheduler.running)
        request.end(error)
