"""A twin of a model: another module tree over the same weights, in which the engine may change what it likes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.engine.packed_linear import PackedLinear, can_pack, pack

_ITS_OWN = frozenset({"_parameters", "_buffers", "_modules", "config", "generate"})
"""What a twin's modules have for themselves. `generate`, where it is attached, is a way back to the model."""


def can_have_twin(model: PreTrainedModel) -> bool:
    """Whether all of the model's computation is reached through its module tree.

    Hooks that replace `forward` on one object (accelerate's, a user's own) and compiled calls lead back to the
    modules they were made for, past any twin.
    """
    return not any(
        "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


class Twin:
    """Another module tree over the parameters and buffers of `model`, which is not touched.

    Args:
        model: Any model that `can_have_twin`.
        attention: What the twin's layers use where the model's use `sdpa`, registered with transformers; `sdpa` as
            well if not given.
        pack_weights: Replace the twin's linear layers with `PackedLinear`.

    Attributes:
        module: The twin itself.
    """

    def __init__(self, model: PreTrainedModel, attention: str | None, pack_weights: bool) -> None:
        self._attention = attention
        self._pack_weights = pack_weights
        self._own: dict[int, torch.nn.Module] = {}  # by the id of the module that it stands for
        self._configs: dict[int, Any] = {}  # each configuration is copied once, wherever it is referred to
        self._made_of = _structure(model)
        self.module: PreTrainedModel = self._twin(model)
        self.refresh(model)

    def fits(self, model: PreTrainedModel) -> bool:
        """Whether modules, parameters, configuration and packed weights of `model` are what they were."""
        packed = (module for module in self._own.values() if isinstance(module, PackedLinear))
        return self._made_of == _structure(model) and all(module.is_current() for module in packed)

    def refresh(self, model: PreTrainedModel) -> None:
        """Take over what has been set on modules since: whether they train, which adapters are active, ..."""
        for module in model.modules():
            own = vars(self._own[id(module)])
            own.update((name, value) for name, value in vars(module).items() if name not in _ITS_OWN)

    def _twin(self, module: torch.nn.Module) -> Any:
        if id(module) in self._own:
            return self._own[id(module)]
        if self._pack_weights and can_pack(module):
            own: torch.nn.Module = pack(module)  # type: ignore[arg-type]
        else:
            own = module.__class__.__new__(module.__class__)
        self._own[id(module)] = own
        vars(own).update((name, dict(vars(module)[name])) for name in ("_parameters", "_buffers", "_modules"))
        for name, child in module._modules.items():
            own._modules[name] = None if child is None else self._twin(child)
        if "config" in vars(module):
            vars(own)["config"] = config = copy.deepcopy(vars(module)["config"], self._configs)
            if self._attention is not None and getattr(config, "_attn_implementation", None) == "sdpa":
                config._attn_implementation = self._attention
        return own


def _structure(model: PreTrainedModel) -> list[object]:
    """What a twin depends on: modules, parameters and where they lie, configuration."""
    structure: list[object] = [model.config.to_json_string(use_diff=False)]
    for module in model.modules():
        structure.append(id(module))
        structure.extend(
            (id(tensor), tensor.data_ptr()) for tensor in module._parameters.values() if tensor is not None
        )
    return structure
