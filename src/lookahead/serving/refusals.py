"""Checks of the arguments of `generate`, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from lookahead.backends.base import Prompts
from lookahead.backends.transformers.cache_names import CACHE, has_own_code, knows_its_length
from lookahead.backends.transformers.chain_cache import is_encoder_decoder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError, not_of_signal
from lookahead.values import display, require, whole_number

_CONSUMED = (
    *("attention_mask", "position_ids", "cache", "past_key_values", "cache_params", "use_cache", "logits_to_keep"),
    "cache_position",
)
"""Model inputs that `generate` prepares, and steps make themselves."""

_NOT_OF_PROMPTS = (
    *("inputs_embeds", "per_layer_inputs", "encoder_outputs", "encoder_hidden_states", "encoder_attention_mask"),
    *("labels", "output_router_logits", "return_dict"),
)
"""Model inputs that replace tokens, are needed at each step, or request other outputs."""

_OWN_CACHE = "a token tree needs a cache that can drop rejected tokens; leave it unset"

_OTHER_MODES = {
    "num_beams": "beam search keeps several texts; use num_beams=1",
    "penalty_alpha": "contrastive search is another way of decoding; leave it unset",
    "constraints": "constrained search needs beams",
    "force_words_ids": "forced words need beams",
    "dola_layers": "DoLa changes the logits; leave it unset",
    "prompt_lookup_num_tokens": "prompt lookup is another way to draft; leave it unset",
    "assistant_early_exit": "early exit is another way to draft; leave it unset",
    "use_mtp": "multi-token prediction is another way to draft",
    "output_attentions": "a step reads many tokens at once; leave it unset",
    "output_hidden_states": "a step reads many tokens at once; leave it unset",
    "cache_implementation": _OWN_CACHE,
}
"""Settings of unsupported decoding methods and outputs, unless the value is `None`, `False` or in `_HARMLESS`."""

ON_STEP = "must be a function that takes a StepRecord"
"""Requirement for an argument `on_step`, for errors."""

_LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")

_FIELDS = {field.name for field in fields(LookaheadConfig)}

_HARMLESS: dict[str, tuple[object, ...]] = {
    "num_beams": (0, 1),
    "penalty_alpha": (0,),
    "cache_implementation": ("dynamic",),
}


def are_whole_numbers(ids: torch.Tensor) -> bool:
    """Return whether a tensor is dense and has an integer type."""
    is_dense = ids.layout is torch.strided and not ids.is_nested
    return is_dense and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def check_prompt_ids(input_ids: object) -> None:
    """Refuse invalid prompts.

    Raises:
        InvalidArgumentError: `input_ids` is not an integer tensor `[batch, tokens]`, or has no rows, tokens or values.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise InvalidArgumentError(
            f"input_ids={type(input_ids).__name__} must be a tensor of token ids [batch, tokens]; "
            "tokenizer(text, return_tensors='pt').input_ids makes one"
        )
    if input_ids.dim() != 2 or not (are_whole_numbers(input_ids) or input_ids.numel() == 0):
        shape = input_ids.layout if input_ids.is_nested else tuple(input_ids.shape)
        raise InvalidArgumentError(
            f"input_ids of shape {shape} and dtype {input_ids.dtype} must be token ids [batch, tokens]: whole numbers, "
            "not sparse"
        )
    if input_ids.shape[1] == 0:
        raise InvalidArgumentError(
            f"input_ids of shape {tuple(input_ids.shape)} is an empty prompt; give it at least one token, "
            "the model's bos_token_id for example"
        )
    if input_ids.shape[0] == 0:
        raise InvalidArgumentError(f"input_ids of shape {tuple(input_ids.shape)} has no rows; give at least one prompt")
    check_values("input_ids", input_ids)


def read_prompt(input_ids: object) -> torch.Tensor:
    """Convert the token ids of one text to a tensor `[1, tokens]` int64.

    Raises:
        InvalidArgumentError: `input_ids` is neither a list of token ids nor a tensor of them.
    """
    try:
        has_numbers = isinstance(input_ids, list) and bool(input_ids) and type(input_ids[0]) is int
        # numpy reads numbers in a quarter of torch's time, but no tensors of other devices
        if not isinstance(input_ids, torch.Tensor):  # torch's default device may be any
            input_ids = torch.as_tensor(np.array(input_ids) if has_numbers else input_ids, device="cpu")
        ids = input_ids
    except Exception as error:  # user objects may raise any error
        raise InvalidArgumentError(
            f"input_ids={display(input_ids)} must be token ids: a list, or a tensor [tokens] or [1, tokens]; "
            "tokenizer(text).input_ids makes one"
        ) from not_of_signal(error)
    ids = ids[None] if ids.dim() == 1 else ids
    check_prompt_ids(ids)
    return ids.long()


