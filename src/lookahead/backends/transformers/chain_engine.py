"""Which module runs chains: the model itself, or a clone of it that reads few tokens in less time."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.checks.clones import goes_on_rightly
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.preserved_state import preserved_state
from lookahead.backends.transformers.shared_clone import SharedClone, all_modules, can_be_cloned, structure

_CHUNK = 16
"""Tokens of a chunk; a draft and its pending tokens are one or two of them."""


def chain_engine(model: PreTrainedModel) -> PreTrainedModel:
    """The module that runs short chains of `model`, which itself stays as it is. Made and tried once per model object.

    State-space layers (Mamba 2 and its kin) read several tokens in chunks of some hundred, and without a kernel for
    them, as on a CPU, they fill a chunk up: two tokens take as long as all of them. A clone has shorter chunks.
    """
    if model.device.type != "cpu" or not can_be_cloned(model) or not any(map(_has_long_chunks, model.modules())):
        return model
    state = state_of(model)
    setting = (model.config._attn_implementation, "short chunks", model.dtype, False)
    with state.lock:
        modules = all_modules(model)
        parts = structure(modules, pack_weights=False)
        if setting not in state.clones or state.clones[setting][0] != parts:
            state.clones[setting] = (parts, _tried_clone(model))
        clone = state.clones[setting][1]
        if not isinstance(clone, SharedClone):
            return model
        clone.refresh(modules)
        _shorten(clone.module)
    return clone.module


def _has_long_chunks(module: torch.nn.Module) -> bool:
    size = getattr(module, "chunk_size", None)
    return isinstance(size, int) and size > _CHUNK and hasattr(module, "A_log")


def _shorten(module: torch.nn.Module) -> None:
    for part in module.modules():
        if _has_long_chunks(part):
            part.chunk_size = _CHUNK  # type: ignore[assignment]


def _tried_clone(model: PreTrainedModel) -> SharedClone | None:
    """A clone that reads chains as the model reads single tokens; `None` if there is none."""
    clone = SharedClone(model, None, pack_weights=False)
    sizes = {part: part.chunk_size for part in clone.module.modules() if _has_long_chunks(part)}
    _shorten(clone.module)
    with preserved_state(model), torch.no_grad():
        same = goes_on_rightly(model, clone.module)
    for part, size in sizes.items():  # else the clone would not look like the model
        part.chunk_size = size
    return clone if same and not clone.keeps_state(model) else None
