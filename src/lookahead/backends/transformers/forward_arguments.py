"""What the installed transformers is, and what the forward pass of a model of it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel, __version__

TRANSFORMERS: tuple[int, ...] = tuple(int(number) for number in __version__.split(".")[:2])
"""Its major and minor version."""


_known: WeakKeyDictionary[Callable[..., Any], Mapping[str, inspect.Parameter]] = WeakKeyDictionary()
"""By function, as looking takes as long as a small layer, and every call asks several times."""


def forward_arguments(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """The parameters of `model.forward`, by name."""
    function = getattr(model.forward, "__func__", None)
    if function is None:  # something else than a method was put there, which may refer to the model
        return inspect.signature(model.forward).parameters
    if function not in _known:
        _known[function] = inspect.signature(function).parameters
    return _known[function]
