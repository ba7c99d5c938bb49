"""Invariant replacements of modules: the bits of a row do not depend on other rows."""

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
"""Function from `[rows, in_features]` to `[rows, out_features]`."""

Wrapper = Callable[..., Any]
"""Invariant forward pass: called with the module, its original forward pass, and the inputs."""

MAX_ROWS = 128
"""Largest number of rows of one product; more rows are split."""

_MIN_ROWS = (1, 2, 4, 8, 16)
_FIXED = 16
_RESULTS = 1 << 17
"""Results to compare for each number of rows: one in ten thousand may differ."""
_MIN_SAMPLE = 8
"""Smallest number of compared rows."""
_MAX_SAMPLE = 8192
"""Largest number of compared rows."""
_TRIALS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, MAX_ROWS)
"""Numbers of rows to try."""


class RowRule(NamedTuple):
    """Smallest and largest number of rows of a product; fewer rows are padded, more are split.

    Libraries choose an order of summation by the shape of a product. Usually all numbers of rows from `min_rows` on
    have the same order; on other processors `min_rows` equals `max_rows`.
    """

    min_rows: int
    max_rows: int


RULES = (*(RowRule(rows, MAX_ROWS) for rows in _MIN_ROWS), RowRule(_FIXED, _FIXED))
"""Rules from the cheapest to the most expensive."""


def find_rule(product: Product, inputs: int, dtype: torch.dtype) -> RowRule | None:
    """Return the cheapest rule that makes products of random rows invariant; `None` if there is none.

    Trials run in a fixed order: timings would make bits depend on the load of the machine.

    Args:
        product: The product.
        inputs: Elements of a row.
        dtype: Their type.
    """
    sample, compared = _sample(product, inputs, dtype)
    expected = torch.cat([product(part) for part in torch.split(sample, MAX_ROWS)])
    sizes = [rows for rows in _TRIALS if _is_equal(product, sample, expected, rows, compared)]
    for rule in RULES[:-1]:
        if all(rows in sizes for rows in _TRIALS if rows >= rule.min_rows):
            return rule
    return RULES[-1] if rows_are_equal(product, inputs, dtype, _FIXED) else None


def rows_are_equal(product: Product, inputs: int, dtype: torch.dtype, size: int) -> bool:
    """Return whether the bits of a row do not depend on its index in products of `size` random rows.

    Args:
        product: As for `find_rule`.
        inputs: As for `find_rule`.
        dtype: As for `find_rule`.
        size: Rows of every product, a divisor of `MAX_ROWS`.
    """
    sample, _ = _sample(product, inputs, dtype)
    expected = torch.cat([product(part) for part in torch.split(sample, size)])
    rolled = sample.roll(5, 0)
    again = torch.cat([product(part) for part in torch.split(rolled, size)]).roll(-5, 0)
    return torch.equal(again, expected)


