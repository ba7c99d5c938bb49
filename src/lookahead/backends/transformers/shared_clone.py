"""Clones of a model with shared weights: other module objects, which the engine may modify."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers.attention import BY_POSITION, INVARIANT, INVARIANT_ROWS, MIN_NODES
from lookahead.backends.transformers.cache_names import CACHE_ARGUMENTS
from lookahead.backends.transformers.chain_cache import is_forgetful
from lookahead.backends.transformers.comparisons import continues_correctly
from lookahead.backends.transformers.composition import all_modules
from lookahead.backends.transformers.invariant import FINDINGS, empty_module, invariant_kind
from lookahead.backends.transformers.model_state import chosen_packing, model_setting, state_of
from lookahead.backends.transformers.packed_linear import PACKED_WEIGHT, PackedLinear, can_pack
from lookahead.backends.transformers.snapshots import in_threads, preserved_state, replace_items
from lookahead.errors import UnsupportedModelError, not_of_signal

FORWARD_IS_REPLACED = "it was compiled, or the forward pass of one of its modules was replaced"
DIFFERS = "a clone of it that shares its weights has other logits"

_ITS_OWN = frozenset({"_modules", "config", "generate", PACKED_WEIGHT, FINDINGS, MIN_NODES})
"""Attributes that the modules of a clone do not share. An attached `generate` refers to the model."""


def can_be_cloned(model: PreTrainedModel) -> bool:
    """Return whether a clone would run its own modules.

    Replaced `forward` attributes (by accelerate's or user-defined hooks) and compiled calls run the original modules.
    """
    return not any(map(_runs_original, all_modules(model)))


def _runs_original(module: torch.nn.Module) -> bool:
    attributes = vars(module)
    return "forward" in attributes or attributes.get("_compiled_call_impl") is not None


class SharedClone:
    """Another module tree over the parameters and buffers of `model`, which stays unchanged.

    Modules of the clone share the dictionaries of parameters and buffers with the model's, so later assignments and
    moves affect both. Torch's own layers are shared, unless they are packed or invariant. Modules without parameters
    and submodules are shared too: some have a state, for example rotary embeddings with frequencies by text length.

    Args:
        model: Any model that `can_be_cloned`.
        attention: Attention registered with transformers, in place of `sdpa`; `sdpa` if not given. Invariant attention
            replaces `eager` too, with modules of `invariant_kind` on a CPU. On a GPU modules of `fused_kind` are added.
        packing: See `chosen_packing`.
        joins: Whether modules of `joined_kind` are added too. No module may have hooks, which would see late sums.

    Attributes:
        module: The clone.
        joins: The argument, if it applies.
    """

    def __init__(self, model: PreTrainedModel, attention: str | None, packing: int = 0, joins: bool = True) -> None:
        self._attention = attention
        self._packing = packing
        self._is_fused = attention is not None and model.device.type == "cuda" and find_spec("triton") is not None
        self._configs: dict[int, Any] = {}  # copies, shared by several references to one configuration
        modules = all_modules(model)
        hooks = [module for module in modules if module._forward_hooks or module._forward_pre_hooks]
        self.joins = joins and self._is_fused and not hooks
        # By the id of the original module.
        self._clones = {id(module): self._new_module(module) for module in modules}
        self.module: PreTrainedModel = self._clones[id(model)]
        self.refresh(modules)

    def refresh(self, modules: Sequence[torch.nn.Module]) -> None:
        """Copy new attributes of the modules, and pack changed weights again.

        Args:
            modules: `all_modules` of the original model, with an unchanged `Composition`.
        """
        clones = self._clones
        for module in modules:
            clone = clones[id(module)]
            if clone is not module:
                _copy_attributes(module, clone, clones)
        packed = [clone for clone in clones.values() if isinstance(clone, PackedLinear)]
        for layer, is_current in zip(packed, in_threads(PackedLinear.is_current, packed), strict=True):
            if not is_current:
                layer.pack(self._packing)

    def keeps_state(self, model: PreTrainedModel) -> bool:
        """Return whether passes have set attributes on the clone's own modules: a state that the model does not share.

        Args:
            model: The original model, unchanged since the last `refresh`.
        """
        return any(_attributes(self._clones[id(module)]) != _attributes(module) for module in all_modules(model))

    def _configure(self, config: Any) -> None:
        used = getattr(config, "_attn_implementation", None)
        replaces_eager = self._is_invariant or self._attention == BY_POSITION
        if self._attention is not None and (used == "sdpa" or (used == "eager" and replaces_eager)):
            config._attn_implementation = self._attention
        if self._is_invariant and getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # runs experts one after another
        own: Any = type(config)
        if own.__getattribute__ is PreTrainedConfig.__getattribute__ and "_heterogeneity_spec" not in vars(config):
            config.__class__ = _read_at_once(own)

    @property
    def _is_invariant(self) -> bool:
        """Whether modules are replaced by invariant ones; passes of one size need none."""
        return self._attention in (INVARIANT, INVARIANT_ROWS)

    def _new_module(self, module: torch.nn.Module) -> Any:
        """Return a module in place of `module`, with its own configuration; or `module` if it is shared."""
        kind = PackedLinear if self._packing and can_pack(module) else module.__class__
        if self._is_invariant:
            kind = invariant_kind(module, kind)
        elif self._is_fused:
            from lookahead.backends.transformers.fused import fused_kind, joined_kind

            kind = fused_kind(module, kind)
            if self.joins:
                kind = joined_kind(module, kind)
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
    """Return a subclass of a configuration class `kind` without lookups in `attribute_map`.

    A pass reads some thirty settings, and each lookup takes 1 to 2 us: 2 % of a pass of 1.5 ms.
    """
    others = {name: property(attrgetter(own)) for name, own in kind.attribute_map.items()}
    return type(kind.__name__, (kind,), {"__getattribute__": object.__getattribute__, **others})


Trial = Callable[[PreTrainedModel, PreTrainedModel, int], str | None]
"""Trial of a model's clone with its packing: returns or raises the reason of a failure; `None` if it passes."""


def clone_for(model: PreTrainedModel, attention: str | None, pack_weights: bool, trial: Trial) -> SharedClone | str:
    """Return the refreshed clone for these settings, or a new one after its trial; the reason if the trial failed."""
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
        if packing:  # free old packed weights, which are large, first
            for other in [other for other in trials.clones if other[-1]]:
                del trials.clones[other]
        clone = _tried(model, attention, packing, trial) if can_be_cloned(model) else FORWARD_IS_REPLACED
        if trials.holds(model):
            trials.clones[setting] = clone
        return clone


def _tried(model: PreTrainedModel, attention: str | None, packing: int, trial: Trial) -> SharedClone | str:
    clone = SharedClone(model, attention, packing)
    why = _failure(model, clone, packing, trial)
    if why is not None and clone.joins:
        clone = SharedClone(model, attention, packing, joins=False)
        why = _failure(model, clone, packing, trial)
    return clone if why is None else why


def _failure(model: PreTrainedModel, clone: SharedClone, packing: int, trial: Trial) -> str | None:
    try:
        with preserved_state(model), torch.no_grad():
            why = trial(model, clone.module, packing)
    except UnsupportedModelError as error:
        why = str(error)
    except Exception as error:
        not_of_signal(error)
        why = f"a clone of it that shares its weights fails ({type(error).__name__}: {error})"
    return DIFFERS if why is None and clone.keeps_state(model) else why


def shell_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model in other module objects that share everything else, to isolate attributes that a pass sets.

    An example is the positions after an image. Torch's own layers set nothing, and are shared. So are all inner modules
    of a text model with transformers' own preparation of `generate`, for which transformers then makes no cache.
    """
    modules = [model]
    prepares_alike = _prepares_as_transformers(model)
    if not prepares_alike:
        modules = [m for m in all_modules(model) if m._modules or not type(m).__module__.startswith("torch.nn.")]
    shells: dict[int, Any] = {id(module): object.__new__(type(module)) for module in modules}
    for module in modules:
        attributes = vars(shells[id(module)])
        attributes.update(vars(module), _parameters=dict(module._parameters), _buffers=dict(module._buffers))
        attributes["_forward_hooks"] = copy.copy(module._forward_hooks)  # transformers registers some in a pass
        attributes["_modules"] = {name: shells.get(id(child), child) for name, child in module._modules.items()}
    shell: PreTrainedModel = shells[id(model)]
    if prepares_alike:  # saves a quarter of the preparation, as a cache has an object for each layer
        vars(shell)["_supports_default_dynamic_cache"] = lambda: False
    return shell


def _prepares_as_transformers(model: PreTrainedModel) -> bool:
    """Return whether a model reads only tokens, and has transformers' own methods to prepare `generate`."""
    if model.config.get_text_config(decoder=True) is not model.config:
        return False
    kind = type(model)
    names = {name for name, value in vars(GenerationMixin).items() if callable(value)} - _OF_DECODING
    return names.isdisjoint(vars(model)) and all(
        getattr(kind, name) is getattr(GenerationMixin, name) for name in names
    )


def _copy_attributes(module: torch.nn.Module, clone: torch.nn.Module, clones: Mapping[int, torch.nn.Module]) -> None:
    """Copy the attributes of `module` to `clone`; a concurrent pass never reads the model's values of `_ITS_OWN`."""
    attributes = vars(clone)
    current = {**vars(module), **{name: attributes[name] for name in _ITS_OWN & attributes.keys()}}
    current.pop("generate", None)
    if children := module._modules:
        current["_modules"] = {name: None if child is None else clones[id(child)] for name, child in children.items()}
    replace_items(attributes, current)


def _attributes(module: torch.nn.Module) -> dict[str, int]:
    """Return the attributes of a module, by identity."""
    return {name: id(value) for name, value in vars(module).items() if name not in _ITS_OWN}


_OF_DECODING = {"prepare_inputs_for_generation", "_reorder_cache"}
"""Methods of transformers' `GenerationMixin` that are called by steps, and not before them."""

_CHUNK = 16
"""Tokens of a chunk in a clone; a draft with pending tokens has one or two chunks."""


def chain_engine(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module that runs short chains of `model`: made and tried once per model object.

    State-space layers of Mamba 2 process chunks of some hundred tokens. Without a kernel, as on a CPU, they pad a
    chunk, so that two tokens take as long as all. A clone has shorter chunks. Mamba 1 continues from its state only for
    one token. In a clone its layers process tokens one by one, and all other layers process them together.
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
    """Return a subclass of a layer class `kind` with chunks of at most `_CHUNK` tokens."""
    return type(kind.__name__, (kind,), {"chunk_size": property(lambda layer: min(vars(layer)["chunk_size"], _CHUNK))})


@cache
def _one_by_one(kind: Any) -> Any:
    """Return a subclass of a layer class `kind` that processes tokens after a cached text one by one."""

    class OneByOne(kind):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = next((kwargs[name] for name in CACHE_ARGUMENTS if name in kwargs), args[0] if args else None)
            continues = cache is not None and cache.has_previous_state(self.layer_idx)
            parts = torch.split(hidden_states, 1, dim=1) if continues else [hidden_states]
            return torch.cat([super(OneByOne, self).forward(part, *args, **kwargs) for part in parts], 1)

    return OneByOne


def _reads_chains(model: PreTrainedModel, clone: PreTrainedModel, packing: int) -> str | None:
    """Modify a clone for chains, and return why it differs from the model; `None` if it does not."""
    for part in clone.modules():
        kind: Any = type(part)
        if _has_long_chunks(part):
            part.__class__ = _in_short_chunks(kind)
        elif is_forgetful(model) and kind.__name__.endswith("MambaMixer"):
            part.__class__ = _one_by_one(kind)
    return None if continues_correctly(model, clone) else "a clone does not continue as it does"
