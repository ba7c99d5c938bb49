"""How GGUF models are run: what a call of `generate` runs on, and what an engine does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import GenerationConfig

from lookahead.backends.base import Call, Prompts, Session
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES
from lookahead.backends.llama_cpp.model import GGUFModel, no_cache
from lookahead.backends.llama_cpp.runner import LlamaChainRunner, LlamaRowsRunner, LlamaRunner
from lookahead.backends.machine import free_bytes, step_clock
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError

_LEAVES_ON_CPU = 64
"""Leaves of a step, over all rows, where the clock decides."""


_SHARE = 2
"""Part of the free memory that the cells of llama.cpp take at most where nothing is said about it."""

_KEPT_SHARE = 4
"""Part of the memory for keys and values that finished texts take at most which lie outside of llama.cpp's cells."""


class GGUFSession(Session):
    """A GGUF model, which was checked as it was loaded.

    Args:
        model: The model.
    """

    refuses_inputs = "a GGUF model reads token ids alone; leave it out"

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self.clock = gguf_clock(model)

    @property
    def number_type(self) -> str:
        """The types of the weights."""
        return self._model.llama.number_type

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return self._model.llama.parameters

    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> GGUFCall:
        """Acquire what a call needs."""
        return GGUFCall(self._model, prompts, config, generation_config)

    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[LlamaRowsRunner, int, int]:
        """What runs rows that come and go.

        llama.cpp takes room for running texts at once, so that there is a number of bytes even where none was given;
        finished ones have a share of their own.
        """
        check_settings(config)
        llama = self._model.llama
        if llama.has_states:
            raise UnsupportedModelError(
                f"path={str(llama.path)!r}: the model has layers with a running state, and is run on chains of tokens, "
                "one text at a time, which an Engine does not; use lookahead.generate"
            )
        most = free_bytes(torch.device("cpu")) // _SHARE if kv_bytes is None else kv_bytes
        prefix_bytes = min(prefix_bytes, most // _KEPT_SHARE)
        most -= prefix_bytes
        if kv_bytes is None:
            most = min(most, llama.token_bytes * max_rows * llama.trained_context)
        runner = LlamaRowsRunner(llama, self._model, max(most // llama.token_bytes, 1), max_rows)
        return runner, most, prefix_bytes

    def keep_text(self) -> None:
        """Let calls of one row leave their text in llama.cpp, where the next one, if it begins alike, goes on."""
        self._model.keeps_text = True

    def reused_tokens(self, cached: int) -> int:
        """Tokens of the last prompt that llama.cpp held."""
        return self._model.reused_tokens

    def sharing_weights(self) -> GGUFModel:
        """Another object for the file as llama.cpp loaded it."""
        return GGUFModel(self._model.llama)


class GGUFCall(Call):
    """What a call of a GGUF model runs on. Made and raises as `Session.begin`."""

    runner: LlamaRunner

    def __init__(
        self, model: GGUFModel, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig
    ) -> None:
        _check(model, prompts, config)
        chains, most = model.llama.has_states, most_nodes(model, config, prompts.rows)
        nodes = min(config.max_nodes, most)
        self.clock = gguf_clock(model)
        hidden = min(prompts.padding)
        cells = prompts.rows * (generation_config.max_length - hidden + nodes)
        self._model = model.llama
        self._keeps = model.keeps_text and prompts.rows == 1
        sequences = 2 if chains else min(MOST_SEQUENCES, max(prompts.rows * (nodes - 1), 1))
        self._context = model.llama.acquire(cells, sequences, resumes=self._keeps)
        last = model.llama.last_length
        self.runner = (
            LlamaChainRunner(self._context, last) if chains else LlamaRunner(self._context, prompts.rows, last)
        )
        self.runner.most_nodes = most
        model.reused_tokens = self.runner.resume(prompts.tokens[0]) if self._keeps else 0

    def restore(self, error: BaseException) -> None:
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
    if config.pack_weights or config.invariant or config.engine not in ("auto", "dynamic"):
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
