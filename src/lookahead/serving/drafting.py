"""Who drafts for the texts of a call or an engine: a drafter for each, what they share and a model's next call finds,
and what they may not touch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backends.base import vocabulary_size
from lookahead.backends.transformers.findings import describe_setting, load_costs, model_identity
from lookahead.backends.transformers.model_state import state_of
from lookahead.config import MAX_NODES_PER_STEP, LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.step_costs import StepCosts
from lookahead.drafting import Drafter, DraftMemory, NGramPool, PredictedText, build_drafter
from lookahead.drafting.memory_file import MemoryFile
from lookahead.errors import InvalidArgumentError, LookaheadWarning, UnsupportedArgumentError
from lookahead.serving.refusals import are_whole_numbers, check_values
from lookahead.values import require

_SPARES = 16
"""Memories of 10 MiB that are kept at most: the system takes 2 to 14 ms to fill the pages of a new one."""


class Drafting:
    """Makes the drafters of texts that share a configuration.

    Args:
        pace: Chooses the nodes: of each text, or of all texts of a step together. As `config` has it if not given.
        pool: The pool of the paper's method; one for each text if not given.
        most_nodes, chains: Nodes that the tree of each text may have, and whether these are chains.

    Attributes:
        most_nodes: Nodes that a tree has at most.
        is_paced: Whether the pace chooses the nodes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LookaheadConfig,
        pace: Pace | SharedPace | None = None,
        pool: NGramPool | None = None,
        most_nodes: int = MAX_NODES_PER_STEP,
        chains: bool = False,
    ) -> None:
        self.config = config
        self.most_nodes = min(config.max_nodes, most_nodes)
        self.is_paced = pace is not None and (config.preset == "auto" or not pace.is_shared)
        self._model, self._pace, self._chains = model, pace, chains
        self._pool = NGramPool(config.ngram_size, config.guess_set_size) if pool is None and config.share_pool else pool
        self._memory: DraftMemory | None = None
        self._file: MemoryFile | None = None
        if config.preset == "auto":
            self._memory, self._file = draft_memory(model, config)

    def drafter(self, predicted: PredictedText | None) -> Drafter:
        """Make the drafter of one text, which may be expected."""
        return build_drafter(
            self.config,
            self._pool,
            self._memory,
            self._pace,
            most=self.most_nodes,
            vocabulary=vocabulary_size(self._model),
            predicted=predicted,
            chains=self._chains,
        )

    def keep(self) -> None:
        """Bring what the memory learned to its file, if it has one.

        A file that cannot be written is a warning: the text is there, and worth more.
        """
        if self._file is None:
            return
        try:
            self._file.save(model_identity(self._model))
        except (OSError, InvalidArgumentError) as error:
            warnings.warn(
                f"memory={str(self._file.path)!r} could not be written ({error}); what this process has learned since "
                "it was last written is lost when it ends",
                LookaheadWarning,
                stacklevel=2,
            )

    def release(self) -> None:
        """Let a later text have the arrays of a memory that no other one shares; nothing drafts from it any more."""
        spares, memory, self._memory = state_of(self._model).spares, self._memory, None
        if memory is not None and self.config.memory == "request" and len(spares) < _SPARES:
            spares.append(memory)


def draft_pace(
    model: PreTrainedModel,
    config: LookaheadConfig,
    rows: int,
    temperature: float,
    chains: bool = False,
    sizes: Sequence[int] = (),
) -> Pace:
    """What steps of `model` cost and drafts bring: as learned in earlier calls; else costs are as `lookahead tune`
    stored them, or a first guess.

    Args:
        config: How its engine is set.
        rows, chains: Sequences that run together, and whether their drafts are chains.
        temperature: Of sampling, 0 for greedy decoding. What drafts bring differs with it.
        sizes: See `Runner.pass_sizes`.
    """
    settings = (*sizes, config.pack_weights, config.engine, config.invariant, model.config._attn_implementation)
    setting = (rows, torch.get_num_threads(), model.dtype, model.device, *settings)
    key = (round(temperature, 1), chains, *setting)
    state = state_of(model)
    with state.lock:
        if setting not in state.costs:
            state.costs[setting] = costs = load_costs(describe_setting(model, config)) or StepCosts()
            costs.captured = sizes
        if key not in state.paces:
            state.paces[key] = Pace(state.costs[setting], rows)
        return state.paces[key]


