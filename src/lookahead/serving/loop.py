"""The loop of an engine: it opens the model, runs the steps of its requests, and reopens a model that has changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from lookahead.backends.base import Runner
from lookahead.backends.machine import free_bytes
from lookahead.backends.session import open_session
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.checks import check_length
from lookahead.backends.transformers.prompt_pass import PromptPass
from lookahead.backends.transformers.shared_clone import shell_of
from lookahead.config import LookaheadConfig, check_config
from lookahead.core.shared_pace import SharedPace
from lookahead.core.statistics import Statistics
from lookahead.drafting.background import BACKGROUND
from lookahead.errors import (
    InvalidArgumentError,
    LookaheadError,
    ModelChangedError,
    UnsupportedArgumentError,
    not_of_signal,
)
from lookahead.serving.arguments import Arguments, check_wrapper, language_model, unknown_token
from lookahead.serving.drafting import Drafting, draft_pace
from lookahead.serving.handle import EngineStatistics
from lookahead.serving.kv_memory import PREFIX_BYTES, KVMemory
from lookahead.serving.refusals import check_own_prefill
from lookahead.serving.request import Notices, Request, Steps
from lookahead.serving.scheduler import Scheduler


class ModelMoved(Exception):
    """The model changed before the end of a pass; its result is not used."""


class EngineLoop:
    """Steps of all requests of an engine. One thread at a time may call it.

    Args:
        model: The model.
        config: Default configuration of drafts.
        max_rows: As for `Engine`.
        kv_bytes: As for `Engine`.
        prompt_tokens: As for `Engine`.
        prefix_cache: As for `Engine`.
        prefix_bytes: As for `Engine`.

    Attributes:
        model: The transformers model, or another with its interface.
        config: Default configuration of drafts.
        runner: Runner of the rows.
        memory: Memory for keys and values.
        scheduler: Waiting and running requests.
        statistics: Counts so far.
        openings: Number of times that a changed model was opened again.
    """

    openings = 0

    def __init__(
        self,
        model: Any,
        config: LookaheadConfig | None,
        max_rows: int,
        kv_bytes: int | None,
        prompt_tokens: int,
        prefix_cache: bool,
        prefix_bytes: int | None,
    ) -> None:
        wrapper, model = language_model(model)
        check_wrapper(wrapper)
        self.model: PreTrainedModel = model
        self.config = config = check_config(config)
        check_engine_config(config)
        BACKGROUND.begin(config)
        self._session = open_session(model)
        if prefix_bytes is None:
            prefix_bytes = PREFIX_BYTES if kv_bytes is None else kv_bytes
        self._rows = config, max_rows, kv_bytes, prefix_bytes if prefix_cache else 0
        self.runner, kv_bytes, prefix_bytes = self._session.open_rows(*self._rows)
        check_engine_config(config, self.runner.most_nodes)
        reuses = prefix_cache and self.runner.shares_beginnings
        self.memory = KVMemory(self.runner, kv_bytes, prefix_bytes if reuses else None, free_bytes(model.device))
        self.statistics = EngineStatistics()
        self.scheduler = Scheduler(max_rows, self.memory, prompt_tokens, self.statistics)
        self._pace = SharedPace(self._pace_of_load, config.step_budget)
        self._notices = Notices()
        self._steps = Steps(
            self.runner, self._session.clock, self._pace, launched=self._during_pass, notices=self._notices
        )
        self._begin()

    def _begin(self) -> None:
        """Allocate the runner's memory, and start to watch the model."""
        self.runner.take_memory(self.memory.tokens, self.memory.block, self._rows[1], self.config.max_nodes)
        self.statistics.graphs = self.runner.recorded
        compares_bits = self.memory.reuses or bool(self.config.pack_weights)
        self._watch = self._session.watch(self.runner, compares_bits)

    def _pace_of_load(self, rows: int, temperature: float) -> Any:
        """Return the pace of a number of rows."""
        runner = self.runner
        return draft_pace(runner.model, self.config, rows, temperature, runner.chains, runner.pass_sizes)

    def check(self, arguments: Arguments, config: LookaheadConfig) -> None:
        """Refuse a request that the engine cannot run; see `check_request`."""
        reason = self._session.refuses_inputs
        if self.runner.chains:
            reason = "models with a running state do not support it in an Engine; use lookahead.generate"
        check_request(arguments, config, self.runner, self.memory, self.config, reason)

    def drafting(self, config: LookaheadConfig, tenant: object = None) -> Drafting:
        """Return the drafting of a request of a tenant."""
        nodes, chains = self.runner.most_nodes, self.runner.chains
        return Drafting(self.model, config, self._pace, max_nodes=nodes, chains=chains, tenant=tenant)

    @property
    def unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self.scheduler.requests)

    def step(self, arrivals: Iterable[Request], is_continuous: bool = False) -> None:
        """Queue new requests, and run one step.

        Args:
            arrivals: New requests.
            is_continuous: Whether the next step follows at once. On a device, handles are then notified during it.

        Raises:
            Exception: The model raised it; the requests of the step end with it.
            LookaheadError: The model has changed and is not supported any more; all requests end with it.
        """
        self._notices.late = is_continuous and self.runner.is_asynchronous
        self._update(arrivals)
        requests = self.scheduler.plan()
        self._read_inputs(requests)
        if requests:
            self._run(requests)
        else:
            self._notices.send()
        self.scheduler.end_step()

    def _update(self, arrivals: Iterable[Request]) -> None:
        """Queue new requests, remove cancelled ones, and reopen the model if it has changed."""
        for request in arrivals:
            self.memory.drop(request)  # gets a row of the current runner
            self.scheduler.add(request)
            if request.opening != self.openings:  # the model was opened again while the request was checked
                self._adapt(request)
        for request in self.scheduler.requests:
            if request.handle.cancelled:
                self._leave(request)
        if self._watch is None or not self.scheduler.requests:
            return
        idle = not self.scheduler.running  # a thorough check would delay running requests
        if self._watch.has_changed(thorough=True) if idle else self._watch.changed_before_pass():
            self._reopen()

    def _run(self, requests: list[Request]) -> None:
        """Run one step, and clear the list of its requests, which the traceback of an error would keep alive."""
        try:
            counts = Statistics()
            self._steps.run(requests, counts)
            self.statistics.steps += 1
            self.statistics.rows += len(requests)
            self.statistics.nodes += sum(counts.nodes_per_step)
            self.statistics.tokens += counts.tokens
        except ModelMoved:
            self._reopen()
        except BaseException as error:
            if isinstance(error, Exception) and self._has_changed():  # which is why it could not run
                self._reopen()
                return
            self._leave_all(requests, error)
            raise
        else:
            self._leave_all([one for one in requests if one.sequence.finished])
        finally:
            requests.clear()

    def _during_pass(self) -> None:
        """Notify handles of the step before, and check the model, after the launch of a pass.

        Raises:
            ModelMoved: The model has changed.
        """
        self._notices.send()
        if self._watch is not None and self._watch.changed_by_pass():
            raise ModelMoved

    def _has_changed(self) -> bool:
        """Return whether the model has changed; see `ModelWatch`."""
        return self._watch is not None and self._watch.has_changed(thorough=False)

    def _read_inputs(self, requests: list[Request]) -> None:
        """Let the model process prompts with images, except their last tokens. An error ends only its own request."""
        runner: Any = self.runner
        for request in [one for one in requests if one.reads_inputs and not one.cached]:
            arguments = request.arguments
            prompts = arguments.prompts
            try:
                with runner.serving([request.row]):
                    model = arguments.model
                    PromptPass(runner, self.model, prompts.input_ids, prompts.mask, prompts.inputs, model).read()
            except Exception as error:
                requests.remove(request)
                self._leave(request, not_of_signal(error))
            else:
                request.row.crop(request.cached - 1)
            if self._watch is not None:
                self._watch.changed_by_pass()  # the check of the next step reports a change

    def _reopen(self) -> None:
        """Reopen the changed model, and forget all keys and values.

        Raises:
            LookaheadError: The model is not supported any more; all requests have ended with it.
        """
        for request in self.scheduler.requests:
            if request.sequence.steps:
                error = ModelChangedError(
                    f"the model changed after {len(request.handle.tokens)} tokens of the text; submit the request again"
                )
                self._leave(request, error)
        self.memory.forget()
        try:
            self.runner = self.memory.runner = self._steps.backend = self._session.open_rows(*self._rows)[0]
            self.openings += 1
            self._begin()
        except LookaheadError as error:
            self._leave_all(self.scheduler.requests, error)
            raise
        for request in self.scheduler.requests:
            self.memory.drop(request)
            self._adapt(request)

    def _adapt(self, request: Request) -> None:
        """Check a request again, and prepare it for the changed model."""
        try:
            if (largest := max(request.sequence.tokens)) >= self.runner.vocabulary:
                raise unknown_token(largest, self.runner.vocabulary)
            request.arguments = replace(request.arguments, model=shell_of(self.model))
            self.check(request.arguments, request.drafting.config)
        except LookaheadError as error:
            self._leave(request, error)
        else:
            request.limit(self.runner.last_length)
            request.draft_by(self.drafting(request.drafting.config, request.tenant))

    def refresh(self) -> bool:
        """Reopen the model if it has changed and no request needs it; return whether it has.

        Raises:
            LookaheadError: The model is not supported any more.
        """
        if self._watch is None or self.scheduler.requests or not self._watch.has_changed(thorough=True):
            return False
        self._reopen()
        return True

    def _leave_all(self, requests: list[Request], error: BaseException | None = None) -> None:
        for request in requests:
            self._leave(request, error)

    def _leave(self, request: Request, error: BaseException | None = None) -> None:
        self._notices.send()  # before the end
        self.scheduler.remove(request)
        if error is None:
            self.memory.keep(request, self.scheduler.running)
        request.end(error)


