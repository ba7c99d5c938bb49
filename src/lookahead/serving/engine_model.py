"""The model of an engine, and what runs rows on it, as long as the model is what it was."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from lookahead.backends.base import Runner
from lookahead.backends.session import open_session
from lookahead.backends.transformers.prompt_pass import PromptPass
from lookahead.config import LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.serving.arguments import check_config
from lookahead.serving.drafting import Drafting, draft_pace
from lookahead.serving.kv_memory import PREFIX_BYTES, KVMemory
from lookahead.serving.request import Request
from lookahead.serving.steps import Steps


class EngineModel:
    """A model that runs requests.

    Args:
        model: The model.
        config: How requests draft that say nothing about it.

    Attributes:
        model: As above.
        session: How it is run.
        runner: What runs its rows.
        steps: Makes steps of requests.
    """

    runner: Runner
    steps: Steps

    def __init__(self, model: PreTrainedModel, config: LookaheadConfig | None) -> None:
        if not isinstance(model, PreTrainedModel):
            raise InvalidArgumentError(f"model={type(model).__name__} is no transformers language model")
        self.model = model
        self._config = _checked(LookaheadConfig(memory="process") if config is None else config)
        self.session = open_session(model)
        self._shared = SharedPace(self._pace, self._config.step_budget)

    def open(self, max_rows: int, kv_bytes: int | None, prefix_bytes: int | None, prefix_cache: bool) -> KVMemory:
        """Begin to run rows, and make room for their keys and values; arguments as for `Engine`."""
        if prefix_bytes is None:
            prefix_bytes = PREFIX_BYTES if kv_bytes is None else kv_bytes
        self._sizes = max_rows, kv_bytes, prefix_bytes if prefix_cache else 0
        self.runner, kv_bytes, prefix_bytes = self.session.open_rows(self._config, *self._sizes)
        self.config(None)
        reuses = prefix_cache and self.runner.shares_beginnings
        self._compares_bits = reuses or bool(self._config.pack_weights)
        self._watch = self.session.watch(self.runner, self._compares_bits)
        self.steps = Steps(self.runner, self.session.clock, self._shared)
        room = self.runner.token_bytes(), kv_bytes, reuses, prefix_bytes
        memory = KVMemory(*room, lambda block: self.runner.new_row(block), self.runner.keeps_apart)
        self._memory = memory.tokens, memory.block, max_rows, self._config.max_nodes
        self.runner.take_memory(*self._memory)
        return memory

    def config(self, given: LookaheadConfig | None) -> LookaheadConfig:
        """The drafting configuration of a request that asks for `given`.

        Raises:
            UnsupportedArgumentError: An engine cannot draft so.
            InvalidArgumentError: Its trees have a fixed shape, for which llama.cpp has not enough sequence ids.
        """
        config = self._config if given is None else _checked(given)
        if config.preset in ("paper", "jacobi") and config.max_nodes > self.runner.most_nodes:
            raise InvalidArgumentError(
                f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each row, but llama.cpp has "
                f"sequences for {self.runner.most_nodes}; choose smaller sizes, or an Engine with a smaller max_rows"
            )
        return config

    def drafting(self, config: LookaheadConfig) -> Drafting:
        """Makes the drafter of a request."""
        runner = self.runner
        return Drafting(self.model, config, self._shared, most_nodes=runner.most_nodes, chains=runner.chains)

    def _pace(self, rows: int, temperature: float) -> Pace:
        """The pace of steps with so many rows of this model."""
        return draft_pace(self.runner.model, self._config, rows, temperature, self.runner.chains)

    def read_inputs(self, request: Request) -> None:
        """Let the model itself read a prompt that is more than tokens. All but its last token stays: that one is sent
        with the coming step.

        Raises:
            LookaheadError: It cannot be read.
        """
        runner: Any = self.runner
        prompts, runner.rows = request.arguments.prompts, [request.row]
        PromptPass(runner, self.model, prompts.input_ids, prompts.mask, prompts.inputs).read()
        request.row.crop(request.cached - 1)

    def settle(self) -> None:
        """Clean up after a step."""
        if self._watch is not None:
            self._watch.settle()

    def has_changed(self, thorough: bool) -> bool:
        """Whether the model is not what it was; see `ModelWatch`."""
        return self._watch is not None and self._watch.has_changed(thorough=thorough)

    def reopen(self) -> None:
        """Run the model as it is now.

        Raises:
            LookaheadError: It cannot be run.
        """
        self.runner = self.steps.backend = self.session.open_rows(self._config, *self._sizes)[0]
        self.runner.take_memory(*self._memory)
        self._watch = self.session.watch(self.runner, self._compares_bits)


def _checked(config: LookaheadConfig | None) -> LookaheadConfig:
    checked = check_config(config)
    if checked.engine not in ("auto", "dynamic"):
        raise UnsupportedArgumentError(f"engine={checked.engine!r} is not supported by an Engine; use engine='auto'")
    return checked
