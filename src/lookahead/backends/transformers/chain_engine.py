"""Which module runs chains: the model itself, or a clone of it that goes on over several tokens rightly, or sooner."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.chain_cache import is_forgetful
from lookahead.backends.transformers.checks.clones import goes_on_rightly
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.shared_clone import SharedClone, can_be_cloned, clone_for
from lookahead.backends.transformers.snapshots import preserved_state

_CHUNK = 16
"""Tokens of a chunk; a draft and its pending tokens are one or two of them."""


def chain_engine(model: PreTrainedModel) -> PreTrainedModel:
    """The module that runs short chains of `model`, which itself stays as it is. Made and tried once per model object.

    State-space layers (Mamba 2 and its kin) read several tokens in chunks of some hundred, and without a kernel for
    them, as on a CPU, they fill a chunk up: two tokens take as long as all of them. A clone has shorter chunks.
    Those of Mamba 1 go on from their state over one token alone. In a clone they take tokens one by one, while all
    other layers take them together.
    """
    forgets = is_forgetful(model)
    has_long_chunks = model.device.type == "cpu" and any(map(_has_long_chunks, model.modules()))
    if not (forgets or has_long_chunks) or not can_be_cloned(model):
        return model
    with state_of(model).lock:
        clone = clone_for(model, "chains", False, _tried_clone)
        if not isinstance(clone, SharedClone):
            return model
        _shorten(clone.module)
    return clone.module


def _has_long_chunks(module: torch.nn.Module) -> bool:
    size = getattr(module, "chunk_size", None)
    return isinstance(size, int) and size > _CHUNK and hasattr(module, "A_log")


def _shorten(module: torch.nn.Module) -> None:
    for part in module.modules():
        if _has_long_chunks(part):
            part.chunk_size = _CHUNK  # type: ignore[assignment]


@cache
def _one_by_one(kind: Any) -> Any:
    """The class `kind` of a layer, whose passes behind a text take its tokens one by one."""

    class OneByOne(kind):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, cache_params: Any = None, *args: Any, **kwargs: Any) -> Any:
            goes_on = cache_params is not None and cache_params.has_previous_state(self.layer_idx)
            parts = torch.split(hidden_states, 1, dim=1) if goes_on else [hidden_states]
            return torch.cat([super(OneByOne, self).forward(part, cache_params, *args, **kwargs) for part in parts], 1)

    return OneByOne


def _tried_clone(model: PreTrainedModel, attention: str | None, pack_weights: bool | str) -> SharedClone | str:
    """A clone that reads chains as the model reads single tokens; a reason in its place if there is none."""
    clone = SharedClone(model, None, pack_weights)
    sizes = {part: part.chunk_size for part in clone.module.modules() if _has_long_chunks(part)}
    _shorten(clone.module)
    for part in clone.module.modules():
        if is_forgetful(model) and type(part).__name__.endswith("MambaMixer"):
            kind: Any = type(part)
            part.__class__ = _one_by_one(kind)
    with preserved_state(model), torch.no_grad():
        same = goes_on_rightly(model, clone.module)
    for part, size in sizes.items():  # else the clone would not look like the model
        part.chunk_size = size
    return clone if same and not clone.keeps_state(model) else "a clone does not go on as it does"