def check_engine_config(config: LookaheadConfig | None, most_nodes: int | None = None) -> LookaheadConfig:
    """Return the checked configuration of an engine or a request.

    Args:
        config: The configuration.
        most_nodes: Maximum number of nodes of the tree of a row, if known.

    Raises:
        UnsupportedArgumentError: Engines do not support a setting.
        InvalidArgumentError: Trees of fixed shape need more sequence ids than llama.cpp has.
    """
    config = check_config(config)
    if config.engine not in ("auto", "dynamic"):
        raise UnsupportedArgumentError(f"engine={config.engine!r} is not supported by an Engine; use engine='auto'")
    if most_nodes is not None and config.preset in ("paper", "jacobi") and config.max_nodes > most_nodes:
        raise InvalidArgumentError(
            f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each row, but llama.cpp has sequence "
            f"ids for {most_nodes}; choose smaller sizes, or an Engine with smaller max_rows"
        )
    return config


def check_request(
    arguments: Arguments,
    config: LookaheadConfig,
    runner: Runner,
    memory: KVMemory,
    engine_config: LookaheadConfig,
    refuses_inputs: str | None,
) -> None:
    """Refuse a request that an engine cannot run.

    Args:
        arguments: Arguments of the request.
        config: Its configuration of drafts.
        runner: Runner of the engine's rows.
        memory: Memory for their keys and values.
        engine_config: Configuration of the engine.
        refuses_inputs: Reason to refuse inputs beside tokens; `None` if they are accepted.

    Raises:
        InvalidArgumentError: It may need more memory or positions than there are.
        UnsupportedArgumentError: Engines do not support an argument, or the text may become so long that other rows
            would change it.
    """
    prompts = arguments.prompts
    longest = int(arguments.config.max_length)
    if prompts.inputs:
        check_own_prefill(arguments.model, prompts, engine_config, arguments.config, refuses_inputs)
    if prompts.rows != 1:
        raise UnsupportedArgumentError(
            f"input_ids and num_return_sequences make {prompts.rows} rows, but a request has one; submit each row "
            "separately"
        )
    if prompts.cache is not None:
        raise UnsupportedArgumentError(f"{CACHE} is not supported by an Engine; give the whole text")
    if not prompts.all_count:
        raise UnsupportedArgumentError(
            "attention_mask hides tokens of input_ids, which an Engine does not support; remove them. Without an "
            "attention_mask, transformers hides tokens that equal pad_token_id"
        )
    check_length(runner, type(arguments.model).__name__, prompts, longest - prompts.width)
    nodes = min(config.max_nodes, runner.most_nodes)
    if memory.tokens is not None and memory.reserved(longest + nodes) > memory.tokens:
        raise InvalidArgumentError(
            f"input_ids and max_new_tokens may reach {longest} tokens, and a step adds up to {nodes}, but kv_bytes "
            f"is enough for {memory.tokens} tokens; choose smaller max_new_tokens, or an Engine with more kv_bytes"
        )
    if runner.changes_after is not None and longest - 1 > runner.changes_after:
        raise UnsupportedArgumentError(
            f"input_ids and max_new_tokens may reach {longest} tokens: beyond {runner.changes_after} the positions "
            "of this model depend on the longest text of a pass; use lookahead.generate, or a smaller "
            "max_new_tokens"
        )
