"""The engine: requests come, share steps, and go."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from threading import Condition, RLock, Thread
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.backends.session import EngineRunner, open_session
from lookahead.backends.transformers.invariant.modules import least_rows
from lookahead.backends.transformers.model_state import draft_pace
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.prompt_pass import PromptPass
from lookahead.config import LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.statistics import OnStep, Statistics
from lookahead.errors import InvalidArgumentError, LookaheadError, ModelChangedError, UnsupportedArgumentError
from lookahead.serving.arguments import check_config, check_prompt_ids
from lookahead.serving.drafting import Drafting
from lookahead.serving.handle import RequestHandle
from lookahead.serving.kv_memory import PREFIX_BYTES, KVMemory
from lookahead.serving.prediction import predicted_texts
from lookahead.serving.prepared import Arguments, hand_over
from lookahead.serving.request import Request, check_request, check_room
from lookahead.serving.scheduler import Scheduler, urgency
from lookahead.serving.statistics import EngineLoad, EngineStatistics
from lookahead.serving.steps import Steps


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
        prefix_cache: Keep keys and values of finished texts, up to 1 GiB or what `kv_bytes` leaves, and let requests
            begin with those of the text, finished or running, that has most in common with theirs.
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
        model: PreTrainedModel,
        config: LookaheadConfig | None = None,
        *,
        max_rows: int = 16,
        kv_bytes: int | None = None,
        prompt_tokens: int = 512,
        prefix_cache: bool = True,
        prefix_bytes: int | None = None,
    ) -> None:
        sizes = {"max_rows": max_rows, "prompt_tokens": prompt_tokens, "kv_bytes": kv_bytes}
        for name, value in (sizes | {"prefix_bytes": prefix_bytes}).items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidArgumentError(f"{name}={value!r} must be a whole number, at least 1")
        if not isinstance(model, PreTrainedModel):
            raise InvalidArgumentError(f"model={type(model).__name__} is no transformers language model")
        self._model = model
        self._config = _check_engine_config(LookaheadConfig(memory="process") if config is None else config)
        if prefix_bytes is None:
            prefix_bytes = PREFIX_BYTES if kv_bytes is None else kv_bytes
        self._session = open_session(model)
        self._runner, kv_bytes, prefix_bytes = self._session.open_rows(
            self._config, max_rows, kv_bytes, prefix_bytes if prefix_cache else 0
        )
        _check_nodes(self._runner, self._config)
        prefix_cache = prefix_cache and self._runner.shares_beginnings
        self._compares_bits = prefix_cache or bool(self._config.pack_weights)
        self._watch = self._session.watch(self._runner, self._compares_bits)
        self._shared = SharedPace(self._pace, self._config.step_budget)
        self._steps = Steps(self._runner, self._session.clock, self._shared)
        self._memory = memory = KVMemory(
            self._runner.token_bytes(),
            kv_bytes,
            prefix_cache,
            prefix_bytes,
            lambda block: self._runner.new_row(block),
            self._runner.keeps_apart,
        )
        self._scheduler: Scheduler[Request] = Scheduler(max_rows, memory, prompt_tokens)
        self._arrivals: deque[Request] = deque()
        self._submitted = 0
        self._changed = Condition()  # held for the arrivals, and by who waits for some
        self._stepping = RLock()  # one step at a time
        self._thread: Thread | None = None
        self._closing = False
        self._process = os.getpid()
        self.statistics = EngineStatistics()

    def submit(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        seed: int | None = None,
        priority: int = 0,
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
            logprobs: Tell with each token how likely the model thought it, and so many of the likeliest tokens; see
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
        if logprobs is not None and (not isinstance(logprobs, int) or logprobs < 0):
            raise InvalidArgumentError(f"logprobs={logprobs!r} must be a whole number, at least 0")
        ids = torch.as_tensor(input_ids)
        ids = ids[None] if ids.dim() == 1 else ids
        check_prompt_ids(ids)
        ids = ids.to(self._model.device)
        arguments: Arguments = hand_over(self._model, ids, dict(kwargs), lambda given: given, checked=True)
        check_request(arguments, self._config, self._session, self._runner)
        config = self._config if lookahead_config is None else _check_engine_config(lookahead_config)
        _check_nodes(self._runner, config)
        seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        expected = predicted_texts(prediction, config, 1, self._model.get_input_embeddings().num_embeddings)[0]
        runner = self._runner
        drafting = Drafting(self._model, config, self._shared, most_nodes=runner.most_nodes, chains=runner.chains)
        check_room(arguments, self._runner, self._memory, drafting.most_nodes)
        noise = SamplingNoise(generator=torch.Generator(ids.device).manual_seed(seed)).row()
        request = Request(arguments, drafting, noise, self._runner.last_length, predicted=expected, logprobs=logprobs)
        request.row, handle = self._memory.new_row(), RequestHandle(self)
        handle.statistics.prompt_tokens = request.length
        handle.statistics.invariant_rows = least_rows(self._runner.model) if self._runner.is_invariant else 0
        with self._changed:
            place = urgency(priority, self.statistics.steps, self._submitted)
            self._submitted += 1
        request.serve(handle, place, on_step)
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
            self._take_arrivals()
            if self._unfinished:
                self._follow_model()
            requests = self._scheduler.plan()
            self._memory.settle(self._scheduler.running)
            self.statistics.preempted = self._scheduler.preempted
            self.statistics.prompt_tokens, self.statistics.reused_tokens = self._memory.asked, self._memory.reused
            if requests:
                self._run(requests)
            return self._unfinished

    def run(self) -> None:
        """Run steps until all requests are finished."""
        while self.step():
            pass

    def start(self) -> None:
        """Begin to run steps in a thread of its own, whenever there are requests. Starting twice does no harm."""
        self.check_process()
        with self._changed:
            if self._thread is None and not self._closing:
                self._thread = Thread(target=self._serve, name="lookahead-engine", daemon=True)
                self._thread.start()

    def close(self, cancel: bool = False) -> None:
        """Take no further requests, finish those that there are, and end the thread.

        Args:
            cancel: Give them up instead.
        """
        self.check_process()
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify_all()
        if cancel:
            self._cancel_all()
        if thread is not None:
            thread.join()
            self._thread = None
        self.run()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._process:  # a fork that leaves the block has nothing to close
            self.close(cancel=error is not None)

    @property
    def started(self) -> bool:
        """Whether a thread of its own runs the steps."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def load(self) -> EngineLoad:
        """What there is to do at the moment."""
        running, size = list(self._scheduler.running), self._memory.token_bytes
        waiting = len(self._arrivals) + len(self._scheduler.waiting)
        held = sum(request.row.capacity for request in running)
        return EngineLoad(waiting, len(running), held * size, self._memory.kept * size, self._memory.most_bytes)

    @property
    def longest_text(self) -> int | None:
        """Most tokens that a text may come to beside the largest draft of the engine's own; any number if `None`."""
        tokens, block = self._memory.tokens, self._memory.block
        return None if tokens is None else max(tokens // block * block - self._config.max_nodes, 0)

    def check_process(self) -> None:
        """Refuse a fork of the process that made the engine: its threads and who holds its locks are not there.

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
        return len(self._arrivals) + len(self._scheduler.waiting) + len(self._scheduler.running)

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

    def _cancel_all(self) -> None:
        with self._stepping:
            self._take_arrivals()
            for request in [*self._scheduler.waiting, *self._scheduler.running]:
                request.handle.cancel()

    def _take_arrivals(self) -> None:
        """Let new requests wait for their turn, and those leave that were cancelled."""
        with self._changed:
            while self._arrivals:
                self._scheduler.add(self._arrivals.popleft())
        for request in [*self._scheduler.waiting, *self._scheduler.running]:
            if request.handle.cancelled:
                self._leave(request)

    def _run(self, requests: list[Request]) -> None:
        """One step. Its requests are taken out of the list: an error keeps its callers' variables, and so this list."""
        try:
            for request in requests:
                request.handle.serve()
            counts = Statistics()
            self._read_inputs(requests)
            self._steps.run([request for request in requests if request.error is None], counts)
            if self._watch is not None:
                self._watch.settle()
            self.statistics.count(len(requests), sum(counts.nodes_per_step), counts.tokens)
        except BaseException as error:
            self._leave_all(requests, error)
            raise
        else:
            self._leave_all([one for one in requests if one.sequence.finished or one.error is not None])
        finally:
            requests.clear()

    def _read_inputs(self, requests: Sequence[Request]) -> None:
        """Let the model read prompts with images; all but the last token, which the step sends. What it refuses is an
        error of its own request."""
        runner: Any = self._runner
        for request in requests:
            if request.reads_inputs and not request.cached:
                prompts, runner.rows = request.arguments.prompts, [request.row]
                try:
                    PromptPass(runner, self._model, prompts.input_ids, prompts.mask, prompts.inputs).read()
                    request.row.crop(request.cached - 1)
                except Exception as error:
                    request.error = error

    def _follow_model(self) -> None:
        """If the model is not what it was, begin anew with what it is: nothing of before may go into a text.

        Raises:
            LookaheadError: It cannot be run as it is now; all requests have ended with that.
        """
        idle = not self._scheduler.running  # who is served one after another does not wait for this in between
        if self._watch is None or not self._watch.has_changed(thorough=idle):
            return
        requests = [*self._scheduler.waiting, *self._scheduler.running]
        begun = [request for request in requests if request.sequence.steps]
        for request in begun:
            self._leave(
                request,
                ModelChangedError(
                    f"the model changed after {len(request.handle.tokens)} tokens of this text, whose rest would be "
                    "that of another model; submit the request again"
                ),
            )
        self._memory.forget()
        rest = [request for request in requests if request not in begun]
        for request in rest:
            self._memory.drop(request)
        try:
            self._runner = self._steps.backend = self._session.open_rows(self._config, 0, None, 0)[0]
        except LookaheadError as error:
            self._leave_all(rest, error)
            raise
        self._watch = self._session.watch(self._runner, self._compares_bits)

    def _pace(self, rows: int, temperature: float) -> Pace:
        """What is learned of drafting for so many rows; of the model that runs."""
        return draft_pace(self._runner.model, self._config, rows, temperature, self._runner.chains)

    def _leave_all(self, requests: list[Request], error: BaseException | None = None) -> None:
        for request in requests:
            self._leave(request, error)

    def _leave(self, request: Request, error: BaseException | None = None) -> None:
        self._scheduler.remove(request)
        if error is None:
            self._memory.keep(request, self._scheduler.running)
        request.end(error)


def _check_nodes(runner: EngineRunner, config: LookaheadConfig) -> None:
    """Refuse methods whose trees have a fixed shape, for which llama.cpp has not enough sequence ids.

    Raises:
        InvalidArgumentError: There are not enough.
    """
    if config.preset in ("paper", "jacobi") and config.max_nodes > runner.most_nodes:
        raise InvalidArgumentError(
            f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each row, but llama.cpp has sequences "
            f"for {runner.most_nodes}; choose smaller sizes, or an Engine with a smaller max_rows"
        )


def _check_engine_config(config: LookaheadConfig | None) -> LookaheadConfig:
    checked = check_config(config)
    if checked.engine != "dynamic":
        raise UnsupportedArgumentError(f"engine={checked.engine!r} is not supported by an Engine; use engine='dynamic'")
    return checked