def _sample(product: Product, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Return random rows, a multiple of `MAX_ROWS`, and the number of rows to compare."""
    outputs = product(torch.zeros(MAX_ROWS, inputs, dtype=dtype, device="cpu")).shape[1]
    compared = min(max(_RESULTS // outputs, _MIN_SAMPLE), _MAX_SAMPLE)
    random = torch.Generator().manual_seed(0)
    rows = -(-compared // MAX_ROWS) * MAX_ROWS
    return torch.randn(rows, inputs, generator=random, device="cpu").to(dtype), compared


def _is_equal(product: Product, sample: torch.Tensor, expected: torch.Tensor, rows: int, compared: int) -> bool:
    """Return whether products of `rows` rows equal products of `MAX_ROWS`, for about `compared` rows of the sample."""
    count = max(compared, rows) // rows * rows
    return all(torch.equal(product(sample[at : at + rows]), expected[at : at + rows]) for at in range(0, count, rows))


def by_rule(product: Product, rows: torch.Tensor, rule: RowRule) -> torch.Tensor:
    """Compute the product of `rows` `[count, in_features]` in padded parts according to a rule."""
    count = rows.shape[0]
    parts = -(-count // rule.max_rows)
    size = max(-(-count // parts), rule.min_rows)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, parts * size - count))
    return torch.cat([product(part) for part in torch.split(padded, size)])[:count]


FINDINGS = "_findings"
"""Attribute of an invariant module with its rules by setting; all other attributes are shared with the original."""

_WHOLE = 64
"""Multiple of the vector sizes of torch, in elements of any type."""
_NO_VECTOR = 15
"""Elements that torch processes without vectors."""
_UNDIVIDED = 32768
"""Largest tensor that torch processes in one thread, in elements."""


def foreign_product(model: torch.nn.Module) -> str | None:
    """Return the name of a module with unknown experts or router; `None` if there is none.

    Trials cannot prove their invariance: with other weights other results are close to a rounding boundary of 16 bits.
    """
    modules: list[tuple[str, torch.nn.Module]] = list(model.named_modules())
    has_experts = any(_are_experts(module) for _, module in modules)
    for name, module in modules:
        is_safe = hasattr(module, "wrapper") or isinstance(module, torch.nn.Embedding)
        if is_safe or type(module).__module__.startswith("torch.nn."):
            continue
        dimensions = max((weight.dim() for weight in module._parameters.values() if weight is not None), default=0)
        if dimensions > (1 if has_experts else 2):
            return name
    return None


def empty_module(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """Return a module of an `invariant_kind` without rules; the caller sets all other attributes."""
    module = kind.__new__(kind)
    vars(module)[FINDINGS] = {}
    return module


def min_rows(model: torch.nn.Module) -> int:
    """Return the smallest number of rows of a product in `model`, from the rules of its passes so far."""
    rules = [rule for module in model.modules() for rule in vars(module).get(FINDINGS, {}).values()]
    return max((rule.min_rows for rule in rules if isinstance(rule, RowRule)), default=1)


@cache
def _wrapped(kind: Any, wrapper: Wrapper) -> Any:
    """Return a subclass of `kind` with an invariant forward pass."""

    def forward(self: Any, *inputs: Any) -> Any:
        return wrapper(self, partial(kind.forward, self), *inputs)

    return type(kind.__name__, (kind,), {"forward": forward, "wrapper": wrapper})


def _pad_rows(module: Any, product: Product, input: torch.Tensor) -> torch.Tensor:
    """Compute a product with padded and split rows; the first call for a setting finds the rule."""
    rule = _rule_for(module, input, product)
    count = input.numel() // input.shape[-1]
    if rule.min_rows <= count <= rule.max_rows or not count:
        return product(input)
    return by_rule(product, input.reshape(count, -1), rule).view(*input.shape[:-1], -1)


_rules: dict[tuple[object, ...], RowRule | None] = {}
"""Rules by shapes and types, for all models of the process."""


def _rule_for(module: Any, input: torch.Tensor, product: Product) -> RowRule:
    """Return the rule of a product with the weights of `module`: from the module, the process, the disk, or a trial."""
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
                "machine, for any number of rows"
            )
        findings[setting] = _rules[key]
    return findings[setting]  # type: ignore[no-any-return]


def _stored_rule(about: dict[str, Any], product: Product, input: torch.Tensor) -> RowRule | None:
    """Return the rule of an earlier process, or find and store one."""
    stored = recall(about)
    if isinstance(stored, list) and stored in [list(rule) for rule in RULES]:
        return RowRule(*stored)
    rule = find_rule(product, input.shape[-1], input.dtype)
    if rule is not None:
        remember(about, list(rule))
    return rule


def _is_activation(module: torch.nn.Module) -> bool:
    """Return whether a module is an elementwise activation of torch or transformers."""
    home = type(module).__module__
    return not module._parameters and home in (activations.__name__, torch.nn.SiLU.__module__)


def _fill_vectors(module: Any, function: Product, input: torch.Tensor) -> torch.Tensor:
    """Compute an activation on whole vectors in one thread, unless its bits never depend on that.

    torch computes the elements after the last whole vector with other instructions.
    """
    findings = vars(module)[FINDINGS]
    if input.dtype not in findings:
        findings[input.dtype] = _ignores_vectors(function, input.dtype)
    if findings[input.dtype]:
        return function(input)
    width = input.shape[-1]
    padded = torch.nn.functional.pad(input.reshape(-1, width), (0, -width % _WHOLE))
    parts = [function(part) for part in torch.split(padded, max(1, _UNDIVIDED // padded.shape[1]))]
    return torch.cat(parts)[:, :width].reshape(input.shape)


def _ignores_vectors(function: Product, dtype: torch.dtype) -> bool:
    """Return whether a function has equal bits with and without vectors, for all numbers of a 16-bit type.

    Wider types have too many numbers for a trial.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
    inside = function(numbers)
    alone = torch.cat([function(part) for part in torch.split(numbers, _NO_VECTOR)])
    return bool(((inside == alone) | inside.isnan()).all())


def _are_experts(module: torch.nn.Module) -> bool:
    """Return whether a module has experts with transformers' own interface."""
    return "has_gate" in vars(module) and "_is_expert_parallel" in vars(module)


def _run_one_by_one(
    module: Any, experts: Product, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run each expert on its tokens, with padded and split rows."""

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        ones = rows.new_ones((len(rows), 1))
        return experts(rows, torch.full_like(ones, expert, dtype=torch.long), ones)

    rule = _rule_for(module, hidden, partial(run, 0))
    output = torch.zeros_like(hidden)
    for expert in sorted({*chosen.flatten().tolist()}):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        result = by_rule(partial(run, expert), hidden[token], rule)
        output.index_add_(0, token, (result * weights[token, choice, None]).to(output.dtype))
    return output


def _is_router(module: torch.nn.Module) -> bool:
    """Return whether a module chooses experts for each row by its own weight."""
    weight = module._parameters.get("weight")
    is_weight = weight is not None and weight.dim() == 2 and len(weight) == vars(module).get("num_experts")
    return is_weight and len(signature(type(module).forward).parameters) == 2


def _route_in_parts(module: Any, router: Product, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run a router on multiples of `_WHOLE` rows.

    torch computes some of its float32 functions with other instructions after the last whole vector.
    """
    findings = vars(module)[FINDINGS]
    setting = (hidden.dtype, torch.get_num_threads())
    width = hidden.shape[-1]

    def side_by_side(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([output.flatten(1).double() for output in router(rows)], dim=1)

    if setting not in findings:
        findings[setting] = rows_are_equal(side_by_side, width, hidden.dtype, _WHOLE)
    if not findings[setting]:
        raise UnsupportedModelError(f"{type(module).__name__} has other bits in other company on this machine")
    rows = hidden.reshape(-1, width)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _WHOLE))
    outputs = [router(part) for part in torch.split(padded, _WHOLE)]
    return tuple(torch.cat(parts)[: len(rows)] for parts in zip(*outputs, strict=True))


def invariant_kind(module: torch.nn.Module, kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class that replaces `module`; `kind` if it is invariant anyway."""
    wrapped: Any = _wrapped  # mypy does not know that classes of modules are hashable
    return next((wrapped(kind, wrapper) for applies, wrapper in _WRAPPERS if applies(module)), kind)


_WRAPPERS: tuple[tuple[Callable[[torch.nn.Module], bool], Wrapper], ...] = (
    (lambda module: type(module) in (torch.nn.Linear, Conv1D), _pad_rows),
    (_is_activation, _fill_vectors),
    (_are_experts, _run_one_by_one),
    (_is_router, _route_in_parts),
)
"""Invariant forward pass for each kind of module."""
