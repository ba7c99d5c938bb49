"""One call of `generate`: a batch of requests without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lookahead.backends.base import CallSession
from lookahead.backends.session import open_session
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.prompt_pass import PromptPass
from lookahead.config import LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.statistics import OnStep, Statistics, StepRecord
from lookahead.drafting import NGramPool
from lookahead.serving.arguments import Arguments
from lookahead.serving.drafting import Drafting, Prediction, draft_pace, predicted_texts, shielded
from lookahead.serving.output import LookaheadOutput, StreamFeeder, make_output, padded_texts
from lookahead.serving.refusals import check_own_prefill
from lookahead.serving.request import Request
from lookahead.serving.steps import Steps

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


def decode_call(
    arguments: Arguments,
    *,
    config: LookaheadConfig,
    on_step: OnStep | None,
    ngram_pool: NGramPool | None,
    start: float,
    prediction: Prediction | None = None,
    parallel: ParallelGroup | None = None,
) -> torch.Tensor | LookaheadOutput:
    """Decode a call of `lookahead.generate` that began at `start` (by `perf_counter`), and return its output."""
    session = open_session(arguments.model) if parallel is None else parallel.open_session(arguments.model)
    if arguments.prompts.inputs:
        check_own_prefill(arguments.prompts, config, arguments.config, session.refuses_inputs)
    if not session.speaks:
        arguments, on_step = replace(arguments, streamer=None), None
    call = Call(arguments, session.settle(config), session, ngram_pool, prediction)
    return call.run(start, on_step)


class Call:
    """The rows of one call: prepared, decoded, and returned.

    Args:
        arguments: What it asks for.
        config: How to draft.
        session: How the model is run.
        pool: A pool for all rows.
        prediction: What is expected of them.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """

    def __init__(
        self,
        arguments: Arguments,
        config: LookaheadConfig,
        session: CallSession,
        pool: NGramPool | None,
        prediction: Prediction | None,
    ) -> None:
        model, prompts, asked = arguments.model, arguments.prompts, arguments.config
        self._arguments = arguments
        self._call = call = session.begin(prompts, config, asked)
        runner = call.runner
        vocabulary = model.get_input_embeddings().num_embeddings if prediction is not None else 0
        predicted = predicted_texts(prediction, config, prompts.rows, vocabulary)
        packed = call.packed
        pace: Pace | SharedPace | None = None
        if config.chooses_nodes and packed is not None:
            pace = SharedPace(partial(draft_pace, packed.model, config))
        elif config.chooses_nodes:
            pace = draft_pace(model, config, prompts.rows, arguments.temperature, runner.chains)
        self._drafting = drafting = Drafting(
            model, shielded(config, prompts.input_ids.device), pace, pool, runner.most_nodes, runner.chains
        )
        self._noise = noise = SamplingNoise(prompts.rows)
        self._requests = [
            Request(arguments, drafting, noise, runner.last_length, row, predicted[row]) for row in range(prompts.rows)
        ]
        self._statistics = Statistics()
        self._fills = self._requests[0].rule.has_eos  # rows that end before others, with padding
        self._steps = steps = Steps(packed or runner, call.clock, pace, come_and_go=packed is not None)
        if packed is None:
            steps.batch.sequences = [request.sequence for request in self._requests]
            steps.backend = call.backend(steps.batch, self._requests[0].rule.asks_others)
        else:
            for request, row in zip(self._requests, runner.rows, strict=True):
                request.row = row
        wants_cache = asked.return_dict_in_generate and asked.use_cache
        self._returns_cache = bool(wants_cache and call.keeps_cache)

    def run(self, start: float, on_step: OnStep | None) -> torch.Tensor | LookaheadOutput:
        """Decode all rows, and return the output of a call that began at `start`."""
        streamer, statistics = self._arguments.streamer, self._statistics
        feeder = (
            None if streamer is None else StreamFeeder(streamer, self._arguments.prompts.input_ids, self._pad_token)
        )
        listeners = [on_step, None if feeder is None else feeder.add, self._leave_noise]
        for request in self._requests:
            request.sequence.listeners = [listener for listener in listeners if listener is not None]
        statistics.seconds.prepare += perf_counter() - start
        keeps_cache = self._returns_cache or self._arguments.prompts.cache is not None
        try:
            self._decode(keeps_cache)
        except BaseException as error:
            self._call.restore(error)
            raise
        finally:
            self._drafting.keep()
        if feeder is not None:
            feeder.end()
        cache = self._call.release(keeps_cache)
        statistics.state_bytes, statistics.invariant_rows = self._call.state_bytes, self._call.invariant_rows
        statistics.engine = self._call.runner.engine
        sequences = [request.sequence for request in self._requests]
        cache = cache if self._returns_cache else None
        output = make_output(sequences, self._arguments, self._pad_token, statistics, cache)
        self._drafting.release()
        return output

    def _leave_noise(self, record: StepRecord) -> None:
        """Keep no noise for a row that needs no more."""
        if record.finished and self._fills:
            self._noise.leave(record.index)

    @property
    def _pad_token(self) -> int | None:
        token = self._arguments.config._pad_token_tensor
        return int(token) if token is not None and self._fills else None

    @torch.no_grad()
    def _decode(self, keeps_cache: bool) -> None:
        prompts, chunk_size = self._arguments.prompts, self._arguments.config.prefill_chunk_size
        steps, statistics = self._steps, self._statistics
        if prompts.inputs:
            runner: Any = self._call.runner
            model = self._arguments.model
            steps.backend = PromptPass(runner, model, prompts.input_ids, prompts.mask, prompts.inputs)
            self._step(self._requests)
            steps.backend = runner
        else:
            start = perf_counter()
            statistics.prefill_passes = steps.prefill(self._requests, chunk_size)
            statistics.seconds.prepare += perf_counter() - start
        self._run_steps()
        if not self._fills:
            self._lengthen()
            self._run_steps()
        if keeps_cache:
            if steps.come_and_go:
                steps.backend.rows = [request.row for request in self._requests]
            steps.backend.complete(padded_texts([request.sequence for request in self._requests], self._pad_token))

    def _run_steps(self) -> None:
        while left := [request for request in self._requests if not request.sequence.finished]:
            self._step(left if self._steps.come_and_go else self._requests)

    def _step(self, requests: Sequence[Request]) -> None:
        self._steps.run(requests, self._statistics)
        for request in requests:
            if request.sequence.error is not None:
                raise request.sequence.error

    def _lengthen(self) -> None:
        """Let rows go on that ended before others: without an end-of-sequence token transformers pads nothing."""
        sequences = [request.sequence for request in self._requests]
        longest = max(sequence.length for sequence in sequences)
        for sequence in sequences:
            sequence.stop = lambda sequence: sequence.length >= longest
            sequence.most_tokens = len(sequence.tokens) + longest - sequence.length
            sequence.finished = sequence.stop(sequence)
