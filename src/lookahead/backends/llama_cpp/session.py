"""Resources of GGUF models for calls of `generate` and for engines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import GenerationConfig

from lookahead.backends.base import Call, Prompts, Session
from lookahead.backends.llama_cpp.checks import check_call, check_code, check_rows, replaced_code
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES
from lookahead.backends.llama_cpp.model import GGUFModel
from lookahead.backends.llama_cpp.runner import LlamaChainRunner, LlamaRowsRunner, LlamaRunner
from lookahead.backends.machine import SHARE, free_bytes, step_clock
from lookahead.config import LookaheadConfig

_LEAVES_ON_CPU = 64
"""Most leaves of a step on a CPU, over all rows, if the number of nodes is chosen by measured times."""

_KEPT_SHARE = 4
"""Divisor of the memory for keys and values: limit for finished texts, which are kept outside of the context."""


class GGUFSession(Session):
    """Session of a GGUF model. The model was checked when it was loaded."""

    refuses_inputs = "a GGUF model reads token ids only; leave it out"

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        # CPU time of the calling thread is exact only if all layers run on the CPU.
        self.clock = step_clock(torch.device("cpu" if model.llama.gpu_layers == 0 else "meta"))

    @property
    def number_type(self) -> str:
        """See `Session`."""
        return self._model.llama.number_type

    def check(self) -> None:
        """Refuse a model that got hooks or a new forward pass since it was loaded."""
        check_code(self._model)

    def watch(self, runner: object, compares_bits: bool) -> GGUFWatch:
        """Return an object that detects hooks and a replaced forward pass."""
        return GGUFWatch(self._model)

    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> GGUFCall:
        """Check a call, and acquire a context for it."""
        self.check()
        return GGUFCall(self._model, prompts, config, generation_config, self.clock)

    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[LlamaRowsRunner, int, int]:
        """Return a runner of rows that join and leave, and bytes for running and for finished texts.

        llama.cpp allocates the cells of running texts at once, so they need a limit even if `kv_bytes` is `None`.
        Finished texts get a separate part of it.
        """
        self.check()
        llama = self._model.llama
        check_rows(llama, config, max_rows)
        kv_limit = free_bytes(torch.device("cpu")) // SHARE if kv_bytes is None else kv_bytes
        prefix_bytes = min(prefix_bytes, kv_limit // _KEPT_SHARE)
        kv_limit -= prefix_bytes
        if kv_bytes is None:
            kv_limit = min(kv_limit, llama.token_bytes * max_rows * llama.trained_context)
        runner = LlamaRowsRunner(llama, self._model, max(kv_limit // llama.token_bytes, 1), max_rows)
        return runner, kv_limit, prefix_bytes

    def keep_text(self) -> None:
        """Let calls of one row leave their text in llama.cpp, so that the next call can reuse its common start."""
        self._model.keeps_text = True

    def reused_tokens(self, cached: int) -> int:
        """Tokens of the last prompt that llama.cpp held already."""
        return self._model.reused_tokens

    def sharing_weights(self) -> GGUFModel:
        """Return another model object for the same loaded file."""
        return GGUFModel(self._model.llama)


class GGUFWatch:
    """Detect changes of a GGUF model. Its weights cannot change, as only llama.cpp holds them."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model

    def has_changed(self, thorough: bool = False) -> bool:
        """Whether the model has hooks or a replaced forward pass."""
        return replaced_code(self._model) is not None

    changed_before_pass = has_changed

    def changed_by_pass(self) -> bool:
        """Return `False`: passes of llama.cpp change nothing in the model."""
        return False


class GGUFCall(Call):
    """Context and runner of a call of a GGUF model. Arguments and errors are the same as for `Session.begin`."""

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
        rows = prompts.rows
        node_limit = most_nodes(model, config, prompts.rows)
        nodes = min(config.max_nodes, node_limit)
        cells = rows * (generation_config.max_length - min(prompts.padding) + nodes)
        sequences = 2 if llama.has_states else min(MOST_SEQUENCES, rows * max(nodes - 1, 1))
        self._keeps = model.keeps_text and rows == 1
        self._context = context = llama.acquire(cells, sequences, resumes=self._keeps)
        kind = LlamaChainRunner if llama.has_states else LlamaRunner
        self.runner = kind(context, rows, llama.last_length)
        self.runner.most_nodes = node_limit
        model.reused_tokens = self.runner.resume(prompts.tokens[0]) if self._keeps else 0

    def restore(self, error: BaseException) -> None:
        """Release the context of a failed call."""
        self._model.release(self._context)

    def release(self, keep_cache: bool) -> None:
        """Release the context. There is no cache to return to the caller."""
        self._model.release(self._context, self.runner.first_text if self._keeps else ())


def most_nodes(model: GGUFModel, config: LookaheadConfig, rows: int) -> int:
    """Most nodes of the tree of each row, so that the sequence ids suffice for all leaves.

    On a CPU a method that chooses its nodes by measured times gets fewer ids, since more leaves are never faster there.
    llama.cpp looks at all pairs of ids in each step.
    """
    ids = MOST_SEQUENCES
    if config.chooses_nodes and model.llama.gpu_layers == 0:
        ids = min(ids, max(_LEAVES_ON_CPU, 2 * rows))
    return ids // rows + 1
