"""A call of `generate`: a batch of requests without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lookahead.backends.session import open_session
from lookahead.backends.transformers.noise import SamplingNoise, default_generator
from lookahead.backends.transformers.prompt_pass import PromptPass
from lookahead.config import LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.statistics import OnStep, Statistics, StepRecord
from lookahead.core.walk import walk_trees
from lookahead.drafting import NGramPool
from lookahead.drafting.checked import shielded
from lookahead.errors import ModelChangedError, UnsupportedArgumentError
from lookahead.serving.arguments import Arguments
from lookahead.serving.drafting import Drafting, Prediction, draft_pace, predicted_texts
from lookahead.serving.lock_step import LockStep
from lookahead.serving.output import LookaheadOutput, StreamFeeder, make_output, padded_texts
from lookahead.serving.refusals import check_own_prefill
from lookahead.serving.request import Request, Steps
from lookahead.serving.selecting import in_lock_step

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


class GenerateCall:
    """Rows of one call of `generate`: preparation, decoding and output. `generate` documents the arguments.

    Raises:
        LookaheadError: The model or its settings do not support the call.
    """

    def __init__(
        self,
        arguments: Arguments,
        config: LookaheadConfig,
        pool: NGramPool | None,
        prediction: Prediction | None,
        parallel: ParallelGroup | None,
    ) -> None:
        model = arguments.model
        prompts = arguments.prompts
        together = in_lock_step(arguments)
        if parallel is not None and together:
            raise UnsupportedArgumentError(
                "parallel is not supported for several rows with guidance_scale, or a logits_processor, a "
                "stopping_criteria or a prefix_allowed_tokens_fn of your own, which may depend on all rows; call "
                "generate once for each row"
            )
        session = open_session(model) if parallel is None else parallel.open_session(model)
        if prompts.inputs:
            check_own_prefill(arguments.model, prompts, config, arguments.config, session.refuses_inputs)
        self._speaks = session.speaks
        config = session.settle(config)
        self._arguments = arguments
        self._statistics = Statistics()
        self._noise = noise = SamplingNoise(prompts.rows)
        self._call = call = session.begin(prompts, config, arguments.config)
        runner = call.runner
        predicted = predicted_texts(prediction, config, prompts.rows, model)
        pace: Pace | SharedPace | None = None
        if config.chooses_nodes and call.rows is not None:
            pace = SharedPace(partial(draft_pace, runner.model, config))
        elif config.chooses_nodes:
            pace = draft_pace(model, config, prompts.rows, arguments.temperature, runner.chains, runner.pass_sizes)
        config = shielded(config, [torch.default_generator, default_generator(prompts.input_ids.device)])
        self._drafting = drafting = Drafting(model, config, pace, pool, runner.most_nodes, runner.chains)
        self._requests = requests = [
            Request(arguments, drafting, noise, runner.last_length, row, predicted[row]) for row in range(prompts.rows)
        ]
        self._sequences = [request.sequence for request in requests]
        self._fills = requests[0].rule.has_eos  # whether rows that end before others get padding
        token = arguments.config._pad_token_tensor
        self._pad_token = int(token) if token is not None and self._fills else None
        self._steps = steps = Steps(runner, call.clock, pace, is_padded=call.rows is None)
        self._leave = call.rows is not None and not together and parallel is None
        if together:
            steps.backend = LockStep(runner, arguments, self._sequences, self._pad_token)
        if call.rows is not None:
            for request, row in zip(requests, call.rows, strict=True):
                request.row = row
        if not together:
            steps.backend = call.backend(self._sequences, requests[0].rule.has_further_criteria)

    def run(self, start: float, on_step: OnStep | None) -> torch.Tensor | LookaheadOutput:
        """Decode all rows, and return the output of a call that began at `start` (of `perf_counter`)."""
        arguments = self._arguments
        call = self._call
        statistics = self._statistics
        listeners: list[OnStep] = [self._leave_noise] if self._fills and self._sequences[0].sampler.samples else []
        feeder: StreamFeeder | None = None
        if self._speaks and on_step is not None:
            listeners.insert(0, on_step)
        if self._speaks and arguments.streamer is not None:
            feeder = StreamFeeder(arguments.streamer, arguments.prompts.input_ids, self._pad_token)
            listeners.append(feeder.add)
        for sequence in self._sequences:
            sequence.listeners = listeners
        returns_cache = arguments.config.return_dict_in_generate and arguments.config.use_cache and call.keeps_cache
        keeps_cache = returns_cache or arguments.prompts.cache is not None
        statistics.seconds.prepare += perf_counter() - start
        try:
            self._decode()
            if not call.model_holds():
                raise ModelChangedError(
                    "the model changed during decoding: a hook, module, method, mode or setting differs from the "
                    "beginning, so the text may mix two models; change models between calls"
                )
            if keeps_cache:
                self._complete()
        except BaseException as error:
            call.restore(error)
            raise
        finally:
            self._drafting.save()
        if feeder is not None:
            feeder.end()
        cache = call.release(keeps_cache)
        statistics.state_bytes = call.state_bytes
        statistics.invariant_rows = call.invariant_rows
        statistics.engine = call.runner.engine
        cache = cache if returns_cache else None
        output = make_output(self._sequences, arguments, self._pad_token, statistics, cache)
        self._drafting.release()
        return output

    def _leave_noise(self, record: StepRecord) -> None:
        """Stop sampling noise for a finished row."""
        if record.finished and self._fills:
            self._noise.leave(record.index)

    @torch.no_grad()
    def _decode(self) -> None:
        prompts = self._arguments.prompts
        steps = self._steps
        statistics = self._statistics
        if prompts.inputs:
            runner: Any = self._call.runner
            backend = steps.backend
            model = self._arguments.model
            walk = getattr(backend, "walk", walk_trees)
            steps.backend = PromptPass(runner, model, prompts.input_ids, prompts.mask, prompts.inputs, walk=walk)
            self._step(self._requests)
            steps.backend = backend
        else:
            start = perf_counter()
            statistics.prefill_passes = steps.prefill(self._requests, self._arguments.config.prefill_chunk_size)
            statistics.seconds.prepare += perf_counter() - start
        self._run_steps()
        if not self._fills:
            self._lengthen()
            self._run_steps()

    def _run_steps(self) -> None:
        while left := [request for request in self._requests if not request.sequence.finished]:
            self._step(left if self._leave else self._requests)

    def _step(self, requests: Sequence[Request]) -> None:
        self._steps.run(requests, self._statistics)
        for sequence in self._sequences:
            if sequence.error is not None:
                raise sequence.error

    def _lengthen(self) -> None:
        """Continue rows that ended before others: without an end-of-sequence token transformers does not pad."""
        longest = max(sequence.length for sequence in self._sequences)
        for sequence in self._sequences:
            sequence.stop = lambda sequence: sequence.length >= longest
            sequence.most_tokens = len(sequence.tokens) + longest - sequence.length
            sequence.end_tokens = ()
            sequence.finished = sequence.stop(sequence)

    @torch.no_grad()
    def _complete(self) -> None:
        """Fill the cache with the tokens that plain decoding leaves in it."""
        self._steps.complete(self._requests, padded_texts(self._sequences, self._pad_token))
