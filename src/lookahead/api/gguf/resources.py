"""What a call runs on if its model is a GGUF file."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import GenerationConfig

from lookahead.api.gguf.model import GGUFModel, no_cache
from lookahead.api.prompts import Prompts
from lookahead.backends.llama_cpp.chain_runner import LlamaChainRunner
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.backends.step_clock import step_clock
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

_LEAVES_ON_CPU = 64
"""Leaves of a step, over all rows, where the clock decides."""


class GGUFResources:
    """Acquired when a call begins, and released when it ends.

    Args:
        model: The model.
        prompts: What the rows begin with.
        config: How to draft.
        generation_config: The configuration of the call.

    Attributes:
        runner: Runs the trees.
        chains: Whether it runs chains alone.
        clock: What its steps are timed by.
        keeps_cache: Whether the cache that a call leaves can be handed on.
        most_nodes: Nodes that the tree of each row may have, so that there are sequence ids for all of them.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """

    keeps_cache = False
    state_bytes = 0
    invariant_rows = 0

    def __init__(
        self, model: GGUFModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        _check(model, prompts, config)
        self.chains = model.llama.has_states
        self.most_nodes = most_nodes(model, config, prompts.rows)
        nodes = min(config.max_nodes, self.most_nodes)
        self.clock = gguf_clock(model)
        hidden = min(prompts.padding)
        cells = prompts.rows * (generation_config.max_length - hidden + nodes)
        self._model = model.llama
        self._keeps = model.keeps_text and prompts.rows == 1
        sequences = 2 if self.chains else min(MOST_SEQUENCES, max(prompts.rows * (nodes - 1), 1))
        self._context = model.llama.acquire(cells, sequences, resumes=self._keeps)
        last = model.llama.last_length
        self.runner = (
            LlamaChainRunner(self._context, last) if self.chains else LlamaRunner(self._context, prompts.rows, last)
        )
        model.reused_tokens = self.runner.resume(prompts.tokens[0]) if self._keeps else 0

    def restore(self) -> None:
        """Give back what was taken by the call, which failed."""
        self._model.release(self._context)

    def release(self, keep_cache: bool) -> None:
        """Give back what was taken; there is no cache that the caller could get."""
        self._model.release(self._context, self.runner.first_text if self._keeps else ())


def gguf_clock(model: GGUFModel) -> Callable[[], float]:
    """The clock for steps of `model`: that of the calling thread, if all layers are run on the CPU."""
    return step_clock(torch.device("cpu" if model.llama.gpu_layers == 0 else "meta"))


def most_nodes(model: GGUFModel, config: LookaheadConfig, rows: int) -> int:
    """Nodes that the tree of each of so many rows may have.

    So that there are sequence ids for all leaves. On a CPU, where more never pay, a method that chooses its nodes by
    the clock gets less than there are: in each step llama.cpp looks at all pairs of ids.
    """
    ids = MOST_SEQUENCES
    if config.chooses_nodes and model.llama.gpu_layers == 0:
        ids = min(ids, max(_LEAVES_ON_CPU, 2 * rows))
    return ids // rows + 1


def check_settings(config: LookaheadConfig) -> None:
    """Refuse settings that are about models of transformers.

    Raises:
        InvalidArgumentError: There is one.
    """
    if config.pack_weights or config.invariant or config.engine != "dynamic":
        what = f"pack_weights={config.pack_weights!r}" if config.pack_weights else f"engine={config.engine!r}"
        what = "invariant=True" if config.invariant and not config.pack_weights else what
        raise InvalidArgumentError(f"{what} is about models of transformers, but this is a GGUF model; leave it out")


def _check(model: GGUFModel, prompts: Prompts, config: LookaheadConfig) -> None:
    last = model.llama.last_length
    if prompts.cache is not None:
        raise no_cache()
    check_settings(config)
    if prompts.rows > MOST_SEQUENCES:
        raise InvalidArgumentError(
            f"input_ids has {prompts.rows} rows, but llama.cpp has {MOST_SEQUENCES} sequences; call generate with fewer"
        )
    if model.llama.has_states and prompts.rows > 1:
        raise UnsupportedArgumentError(
            f"input_ids has {prompts.rows} rows, but this model has layers with a running state, and is run on chains "
            "of tokens, one text at a time; call generate once for each row"
        )
    if last is not None and prompts.longest >= last:
        raise InvalidArgumentError(
            f"input_ids is a prompt of {prompts.longest} tokens, but the model's context holds {last}; shorten it"
        )
    # Methods whose trees have a fixed shape need the room that it takes.
    leaves = prompts.rows * (config.max_nodes - 1)
    if leaves > MOST_SEQUENCES and config.preset in ("paper", "jacobi"):
        raise InvalidArgumentError(
            f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each of {prompts.rows} rows, but "
            f"llama.cpp has {MOST_SEQUENCES} sequences; choose smaller sizes, or fewer rows"
        )
