"""One request: its text, who drafts and selects its tokens, where it ends, and who hears of it. And the steps that
requests make together, those of one call of `generate` or those that an engine serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from time import perf_counter
from traceback import walk_tb
from types import FrameType
from typing import Any

from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.protocols import StepPace
from lookahead.core.results import StepResults
from lookahead.core.statistics import OnStep, Statistics
from lookahead.core.step import Batch, Phase, step
from lookahead.core.step_time import StepTimer
from lookahead.drafting import PredictedText
from lookahead.drafting.background import BACKGROUND
from lookahead.serving.arguments import Arguments
from lookahead.serving.drafting import Drafting
from lookahead.serving.handle import RequestHandle
from lookahead.serving.output import StreamFeeder, make_output
from lookahead.serving.selecting import LogprobSampler, StopRule, in_lock_step, last_lengths, row_processors


class Request:
    """One text that is decoded. `generate` has one for each row of a call, an `Engine` one for each that it was given.

    Args:
        arguments: What the call asks for.
        drafting: Makes its drafter.
        noise: What its tokens are sampled with, if they are.
        last_length: Tokens after which the model has no position for another one, if there are.
        place: Which row of the call it is.
        predicted: A text that is expected.
        logprobs: How many of the likeliest tokens to note with the log-probability of each token; none of both if
            `None`.

    Attributes:
        sequence: The text, for `step`.
        rule: When it is complete.
        row: Its keys and values (`TextRow`); `None` where the runner has those of all rows of a call.
        handle: What a caller has of it who submitted it.
        reads_inputs: Whether its prompt is more than tokens, such as images: then its keys and values are no other
            text's.
        temperature: Of its sampling, 0 for greedy decoding.
        group: Its group, if it has one; see `Engine.submit`.
        urgency: Its place among others, which never changes, the smallest first: the step at which it came, earlier by
            its priority, and which request it is.
    """

    row: Any = None
    group: object = None

    def __init__(
        self,
        arguments: Arguments,
        drafting: Drafting,
        noise: SamplingNoise,
        last_length: int | None,
        place: int = 0,
        predicted: PredictedText | None = None,
        logprobs: int | None = None,
    ) -> None:
        prompts = arguments.prompts
        self.arguments, self.drafting, self.predicted = arguments, drafting, predicted
        self.reads_inputs, self.temperature = bool(prompts.inputs), arguments.temperature
        self.rule = rule = StopRule(arguments.criteria)
        self._feeder: StreamFeeder | None = None
        config = arguments.config
        keeps = bool(config.return_dict_in_generate)
        kind = TextSampler if logprobs is None else partial(LogprobSampler, logprobs)
        alone = not in_lock_step(arguments)  # where tokens are selected for all rows together
        sampler = kind(
            processor=(alone and row_processors(arguments.processors, place, prompts.rows)) or None,
            noise=noise if alone and config.do_sample else None,
            row=place,
            keep_logits=keeps and bool(config.output_logits),
            keep_scores=keeps and bool(config.output_scores),
        )
        self._notes = sampler if isinstance(sampler, LogprobSampler) else None
        tokens = prompts.tokens[place]
        self.sequence = TextSequence(
            prompts.input_ids[place : place + 1].long(),  # as the texts that transformers returns
            tokens,
            drafting.drafter(predicted),
            sampler,
            rule,
            last_lengths(last_length, prompts, rule.has_eos)[place],
            index=place,
            most_tokens=rule.most_tokens(prompts.width, len(tokens)),
        )
        last = self.sequence.last_length
        if last is None or self.sequence.length + self.sequence.most_tokens - len(tokens) <= last:
            self.sequence.end_tokens = rule.end_tokens
        if prompts.source_tokens and (read := prompts.source_tokens[place]):  # texts copy from what they are about
            self.sequence.ask_drafter(lambda drafter: drafter.start([*read, *tokens]), None)
        if (trace := drafting.config.trace) is not None:
            self.sequence.watcher = trace.begin(tokens)

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.sequence.tokens)

    @property
    def cached(self) -> int:
        """How many of them have keys and values."""
        return int(self.row.length)

    @property
    def reach(self) -> int:
        """Length in tokens that the text may reach in the coming step, drafts included."""
        return self.length + self.drafting.most_nodes

    def serve(self, handle: RequestHandle, urgency: tuple[int, int], on_step: OnStep | None) -> None:
        """Become a request of an engine, which notifies `handle` of each step; `on_step` and the streamer listen."""
        self.handle, self.urgency = handle, urgency
        handle.follow(self.sequence.tokens, self._notes is not None)
        listeners: list[OnStep] = []
        if on_step is not None:
            listeners.append(on_step)
        if self.arguments.streamer is not None:
            self._feeder = StreamFeeder(self.arguments.streamer, self.arguments.prompts.input_ids, None)
            listeners.append(self._feeder.add)
        self.sequence.listeners = listeners

    def add(self, nodes: int, tokens: int) -> None:
        """Notify the handle of a step; see `RequestHandle.add`."""
        try:
            self.handle.add(nodes, tokens, () if self._notes is None else self._notes.take())
        except Exception as error:
            self.sequence.fail(error)

    def end(self, error: BaseException | None = None) -> None:
        """Tell the handle how it ended: complete, with an error, or cancelled."""
        self.sequence.watcher = None
        self.sequence.listeners = ()  # which refer to this object: what it holds is to go with it, not some time later
        self.drafting.keep()
        error = error or self.sequence.error
        try:
            if self._feeder is not None:
                self._feeder.end()
        except Exception as raised:
            error = error or raised
        if error is not None:
            _forget_locals(error)
        complete = self.sequence.finished and error is None and not self.handle.cancelled
        reason = "error" if error is not None else "cancelled"
        if complete:
            reason = "length" if self.rule.ends_by_length(self.sequence) else "stop"
        statistics = self.handle.statistics
        statistics.predicted_tokens = 0 if self.predicted is None else self.predicted.accepted
        output = make_output([self.sequence], self.arguments, None, statistics) if complete else None
        self.drafting.release()
        self.handle.end(output, error, reason)


def _forget_locals(error: BaseException) -> None:
    """Clear the variables of all functions that have ended of those that an error came through, and was called from.

    They hold the request, whose handle holds the error: the step's logits would stay until the garbage collector comes.
    """
    came_through = [frame for frame, _ in walk_tb(error.__traceback__)]
    called: FrameType | None = came_through[-1] if came_through else None
    while called is not None:
        with suppress(RuntimeError):  # it runs
            called.clear()
        called = called.f_back


def notify_handles(requests: Sequence[Request], results: StepResults) -> None:
    """Notify the handles of requests of what a step has added."""
    rows = zip(requests, results.nodes.tolist(), results.walks.counts.tolist(), strict=True)
    for request, nodes, tokens in rows:
        if tokens:
            request.add(nodes, tokens)


class Steps:
    """Runs requests, step by step, timed for a pace.

    Args:
        backend: Runs their trees.
        clock: The clock for its steps, in seconds.
        pace: Chooses their nodes, if that is to go by the clock: those of each, or of all together.
        rows_leave: See `Call`.
        launched: Called when the pass of a step was launched, which a device still computes.
        notify: Called with the requests and the results of a step, before any listener.

    Attributes:
        batch: What is handed to `step`.
    """

    def __init__(
        self,
        backend: Any,
        clock: Callable[[], float],
        pace: StepPace | None = None,
        rows_leave: bool = True,
        launched: Callable[[], None] | None = None,
        notify: Callable[[Sequence[Request], StepResults], None] | None = None,
    ) -> None:
        self.backend = backend
        self.rows_leave = rows_leave
        self._pace, self._notify = pace, notify
        # A thread's own time is a call into the system.
        self._timer = StepTimer(perf_counter if pace is None else clock, perf_counter, packed=rows_leave)
        timer = self._timer

        def mark(phase: Phase) -> None:
            if phase == "forward" and launched is not None:
                launched()
            timer.mark(phase)

        self.batch = Batch((), mark=self._timer.mark if launched is None else mark)

    def run(self, requests: Sequence[Request], statistics: Statistics) -> None:
        """Make one step, and add its counts and times to `statistics`. What one of `requests` raises is in its
        `SequenceState.error`."""
        batch = self.batch
        batch.sequences, batch.statistics = [request.sequence for request in requests], statistics
        batch.notify = None if self._notify is None else partial(self._notify, requests)
        batch.pace = pace = self._pace_of(requests)
        try:
            with self._serving(requests):
                self._timer.begin(batch)
                done = step(self.backend, batch)
            if pace is not None and not pace.skip():
                pace.book(self._timer.end(batch, done, pace.searches))
        finally:  # an error keeps this object, which is not to keep requests
            batch.sequences, batch.notify, batch.pace = (), None, None

    def _serving(self, requests: Sequence[Request]) -> AbstractContextManager[None]:
        """Passes over the rows of some requests, where each step has its own."""
        if requests[0].row is None:  # the runner has the rows of a call
            return nullcontext()
        serving: AbstractContextManager[None] = self.backend.serving([request.row for request in requests])
        return serving

    def _pace_of(self, requests: Sequence[Request]) -> StepPace | None:
        """The pace of the coming step, if drafts can be made and nodes are chosen by it."""
        if self._pace is None or not BACKGROUND.are_there() or not any(one.drafting.is_paced for one in requests):
            return None
        self._pace.begin_step(len(requests), sum([request.temperature for request in requests]) / len(requests))
        return self._pace

    def prefill(self, requests: Sequence[Request], chunk_size: int | None) -> int:
        """Send long texts ahead in parts, so that the first step has few pending tokens; returns how many passes."""
        with self._serving(requests):
            return int(self.backend.prefill([request.sequence.tokens for request in requests], chunk_size))

    def complete(self, requests: Sequence[Request], texts: Sequence[Sequence[int]]) -> None:
        """Fill the caches of requests with all of their texts but the last token."""
        with self._serving(requests):
            self.backend.complete(texts)
