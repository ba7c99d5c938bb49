"""Changes of a model: between two calls, during a run of an `Engine`, or before the first call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from transformers import LogitsProcessorList, PreTrainedModel

from compared.settings import Tiring
from lookahead.backends.transformers.miniature import VOCABULARY
from tiny.families import CannotBuild

Undo = Callable[[], object]
Effect = Callable[[Tensor], Tensor]

SHRUNK = 70
"""Size of the shrunk vocabulary."""


def change(model: PreTrainedModel, name: str, seed: int) -> Undo:
    """Apply the change `name` to `model`, at a location chosen by `seed`; return a function that undoes it.

    Raises:
        CannotBuild: The change does not fit the model.
    """
    torch.manual_seed(seed)
    kind, _, what = name.partition(": ")
    try:
        if kind in PLACES:
            return PLACES[kind](model, EFFECTS[what], seed)
        if kind in ("class", "object"):
            return _override(model, what, on_class=kind == "class")
        with torch.no_grad():
            OTHERS[name](model, seed)
    except Exception as error:
        raise CannotBuild(f"the change {name!r} cannot be made: {type(error).__name__}: {error}"[:200]) from error
    return lambda: None


# Effects on values `[rows, tokens, size]`; all but the first depend on the shape of a pass.


def _vector(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(values.shape[-1])
    return 1.5 * torch.randn(values.shape[-1], generator=generator).to(values.dtype)


def _last_place(values: Tensor) -> Tensor:
    return torch.cat([values[..., :-1, :], values[..., -1:, :] + _vector(values)], -2)


EFFECTS: dict[str, Effect] = {
    "everywhere": lambda values: values + _vector(values),
    "last place": _last_place,
    "one token": lambda values: values + _vector(values) if values.shape[-2] == 1 else values,
    "several tokens": lambda values: values + _vector(values) if values.shape[-2] > 1 else values,
    "mean of the places": lambda values: values + values.mean(-2, keepdim=True),
}


def _on_output(output: Any, effect: Effect) -> Any:
    """Return the output of a module with `effect` on its first value."""
    if isinstance(output, Tensor):
        return effect(output)
    if isinstance(output, tuple):
        return (effect(output[0]), *output[1:])
    name = "logits" if "logits" in output else next(iter(output))
    output[name] = effect(output[name])
    return output


def _on_input(args: tuple[Any, ...], kwargs: dict[str, Any], effect: Effect) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (effect(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": effect(kwargs["hidden_states"])}


# Locations for effects.


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    text = model.config.get_text_config(decoder=True)
    lists = [part for part in decoder.modules() if isinstance(part, nn.ModuleList)]
    return next(part for part in lists if len(part) == getattr(text, "num_hidden_layers", len(part)))


def _layer(model: PreTrainedModel, seed: int) -> nn.Module:
    layers = _layers(model)
    return layers[seed % len(layers)]


def _global_hook(model: PreTrainedModel, effect: Effect, seed: int, only_this: bool = False) -> Undo:
    layer = _layer(model, seed)

    def hook(part: nn.Module, args: Any, output: Any) -> Any:
        chosen = part is layer if only_this else type(part) is type(layer)
        return _on_output(output, effect) if chosen else None

    return modules.register_module_forward_hook(hook).remove


def _forward_of(part: nn.Module, effect: Effect) -> Undo:
    forward = part.forward
    part.forward = wraps(forward)(lambda *args, **kwargs: _on_output(forward(*args, **kwargs), effect))
    return partial(delattr, part, "forward")


class Wrapper(nn.Module):
    """A module around a layer, with an effect on its output."""

    def __init__(self, inner: nn.Module, effect: Effect) -> None:
        super().__init__()
        self.inner, self.effect = inner, effect

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _on_output(self.inner(*args, **kwargs), self.effect)


def _wrap(model: PreTrainedModel, effect: Effect, seed: int) -> Undo:
    layers = _layers(model)
    place = seed % len(layers)
    inner = layers[place]
    layers[place] = Wrapper(inner, effect)
    return partial(layers.__setitem__, place, inner)


def _hook(part: nn.Module, effect: Effect) -> Undo:
    return part.register_forward_hook(lambda _, args, output: _on_output(output, effect)).remove


PLACES: dict[str, Callable[[PreTrainedModel, Effect, int], Undo]] = {
    "layer hook": lambda model, effect, seed: _hook(_layer(model, seed), effect),
    "layer pre-hook": lambda model, effect, seed: (
        _layer(model, seed)
        .register_forward_pre_hook(lambda _, args, kwargs: _on_input(args, kwargs, effect), with_kwargs=True)
        .remove
    ),
    "embedding hook": lambda model, effect, seed: _hook(model.get_input_embeddings(), effect),
    "head hook": lambda model, effect, seed: _hook(model.get_output_embeddings(), effect),
    "model hook": lambda model, effect, seed: _hook(model, effect),
    "global hook": _global_hook,
    "global hook of one layer": partial(_global_hook, only_this=True),
    "layer forward": lambda model, effect, seed: _forward_of(_layer(model, seed), effect),
    "model forward": lambda model, effect, seed: _forward_of(model, effect),
    "base forward": lambda model, effect, seed: _forward_of(model.base_model, effect),
    "layer wrapper": _wrap,
}


# Methods of a class or of one object that differ from transformers'.


def _with_processor(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """A `_sample` with an additional processor."""
    processors = kwargs.pop("logits_processor", None)
    return original(*args, logits_processor=LogitsProcessorList([*(processors or []), Tiring()]), **kwargs)


def _second_best(original: Any, model: PreTrainedModel, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A `_sample` that always selects the second likeliest token."""
    ended = False
    while not ended:
        logits = model(ids).logits[:, -1]
        ids = torch.cat([ids, logits.topk(2).indices[:, 1:]], 1)
        ended = bool(kwargs["stopping_criteria"](ids, logits).all())
    return ids