def draft_memory(model: PreTrainedModel, config: LookaheadConfig) -> tuple[DraftMemory, MemoryFile | None]:
    """The memory that a call drafts from and fills, a new one or that of `config.memory`, and its file, if it has one.

    Raises:
        InvalidArgumentError: The file is no memory, or that of another model, or there cannot be one of that name.
        OSError: The file cannot be read.
    """
    state = state_of(model)
    with state.lock:
        if config.memory == "request":
            memory = state.spares.pop() if state.spares else DraftMemory()
            memory.clear()
            return memory, None
        if config.memory == "process":
            state.memory = state.memory or DraftMemory()
            state.memory.fit(vocabulary_size(model))
            return state.memory, None
        try:
            path = Path(config.memory).expanduser().absolute()
        except RuntimeError as error:  # there is no such user
            name = os.fspath(config.memory)
            raise InvalidArgumentError(f"memory={name!r} cannot be written: {error}; choose another file") from error
        if str(path) not in state.files:
            state.files[str(path)] = MemoryFile(path, model_identity(model))
        file = state.files[str(path)]
        file.memory.fit(vocabulary_size(model))
        return file.memory, file


Prediction = torch.Tensor | Sequence[int] | Sequence[Sequence[int] | None]
"""Token ids of the text that is expected of the one row, or for each row its own, `None` where there is none."""


def _token_ids(tokens: Any, vocabulary: int) -> list[int]:
    """Token ids of a text, given as a list or a tensor.

    Raises:
        InvalidArgumentError: They are none.
    """
    try:
        ids = torch.as_tensor(tokens)
    except Exception:  # an object of the user's own may raise anything
        ids = torch.empty(1)
    check_values("prediction", ids)
    is_whole = are_whole_numbers(ids) or (ids.layout is torch.strided and not ids.numel())
    ids = ids.long() if is_whole else ids
    if not is_whole or ids.numel() != (ids.shape[-1] if ids.dim() else 0) or ((ids < 0) | (ids >= vocabulary)).any():
        raise InvalidArgumentError(
            f"prediction must be the token ids of one text, whole numbers from 0 to {vocabulary - 1}"
        )
    return [int(token) for token in ids.flatten().tolist()]


def predicted_texts(
    prediction: Prediction | None, config: LookaheadConfig, rows: int, model: PreTrainedModel
) -> list[PredictedText | None]:
    """The predicted text of each row; `None` for an empty one.

    Raises:
        InvalidArgumentError: `prediction` is not one text for each row.
        UnsupportedArgumentError: The preset does not draft from it.
    """
    if prediction is None:
        return [None] * rows
    if config.preset != "auto":
        raise UnsupportedArgumentError(
            f"prediction is not supported by preset={config.preset!r}, which drafts from other texts; use preset='auto'"
        )
    given: Sequence[Any] = _rows(prediction)
    if len(given) != rows:
        raise InvalidArgumentError(
            f"prediction has {len(given)} texts for {rows} prompts; give a list with one for each, None where nothing "
            "is expected"
        )
    vocabulary = vocabulary_size(model)
    texts = [[] if item is None else _token_ids(item, vocabulary) for item in given]
    return [PredictedText(text) if text else None for text in texts]


def _rows(prediction: Any) -> Sequence[Any]:
    """The text of each row, of which there may be one alone.

    Raises:
        InvalidArgumentError: It is neither a list nor a tensor.
    """
    is_array = isinstance(prediction, (torch.Tensor, np.ndarray))
    is_list = (is_array and not getattr(prediction, "is_nested", False)) or (
        isinstance(prediction, Sequence) and not isinstance(prediction, (str, bytes))
    )
    require(is_list, "prediction", prediction, "must be token ids: a list, or a tensor [tokens]")
    if is_array:
        return list(prediction) if prediction.ndim == 2 else [prediction]
    is_nested = any(item is None or isinstance(item, (Sequence, torch.Tensor, np.ndarray)) for item in prediction)
    return list(prediction) if is_nested else [prediction]
