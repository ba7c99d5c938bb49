"""A clone of a model that shares its weights: other module objects, which the engine may change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, INVARIANT_ROWS, LEAST_NODES
from lookahead.backends.transformers.cache_names import CACHE_ARGUMENTS
from lookahead.backends.transformers.chain_cache import is_forgetful
from lookahead.backends.transformers.comparisons import goes_on_rightly
from lookahead.backends.transformers.composition import all_modules
from lookahead.backends.transformers.invariant.modules import FINDINGS, empty_module, invariant_kind
from lookahead.backends.transformers.model_state import chosen_packing, model_setting, state_of
from lookahead.backends.transformers.packed_linear import PACKED_WEIGHT, PackedLinear, can_pack
from lookahead.backends.transformers.snapshots import hold_only, in_threads, preserved_state
from lookahead.errors import UnsupportedModelError

FORWARD_IS_REPLACED = "it was compiled, or a hook stands in for the forward pass of one of its modules"
DIFFERS = "a clone of it that shares its weights does not compute what it computes"

_ITS_OWN = frozenset({"_modules", "config", "generate", PACKED_WEIGHT, FINDINGS, LEAST_NODES})
"""Attributes that the modules of a clone do not share. `generate`, where it is attached, refers to the model."""


def can_be_cloned(model: PreTrainedModel) -> bool:
    """Whether all of the model's computation is reached through its module tree.

    Hooks that replace `forward` on one object (accelerate's, user-defined ones) and compiled calls run the modules
    that they were made for, not those of a clone.
    """
    return not any(map(_runs_others, all_modules(model)))


def _runs_others(module: torch.nn.Module) -> bool:
    attributes = vars(module)
    return "forward" in attributes or attributes.get("_compiled_call_impl") is not None


class SharedClone:
    """Another module tree over the parameters and buffers of `model`, which is not touched.

    A module of the clone has the same dictionary objects of parameters and buffers as the model's module, so what is
    assigned, registered or moved there is the clone's as well. Torch's own layers are shared, unless they
    are packed or made invariant, and so are modules with neither parameters nor submodules: those that keep a state
    which their forward pass changes (rotary embeddings whose frequencies follow the length of the text) are among
    them. So there is one state, whichever runs the next pass.

    Args:
        model: Any model that `can_be_cloned`.
        attention: What the clone's layers use where the model's use `sdpa`, registered with transformers; `sdpa` as
            well if not given. Invariant attention takes the place of `eager`, too, and on a CPU its products and
            activations are those of `invariant_kind`. On a GPU there are modules of `fused_kind` beside it.
        packing: See `chosen_packing`.

    Attributes:
        module: The clone itself.
    """

    def __init__(self, model: PreTrainedModel, attention: str | None, packing: int = 0) -> None:
        self._attention = attention
        self._packing = packing
        self._is_fused = attention is not None and model.device.type == "cuda" and find_spec("triton") is not None
        self._configs: dict[int, Any] = {}  # each configuration is copied once, wherever it is referred to
        modules = all_modules(model)
        # By the id of the module that each stands for.
        self._clones = {id(module): self._new_module(module) for module in modules}
        self.module: PreTrainedModel = self._clones[id(model)]
        self.refresh(modules)

    def refresh(self, modules: Sequence[torch.nn.Module]) -> None:
        """Take over what has been set on modules since, and pack the weights anew that have changed.

        Args:
            modules: `all_modules` of the model it was made of, whose `Composition` is unchanged.
        """
        clones = self._clones
        for module in modules:
            clone = clones[id(module)]
            if clone is not module:
                _take_over(module, clone, clones)
        packed = [clone for clone in clones.values() if isinstance(clone, PackedLinear)]
        for layer, is_current in zip(packed, in_threads(PackedLinear.is_current, packed), strict=True):
            if not is_current:
                layer.pack(self._packing)

    def keeps_state(self, model: PreTrainedModel) -> bool:
        """Whether passes of the clone have set attributes of its own modules: a state that the model would not share.

        Args:
            model: The model it was made of, as it was at the last `refresh`.
        """
        return any(_attributes(self._clones[id(module)]) != _attributes(module) for module in all_modules(model))

    def _configure(self, config: Any) -> None:
        used = getattr(config, "_attn_implementation", None)
        replaces_eager = self._is_invariant or self._attention == BY_POSITION
        if self._attention is not None and (used == "sdpa" or (used == "eager" and replaces_eager)):
            config._attn_implementation = self._attention
        if self._is_invariant and getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # the one in which experts are asked one after another
        own: Any = type(config)
        if own.__getattribute__ is PreTrainedConfig.__getattribute__ and "_heterogeneity_spec" not in vars(config):
            config.__class__ = _read_at_once(own)

    @property
    def _is_invariant(self) -> bool:
        """Whether its modules have care of their own; passes of one size need none."""
        return self._attention in (INVARIANT, INVARIANT_ROWS)

    def _new_module(self, module: torch.nn.Module) -> Any:
        """A module in place of `module`, with a configuration of its own; or `module` itself where it is shared."""
        kind = PackedLinear if self._packing and can_pack(module) else module.__class__
        if self._is_invariant:
            kind = invariant_kind(module, kind)
        elif self._is_fused:
            from lookahead.backends.transformers.fused import fused_kind

            kind = fused_kind(module, kind)
        is_torchs = kind.__module__.startswith("torch.nn.")
        if kind is module.__class__ and not module._modules and (is_torchs or not module._parameters):
            return module
        clone = empty_module(kind) if self._is_invariant else kind.__new__(kind)
        if "config" in vars(module):
            vars(clone)["config"] = config = copy.deepcopy(module.config, self._configs)
            self._configure(config)
        return clone


@cache
def _read_at_once(kind: Any) -> Any:
    """The class `kind` of a configuration, whose names are not looked up one by one in `attribute_map`.

    A pass reads some thirty settings, and each look takes 1 to 2 us: 2 % of a pass of 1.5 ms.
    """
    others = {name: property(attrgetter(own)) for name, own in kind.attribute_map.items()}
    return type(kind.__name__, (kind,), {"__getattribute__": object.__getattribute__, **others})


Trial = Callable[[PreTrainedModel, PreTrainedModel, int], str | None]
"""Given a model, a clone of it, and how the weights of that are packed: why the clone is not right; `None` if it is.
What it raises is a reason as well."""


def clone_for(model: PreTrainedModel, attention: str | None, pack_weights: bool, trial: Trial) -> SharedClone | str:
    """The clone that is kept for these settings, after an update; a new one if none fits. If it does not pass its
    trial, which leaves no trace in the model, the reason. Weights are packed by `chosen_packing`."""
    state = state_of(model)
    with state.lock:
        trials = state.trials
        modules = all_modules(model)
        packing = chosen_packing(model, pack_weights, attention in (INVARIANT, INVARIANT_ROWS))
        packable = tuple(map(can_pack, modules)) if packing else ()
        setting = (attention, trial.__name__, *model_setting(model), packable, packing)
        if setting in trials.clones:
            clone: SharedClone | str = trials.clones[setting]
            if isinstance(clone, SharedClone):
                clone.refresh(modules)
            return clone
        if packing:  # packed weights are large: the old ones go before there are new ones
            for other in [other for other in trials.clones if other[-1]]:
                del trials.clones[other]
        clone = _tried(model, attention, packing, trial) if can_be_cloned(model) else FORWARD_IS_REPLACED
        if trials.holds(model):
            trials.clones[setting] = clone
        return clone


def _tried(model: PreTrainedModel, attention: str | None, packing: int, trial: Trial) -> SharedClone | str:
    clone = SharedClone(model, attention, packing)
    try:
        with preserved_state(model), torch.no_grad():
            why = trial(model, clone.module, packing)
    except UnsupportedModelError as error:
        why = str(error)
    except Exception as error:
        why = f"a clone of it that shares its weights fails ({type(error).__name__}: {error})"
    if why is None and clone.keeps_state(model):
        why = DIFFERS
    return clone if why is None else why


def shell_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model in other module objects, which share all else: what code of the model sets on its modules meanwhile,
    such as the positions behind an image, it sets on these alone. Torch's own layers, which set nothing, are shared; so
    are all inner modules of a model of text if the preparation of `generate` is transformers' own."""
    modules = [model]
    if not _prepares_as_transformers(model):
        modules = [m for m in all_modules(model) if m._modules or not type(m).__module__.startswith("torch.nn.")]
    shells: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    for module in modules:
        attributes = vars(shells[id(module)])
        attributes.update(vars(module), _parameters=dict(module._parameters), _buffers=dict(module._buffers))
        attributes["_forward_hooks"] = copy.copy(module._forward_hooks)  # transformers registers some in a pass
        attributes["_modules"] = {name: shells.get(id(child), child) for name, child in module._modules.items()}
    shell: PreTrainedModel = shells[id(model)]
    return shell


def _prepares_as_transformers(model: PreTrainedModel) -> bool:
    """Whether a model reads tokens only, and has no methods of its own that `generate` calls before it decodes."""
    if model.config.get_text_config(decoder=True) is not model.config:
        return False
    kind = type(model)
    names = {name for name, value in vars(GenerationMixin).items() if callable(value)} - _OF_DECODING
    return names.isdisjoint(vars(model)) and all(
        getattr(kind, name) is getattr(GenerationMixin, name) for name in names
    )


def _take_over(module: torch.nn.Module, clone: torch.nn.Module, clones: Mapping[int, torch.nn.Module]) -> None:
    """Set on `clone` what is set on `module`. Another thread may run it meanwhile: it never has the model's own."""
    attributes = vars(clone)
    current = {**vars(module), **{name: attributes[name] for name in _ITS_OWN & attributes.keys()}}
    current.pop("generate", None)
    if children := module._modules:
        current["_modules"] = {name: None if child is None else clones[id(child)] for name, child in children.items()}
    hold_only(attributes, current)


def _attributes(module: torch.nn.Module) -> dict[str, int]:
    """What is set on a module, by identity."""
    return {name: id(value) for name, value in vars(module).items() if name not in _ITS_OWN}


_OF_DECODING = {"prepare_inputs_for_generation", "_reorder_cache"}
"""Methods of transformers' `GenerationMixin` that are called by steps, and not before them."""

_CHUNK = 16
"""Tokens of a chunk; a draft and its pending tokens are one or two of them."""


def chain_engine(model: PreTrainedModel) -> PreTrainedModel:
    """The module that runs short chains of `model`, which itself stays as it is. Made and tried once per model object.

    State-space layers (Mamba 2 and its kin) read several tokens in chunks of some hundred, and without a kernel for
    them, as on a CPU, they fill a chunk up: two tokens take as long as all of them. A clone has shorter chunks.
    Those of Mamba 1 go on from their state over one token alone. In a clone they take tokens one by one, while all
    other layers take them together.
    """
    has_long_chunks = model.device.type == "cpu" and any(map(_has_long_chunks, model.modules()))
    if not (is_forgetful(model) or has_long_chunks) or not can_be_cloned(model):
        return model
    clone = clone_for(model, None, False, _reads_chains)
    return clone.module if isinstance(clone, SharedClone) else model


def _has_long_chunks(module: torch.nn.Module) -> bool:
    size = getattr(module, "chunk_size", None)
    return isinstance(size, int) and size > _CHUNK and hasattr(module, "A_log")


@cache
def _in_short_chunks(kind: Any) -> Any:
    """The class `kind` of a layer, with chunks of at most `_CHUNK` tokens, whatever is set on it."""
    return type(kind.__name__, (kind,), {"chunk_size": property(lambda layer: min(vars(layer)["chunk_size"], _CHUNK))})


@cache
def _one_by_one(kind: Any) -> Any:
    """The class `kind` of a layer, whose passes behind a text take its tokens one by one."""

    class OneByOne(kind):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            given = next((kwargs[name] for name in CACHE_ARGUMENTS if name in kwargs), args[0] if args else None)
            goes_on = given is not None and given.has_previous_state(self.layer_idx)
            parts = torch.split(hidden_states, 1, dim=1) if goes_on else [hidden_states]
            return torch.cat([super(OneByOne, self).forward(part, *args, **kwargs) for part in parts], 1)

    return OneByOne


def _reads_chains(model: PreTrainedModel, clone: PreTrainedModel, packing: int) -> str | None:
    """Whether a clone, made to, reads chains as the model reads single tokens."""
    for part in clone.modules():
        kind: Any = type(part)
        if _has_long_chunks(part):
            part.__class__ = _in_short_chunks(kind)
        elif is_forgetful(model) and kind.__name__.endswith("MambaMixer"):
            part.__class__ = _one_by_one(kind)
    return None if goes_on_rightly(model, clone) else "a clone does not go on as it does"
