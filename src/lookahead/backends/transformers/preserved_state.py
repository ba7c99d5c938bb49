"""Passes that leave no trace in a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved_state(model: torch.nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of the modules of `model` that passes change meanwhile.

    The rotary embeddings of a model with dynamic RoPE, for one, keep the frequencies of the longest text so far, and
    a short text puts them back: after a check pass, plain decoding would go on with other frequencies.
    """
    kept = [
        (module, dict(vars(module)), [(name, buffer, _copy(buffer)) for name, buffer in module._buffers.items()])
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            _put_back(module._buffers, buffers)


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _put_back(
    registered: dict[str, torch.Tensor | None], buffers: list[tuple[str, torch.Tensor | None, torch.Tensor | None]]
) -> None:
    for name in registered.keys() - {name for name, _, _ in buffers}:
        del registered[name]
    for name, buffer, values in buffers:
        if registered.get(name) is not buffer or name not in registered:
            registered[name] = buffer
        # On the meta device there are no values.
        if buffer is not None and values is not None and not buffer.is_meta and not torch.equal(buffer, values):
            with torch.no_grad():
                buffer.copy_(values)
