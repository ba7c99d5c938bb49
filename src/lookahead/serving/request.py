"""One request: its text, who drafts and selects its tokens, and where its keys and values are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from traceback import walk_tb
from types import FrameType
from typing import cast

import torch
from transformers import PreTrainedModel

from lookahead.backends.session import EngineRunner
from lookahead.backends.transformers.invariant.modules import least_rows
from lookahead.backends.transformers.model_state import draft_memory, keep_memory
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.backends.transformers.text_limits import check_length
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.config import LookaheadConfig
from lookahead.core.shared_budget import SharedBudget
from lookahead.core.statistics import OnStep, StepRecord
from lookahead.drafting import PredictedText, build_drafter
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.serving.arguments import inputs_beside_tokens
from lookahead.serving.handle import Output, RequestHandle, TokenEvent
from lookahead.serving.kv_memory import KVMemory
from lookahead.serving.output import LookaheadOutput, stack_collected
from lookahead.serving.prepared import Arguments
from lookahead.serving.prompt_warm_up import warm_up_tokens
from lookahead.serving.selecting import LogprobSampler, make_sampler
from lookahead.serving.stopping import StopRule, last_lengths
from lookahead.serving.streaming import StreamFeeder


@dataclass(frozen=True)
class Extras:
    """What a request may want beside the arguments of `generate`.

    Attributes:
        seed: Of its random draws.
        logprobs: How many of the likeliest tokens to tell with the log-probabilities of each token; neither these nor
            those if `None`.
        prediction: Token ids of the text that is expected.
    """

    seed: int
    logprobs: int | None = None
    prediction: Sequence[int] | None = None


def check_request(arguments: Arguments) -> None:
    """Refuse what an engine does not run.

    Raises:
        UnsupportedArgumentError: It is asked for.
    """
    prompts = arguments.prompts
    if prompts.inputs:
        names = ", ".join(inputs_beside_tokens(prompts.inputs))
        raise UnsupportedArgumentError(
            f"{names or 'position_ids'} is not supported by an Engine, which sends prompts in parts; use "
            "lookahead.generate"
        )
    if prompts.rows != 1:
        raise UnsupportedArgumentError(
            f"input_ids and num_return_sequences make {prompts.rows} rows, but a request has one; submit each by itself"
        )
    if prompts.cache is not None:
        raise UnsupportedArgumentError("past_key_values is not supported by an Engine; give the whole text")
    if not prompts.all_count:
        raise UnsupportedArgumentError(
            "attention_mask hides tokens of input_ids, which an Engine does not support; leave them out. Without "
            "an attention_mask, transformers hides those that are the pad_token_id"
        )


class Request:
    """A request that waits or runs.

    Args:
        model: The model.
        runner: Runs it.
        memory: Where its keys and values go.
        arguments: Its arguments.
        extras: What it wants besides.
        config: How to draft.
        shared: Which nodes it may send.
        handle: What the caller has of it.
        urgency: See `scheduler.urgency`.

    Attributes:
        row: Its keys and values.
        error: What went wrong with it alone, if anything did.
        shares: Whether its candidates compete with those of other requests.
        temperature: Of sampling; 0 for the likeliest tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        runner: EngineRunner,
        memory: KVMemory,
        arguments: Arguments,
        extras: Extras,
        config: LookaheadConfig,
        shared: SharedBudget,
        handle: RequestHandle,
        urgency: tuple[int, int],
    ) -> None:
        prompts = arguments.prompts
        check_length(runner, type(model).__name__, prompts, arguments.longest - prompts.width)
        self.handle, self.urgency = handle, urgency
        self.row = memory.new_row()
        self.error: BaseException | None = None
        self._kv_memory, self._submitted = memory, perf_counter()
        self._model, self._config, self._arguments = model, config, arguments
        self.shares = shares = config.preset == "auto"
        self.most_nodes = min(config.max_nodes, runner.most_nodes)
        rule = StopRule(arguments.criteria)
        generator = torch.Generator(prompts.input_ids.device).manual_seed(extras.seed)
        sampler = make_sampler(arguments.processors, arguments.config, SamplingNoise(generator=generator).row())
        self._logprobs = None if extras.logprobs is None else LogprobSampler(sampler, extras.logprobs)
        self._prediction = PredictedText(extras.prediction) if shares and extras.prediction else None
        self._memory = draft_memory(model, config) if shares else None
        tokens = prompts.tokens[0]
        self.temperature = arguments.temperature
        self.sequence = TextSequence(
            prompts.input_ids.long(),
            tokens,
            build_drafter(
                config,
                memory=self._memory,
                vocabulary=getattr(model.get_input_embeddings(), "num_embeddings", None),
                warm_up=warm_up_tokens(model, len(tokens), config.chooses_nodes) if shares else 0,
                most=self.most_nodes,
                budget=shared.row(self.temperature, arguments.longest) if shares else None,
                predicted=self._prediction,
            ),
            cast(TextSampler, self._logprobs or sampler),
            rule,
            last_lengths(runner.last_length, prompts, rule.has_eos)[0],
            most_tokens=rule.most_tokens(prompts.width, len(tokens)),
        )
        if config.trace is not None:
            self.sequence.watcher = config.trace.begin(tokens)
        handle.statistics.prompt_tokens = len(tokens)
        handle.statistics.invariant_rows = least_rows(runner.model) if runner.is_invariant else 0
        self._rule = rule
        self._feeder = None if arguments.streamer is None else StreamFeeder(arguments.streamer, 1, None)

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.sequence.tokens)

    @property
    def cached(self) -> int:
        """How many of them have keys and values."""
        return self.row.length

    @property
    def reserved(self) -> int:
        """Tokens that its keys and values may take in the coming step."""
        return self._kv_memory.reserved(self.length + self.most_nodes)

    def send(self, tokens: int) -> None:
        """Send so many of the tokens that are not cached with the coming step."""
        self.row.most_pending = tokens
        if self.handle.statistics.queue_seconds is None:
            self.handle.statistics.queue_seconds = perf_counter() - self._submitted

    def drop(self) -> None:
        """Forget keys and values; they will be computed anew."""
        self.row = self._kv_memory.new_row()

    def listen(self, on_step: OnStep | None) -> None:
        """Tell handle, `on_step` and streamer of each step. What these raise is an error of this request alone."""
        if self._feeder is not None:
            self._feeder.start(self._arguments.prompts.input_ids)

        def tell(record: StepRecord) -> None:
            statistics = self.handle.statistics
            statistics.steps += 1
            statistics.record(record)
            if statistics.first_token_seconds is None:
                statistics.first_token_seconds = perf_counter() - self._submitted
            self.handle.add(self._events(record.tokens))
            try:
                if on_step is not None:
                    on_step(record)
                if self._feeder is not None:
                    self._feeder.add(record)
            except Exception as error:
                self.error = error

        self.sequence.on_step = tell

    def _events(self, tokens: list[int]) -> list[TokenEvent]:
        if self._logprobs is None:
            return [TokenEvent(token) for token in tokens]
        noted, self._logprobs.noted = self._logprobs.noted, []
        return [TokenEvent(token, one.logprob, one.top) for token, one in zip(tokens, noted, strict=True)]

    def end(self, error: BaseException | None = None) -> None:
        """Tell the handle how it ended: complete, with an error, or cancelled."""
        self.sequence.watcher = None
        self.sequence.on_step = None  # which refers to this object: what it holds is to go with it, not some time later
        if self._memory is not None:
            keep_memory(self._model, self._config, self._memory)
        error = error or self.error
        try:
            if self._feeder is not None:
                self._feeder.end()
        except Exception as raised:
            error = error or raised
        if error is not None:
            _forget_locals(error)
        complete = self.sequence.finished and error is None and not self.handle.cancelled
        statistics = self.handle.statistics
        statistics.total_seconds = perf_counter() - self._submitted
        statistics.predicted_tokens = 0 if self._prediction is None else self._prediction.accepted
        reason = "error" if error is not None else "cancelled"
        if complete:
            reason = "length" if self._rule.ends_by_length(self.sequence) else "stop"
        self.handle.end(self._output() if complete else None, error, reason)

    def _output(self) -> Output:
        sequence = self.sequence
        if not self._arguments.config.return_dict_in_generate:
            return sequence.ids.clone()
        self.handle.statistics.sources = [sequence.ask_drafter(lambda drafter: drafter.statistics(), {})]
        return LookaheadOutput(
            sequences=sequence.ids.clone(),
            scores=stack_collected([sequence.sampler.scores]),
            logits=stack_collected([sequence.sampler.logits]),
            statistics=self.handle.statistics,
        )


def check_room(arguments: Arguments, runner: EngineRunner, memory: KVMemory, nodes: int) -> None:
    """Refuse a text for which there is not room enough, or that is read otherwise beside others.

    Raises:
        InvalidArgumentError: It may need more memory than there is.
        UnsupportedArgumentError: It may come to where its positions depend on the other rows.
    """
    longest = arguments.longest
    if memory.tokens is not None and memory.reserved(longest + nodes) > memory.tokens:
        raise InvalidArgumentError(
            f"input_ids and max_new_tokens may come to {longest} tokens, and a step to {nodes} more, but kv_bytes has "
            f"room for {memory.tokens} tokens; choose a smaller max_new_tokens, or an Engine with more kv_bytes"
        )
    if runner.changes_after is not None and longest - 1 > runner.changes_after:
        raise UnsupportedArgumentError(
            f"input_ids and max_new_tokens may come to {longest} tokens: beyond {runner.changes_after} the positions "
            "of this model depend on the longest text of a pass; use lookahead.generate, or a smaller max_new_tokens"
        )


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
