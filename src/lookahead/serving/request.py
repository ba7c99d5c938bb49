"""One request: its text, drafter, sampler, stop rule and listeners; and the steps of several requests together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from time import perf_counter
from traceback import walk_tb
from types import FrameType
from typing import Any

from lookahead.backends.session import open_session
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.protocols import StepPace
from lookahead.core.results import StepResults
from lookahead.core.statistics import OnStep, Statistics
from lookahead.core.step import Batch, step
from lookahead.core.step_time import StepTimer
from lookahead.drafting import PredictedText
from lookahead.drafting.background import BACKGROUND
from lookahead.errors import not_of_signal
from lookahead.serving.arguments import Arguments
from lookahead.serving.drafting import Drafting
from lookahead.serving.handle import RequestHandle
from lookahead.serving.output import StreamFeeder, make_output
from lookahead.serving.plain_step import plain_step
from lookahead.serving.selecting import LogprobSampler, StopRule, in_lock_step, last_lengths, row_processors


class Request:
    """One text in decoding: a row of a call of `generate`, or a request of an `Engine`.

    Args:
        arguments: Arguments of the call.
        drafting: Makes the drafter.
        noise: Random numbers of sampling.
        last_length: Largest number of tokens for the model's positions; unlimited if `None`.
        index: Row of the call.
        predicted: Predicted text.
        logprobs: Number of likeliest tokens to record with the log-probability of each token; `None` records neither.

    Attributes:
        sequence: State of the text for `step`.
        rule: Stop rule.
        row: Keys and values (`TextRow`); `None` if the runner has the rows of a call.
        handle: Handle of the caller, in an engine.
        notes: Sampler that records log-probabilities; `None` without them.
        reads_inputs: Whether the prompt has inputs beside tokens (images). Its keys and values are not shared then.
        temperature: Temperature of sampling; 0 for greedy decoding.
        group, tenant: Group and tenant of the request; see `Engine.submit`.
        urgency: Fixed order of requests, smallest first: the step of arrival minus the priority's steps, and a number.
        opening: Number of the opening of the model, in an engine, before the request was checked.
    """

    opening = 0
    row: Any = None
    group: object = None
    tenant: object = None

    def __init__(
        self,
        arguments: Arguments,
        drafting: Drafting,
        noise: SamplingNoise,
        last_length: int | None,
        index: int = 0,
        predicted: PredictedText | None = None,
        logprobs: int | None = None,
    ) -> None:
        prompts = arguments.prompts
        self.arguments = arguments
        self.drafting = drafting
        self.predicted = predicted
        self.reads_inputs = bool(prompts.inputs)
        self.temperature = arguments.temperature
        self.rule = rule = StopRule(arguments.criteria)
        self._feeder: StreamFeeder | None = None
        config = arguments.config
        keeps = bool(config.return_dict_in_generate)
        kind = TextSampler if logprobs is None else partial(LogprobSampler, logprobs)
        alone = not in_lock_step(arguments)  # in lock step, tokens are selected for all rows together
        processors = row_processors(arguments.processors, index, prompts.rows) if alone else None
        selector: Any = None
        if alone:
            session = open_session(arguments.model)
            selector = session.selector(processors or (), bool(config.do_sample), noise.seed, prompts.rows)
        own = alone and selector is None
        sampler = kind(
            processor=(own and processors) or None,
            noise=noise if own and config.do_sample else None,
            selector=selector,
            row=index,
            keep_logits=keeps and bool(config.output_logits),
            keep_scores=keeps and bool(config.output_scores),
        )
        self.notes = sampler if isinstance(sampler, LogprobSampler) else None
        tokens = prompts.tokens[index]
        self.sequence = TextSequence(
            prompts.input_ids[index : index + 1].long(),  # dtype of the texts that transformers returns
            tokens,
            drafting.drafter(predicted),
            sampler,
            rule,
            index=index,
            most_tokens=rule.max_tokens(prompts.width, len(tokens)),
        )
        self.limit(last_length)
        if prompts.source_tokens and (source := prompts.source_tokens[index]):  # outputs often copy the input
            self.sequence.ask_drafter(lambda drafter: drafter.start([*source, *tokens]), None)
        if (trace := drafting.config.trace) is not None:
            self.sequence.watcher = trace.begin(tokens)

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.sequence.tokens)

    @property
    def cached(self) -> int:
        """Tokens with keys and values."""
        return int(self.row.length)

    @property
    def reach(self) -> int:
        """Largest length of the text in the next step, drafts included."""
        return self.length + self.drafting.max_nodes

    def serve(self, handle: RequestHandle, urgency: tuple[int, int], on_step: OnStep | None) -> None:
        """Make this a request of an engine: `handle`, `on_step` and the streamer get each step."""
        self.handle = handle
        self.urgency = urgency
        handle.follow(self.sequence.tokens, self.notes is not None)
        listeners: list[OnStep] = []
        if on_step is not None:
            listeners.append(on_step)
        if self.arguments.streamer is not None:
            self._feeder = StreamFeeder(self.arguments.streamer, self.arguments.prompts.input_ids, None)
            listeners.append(self._feeder.add)
        self.sequence.listeners = listeners

    def limit(self, last_length: int | None) -> None:
        """Set the largest number of tokens for the model's positions, before the first token."""
        sequence, rule = self.sequence, self.rule
        sequence.last_length = last = last_lengths(last_length, self.arguments.prompts, rule.has_eos)[sequence.index]
        fits = last is None or sequence.length + sequence.most_tokens - len(sequence.tokens) <= last
        sequence.end_tokens = rule.end_tokens if fits else None

    def draft_by(self, drafting: Drafting) -> None:
        """Begin with new drafts, since the model has changed before the first token."""
        self.drafting.release()
        self.drafting = drafting
        self.sequence.drafter = drafting.drafter(self.predicted)
        self.sequence.ask_drafter(lambda drafter: drafter.start(self.sequence.tokens), None)

    def end(self, error: BaseException | None = None) -> None:
        """End the request, and pass its output, its error or its cancellation to the handle."""
        self.sequence.watcher = None
        self.sequence.listeners = ()  # breaks a reference cycle, so that memory is freed at once
        self.drafting.save()
        error = error or self.sequence.error
        raised: BaseException | None = None
        try:
            if self._feeder is not None:
                self._feeder.end()
        except BaseException as failure:
            raised = failure
            error = error or failure
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
        if raised is not None:
            not_of_signal(raised)


