"""Modules whose bits for a row do not depend on the rows beside it, in place of those that have no such care."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import activations
from transformers.pytorch_utils import Conv1D

from lookahead.backends.transformers.invariant.findings import recall, remember
from lookahead.backends.transformers.invariant.rows import RULES, Product, RowRule, by_rule, find_rule
from lookahead.errors import UnsupportedModelError

FINDINGS = "_findings"
"""The attribute that such a module has for itself, a dict by setting of what it found; all others are those of the
module it stands for."""

_WHOLE = 64
"""Elements of which torch makes whole vectors, whatever their type."""
_NO_VECTOR = 15
"""Elements of which torch makes none."""
_UNDIVIDED = 32768
"""Elements up to which torch gives all of a tensor to one thread."""


def invariant_kind(module: torch.nn.Module, kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class of what stands for `module`, which would be `kind` otherwise."""
    joined: Any = kind
    joining: Any = _joined  # classes are hashable, which mypy doubts of those of modules
    if type(module) in (torch.nn.Linear, Conv1D):
        joined = joining(_ByRule, kind)
    elif _is_activation(module):
        joined = joining(_WholeVectors, kind)
    elif "has_gate" in vars(module) and "_is_expert_parallel" in vars(module):
        joined = joining(_InCompany, kind)
    return joined  # type: ignore[no-any-return]


def empty_module(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """A module of a class of `invariant_kind` that has found nothing yet; all else is for the caller to set."""
    module = kind.__new__(kind)
    vars(module)[FINDINGS] = {}
    return module


def least_rows(model: torch.nn.Module) -> int:
    """Rows that every product of `model` has at least, by what its passes have found."""
    found = [rule for module in model.modules() for rule in vars(module).get(FINDINGS, {}).values()]
    return max((rule.least for rule in found if isinstance(rule, RowRule)), default=1)


@cache
def _joined(care: Any, kind: Any) -> Any:
    return type(kind.__name__, (care, kind), {})


class _ByRule:
    """A product whose rows are padded and cut; the rule is found at the first one, for the weight's shape and type."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        findings = vars(self)[FINDINGS]
        setting = (input.dtype, torch.get_num_threads())
        if setting not in findings:
            findings[setting] = _rule_for(self, input)  # type: ignore[arg-type]
        least, most = findings[setting]
        product = super().forward  # type: ignore[misc]
        count = input.numel() // input.shape[-1]
        if least <= count <= most or not count:
            return product(input)  # type: ignore[no-any-return]
        output = by_rule(product, input.reshape(count, -1), findings[setting])
        return output.view(*input.shape[:-1], -1)


_rules: dict[tuple[object, ...], RowRule | None] = {}
"""By shapes and types: what a machine multiplies how is the same for all models."""


def _rule_for(module: torch.nn.Module, input: torch.Tensor) -> RowRule:
    weight: Any = module.weight
    kind: Any = type(module).__bases__[1]
    bias = getattr(module, "bias", None) is not None
    setting = (kind, tuple(weight.shape), weight.dtype, bias, input.dtype, torch.get_num_threads())
    if setting not in _rules:
        _rules[setting] = _stored_rule(module, kind, input)
    rule = _rules[setting]
    if rule is None:
        raise UnsupportedModelError(
            f"products with a weight of {tuple(weight.shape)} in {weight.dtype} have other bits in other company on "
            "this machine, whatever their number of rows"
        )
    return rule


def _stored_rule(module: torch.nn.Module, kind: Any, input: torch.Tensor) -> RowRule | None:
    """The rule of an earlier process, else one that is found now."""
    weight: Any = module.weight
    about: dict[str, Any] = {"product": f"{kind.__module__}.{kind.__qualname__}", "shape": list(weight.shape)}
    about |= {"weight": str(weight.dtype), "input": str(input.dtype), "bias": getattr(module, "bias", None) is not None}
    found = recall(about)
    if isinstance(found, list) and found in [list(rule) for rule in RULES]:
        return RowRule(*found)
    inputs = input.shape[-1]
    rule = find_rule(lambda rows: kind.forward(module, rows), inputs, weight.numel() // inputs, input.dtype)
    if rule is not None:
        remember(about, list(rule))
    return rule


def _is_activation(module: torch.nn.Module) -> bool:
    """Whether it is a function of single elements, as torch and transformers define them."""
    home = type(module).__module__
    return not module._parameters and home in (activations.__name__, torch.nn.SiLU.__module__)


class _WholeVectors:
    """An activation whose elements all lie in whole vectors, and in one thread's share, if that matters to their bits.

    torch computes what is left behind the last whole vector in another way than those before it.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        function = super().forward  # type: ignore[misc]
        findings = vars(self)[FINDINGS]
        if input.dtype not in findings:
            findings[input.dtype] = _is_the_same_everywhere(function, input.dtype)
        if findings[input.dtype]:
            return function(input)  # type: ignore[no-any-return]
        width = input.shape[-1]
        padded = torch.nn.functional.pad(input.reshape(-1, width), (0, -width % _WHOLE))
        parts = [function(part) for part in torch.split(padded, max(1, _UNDIVIDED // padded.shape[1]))]
        return torch.cat(parts)[:, :width].reshape(input.shape)


def _is_the_same_everywhere(function: Product, dtype: torch.dtype) -> bool:
    """Whether a function of 16 bits gives the same for each number there is, inside of a vector and alone.

    The numbers of wider types are too many to be tried.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    inside, alone = function(numbers), torch.cat([function(part) for part in torch.split(numbers, _NO_VECTOR)])
    return bool(((inside == alone) | inside.isnan()).all())


class _InCompany:
    """Experts, none of which computes a single token alone."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(chosen.reshape(-1))
        lonely = (counts[chosen] == 1).any(dim=-1).nonzero()[:, 0]
        count = hidden.shape[0]
        hidden, chosen, weights = (torch.cat([states, states[lonely]]) for states in (hidden, chosen, weights))
        output = super().forward(hidden, chosen, weights)  # type: ignore[misc]
        return output[:count]  # type: ignore[no-any-return]
