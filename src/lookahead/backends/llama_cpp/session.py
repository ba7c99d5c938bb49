"""How GGUF models are run: what a call of `generate` runs on, and what an engine does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import GenerationConfig

from lookahead.backends.base import Call, Prompts, Session
from lookahead.backends.llama_cpp.checks import check_call, check_code, check_rows, replaced_code
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES
from lookahead.backends.llama_cpp.model import GGUFModel
from lookahead.backends.llama_cpp.runner import LlamaChainRunner, LlamaRowsRunner, LlamaRunner
from lookahead.backends.machine import free_bytes, step_clock
from lookahead.config import LookaheadConfig

_LEAVES_ON_CPU = 64
"""Leaves of a step, over all rows, where the clock decides."""

_SHARE = 2
"""Part of the free memory that the cells of llama.cpp take at most where nothing is said about it."""

_KEPT_SHARE = 4
"""Part of the memory for keys and values that finished texts take at most which lie outside of llama.cpp's cells."""


class GGUFSession(Session):
    """A GGUF model, which was checked as it was loaded."""

    refuses_inputs = "a GGUF model reads token ids alone; leave it out"

    def __init__(self, model: GGUFModel) -> None:
        self._model, self.number_type = model, model.llama.number_type
        # That of the calling thread, if all layers are run on the CPU.
        self.clock = step_clock(torch.device("cpu" if model.llama.gpu_layers == 0 else "meta"))

    def check(self) -> None:
        """Refuse a model that was given other code since it was loaded."""
        check_code(self._model)

    def watch(self, runner: object, compares_bits: bool) -> GGUFWatch:
        """Notices hooks and the like."""
        return GGUFWatch(self._model)

    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> GGUFCall:
        """Acquire what a call needs."""
        self.check()
        return GGUFCall(self._model, prompts, config, generation_config, self.clock)

    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[LlamaRowsRunner, int, int]:
        """What runs rows that come and go.

        llama.cpp takes room for running texts at once, so that there is a number of bytes even where none was given;
        finished ones have a share of their own.
        """
        self.check()
        llama = self._model.llama
        check_rows(llama, config, max_rows)
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


class GGUFWatch:
    """Says whether a GGUF model can still be run as llama.cpp runs it. Its weights are out of everybody's reach.

    Args:
        model: The model.
    """

    def __init__(self, model: GGUFModel) -> None:
        self._model = model

    def has_changed(self, thorough: bool) -> bool:
        """Whether there is code around its forward pass."""
        return replaced_code(self._model) is not None

    def settle(self) -> None:
        """Passes of llama.cpp change nothing in the model."""


class GGUFCall(Call):
    """What a call of a GGUF model runs on. Made and raises as `Session.begin`."""

    runner: LlamaRunner

    def __init__(
        self,
        model: GGUFModel,
        prompts: Prompts,
        config: LookaheadConfig,
        generation_config: GenerationConfig,
        clock: Callable[[], float],
    ) -> None:
        self._model = llama = model.llama
        check_call(llama, prompts, config)
        self.clock = clock
        rows, most = prompts.rows, most_nodes(model, config, prompts.rows)
        nodes = min(config.max_nodes, most)
        cells = rows * (generation_config.max_length - min(prompts.padding) + nodes)
        sequences = 2 if llama.has_states else min(MOST_SEQUENCES, rows * max(nodes - 1, 1))
        self._keeps = model.keeps_text and rows == 1
        self._context = context = llama.acquire(cells, sequences, resumes=self._keeps)
        kind = LlamaChainRunner if llama.has_states else LlamaRunner
        self.runner = kind(context, rows, llama.last_length)
        self.runner.most_nodes = most
        model.reused_tokens = self.runner.resume(prompts.tokens[0]) if self._keeps else 0

    def restore(self, error: BaseException) -> None:
        """Give back what was taken by the call, which failed."""
        self._model.release(self._context)

    def release(self, keep_cache: bool) -> None:
        """Give back what was taken; there is no cache that the caller could get."""
        self._model.release(self._context, self.runner.first_text if self._keeps else ())


def most_nodes(model: GGUFModel, config: LookaheadConfig, rows: int) -> int:
    """Nodes that the tree of each of so many rows may have.

    So that there are sequence ids for all leaves. On a CPU, where more never pay, a method that chooses its nodes by
    the clock gets less than there are: in each step llama.cpp looks at all pairs of ids.
    """
    ids = MOST_SEQUENCES
    if config.chooses_nodes and model.llama.gpu_layers == 0:
        ids = min(ids, max(_LEAVES_ON_CPU, 2 * rows))
    return ids // rows + 1
