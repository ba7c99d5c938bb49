"""Model of an engine: its session, runner and memory, and the watch for changes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from lookahead.backends.session import open_session
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.checks import check_length
from lookahead.backends.transformers.prompt_pass import PromptPass
from lookahead.config import LookaheadConfig, check_config
from lookahead.core.shared_pace import SharedPace
from lookahead.drafting.background import BACKGROUND
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.serving.arguments import Arguments, check_wrapper, language_model
from lookahead.serving.drafting import Drafting, draft_pace
from lookahead.serving.kv_memory import PREFIX_BYTES, KVMemory
from lookahead.serving.refusals import check_own_prefill
from lookahead.serving.request import Request, Steps, notify_handles


class ModelMoved(Exception):
    """The model changed before the end of a pass; its result is not used."""


class EngineModel:
    """Model of an engine.

    Args:
        model: The model.
        config: Default configuration of drafts.
        max_rows: As for `Engine`.
        kv_bytes: As for `Engine`.
        prefix_cache: As for `Engine`.
        prefix_bytes: As for `Engine`.

    Attributes:
        session: The opened model.
        runner: Runner of the rows.
        memory: Memory for keys and values.
        steps: Runs the steps of requests.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LookaheadConfig | None,
        max_rows: int,
        kv_bytes: int | None,
        prefix_cache: bool,
        prefix_bytes: int | None,
    ) -> None:
        wrapper, model = language_model(model)
        check_wrapper(wrapper)
        self.model = model
        self.config = config = _checked(LookaheadConfig(memory="process") if config is None else config)
        BACKGROUND.begin(config)
        self.session = open_session(model)
        self._shared = SharedPace(
            lambda rows, temperature: draft_pace(
                self.runner.model, config, rows, temperature, self.runner.chains, self.runner.pass_sizes
            ),
            config.step_budget,
        )
        if prefix_bytes is None:
            prefix_bytes = PREFIX_BYTES if kv_bytes is None else kv_bytes
        self._rows = config, max_rows, kv_bytes, prefix_bytes if prefix_cache else 0
        self.runner, kv_bytes, prefix_bytes = self.session.open_rows(*self._rows)
        self.config_of(config)  # checks it against the runner
        reuses = prefix_cache and self.runner.shares_beginnings
        self._compares_bits = reuses or bool(config.pack_weights)
        self.memory = KVMemory(self.runner, kv_bytes, prefix_bytes if reuses else None)
        self.steps = Steps(
            self.runner, self.session.clock, self._shared, launched=self._check_pass, notify=notify_handles
        )
        self._begin()

    def reopen(self) -> None:
        """Open the changed model again.

        Raises:
            LookaheadError: The model is not supported.
        """
        self.runner = self.memory.runner = self.steps.backend = self.session.open_rows(*self._rows)[0]
        self._begin()

    def _begin(self) -> None:
        """Allocate the runner's memory, and start to watch the model."""
        self.runner.take_memory(self.memory.tokens, self.memory.block, self._rows[1], self.config.max_nodes)
        self._watch = self.session.watch(self.runner, self._compares_bits)

    def config_of(self, override: LookaheadConfig | None) -> LookaheadConfig:
        """Return the checked configuration of a request: `override`, or the engine's.

        Raises:
            UnsupportedArgumentError: Engines do not support a setting.
            InvalidArgumentError: Trees of fixed shape need more sequence ids than llama.cpp has.
        """
        config = self.config if override is None else _checked(override)
        if config.preset in ("paper", "jacobi") and config.max_nodes > self.runner.most_nodes:
            raise InvalidArgumentError(
                f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each row, but llama.cpp has "
                f"sequence ids for {self.runner.most_nodes}; choose smaller sizes, or an Engine with smaller max_rows"
            )
        return config

    def check(self, arguments: Arguments, config: LookaheadConfig) -> None:
        """Refuse a request that the engine cannot run.

        Raises:
            InvalidArgumentError: It may need more memory or positions than there are.
            UnsupportedArgumentError: Engines do not support an argument, or the text may become so long that other rows
                would change it.
        """
        prompts, runner, memory = arguments.prompts, self.runner, self.memory
        longest = int(arguments.config.max_length)
        if prompts.inputs:
            reason = self.session.refuses_inputs
            if runner.chains:
                reason = "models with a running state do not support it in an Engine; use lookahead.generate"
            check_own_prefill(arguments.model, prompts, self.config, arguments.config, reason)
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
        check_length(runner, type(self.model).__name__, prompts, longest - prompts.width)
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

    def drafting(self, config: LookaheadConfig) -> Drafting:
        """Return the drafting of a request."""
        runner = self.runner
        return Drafting(self.model, config, self._shared, max_nodes=runner.most_nodes, chains=runner.chains)

    def read_inputs(self, request: Request) -> None:
        """Process a prompt with inputs beside tokens by the model's own prefill, except its last token.

        Raises:
            LookaheadError: The model cannot read it.
        """
        arguments = request.arguments
        prompts = arguments.prompts
        runner: Any = self.runner
        with runner.serving([request.row]):
            own = PromptPass(runner, self.model, prompts.input_ids, prompts.mask, prompts.inputs, arguments.model)
            own.read()
        if self._watch is not None:
            self._watch.changed_by_pass()  # the check of the next step reports a change
        request.row.crop(request.cached - 1)

    def _check_pass(self) -> None:
        """Check the model after the launch of a pass.

        Raises:
            ModelMoved: The model has changed.
        """
        if self._watch is not None and self._watch.changed_by_pass():
            raise ModelMoved

    def has_changed(self, thorough: bool = False) -> bool:
        """Return whether the model has changed; see `ModelWatch`."""
        return self._watch is not None and self._watch.has_changed(thorough=thorough)

    def changed_before_pass(self) -> bool:
        """Return whether a change of the model forbids the launch of a pass; see `ModelWatch`."""
        return self._watch is not None and self._watch.changed_before_pass()


def _checked(config: LookaheadConfig | None) -> LookaheadConfig:
    config = check_config(config)
    if config.engine not in ("auto", "dynamic"):
        raise UnsupportedArgumentError(f"engine={config.engine!r} is not supported by an Engine; use engine='auto'")
    return config