def _forget_locals(error: BaseException) -> None:
    """Clear the locals of finished frames in an error's traceback.

    They refer to the request, and its handle refers to the error: this cycle would keep the step's logits alive.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    frame: FrameType | None = frames[-1] if frames else None
    while frame is not None:
        with suppress(RuntimeError):  # still running
            frame.clear()
        frame = frame.f_back


class Notices:
    """Notifications of handles of the new tokens of a step.

    Attributes:
        late: Whether they wait for `send`. A device then computes the next pass meanwhile.
    """

    def __init__(self) -> None:
        self.late = False
        self._waiting: list[tuple[Request, int, int]] = []

    def add(self, requests: Sequence[Request], results: StepResults) -> None:
        """Notify the handles of the requests of a step, now or later; now if a request is complete."""
        self.send()
        self._waiting = list(zip(requests, results.nodes.tolist(), results.walks.counts.tolist(), strict=True))
        if not self.late or results.walks.stopped.any():
            self.send()

    def send(self) -> None:
        """Send the waiting notifications."""
        waiting = self._waiting
        self._waiting = []
        raised: Exception | None = None
        for request, nodes, tokens in waiting:
            if tokens:
                try:
                    request.handle.add(nodes, tokens, () if request.notes is None else request.notes.take())
                except Exception as error:
                    request.sequence.fail(error)
                    raised = error
        if raised is not None:
            not_of_signal(raised)


class Steps:
    """Runs steps of requests, and measures their times for a pace.

    Args:
        backend: Runs the trees.
        clock: Clock of the steps in seconds.
        pace: Chooses the number of nodes, of each row or of all together; `None` for no choice by time.
        is_padded: Whether the backend pads the trees of a step to the same size.
        launched: Called after the launch of a pass, while the device computes.
        notices: Notifies handles of each step, before all listeners; `None` for requests without handles.

    Attributes:
        batch: Arguments of `step`.
    """

    def __init__(
        self,
        backend: Any,
        clock: Callable[[], float],
        pace: StepPace | None = None,
        is_padded: bool = False,
        launched: Callable[[], None] | None = None,
        notices: Notices | None = None,
    ) -> None:
        self.backend = backend
        self._pace = pace
        self._notices = notices
        # Without a pace the cheaper clock is enough: CPU time needs a system call.
        self._timer = StepTimer(perf_counter if pace is None else clock, perf_counter, is_padded)
        self.batch = Batch((), launched=launched)

    def run(self, requests: Sequence[Request], statistics: Statistics) -> None:
        """Run one step, and add its counts to `statistics`. Errors of a request are stored in `SequenceState.error`."""
        batch = self.batch
        batch.sequences, batch.statistics = [request.sequence for request in requests], statistics
        batch.notify = None if self._notices is None else partial(self._notices.add, requests)
        batch.mark = self._timer.mark
        pace = self._pace_of(requests)
        try:
            with self._serving(requests):
                self._timer.begin(batch)
                is_single = len(requests) == 1 and self._notices is None
                is_plain = is_single and plain_step(self.backend, batch.sequences[0], statistics, batch.mark)
                done = None if is_plain else step(self.backend, batch)
            if pace is not None and not pace.skip():
                pace.book(self._timer.end(batch, done, pace.searches))
        finally:  # the traceback of an error must not keep requests alive
            batch.sequences = ()
            batch.notify = None

    def _serving(self, requests: Sequence[Request]) -> AbstractContextManager[None]:
        """Return a context for passes over the rows of some requests."""
        if requests[0].row is None:  # the runner has the rows of a call
            return nullcontext()
        serving: AbstractContextManager[None] = self.backend.serving([request.row for request in requests])
        return serving

    def _pace_of(self, requests: Sequence[Request]) -> StepPace | None:
        """Return the pace of the next step; `None` if no drafts are chosen by time."""
        if self._pace is None or not BACKGROUND.are_there() or not any(one.drafting.is_paced for one in requests):
            return None
        self._pace.begin_step(len(requests), sum([request.temperature for request in requests]) / len(requests))
        return self._pace

    def prefill(self, requests: Sequence[Request], chunk_size: int | None) -> int:
        """Process long texts in chunks, so that the first step has few pending tokens; return the number of passes."""
        with self._serving(requests):
            return int(self.backend.prefill([request.sequence.tokens for request in requests], chunk_size))

    def complete(self, requests: Sequence[Request], texts: Sequence[Sequence[int]]) -> None:
        """Fill the caches of requests with their texts except the last token."""
        with self._serving(requests):
            self.backend.complete(texts)
