"""Row-invariant replacements of modules: the bits of a row do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from transformers import activations
from transformers.pytorch_utils import Conv1D

from lookahead.backends.transformers.findings import recall, remember
from lookahead.errors import UnsupportedModelError

Product = Callable[..., torch.Tensor]
"""`[rows, in_features]` to `[rows, out_features]`."""

Care = Callable[..., Any]
"""Given a module, what it would do, and its inputs: what it does, so that the bits of a row are its own."""

MOST = 128
"""Rows of one product at most; more are multiplied in several."""

_LEAST = (1, 2, 4, 8, 16)
_FIXED = 16
_OUTCOMES = 1 << 17
"""Results that are compared for each number of rows, as few as one in ten thousand may differ; but of no fewer and no
more rows than `_FEWEST` and `_ROWS`."""
_FEWEST = 8
_ROWS = 8192
_TRIED = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, MOST)


class RowRule(NamedTuple):
    """Between how many rows a product may have; fewer are padded, and more are cut.

    Libraries choose an order of summation by the shape of a product. Where all numbers of rows from `least` on have
    one order in common, that is enough; on processors where they have not, `least` and `most` are the same.
    """

    least: int
    most: int


RULES = (*(RowRule(least, MOST) for least in _LEAST), RowRule(_FIXED, _FIXED))
"""From the cheapest one to the dearest."""


def find_rule(product: Product, inputs: int, dtype: torch.dtype) -> RowRule | None:
    """The cheapest rule under which products of random rows have the same bits in every company; `None` if there is
    none.

    Found by trying, always in the same order: a time would make bits depend on the load of the machine.

    Args:
        product: The product.
        inputs: Elements of a row.
        dtype: Their type.
    """
    sample, compared = _sample(product, inputs, dtype)
    expected = torch.cat([product(part) for part in torch.split(sample, MOST)])
    sizes = [rows for rows in _TRIED if _alike(product, sample, expected, rows, compared)]
    for rule in RULES[:-1]:
        if all(rows in sizes for rows in _TRIED if rows >= rule.least):
            return rule
    return RULES[-1] if are_alike(product, inputs, dtype, _FIXED) else None


def are_alike(product: Product, inputs: int, dtype: torch.dtype, size: int) -> bool:
    """Whether the rows of a product of `size` random ones, a divisor of `MOST`, have the same bits in each place.

    Args:
        product, inputs, dtype: As for `find_rule`.
        size: Rows of every product.
    """
    sample, _ = _sample(product, inputs, dtype)
    expected = torch.cat([product(part) for part in torch.split(sample, size)])
    turned = sample.roll(5, 0)
    again = torch.cat([product(part) for part in torch.split(turned, size)]).roll(-5, 0)
    return torch.equal(again, expected)


def _sample(product: Product, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Random rows, a multiple of `MOST`, and how many of them are compared."""
    outputs = product(torch.zeros(MOST, inputs, dtype=dtype)).shape[1]
    compared = min(max(_OUTCOMES // outputs, _FEWEST), _ROWS)
    random = torch.Generator().manual_seed(0)
    return torch.randn(-(-compared // MOST) * MOST, inputs, generator=random).to(dtype), compared


def _alike(product: Product, sample: torch.Tensor, expected: torch.Tensor, rows: int, compared: int) -> bool:
    """Whether so many rows at once give what `MOST` of them give; for the first `compared` of the sample or so."""
    count = max(compared, rows) // rows * rows
    return all(torch.equal(product(sample[at : at + rows]), expected[at : at + rows]) for at in range(0, count, rows))


def by_rule(product: Product, rows: torch.Tensor, rule: RowRule) -> torch.Tensor:
    """The product of `rows` `[count, in_features]` in as many parts, each padded, as the rule wants."""
    count = rows.shape[0]
    parts = -(-count // rule.most)
    size = max(-(-count // parts), rule.least)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, parts * size - count))
    return torch.cat([product(part) for part in torch.split(padded, size)])[:count]


FINDINGS = "_findings"
"""The attribute that such a module has for itself, a dict by setting of what it found; all others are those of the
module it stands for."""

_WHOLE = 64
"""Elements of which torch makes whole vectors, whatever their type."""
_NO_VECTOR = 15
"""Elements of which torch makes none."""
_UNDIVIDED = 32768
"""Elements up to which torch gives all of a tensor to one thread."""


def foreign_product(model: torch.nn.Module) -> str | None:
    """The name of a module with experts or a router in it of a kind that is not known here; `None` if there is none.

    Trying cannot show that their bits are the same in every company: where the weights of a model are drawn otherwise,
    other results come to lie next to the border between two numbers of 16 bits.
    """
    modules: list[tuple[str, torch.nn.Module]] = list(model.named_modules())
    has_experts = any(_are_experts(module) for _, module in modules)
    for name, module in modules:
        is_safe = hasattr(module, "care") or isinstance(module, torch.nn.Embedding)
        if is_safe or type(module).__module__.startswith("torch.nn."):
            continue
        most = max((weight.dim() for weight in module._parameters.values() if weight is not None), default=0)
        if most > (1 if has_experts else 2):
            return name
    return None


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
def _with_care(kind: Any, care: Care) -> Any:
    """The class `kind`, with `care` in place of its forward pass."""

    def forward(self: Any, *inputs: Any) -> Any:
        return care(self, partial(kind.forward, self), *inputs)

    return type(kind.__name__, (kind,), {"forward": forward, "care": care})


def _pad_rows(module: Any, product: Product, input: torch.Tensor) -> torch.Tensor:
    """A product whose rows are padded and cut; the rule is found at the first one, for the weight's shape and type."""
    rule = _rule_for(module, input, product)
    count = input.numel() // input.shape[-1]
    if rule.least <= count <= rule.most or not count:
        return product(input)
    output = by_rule(product, input.reshape(count, -1), rule)
    return output.view(*input.shape[:-1], -1)


_rules: dict[tuple[object, ...], RowRule | None] = {}
"""By shapes and types: what a machine multiplies how is the same for all models."""


def _rule_for(module: Any, input: torch.Tensor, product: Product) -> RowRule:
    """The rule of a product with the weights of `module`; it is looked up here, in the process, on disk, and found."""
    findings = vars(module)[FINDINGS]
    setting = (input.dtype, torch.get_num_threads())
    if setting not in findings:
        kind = type(module).__bases__[0]
        weights = [[name, list(weight.shape), str(weight.dtype)] for name, weight in module.named_parameters()]
        about = {"product": f"{kind.__module__}.{kind.__qualname__}", "weights": weights, "input": str(input.dtype)}
        key = (kind, str(weights), *setting)
        if key not in _rules:
            _rules[key] = _stored_rule(about, product, input)
        if _rules[key] is None:
            raise UnsupportedModelError(
                f"products of {kind.__name__} with the weights {weights} have other bits in other company on this "
                "machine, whatever their number of rows"
            )
        findings[setting] = _rules[key]
    return findings[setting]  # type: ignore[no-any-return]


def _stored_rule(about: dict[str, Any], product: Product, input: torch.Tensor) -> RowRule | None:
    """The rule of an earlier process, else one that is found now."""
    found = recall(about)
    if isinstance(found, list) and found in [list(rule) for rule in RULES]:
        return RowRule(*found)
    rule = find_rule(product, input.shape[-1], input.dtype)
    if rule is not None:
        remember(about, list(rule))
    return rule


def _is_activation(module: torch.nn.Module) -> bool:
    """Whether it is a function of single elements, as torch and transformers define them."""
    home = type(module).__module__
    return not module._parameters and home in (activations.__name__, torch.nn.SiLU.__module__)


def _fill_vectors(module: Any, function: Product, input: torch.Tensor) -> torch.Tensor:
    """An activation whose elements all lie in whole vectors, and in one thread's share, if that matters to their bits.

    torch computes what is left behind the last whole vector in another way than those before it.
    """
    findings = vars(module)[FINDINGS]
    if input.dtype not in findings:
        findings[input.dtype] = _is_the_same_everywhere(function, input.dtype)
    if findings[input.dtype]:
        return function(input)
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
    inside = function(numbers)
    alone = torch.cat([function(part) for part in torch.split(numbers, _NO_VECTOR)])
    return bool(((inside == alone) | inside.isnan()).all())


def _are_experts(module: torch.nn.Module) -> bool:
    """Whether these are experts that transformers asks through its own interface."""
    return "has_gate" in vars(module) and "_is_expert_parallel" in vars(module)


def _ask_one_by_one(
    module: Any, experts: Product, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Experts, each of which computes its tokens in as many rows as the rule for its products wants."""

    def ask(expert: int, rows: torch.Tensor) -> torch.Tensor:
        ones = rows.new_ones((len(rows), 1))
        return experts(rows, torch.full_like(ones, expert, dtype=torch.long), ones)

    rule = _rule_for(module, hidden, partial(ask, 0))
    output = torch.zeros_like(hidden)
    for expert in sorted({*chosen.flatten().tolist()}):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        said = by_rule(partial(ask, expert), hidden[token], rule)
        output.index_add_(0, token, (said * weights[token, place, None]).to(output.dtype))
    return output


def _is_router(module: torch.nn.Module) -> bool:
    """Whether it chooses experts for each row by a weight of its own."""
    weight = module._parameters.get("weight")
    is_weight = weight is not None and weight.dim() == 2 and len(weight) == vars(module).get("num_experts")
    return is_weight and len(signature(type(module).forward).parameters) == 2


def _route_in_parts(module: Any, router: Product, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A router, all of which is computed for so many rows at once that they make whole vectors.

    Its scores come from functions in float32, some of which torch computes in another way behind the last whole vector.
    """
    findings = vars(module)[FINDINGS]
    setting = (hidden.dtype, torch.get_num_threads())
    width = hidden.shape[-1]

    def side_by_side(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([output.flatten(1).double() for output in router(rows)], dim=1)

    if setting not in findings:
        findings[setting] = are_alike(side_by_side, width, hidden.dtype, _WHOLE)
    if not findings[setting]:
        raise UnsupportedModelError(f"{type(module).__name__} has other bits in other company on this machine")
    rows = hidden.reshape(-1, width)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _WHOLE))
    outputs = [router(part) for part in torch.split(padded, _WHOLE)]
    return tuple(torch.cat(parts)[: len(rows)] for parts in zip(*outputs, strict=True))


def invariant_kind(module: torch.nn.Module, kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class of what stands for `module`, which would be `kind` otherwise."""
    joined: Any = _with_care  # classes are hashable, which mypy doubts of those of modules
    return next((joined(kind, care) for applies, care in _CARE if applies(module)), kind)


_CARE: tuple[tuple[Callable[[torch.nn.Module], bool], Care], ...] = (
    (lambda module: type(module) in (torch.nn.Linear, Conv1D), _pad_rows),
    (_is_activation, _fill_vectors),
    (_are_experts, _ask_one_by_one),
    (_is_router, _route_in_parts),
)
"""What each kind of module needs so that the bits of its rows do not depend on others."""
