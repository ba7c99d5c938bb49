"""Drafters for the texts of a call or an engine, and their shared memory, pool, pace and costs."""

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
from lookahead.errors import InvalidArgumentError, LookaheadWarning, UnsupportedArgumentError, not_of_signal
from lookahead.serving.refusals import are_whole_numbers, check_values
from lookahead.values import require

_SPARES = 16
"""Most memories of adapters and tenants, and most unused ones: 10 MiB each; a new one costs 2 to 14 ms."""


class Drafting:
    """Makes the drafters of texts with one configuration.

    Args:
        model: The model.
        config: Configuration of drafts.
        pace: Chooses the number of nodes, of each text or of all together; `None` for the numbers in `config`.
        pool: Pool of the paper's method; one for each text if not given.
        max_nodes: Limit for the nodes of each text's tree.
        chains: Whether drafts must be chains.
        tenant: Key of the memory of the process; see `Engine.submit`.

    Attributes:
        max_nodes: Largest number of nodes of a tree.
        is_paced: Whether the pace chooses the number of nodes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LookaheadConfig,
        pace: Pace | SharedPace | None = None,
        pool: NGramPool | None = None,
        max_nodes: int = MAX_NODES_PER_STEP,
        chains: bool = False,
        tenant: object = None,
    ) -> None:
        self.config = config
        self.max_nodes = min(config.max_nodes, max_nodes)
        self.is_paced = pace is not None and (config.preset == "auto" or not pace.is_shared)
        self._model = model
        self._pace = pace
        self._chains = chains
        self._pool = NGramPool(config.ngram_size, config.guess_set_size) if pool is None and config.share_pool else pool
        self._memory: DraftMemory | None = None
        self._file: MemoryFile | None = None
        if config.preset == "auto":
            self._memory, self._file = draft_memory(model, config, tenant)

    def drafter(self, predicted: PredictedText | None) -> Drafter:
        """Make the drafter of one text."""
        return build_drafter(
            self.config,
            self._pool,
            self._memory,
            self._pace,
            max_nodes=self.max_nodes,
            vocabulary=vocabulary_size(self._model),
            predicted=predicted,
            chains=self._chains,
        )

    def save(self) -> None:
        """Save the memory to its file, if it has one; warn if the file cannot be written."""
        if self._file is None:
            return
        try:
            self._file.save(model_identity(self._model))
        except (OSError, InvalidArgumentError) as error:
            warnings.warn(
                f"memory={str(self._file.path)!r} could not be written ({error}); predictions learned since the last "
                "save are lost when this process ends. Check the path and its permissions",
                LookaheadWarning,
                stacklevel=2,
            )

    def release(self) -> None:
        """Give up the memory, and keep its arrays for a later text if no other text shares it."""
        spares = state_of(self._model).spares
        memory = self._memory
        self._memory = None
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
    """Return the pace of a model for a setting, with the costs of earlier calls, of `lookahead tune`, or a first guess.

    Args:
        model: The model.
        config: Its engine's configuration.
        rows: Number of rows that run together.
        temperature: Temperature of sampling; 0 for greedy decoding. It changes the acceptance of drafts.
        chains: Whether drafts are chains.
        sizes: Sizes of captured passes; see `Runner.pass_sizes`.
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


def draft_memory(
    model: PreTrainedModel, config: LookaheadConfig, tenant: object = None
) -> tuple[DraftMemory, MemoryFile | None]:
    """Return the memory of a call according to `config.memory`, and its file if it has one.

    Raises:
        InvalidArgumentError: The file is not a memory, belongs to another model, or has an invalid name.
        OSError: The file cannot be read.
    """
    state = state_of(model)
    with state.lock:
        if config.memory == "request":
            memory = state.spares.pop() if state.spares else DraftMemory()
            memory.clear()
            return memory, None
        if config.memory == "process":
            key = _active_adapters(model), tenant
            memory = state.memories.pop(key) if key in state.memories else DraftMemory()
            state.memories[key] = memory  # the last one
            for unused in list(state.memories)[:-_SPARES]:
                del state.memories[unused]
            memory.fit(vocabulary_size(model))
            return memory, None
        try:
            path = Path(config.memory).expanduser().absolute()
        except RuntimeError as error:  # unknown user after ~
            name = os.fspath(config.memory)
            raise InvalidArgumentError(f"memory={name!r} cannot be written: {error}; choose another file") from error
        if str(path) not in state.files:
            state.files[str(path)] = MemoryFile(path, model_identity(model))
        file = state.files[str(path)]
        file.memory.fit(vocabulary_size(model))
        return file.memory, file


def _active_adapters(model: PreTrainedModel) -> object:
    """Return the names of PEFT's active adapters, whose predictions differ; `None` without any."""
    if getattr(model, "peft_config", None) is None:
        return None
    layer: Any = next((module for module in model.modules() if hasattr(module, "_disable_adapters")), None)
    return None if layer is None or layer._disable_adapters else tuple(layer.active_adapters)


Prediction = torch.Tensor | Sequence[int] | Sequence[Sequence[int] | None]
"""Token ids of the predicted output of a single row, or a list with one item for each row (`None`: no prediction)."""


def _token_ids(tokens: Any, vocabulary: int) -> list[int]:
    """Convert a list or tensor of token ids.

    Raises:
        InvalidArgumentError: It has other values.
    """
    try:
        ids = tokens if isinstance(tokens, torch.Tensor) else torch.as_tensor(tokens, device="cpu")
    except Exception as error:  # user objects may raise any error
        not_of_signal(error)
        ids = torch.empty(1, device="cpu")
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
    """Return the predicted text of each row; `None` for an empty one.

    Raises:
        InvalidArgumentError: `prediction` is not one text for each row.
        UnsupportedArgumentError: The preset does not use predictions.
    """
    if prediction is None:
        return [None] * rows
    if config.preset != "auto":
        raise UnsupportedArgumentError(
            f"prediction is not supported by preset={config.preset!r}, which drafts from other texts; use preset='auto'"
        )
    items: Sequence[Any] = _rows(prediction)
    if len(items) != rows:
        raise InvalidArgumentError(
            f"prediction has {len(items)} texts for {rows} prompts; give a list with one text for each, None for no "
            "prediction"
        )
    vocabulary = vocabulary_size(model)
    texts = [[] if item is None else _token_ids(item, vocabulary) for item in items]
    return [PredictedText(text) if text else None for text in texts]


def _rows(prediction: Any) -> Sequence[Any]:
    """Split a prediction into the texts of the rows.

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
