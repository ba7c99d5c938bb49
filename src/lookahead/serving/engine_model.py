"""The model of an engine, and what runs rows on it, as long as the model is what it was."""

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
    """The model changed before the end of a pass, whose result is not used."""


class EngineModel:
    """A model that runs requests.

    Args:
        config: How requests draft that say nothing about it.
        max_rows, kv_bytes, prefix_cache, prefix_bytes: As for `Engine`.

    Attributes:
        session, runner: How it is run, and what runs its rows.
        memory: Where their keys and values are.
        steps: Makes the steps of requests.
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
        self.config_of(config)  # which it may refuse
        reuses = prefix_cache and self.runner.shares_beginnings
        self._compares_bits = reuses or bool(config.pack_weights)
        self.memory = KVMemory(self.runner, kv_bytes, prefix_bytes if reuses else None)
        self.steps = Steps(
            self.runner, self.session.clock, self._shared, launched=self._check_pass, notify=notify_handles
        )
        self._begin()

    def reopen(self) -> None:
        """Run the model as it is now.

        Raises:
            LookaheadError: It cannot be run.
        """
        self.runner = self.memory.runner = self.steps.backend = self.session.open_rows(*self._rows)[0]
        self._begin()

    def _begin(self) -> None:
        """Give the runner its memory, and watch the model from now on."""
        self.runner.take_memory(self.memory.tokens, self.memory.block, self._rows[1], self.config.max_nodes)
        self._watch = self.session.watch(self.runner, self._compares_bits)

    def config_of(self, given: LookaheadConfig | None) -> LookaheadConfig:
        """How a request drafts that asks for `given`.

        Raises:
            UnsupportedArgumentError: An engine cannot draft so.
            InvalidArgumentError: Its trees have a fixed shape, for which llama.cpp has not enough sequence ids.
        """
        config = self.config if given is None else _checked(given)
        if config.preset in ("paper", "jacobi") and config.max_nodes > self.runner.most_nodes:
            raise InvalidArgumentError(
                f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each row, but llama.cpp has "
                f"sequences for {self.runner.most_nodes}; choose smaller sizes, or an Engine with a smaller max_rows"
            )
        return config

    def check(self, arguments: Arguments, config: LookaheadConfig) -> None:
        """Refuse a request that an engine does not run, or has no room for.

        Raises:
            InvalidArgumentError: It may need more memory, or more positions, than there are.
            UnsupportedArgumentError: It is of a kind that an engine does not run, or may come to where its text is read
                otherwise beside others.
        """
        prompts, runner, memory = arguments.prompts, self.runner, self.memory
        longest = int(arguments.config.max_length)
        if prompts.inputs:
            refused = self.session.refuses_inputs
            if runner.chains:
                refused = "an Engine reads such prompts of models without a running state alone; use lookahead.generate"
            check_own_prefill(arguments.model, prompts, self.config, arguments.config, refused)
        if prompts.rows != 1:
            raise UnsupportedArgumentError(
                f"input_ids and num_return_sequences make {prompts.rows} rows, but a request has one; submit each by "
                "itself"
            )
        if prompts.cache is not None:
            raise UnsupportedArgumentError(f"{CACHE} is not supported by an Engine; give the whole text")
        if not prompts.all_count:
            raise UnsupportedArgumentError(
                "attention_mask hides tokens of input_ids, which an Engine does not support; leave them out. Without "
                "an attention_mask, transformers hides those that are the pad_token_id"
            )
        check_length(runner, type(self.model).__name__, prompts, longest - prompts.width)
        nodes = min(config.max_nodes, runner.most_nodes)
        if memory.tokens is not None and memory.reserved(longest + nodes) > memory.tokens:
            raise InvalidArgumentError(
                f"input_ids and max_new_tokens may come to {longest} tokens, and a step to {nodes} more, but kv_bytes "
                f"has room for {memory.tokens} tokens; choose a smaller max_new_tokens, or an Engine with more kv_bytes"
            )
        if runner.changes_after is not None and longest - 1 > runner.changes_after:
            raise UnsupportedArgumentError(
                f"input_ids and max_new_tokens may come to {longest} tokens: beyond {runner.changes_after} the "
                "positions of this model depend on the longest text of a pass; use lookahead.generate, or a smaller "
                "max_new_tokens"
            )

    def drafting(self, config: LookaheadConfig) -> Drafting:
        """Makes the drafter of a request."""
        runner = self.runner
        return Drafting(self.model, config, self._shared, most_nodes=runner.most_nodes, chains=runner.chains)

    def read_inputs(self, request: Request) -> None:
        """Let the model itself read a prompt that is more than tokens. All but its last token stays: that one is sent
        with the coming step.

        Raises:
            LookaheadError: It cannot be read.
        """
        arguments = request.arguments
        prompts = arguments.prompts
        runner: Any = self.runner
        with runner.serving([request.row]):
            own = PromptPass(runner, self.model, prompts.input_ids, prompts.mask, prompts.inputs, arguments.model)
            own.read()
        if self._watch is not None:
            self._watch.changed_by_pass()  # the look of the next step finds what has changed
        request.row.crop(request.cached - 1)

    def _check_pass(self) -> None:
        """Look at the model after the launch of a pass.

        Raises:
            ModelMoved: It has changed.
        """
        if self._watch is not None and self._watch.changed_by_pass():
            raise ModelMoved

    def has_changed(self, thorough: bool = False) -> bool:
        """Whether the model is not what it was; see `ModelWatch`."""
        return self._watch is not None and self._watch.has_changed(thorough=thorough)

    def changed_before_pass(self) -> bool:
        """Whether no pass may be launched, as the model has changed; see `ModelWatch`."""
        return self._watch is not None and self._watch.changed_before_pass()


def _checked(config: LookaheadConfig | None) -> LookaheadConfig:
    checked = check_config(config)
    if checked.engine not in ("auto", "dynamic"):
        raise UnsupportedArgumentError(f"engine={checked.engine!r} is not supported by an Engine; use engine='auto'")
    return checked
