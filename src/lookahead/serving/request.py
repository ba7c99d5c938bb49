"""One request: its text, who drafts and selects its tokens, where it ends, and who hears of it. And the steps that
requests make together, those of one call of `generate` or those that an engine serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from traceback import walk_tb
from types import FrameType
from typing import Any

from lookahead.backends.base import TextRow
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.statistics import OnStep, Statistics, StepRecord
from lookahead.core.step import Batch, Phase, step
from lookahead.core.step_time import StepTimer
from lookahead.drafting import PredictedText
from lookahead.drafting.background import BACKGROUND
from lookahead.serving.arguments import Arguments
from lookahead.serving.drafting import Drafting
from lookahead.serving.handle import RequestHandle, TokenEvent
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
        row: Its keys and values, where rows come and go.
        handle: What a caller has of it who submitted it.
        group: Its group, if it has one; see `Engine.submit`.
        urgency: Its place among others, which never changes, the smallest first: the step at which it came, earlier by
            its priority, and which request it is.
    """

    row: TextRow
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
        self.rule = rule = StopRule(arguments.criteria)
        self._feeder: StreamFeeder | None = None
        config = arguments.config
        keeps = bool(config.return_dict_in_generate)
        kind = TextSampler if logprobs is None else partial(LogprobSampler, logprobs)
        alone = not in_lock_step(arguments)  # where tokens are selected for all rows together
        self._sampler = kind(
            processor=(alone and row_processors(arguments.processors, place, prompts.rows)) or None,
            noise=noise if alone and config.do_sample else None,
            row=place,
            keep_logits=keeps and bool(config.output_logits),
            keep_scores=keeps and bool(config.output_scores),
        )
        tokens = prompts.tokens[place]
        self.sequence = TextSequence(
            prompts.input_ids[place : place + 1].long(),  # as the texts that transformers returns
            tokens,
            drafting.drafter(predicted),
            self._sampler,
            rule,
            last_lengths(last_length, prompts, rule.has_eos)[place],
            index=place,
            most_tokens=rule.most_tokens(prompts.width, len(tokens)),
        )
        last = self.sequence.last_length
        if last is None or self.sequence.length + self.sequence.remaining <= last:
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
        return self.row.length

    @property
    def reads_inputs(self) -> bool:
        """Whether its prompt is more than tokens, such as images: then its keys and values are no other text's."""
        return bool(self.arguments.prompts.inputs)

    @property
    def reach(self) -> int:
        """Length in tokens that the text may reach in the coming step, drafts included."""
        return self.length + self.drafting.most_nodes

    def serve(self, handle: RequestHandle, urgency: tuple[int, int], on_step: OnStep | None) -> None:
        """Become a request of an engine: each step is told to `handle`, `on_step` and the streamer."""
        self.handle, self.urgency = handle, urgency
        listeners: list[OnStep] = [self._tell_handle]
        if on_step is not None:
            listeners.append(on_step)
        if self.arguments.streamer is not None:
            self._feeder = StreamFeeder(self.arguments.streamer, self.arguments.prompts.input_ids, None)
            listeners.append(self._feeder.add)
        self.sequence.listeners = listeners

    def _tell_handle(self, record: StepRecord) -> None:
        if isinstance(self._sampler, LogprobSampler):
            self.handle.add(record, self._sampler.take())
        else:
            self.handle.add(record, [TokenEvent(token) for token in record.tokens])

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


class Steps:
    """Runs requests, step by step, timed for a pace.

    Args:
        backend: Runs their trees.
        clock: The clock for its steps, in seconds.
        pace: Chooses their nodes, if that is to go by the clock: those of each, or of all together.
        come_and_go: Whether the rows of `backend` do, so that each step has its own; else it has all of a call.
        launched: Called when the pass of a step was launched, which a device still computes.

    Attributes:
        batch: What is handed to `step`.
    """

    def __init__(
        self,
        backend: Any,
        clock: Callable[[], float],
        pace: Pace | SharedPace | None = None,
        come_and_go: bool = True,
        launched: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.come_and_go = come_and_go
        self._pace = pace
        # A thread's own time is a call into the system.
        self._timer = StepTimer(perf_counter if pace is None else clock, perf_counter, packed=come_and_go)
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
        if self.come_and_go:
            self.backend.rows = [request.row for request in requests]
        pace = self._pace_of(requests)
        batch.share_out = pace.share_out if isinstance(pace, SharedPace) else None
        try:
            self._timer.begin(batch)
            done = step(self.backend, batch)
            if pace is not None and not pace.skip():
                pace.book(self._timer.end(batch, done, pace.searches))
        finally:  # an error keeps this object, which is not to keep requests
            batch.sequences = ()
            if self.come_and_go:  # nor rows, whose memory others may take
                self.backend.rows = []

    def _pace_of(self, requests: Sequence[Request]) -> Pace | SharedPace | None:
        """What chooses the nodes of the coming step, by its time, if drafts can be made; one that is shared is told who
        shares it."""
        if not BACKGROUND.are_there():
            return None
        pace = self._pace
        if isinstance(pace, SharedPace):
            if not any(request.drafting.shares for request in requests):
                return None
            pace.begin_step(len(requests), sum(request.arguments.temperature for request in requests) / len(requests))
        return pace

    def prefill(self, requests: Sequence[Request], chunk_size: int | None) -> int:
        """Send long texts ahead in parts, so that the first step has few pending tokens; returns how many passes."""
        if self.come_and_go:
            self.backend.rows = [request.row for request in requests]
        return int(self.backend.prefill([request.sequence.tokens for request in requests], chunk_size))
