"""Checks of what a call of `generate` asks for, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from lookahead.backends.base import Prompts
from lookahead.backends.transformers.cache_names import CACHE, knows_its_length
from lookahead.backends.transformers.chain_cache import is_encoder_decoder
from lookahead.backends.transformers.model_state import forward_arguments
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.values import require, shown, whole_number

_CONSUMED = (
    *("attention_mask", "position_ids", "cache", "past_key_values", "cache_params", "use_cache", "logits_to_keep"),
    "cache_position",
)
"""Model inputs that `generate` prepares and the engine makes for itself."""

_NOT_OF_PROMPTS = (
    *("inputs_embeds", "per_layer_inputs", "encoder_outputs", "encoder_hidden_states", "encoder_attention_mask"),
    *("labels", "output_router_logits", "return_dict"),
)
"""Model inputs that take the place of tokens, are read at each step, or ask for other outputs."""

_OWN_CACHE = "a token tree needs a cache that can take back what was not accepted; leave it unset"

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
"""Settings of ways of decoding that are neither greedy nor sampling, and of outputs that a tree does not give; unless
they are `None`, `False` or one of `_HARMLESS`."""

ON_STEP = "must be a function that takes a StepRecord"
"""What an argument `on_step` has to be."""

_LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")

_FIELDS = {field.name for field in fields(LookaheadConfig)}

_HARMLESS: dict[str, tuple[object, ...]] = {
    "num_beams": (0, 1),
    "penalty_alpha": (0,),
    "cache_implementation": ("dynamic",),
}


def are_whole_numbers(ids: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers, one beside the other."""
    is_dense = ids.layout is torch.strided and not ids.is_nested
    return is_dense and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def check_prompt_ids(input_ids: object) -> None:
    """Refuse prompts that are no token ids, or have none.

    Raises:
        InvalidArgumentError: `input_ids` is no integer tensor `[batch, tokens]`, or has no rows, tokens or values.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise InvalidArgumentError(
            f"input_ids={type(input_ids).__name__} must be a tensor of token ids [batch, tokens]; "
            "tokenizer(text, return_tensors='pt').input_ids makes one"
        )
    if not are_whole_numbers(input_ids) or input_ids.dim() != 2:
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
    """The token ids of one text as a tensor, `[1, tokens]` int64.

    Raises:
        InvalidArgumentError: `input_ids` is neither a list of token ids nor a tensor of them.
    """
    try:
        ids = torch.as_tensor(input_ids)
    except Exception as error:  # an object of the user's own may raise anything
        raise InvalidArgumentError(
            f"input_ids={shown(input_ids)} must be token ids: a list, or a tensor [tokens] or [1, tokens]; "
            "tokenizer(text).input_ids makes one"
        ) from error
    ids = ids[None] if ids.dim() == 1 else ids
    check_prompt_ids(ids)
    return ids.long()


def check_lengths(setting: Callable[[str], Any]) -> None:
    """Refuse lengths that are no whole numbers: a text up to nan tokens never ends.

    Args:
        setting: Gives what is set for a name.

    Raises:
        InvalidArgumentError: One is something else.
    """
    for name in _LENGTHS:
        length = setting(name)
        if length is not None:
            whole_number(name, length, meaning="tokens")


def _check_names(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Refuse fields of the configuration among the arguments, unless the model has such an argument.

    Raises:
        InvalidArgumentError: There is one.
    """
    for name in kwargs.keys() & _FIELDS:
        methods = (model.forward, model.prepare_inputs_for_generation)
        if not any(name in inspect.signature(method).parameters for method in methods):
            raise InvalidArgumentError(
                f"{name}={shown(kwargs[name])} is no argument of generate; pass "
                f"lookahead_config=lookahead.LookaheadConfig({name}={shown(kwargs[name])})"
            )


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor on the device `meta`.

    Raises:
        InvalidArgumentError: It is one.
    """
    if tensor.is_meta:
        raise InvalidArgumentError(
            f"{name} is a tensor on the device 'meta', which holds no values; give one on the model's device"
        )


def effective_setting(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    """What a field of the generation configuration is for a call: an argument goes before the call's configuration,
    and that before the model's."""
    if name in kwargs:
        return kwargs[name]
    given = getattr(kwargs.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given


def check_call(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Refuse what transformers would act upon, or drop, before it hands the call over. Takes such arguments out.

    Raises:
        InvalidArgumentError: `custom_generate` is given, or a tensor without values.
        UnsupportedArgumentError: Another one is asked for; the message names it.
    """
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            check_values(name, value)
    _check_names(model, kwargs)
    check_lengths(lambda name: effective_setting(model, kwargs, name))
    streamer = kwargs.get("streamer")
    puts = streamer is None or all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    require(puts, "streamer", streamer, "takes no tokens; give a streamer of transformers, with put and end")
    if kwargs.pop("custom_generate", None) is not None:
        raise InvalidArgumentError("custom_generate cannot be combined with lookahead.generate; leave it out")
    if kwargs.pop("assistant_model", None) is not None:
        raise UnsupportedArgumentError(
            "assistant_model is another way to draft; leave it out, or use the model's own generate"
        )
    if kwargs.pop("synced_gpus", None):
        raise _synced()
    if kwargs.get("inputs_embeds") is not None:
        raise UnsupportedArgumentError("inputs_embeds is not supported by lookahead decoding; give input_ids")
    if effective_setting(model, kwargs, "token_healing"):
        raise UnsupportedArgumentError(
            "token_healing=True is not supported: transformers keeps the tokenizer to itself; heal the prompt first, "
            "input_ids = model.heal_tokens(input_ids, tokenizer)"
        )
    if effective_setting(model, kwargs, "cache_implementation") == "paged":
        raise _unsupported("cache_implementation", "paged", _OWN_CACHE)


def check_devices(model: PreTrainedModel, synced: bool) -> None:
    """Refuse models whose weights are spread over devices that have to take the same steps.

    Raises:
        UnsupportedArgumentError: They are, or the call says so.
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and torch.distributed.get_world_size() > 1:
        synced |= bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
    if synced:
        raise _synced()


def check_mode(config: GenerationConfig) -> None:
    """Refuse the ways of decoding that are neither greedy nor sampling, and outputs that a tree does not give.

    Raises:
        InvalidArgumentError: A length is none, or the settings of a prompt's chunks cannot work.
        UnsupportedArgumentError: One of them is asked for; the message names the argument.
    """
    check_lengths(partial(getattr, config))
    for name, advice in _OTHER_MODES.items():
        value = getattr(config, name, None)
        if value is None or value is False or value in _HARMLESS.get(name, ()):
            continue
        if name != "penalty_alpha" or not config.do_sample:  # which goes before it
            raise _unsupported(name, value, advice)
    if config.prefill_chunk_size is not None:
        whole_number("prefill_chunk_size", config.prefill_chunk_size, 1, meaning="None for no chunks")
    if config.prefill_chunk_size is not None and not config.use_cache:
        raise InvalidArgumentError("use_cache=False leaves nothing for prefill_chunk_size to fill; drop one of them")


def check_model_inputs(model: PreTrainedModel, model_kwargs: dict[str, Any], use_cache: bool) -> None:
    """Refuse inputs of the model that are no part of a prompt.

    Raises:
        InvalidArgumentError: A cache is given, but is not to be used.
        UnsupportedArgumentError: There is such an input, or a cache beside an encoder; the message names it.
    """
    for name in (CACHE, "cache_params"):
        cache = model_kwargs.get(name)
        if getattr(cache, "_is_user_defined", False) and (name != CACHE or not knows_its_length(cache)):
            raise _unsupported(name, type(cache).__name__, "it does not know how long its text is; give the whole text")
    modalities = model.input_modalities
    reads_text_alone = modalities == "text" or set(modalities) == {"text"}
    for name in inputs_beside_tokens(model, model_kwargs):
        if reads_text_alone or name in _NOT_OF_PROMPTS or is_encoder_decoder(model):
            kind = type(model_kwargs[name]).__name__
            raise _unsupported(name, kind, "steps send the model token ids alone; leave it out")
        if not use_cache:
            raise _unsupported("use_cache", False, f"the model would read {name} anew at each step; leave it unset")
    if not getattr(model_kwargs.get(CACHE), "_is_user_defined", False):
        return
    if is_encoder_decoder(model):  # of which it holds what another source gave
        raise UnsupportedArgumentError(
            f"{CACHE} is not supported for {type(model).__name__}, an encoder-decoder; leave it out"
        )
    if not use_cache:
        raise InvalidArgumentError(
            f"use_cache=False, as given or as the model's generation configuration has it, contradicts {CACHE}; "
            "pass use_cache=True, or leave the cache out"
        )


def check_own_prefill(
    model: PreTrainedModel,
    prompts: Prompts,
    config: LookaheadConfig,
    generation_config: GenerationConfig,
    refused: str | None,
) -> None:
    """Refuse what does not go with a prompt that the model's own prefill reads; `refused` says why it is refused in any
    case, if it is.

    Raises:
        UnsupportedArgumentError: Something else is asked for; the message names it.
    """
    names = ", ".join(inputs_beside_tokens(model, prompts.inputs)) or "positions that follow an image"
    if refused is not None:
        reason = refused
    elif config.invariant:
        reason = "the model's own prefill reads it, whose bits depend on what is sent together; use invariant=False"
    elif generation_config.prefill_chunk_size is not None:
        reason = "it is read in one pass; leave prefill_chunk_size unset"
    elif prompts.cache is not None and not bool(prompts.mask.all()):
        reason = f"it cannot be read behind {CACHE} with hidden tokens; give the whole text without a cache"
    else:
        return
    raise UnsupportedArgumentError(f"a prompt with {names} is not supported here: {reason}")


def inputs_beside_tokens(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> list[str]:
    """Names of what a model is to read of a prompt beside its tokens, such as images."""
    names = [name for name, value in model_kwargs.items() if name not in _CONSUMED and _given(value)]
    return [name for name in names if not _asks_for_nothing(model, name, model_kwargs[name])]


def _given(value: object) -> bool:
    """Whether there is something. To a class that could see images transformers passes what it encoded of them, even
    where there are none."""
    if isinstance(value, Mapping):
        return any(map(_given, value.values()))
    return value is not None


def _asks_for_nothing(model: PreTrainedModel, name: str, value: object) -> bool:
    """Whether an input is what the model takes without it, or an output that is not asked for."""
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