def check_lengths(setting: Callable[[str], Any]) -> None:
    """Refuse lengths that are not whole numbers: a text of up to nan tokens never ends.

    Args:
        setting: Returns the setting of a name.

    Raises:
        InvalidArgumentError: A length is not a whole number.
    """
    for name in _LENGTHS:
        length = setting(name)
        if length is not None:
            whole_number(name, length, meaning="tokens")


def _check_names(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Refuse fields of `LookaheadConfig` among the arguments, unless the model has an argument of this name.

    Raises:
        InvalidArgumentError: There is one.
    """
    for name in kwargs.keys() & _FIELDS:
        methods = (model.forward, model.prepare_inputs_for_generation)
        if not any(name in inspect.signature(method).parameters for method in methods):
            raise InvalidArgumentError(
                f"{name}={display(kwargs[name])} is not an argument of generate; pass "
                f"lookahead_config=lookahead.LookaheadConfig({name}={display(kwargs[name])})"
            )


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor on the device `meta`.

    Raises:
        InvalidArgumentError: It is on this device.
    """
    if tensor.is_meta:
        raise InvalidArgumentError(
            f"{name} is a tensor on the device 'meta', which has no values; give one on the model's device"
        )


def effective_setting(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    """Return a generation setting: from the arguments, else from the configuration of the call, else of the model."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(kwargs.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def check_call(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Check arguments that transformers would use or drop before decoding begins, and remove them from `kwargs`.

    Raises:
        InvalidArgumentError: There is `custom_generate`, or a tensor without values.
        UnsupportedArgumentError: An argument is not supported; the message names it.
    """
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            check_values(name, value)
    _check_names(model, kwargs)
    check_lengths(lambda name: effective_setting(model, kwargs, name))
    streamer = kwargs.get("streamer")
    puts = streamer is None or all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    require(puts, "streamer", streamer, "is not a streamer; give a streamer of transformers, with put and end")
    is_list = isinstance(kwargs.get(CACHE), (list, tuple))
    require(not is_list, CACHE, kwargs.get(CACHE), "is a list, but must be a cache of transformers; leave it out")
    if kwargs.pop("custom_generate", None) is not None:
        raise InvalidArgumentError("custom_generate cannot be combined with lookahead.generate; leave it out")
    if kwargs.pop("assistant_model", None) is not None:
        raise UnsupportedArgumentError(
            "assistant_model is another way to draft; leave it out, or use the model's own generate"
        )
    if kwargs.pop("synced_gpus", None):
        raise _synced()
    if kwargs.get("adapter_names") is not None:  # of PEFT
        raise UnsupportedArgumentError(
            f"adapter_names={kwargs['adapter_names']!r} is not supported by lookahead decoding: rows share a pass; "
            "call model.set_adapter, and generate once for each adapter"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise UnsupportedArgumentError("inputs_embeds is not supported by lookahead decoding; give input_ids")
    if effective_setting(model, kwargs, "token_healing"):
        raise UnsupportedArgumentError(
            "token_healing=True is not supported: transformers does not pass the tokenizer on; heal the prompt first, "
            "input_ids = model.heal_tokens(input_ids, tokenizer)"
        )
    if effective_setting(model, kwargs, "cache_implementation") == "paged":
        raise _unsupported("cache_implementation", "paged", _OWN_CACHE)


def check_devices(model: PreTrainedModel, synced: bool) -> None:
    """Refuse models with weights sharded over devices that must run the same steps.

    Raises:
        UnsupportedArgumentError: The model is sharded, or the call has `synced_gpus`.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and torch.distributed.get_world_size() > 1:
        synced |= bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
    if synced:
        raise _synced()


def check_mode(config: GenerationConfig) -> None:
    """Refuse decoding methods other than greedy decoding and sampling, and unsupported outputs.

    Raises:
        InvalidArgumentError: A length is not a whole number, or the settings of a prompt's chunks are invalid.
        UnsupportedArgumentError: A setting is not supported; the message names it.
    """
    check_lengths(partial(getattr, config))
    for name, advice in _OTHER_MODES.items():
        value = getattr(config, name, None)
        if value is None or value is False or value in _HARMLESS.get(name, ()):
            continue
        if name != "penalty_alpha" or not config.do_sample:  # sampling has precedence
            raise _unsupported(name, value, advice)
    if not config.use_cache and config.use_cache is not False:  # a cache that transformers reads as if it were empty
        raise _unsupported("use_cache", config.use_cache, "texts of transformers differ then; give True or False")
    if config.prefill_chunk_size is not None:
        whole_number("prefill_chunk_size", config.prefill_chunk_size, 1, meaning="None for no chunks")
    if config.prefill_chunk_size is not None and not config.use_cache:
        raise InvalidArgumentError("prefill_chunk_size has no effect with use_cache=False; leave one of them out")


def check_model_inputs(model: PreTrainedModel, model_kwargs: dict[str, Any], use_cache: bool) -> None:
    """Refuse inputs of the model that are not part of a prompt.

    Raises:
        InvalidArgumentError: There is a cache, and `use_cache=False`.
        UnsupportedArgumentError: There is another input, or a cache for an encoder-decoder; the message names it.
    """
    for name in (CACHE, "cache_params"):
        cache = model_kwargs.get(name)
        if getattr(cache, "_is_user_defined", False) and (name != CACHE or not knows_its_length(cache)):
            raise _unsupported(name, type(cache).__name__, "its text has no known length; give the whole text")
    modalities = model.input_modalities
    is_text_model = modalities == "text" or set(modalities) == {"text"}
    for name in inputs_beside_tokens(model, model_kwargs):
        if is_text_model or name in _NOT_OF_PROMPTS or is_encoder_decoder(model):
            kind = type(model_kwargs[name]).__name__
            raise _unsupported(name, kind, "steps send only token ids to the model; leave it out")
        if not use_cache:
            raise _unsupported("use_cache", False, f"each step would process {name} again; leave it unset")
    if not getattr(model_kwargs.get(CACHE), "_is_user_defined", False):
        return
    if is_encoder_decoder(model):  # the cache belongs to another source
        raise UnsupportedArgumentError(
            f"{CACHE} is not supported for {type(model).__name__}, an encoder-decoder; leave it out"
        )
    if not use_cache:
        raise InvalidArgumentError(
            f"use_cache=False, in the call or the model's generation configuration, contradicts {CACHE}; pass "
            "use_cache=True, or leave the cache out"
        )
    cache = model_kwargs[CACHE]
    if has_own_code(cache):
        raise _unsupported(
            CACHE, type(cache).__name__, "it has methods of its own; pass a DynamicCache of transformers"
        )


def check_own_prefill(
    model: PreTrainedModel,
    prompts: Prompts,
    config: LookaheadConfig,
    generation_config: GenerationConfig,
    refused: str | None,
) -> None:
    """Refuse settings that contradict a prefill by the model itself.

    Args:
        model: The model.
        prompts: The prompts.
        config: Configuration of drafts.
        generation_config: Generation configuration.
        refused: Reason to refuse this prefill in any case.

    Raises:
        UnsupportedArgumentError: A setting is not supported; the message names it.
    """
    names = ", ".join(inputs_beside_tokens(model, prompts.inputs)) or "positions that follow an image"
    if refused is not None:
        reason = refused
    elif config.invariant:
        reason = "the bits of the model's own prefill depend on the other tokens of a pass; use invariant=False"
    elif generation_config.prefill_chunk_size is not None:
        reason = "its prefill is one pass; leave prefill_chunk_size unset"
    elif prompts.cache is not None and not bool(prompts.mask.all()):
        reason = f"it cannot follow {CACHE} with hidden tokens; give the whole text without a cache"
    else:
        return
    raise UnsupportedArgumentError(f"a prompt with {names} is not supported here: {reason}")


def inputs_beside_tokens(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> list[str]:
    """Return the names of a prompt's inputs beside tokens, for example images."""
    names = [name for name, value in model_kwargs.items() if name not in _CONSUMED and _is_present(value)]
    return [name for name in names if not _is_default(model, name, model_kwargs[name])]


def _is_present(value: object) -> bool:
    """Return whether an input has a value. transformers passes mappings of `None` for missing images."""
    if isinstance(value, Mapping):
        return any(map(_is_present, value.values()))
    return value is not None


def _is_default(model: PreTrainedModel, name: str, value: object) -> bool:
    """Return whether an input has the model's default, or requests no output."""
    parameter = forward_arguments(model).get(name)
    is_default = parameter is not None and value is parameter.default
    return is_default or (value is False and name.startswith("output_"))


def _unsupported(name: str, value: object, advice: str) -> UnsupportedArgumentError:
    return UnsupportedArgumentError(
        f"{name}={value!r} is not supported by lookahead decoding: {advice}, or use the model's own generate"
    )


def _synced() -> UnsupportedArgumentError:
    return UnsupportedArgumentError(
        "synced_gpus=True is not supported by lookahead decoding: each device would need the same steps; gather the "
        "model on one device"
    )