def _twice(original: Callable[..., Any], model: PreTrainedModel, inputs: Any = None, **kwargs: Any) -> Any:
    """A `generate` that makes two calls, the second from the text of the first."""
    inputs = kwargs.pop("input_ids", None) if inputs is None else inputs
    kwargs["max_new_tokens"] = max(1, kwargs["max_new_tokens"] // 2)
    first = original(inputs, **kwargs)
    text = first if isinstance(first, Tensor) else first.sequences
    if kwargs.get("attention_mask") is not None:
        grown = torch.ones(len(text), text.shape[1] - inputs.shape[1], dtype=torch.long)
        kwargs["attention_mask"] = torch.cat([kwargs["attention_mask"], grown], 1)
    return original(text, **kwargs)


def _prepared(
    original: Callable[..., Any], model: PreTrainedModel, ids: Tensor, *args: Any, scale: int = 1, **kwargs: Any
) -> Any:
    """A `prepare_inputs_for_generation` with positions times `scale`, plus one if the pass has one token."""
    inputs = original(ids, *args, **kwargs)
    if inputs.get("position_ids") is not None:
        places = inputs["position_ids"]
        inputs["position_ids"] = places * scale + (scale == 1 and places.shape[-1] == 1)
    return inputs


def _hidden_steps(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """An `_update_model_kwargs_for_generation` that hides every third token."""
    values = original(*args, **kwargs)
    mask = values.get("attention_mask")
    if mask is not None and mask.shape[1] % 3 == 0:
        mask[:, -1] = 0
    return values


def _further_positions(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    values = original(*args, **kwargs)
    if values.get("position_ids") is not None:
        values["position_ids"] = values["position_ids"] + 3
    return values


def _processors(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    return LogitsProcessorList([*original(*args, **kwargs), Tiring()])


def _forward(original: Callable[..., Any], model: PreTrainedModel, *args: Any, effect: Effect, **kwargs: Any) -> Any:
    return _on_output(original(*args, **kwargs), effect)


def _other_with_cache(original: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get("past_key_values", kwargs.get("cache"))
    begins = cache is None or cache.get_seq_length() == 0
    output = original(*args, **kwargs)
    return output if begins else _on_output(output, lambda logits: logits.flip(-1))


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "loop with a processor": ("_sample", _with_processor),
    "loop of second best tokens": ("_sample", _second_best),
    "generate with a processor": ("generate", _with_processor),
    "generate twice": ("generate", _twice),
    "doubled positions": ("prepare_inputs_for_generation", partial(_prepared, scale=2)),
    "other positions for one token": ("prepare_inputs_for_generation", _prepared),
    "hidden steps": ("_update_model_kwargs_for_generation", _hidden_steps),
    "further positions": ("_update_model_kwargs_for_generation", _further_positions),
    "processors of its own": ("_get_logits_processor", _processors),
    "other logits behind a cache": ("forward", _other_with_cache),
    **{f"forward, {name}": ("forward", partial(_forward, effect=effect)) for name, effect in EFFECTS.items()},
}


def _double(model: PreTrainedModel, seed: int) -> None:
    """Convert to float64, except with eager attention: its float32 mask would make padding NaN."""
    if model.config._attn_implementation == "eager":
        raise ValueError("eager attention gives no numbers in float64 behind padding")
    model.to(torch.float64)


def _override(model: PreTrainedModel, what: str, on_class: bool) -> Undo:
    """Give `model` a method from `METHODS`, in a new class or as an attribute of the object."""
    name, method = METHODS[what]
    kind = type(model)
    if not on_class:
        before = getattr(model, name)
        bound = wraps(before)(lambda self, *args, **kwargs: method(before, self, *args, **kwargs))
        setattr(model, name, MethodType(bound, model))
        return partial(delattr, model, name)
    inherited = getattr(kind, name)

    @wraps(inherited)
    def own(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return method(partial(inherited, self), self, *args, **kwargs)

    model.__class__ = type(f"Own{kind.__name__}", (kind,), {name: own})
    return partial(setattr, model, "__class__", kind)


# Other changes.


def _train(model: PreTrainedModel, seed: int) -> None:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.3
        for name in ("attention_dropout", "dropout", "hidden_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.3)
    model.train()


def _checkpointing(model: PreTrainedModel, seed: int) -> None:
    model.gradient_checkpointing_enable()
    model.train()


def _weight(model: PreTrainedModel, seed: int) -> Tensor:
    weights = [weight for weight in _layer(model, seed).parameters() if weight.dim() > 1]
    return weights[seed % len(weights)]


def _write_row(model: PreTrainedModel, seed: int) -> None:
    weight = _weight(model, seed)
    weight.data[seed % len(weight)] += 2.0


def _other_layer(model: PreTrainedModel, seed: int) -> None:
    layers = _layers(model)
    layer = copy.deepcopy(layers[seed % len(layers)])
    for weight in layer.parameters():
        weight.add_(0.3 * torch.randn_like(weight))
    layers[seed % len(layers)] = layer


def _exchange_layers(model: PreTrainedModel, seed: int) -> None:
    layers = _layers(model)
    layers[0], layers[1] = layers[1], layers[0]


def _module_value(model: PreTrainedModel, seed: int) -> None:
    part = next(part for part in _layer(model, seed).modules() if isinstance(getattr(part, "scaling", None), float))
    part.scaling *= 1.7


def _activation(model: PreTrainedModel, seed: int) -> None:
    parts = [part for part in _layer(model, seed).modules() if hasattr(part, "act_fn")]
    parts[0].act_fn = nn.Tanh()


def _buffer(model: PreTrainedModel, seed: int) -> None:
    rotary = next(part for part in model.modules() if hasattr(part, "inv_freq"))
    rotary.inv_freq.mul_(0.5)


def _set(owner: str, **values: Any) -> Callable[[PreTrainedModel, int], None]:
    """Return a change that sets values of a configuration, existing or new."""

    def make(model: PreTrainedModel, seed: int) -> None:
        config = getattr(model, owner)
        config = config.get_text_config(decoder=True) if owner == "config" else config
        for name, value in values.items():
            setattr(config, name, value)

    return make


def _rope(model: PreTrainedModel, seed: int) -> None:
    config = model.config.get_text_config(decoder=True)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 4.0}
    config.max_position_embeddings = 16


def _attention(model: PreTrainedModel, seed: int) -> None:
    now = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation("eager" if now == "sdpa" else "sdpa")


def _compile(model: PreTrainedModel, seed: int) -> None:
    torch._dynamo.reset()  # forget earlier compilations
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)


OTHERS: dict[str, Callable[[PreTrainedModel, int], Any]] = {
    "dropout in training": _train,
    "gradient checkpointing in training": _checkpointing,
    "weight written": lambda model, seed: _weight(model, seed).mul_(1.7),
    "weight written through data": lambda model, seed: _weight(model, seed).data.mul_(1.7),
    "row of a weight written through data": _write_row,
    "parameters replaced": lambda model, seed: model.load_state_dict(
        {name: 1.1 * value if value.dim() > 1 else value for name, value in model.state_dict().items()}, assign=True
    ),
    "layer replaced": _other_layer,
    "layers exchanged": _exchange_layers,
    "value of a module": _module_value,
    "activation replaced": _activation,
    "frequencies written": _buffer,
    "window in the configuration": _set("config", sliding_window=3, attention_chunk_size=3),
    "scales in the configuration": _set("config", final_logit_softcapping=12.0, logit_scale=0.3, logits_scaling=0.3),
    "cache in the configuration": _set("config", use_cache=False),
    "rope in the configuration": _rope,
    "attention implementation": _attention,
    "number type": _double,
    "forward compiled": _compile,
    "penalty in the generation configuration": _set("generation_config", repetition_penalty=1.4),
    "sampling in the generation configuration": _set("generation_config", do_sample=True, temperature=0.7),
    "end in the generation configuration": _set("generation_config", eos_token_id=[5, 6, 7, 8, 9, 10, 11]),
    "embeddings shrunk": lambda model, seed: model.resize_token_embeddings(SHRUNK),
    "embeddings grown": lambda model, seed: model.resize_token_embeddings(VOCABULARY + 9),
}
