"""What a call runs on if its model is a GGUF file."""

from __future__ import annotations

from time import perf_counter

from transformers import GenerationConfig

from lookahead.api.gguf.model import GGUFModel, no_cache
from lookahead.api.prompts import Prompts
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError


class GGUFResources:
    """Acquired when a call begins, and released when it ends.

    Args:
        model: The model.
        prompts: What the rows begin with.
        config: How to draft.
        generation_config: The configuration of the call.

    Attributes:
        runner: Runs the trees.
        clock: What its steps are timed by.
        keeps_cache: Whether the cache that a call leaves can be handed on.
        most_nodes: Nodes that the tree of each row may have, so that there are sequence ids for all of them.

    Raises:
        LookaheadError: The model or its settings cannot do what is asked for.
    """

    chains = False
    keeps_cache = False
    state_bytes = 0
    invariant_rows = 0
    clock = staticmethod(perf_counter)

    def __init__(
        self, model: GGUFModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        _check(model, prompts, config)
        self.most_nodes = MOST_SEQUENCES // prompts.rows + 1
        nodes = min(config.max_nodes, self.most_nodes)
        hidden = min(prompts.padding)
        cells = prompts.rows * (generation_config.max_length - hidden + nodes)
        self._model = model.llama
        self._context = model.llama.acquire(cells, min(MOST_SEQUENCES, prompts.rows * nodes))
        self.runner = LlamaRunner(self._context, prompts.rows, model.llama.last_length)

    def restore(self) -> None:
        """Give back what was taken by the call, which failed."""
        self._model.release(self._context)

    def release(self, keep_cache: bool) -> None:
        """Give back what was taken; there is no cache that the caller could get."""
        self._model.release(self._context)


def _check(model: GGUFModel, prompts: Prompts, config: LookaheadConfig) -> None:
    last = model.llama.last_length
    if prompts.cache is not None:
        raise no_cache()
    if config.pack_weights or config.invariant or config.engine != "dynamic":
        what = f"pack_weights={config.pack_weights!r}" if config.pack_weights else f"engine={config.engine!r}"
        what = "invariant=True" if config.invariant and not config.pack_weights else what
        raise InvalidArgumentError(f"{what} is about models of transformers, but this is a GGUF model; leave it out")
    if prompts.rows > MOST_SEQUENCES:
        raise InvalidArgumentError(
            f"input_ids has {prompts.rows} rows, but llama.cpp has {MOST_SEQUENCES} sequences; call generate with fewer"
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
