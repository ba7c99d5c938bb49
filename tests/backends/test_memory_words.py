"""Versions of dictionaries: every write is noticed, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from lookahead.backends.transformers.memory_words import DictVersions, has_dict_versions
from lookahead.backends.transformers.surroundings import Surroundings
from model_zoo import build

pytestmark = pytest.mark.skipif(not has_dict_versions(), reason="this Python keeps no versions of dictionaries")


class _Scaled(torch.nn.Linear):
    pass


WRITES: dict[str, Callable[[torch.nn.Linear], Any]] = {
    "attribute": lambda module: setattr(module, "scale", 2.0),
    "training": lambda module: module.eval(),
    "by vars": lambda module: vars(module).update(in_features=5),
    "deleted": lambda module: delattr(module, "bias"),
    "parameter": lambda module: setattr(module, "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "buffer": lambda module: module.register_buffer("mean", torch.ones(2)),
    "submodule": lambda module: module.add_module("inner", torch.nn.Identity()),
    "hook": lambda module: module.register_forward_hook(print),
    "earlier hook": lambda module: module.register_forward_pre_hook(print),
    "class": lambda module: setattr(module, "__class__", _Scaled),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_modules_are_noticed(write: Callable[[torch.nn.Linear], Any]) -> None:
    modules = [torch.nn.Linear(2, 2) for _ in range(3)]
    containers = [value for module in modules for value in vars(module).values() if isinstance(value, dict)]
    versions = DictVersions([*map(vars, modules), *containers], modules)
    for module in modules:
        module(torch.ones(2))
    assert versions.hold()
    write(modules[1])
    assert not versions.hold()
    versions.note(versions.read())
    assert versions.hold()


def test_each_of_many_writes_is_noticed() -> None:
    contents: list[Any] = [{}, OrderedDict(a=1), {str(number): number for number in range(100)}]
    versions = DictVersions(contents)
    for number in range(300):
        contents[number % 3]["a"] = (number,)
        assert not versions.hold()
        versions.note(versions.read())
        assert [len(content) for content in contents][1] == 1
        assert versions.hold()


def test_writes_between_reading_and_noting_are_noticed() -> None:
    content: dict[str, int] = {}
    versions = DictVersions([content])
    words = versions.read()
    content["a"] = 1
    versions.note(words)
    assert not versions.hold()


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x


CHANGES: dict[str, tuple[Any, str, object]] = {
    "method": (modeling_llama.LlamaMLP, "forward", _forward),
    "new method": (modeling_llama.LlamaRMSNorm, "__call__", _forward),
    "method of a base class": (torch.nn.Module, "__call__", _forward),
    "function": (modeling_llama, "rotate_half", _forward),
    "function of torch": (torch.nn.functional, "silu", _forward),
    "cache": (DynamicCache, "update", _forward),
    "attention": (ALL_ATTENTION_FUNCTIONS, "sdpa", _forward),
}


@pytest.mark.parametrize("checked_before", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_code_are_noticed(change: tuple[Any, str, object], checked_before: bool) -> None:
    space, name, value = change
    surroundings = Surroundings(build("llama"))
    assert not checked_before or all(surroundings.hold() for _ in range(3))
    is_registry = isinstance(space, MutableMapping)
    with patch.dict(space, {name: value}) if is_registry else patch.object(space, name, value, create=True):
        assert not any(surroundings.hold() for _ in range(3))
    assert all(surroundings.hold() for _ in range(3))
    modeling_llama.unread = object()  # no code
    del modeling_llama.unread
    assert surroundings.hold()
