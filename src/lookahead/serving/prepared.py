"""The arguments of a call of `generate`, as transformers checks and prepares them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from lookahead.backends.base import Prompts
from lookahead.backends.session import open_session
from lookahead.backends.transformers.chain_cache import is_encoder_decoder, source_tokens, take_source
from lookahead.backends.transformers.checks.models import check_adapters
from lookahead.errors import InvalidArgumentError
from lookahead.serving.arguments import (
    check_call,
    check_devices,
    check_mode,
    check_model_inputs,
    check_prompt_ids,
    effective_setting,
)
from lookahead.serving.prompts import read_prompts


@dataclass(frozen=True)
class Arguments:
    """What a call asks for, once transformers has prepared it.

    Attributes:
        model: The model.
        prompts: What the rows begin with.
        config: The configuration of the call.
        processors: Change the logits of each token.
        criteria: End the texts.
        streamer: Gets the tokens, if there is one.
    """

    model: PreTrainedModel
    prompts: Prompts
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None = None

    @property
    def temperature(self) -> float:
        """Of sampling; 0 for the likeliest tokens."""
        return float(self.config.temperature or 1.0) if self.config.do_sample else 0.0

    @property
    def longest(self) -> int:
        """Tokens that a text may come to, padding included."""
        return int(self.config.max_length)


def read_arguments(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    streamer: BaseStreamer | None = None,
    source_ids: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> Arguments:
    """What transformers hands to any of its decoding methods.

    Args:
        source_ids: What the encoder read, if the model has one.

    Raises:
        InvalidArgumentError: Something cannot work.
        UnsupportedArgumentError: Something else is asked for than decoding does here; the message names it.
    """
    check_devices(model, model_kwargs.pop("synced_gpus", False))
    check_mode(generation_config)
    check_prompt_ids(input_ids)
    source = take_source(model_kwargs) if is_encoder_decoder(model) else {}
    check_model_inputs(model, model_kwargs, generation_config.use_cache)
    prompts = read_prompts(model, input_ids, model_kwargs, generation_config)
    if source:
        read = source_tokens(model, source, source_ids, prompts.rows)
        prompts = replace(prompts, source=source, source_tokens=read)
    return Arguments(model, prompts, generation_config, logits_processor, stopping_criteria, streamer)


def hand_over(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
    decode: Callable[[Arguments], Any],
    checked: bool = False,
) -> Any:
    """Have transformers check and prepare a call of `generate`.

    Args:
        model: The model, or a wrapper.
        input_ids: The prompts, if they are given by this name.
        kwargs: The other arguments of the call.
        decode: Called, inside of transformers' `generate`, with what that made of the arguments.
        checked: Whether the model has been checked for what runs it.

    Returns:
        What `decode` returns.
    """
    model = language_model(model)[0] if checked else language_model_or_wrapper(model)
    if "inputs" in kwargs:
        if input_ids is not None:
            raise InvalidArgumentError("input_ids and inputs are two names of the same prompt; pass one of them")
        input_ids = kwargs.pop("inputs")
    check_call(model, kwargs)
    if input_ids is not None and not is_encoder_decoder(model):  # an encoder may read something else
        check_prompt_ids(input_ids)
    source_ids = input_ids if input_ids is not None else kwargs.get("input_ids")
    # transformers drops these before it calls a custom generate function, so they are passed around it
    streamer = kwargs.pop("streamer", None)
    _take_stop_strings(model, kwargs)

    # Transformers passes the arguments that this signature names; so none of them can be mistyped by a user.
    def decode_here(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
        return decode(read_arguments(model, input_ids, streamer=streamer, source_ids=source_ids, **prepared))

    prompt = () if input_ids is None else (input_ids,)  # which some models call otherwise
    return type(model).generate(model, *prompt, custom_generate=decode_here, **kwargs)


def language_model_or_wrapper(model: Any) -> Any:
    """What to call `generate` of: `model`, after checking the transformers model in it.

    Raises:
        InvalidArgumentError: There is no transformers model in it.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    model, inner = language_model(model)
    check_adapters(model)
    open_session(inner).check()
    return model


def language_model(model: Any) -> tuple[Any, PreTrainedModel]:
    """What to call `generate` of, and the transformers model in it.

    Raises:
        InvalidArgumentError: There is none.
    """
    model = getattr(model, "_orig_mod", model)  # transformers, too, generates with the model that was compiled
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel) or not hasattr(inner, "generate"):
        raise InvalidArgumentError(
            f"model={type(model).__name__} is no transformers language model; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    return model, inner


def _take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Turn stop strings and their tokenizer into a criterion, as transformers would if it had the tokenizer here."""
    tokenizer = kwargs.pop("tokenizer", None)
    given: GenerationConfig | None = kwargs.get("generation_config")
    stop_strings = effective_setting(model, kwargs, "stop_strings")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise InvalidArgumentError(f"stop_strings={stop_strings!r} needs the model's tokenizer: pass tokenizer=...")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    # As in transformers, one that the caller passed goes before one made of settings.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    kwargs["stopping_criteria"] = criteria
    kwargs.pop("stop_strings", None)
    if given is not None and given.stop_strings is not None:
        kwargs["generation_config"] = copy.deepcopy(given)
        kwargs["generation_config"].stop_strings = None
    if model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None  # the model's own would be filled in again
