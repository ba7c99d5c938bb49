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
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from lookahead.backends.base import Prompts, vocabulary_size
from lookahead.backends.session import open_session
from lookahead.backends.transformers import TRANSFORMERS
from lookahead.backends.transformers.cache_names import CACHE, rename_cache
from lookahead.backends.transformers.chain_cache import is_encoder_decoder, source_tokens, take_source
from lookahead.backends.transformers.checks import check_adapters
from lookahead.backends.transformers.own_decoding import given_generate
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from lookahead.serving.refusals import (
    check_call,
    check_devices,
    check_mode,
    check_model_inputs,
    check_prompt_ids,
    effective_setting,
    inputs_beside_tokens,
)


@dataclass(frozen=True)
class Arguments:
    """What a call asks for, once transformers has prepared it.

    Attributes:
        prompts: What the rows begin with.
        processors, criteria: What changes the logits of each token, and what ends the texts.
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


def read_prompts(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> Prompts:
    """The prompts of a call that transformers has prepared, which would hand `model_kwargs` to the model.

    Raises:
        InvalidArgumentError: Prompts, mask and cache do not fit together.
        UnsupportedArgumentError: Positions that do not count the tokens.
    """
    mask = _whole_mask(input_ids, model_kwargs.get("attention_mask"), config)
    positions = model_kwargs.get("position_ids")
    counts = positions is None or _count_tokens(positions, mask)
    follows_image = positions is not None and positions.dim() == 3 and not counts
    own_prefill = bool(inputs_beside_tokens(model, model_kwargs)) or follows_image
    if not counts and not own_prefill:
        raise UnsupportedArgumentError(
            "position_ids that do not count the tokens 0, 1, 2, ... are not supported by lookahead decoding; leave "
            "them out"
        )
    tokens = _prompt_tokens(model, input_ids, mask[:, -input_ids.shape[1] :])
    # transformers marks the cache that the caller passed, and makes an empty one where there is none
    cache: Cache | None = model_kwargs.get(CACHE)
    cache = cache if getattr(cache, "_is_user_defined", False) else None
    _check_chunks(cache, config)
    inputs = model_kwargs if own_prefill else {}
    return Prompts(input_ids, mask, tokens, _tokens_before(cache, mask, input_ids), cache, inputs)


def _check_chunks(cache: Cache | None, config: GenerationConfig) -> None:
    """Refuse to read a prompt in chunks after cached text, which plain decoding reads wrongly before 5.23."""
    if TRANSFORMERS >= (5, 23) or config.prefill_chunk_size is None or cache is None or cache.get_seq_length() == 0:
        return
    raise UnsupportedArgumentError(
        f"prefill_chunk_size={config.prefill_chunk_size} is not supported with {CACHE} that holds tokens: "
        "generate of transformers before 5.23 puts the chunks at the start of the text; leave one of them out"
    )


def _count_tokens(positions: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether position ids `[batch or 1, tokens]` count the tokens of the whole text, `mask` `[batch, tokens]`.

    A model that could see images has `[kinds, batch or 1, tokens]`: time, height and width, which are the same in text.
    """
    usual = mask.long().cumsum(-1) - 1
    return positions.shape[-1] == usual.shape[-1] and bool(
        ((positions.to(usual.device).expand(*positions.shape[:-2], *usual.shape) == usual) | ~mask).all()
    )


def _prompt_tokens(model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The tokens of each row's prompt that the model reads: those the attention mask does not hide.

    Raises:
        InvalidArgumentError: The mask hides the end of a row, or a token id is outside the vocabulary.
    """
    vocabulary = vocabulary_size(model)
    if mask.all():
        rows: list[list[int]] = input_ids.tolist()
        if all(min(row) >= 0 and max(row) < vocabulary for row in rows):
            return rows
    outside = mask & ((input_ids < 0) | (input_ids >= vocabulary))
    if outside.any():
        raise unknown_token(int(input_ids[outside][0]), vocabulary)
    if not mask[:, -1].all():
        row = int((~mask[:, -1]).nonzero()[0])
        raise InvalidArgumentError(
            f"attention_mask hides the last token of row {row} of input_ids; pad on the left, and leave each row at "
            "least one token"
        )
    return [row[mine].tolist() for row, mine in zip(input_ids, mask, strict=True)]


def unknown_token(token: int, vocabulary: int) -> InvalidArgumentError:
    """The error of a prompt with a token that the model does not know."""
    return InvalidArgumentError(
        f"input_ids holds the token id {token}, but the model's vocabulary has {vocabulary} entries; use the tokenizer "
        "that belongs to the model"
    )


def _whole_mask(
    input_ids: torch.Tensor, mask: torch.Tensor | None, generation_config: GenerationConfig
) -> torch.Tensor:
    """Which tokens of the whole text count, `[batch, tokens]` bool: of what is cached and left out of the prompt, too.

    Raises:
        InvalidArgumentError: The mask is shorter than the prompt.
    """
    rows, tokens = input_ids.shape
    if mask is None:
        # transformers drops a mask of ones, and notes how long it was
        tokens = getattr(generation_config, "_mask_length", None) or tokens
        return torch.ones(rows, tokens, dtype=torch.bool, device=input_ids.device)
    if mask.shape[1] < input_ids.shape[1]:
        raise InvalidArgumentError(
            f"attention_mask of shape {tuple(mask.shape)} is shorter than input_ids of shape {tuple(input_ids.shape)}"
        )
    return mask.to(input_ids.device).bool()


def _tokens_before(cache: Cache | None, mask: torch.Tensor, input_ids: torch.Tensor) -> list[int]:
    """How many tokens that count come before each row's prompt: those of the cache, or none if the prompt repeats them.

    As in transformers, an attention mask that is longer than the prompt says that the prompt is new text alone.

    Raises:
        InvalidArgumentError: The cache does not fit the prompt.
        UnsupportedArgumentError: The cache holds another number of tokens than the mask counts.
    """
    held = 0 if cache is None else cache.get_seq_length()
    earlier = mask.shape[1] - input_ids.shape[1]
    if earlier:
        if earlier != held:
            refusal = UnsupportedArgumentError if held else InvalidArgumentError
            raise refusal(
                f"attention_mask counts {earlier} tokens before input_ids, but {CACHE} holds {held}; give a mask as "
                "long as input_ids, or as the cached text and input_ids together"
            )
        return [int(count) for count in mask[:, :earlier].sum(dim=1)]
    if held >= input_ids.shape[1]:
        raise InvalidArgumentError(
            f"{CACHE} holds {held} tokens, but input_ids has {input_ids.shape[1]}: give the whole text with at "
            "least one new token, or new tokens alone with an attention_mask over the whole text"
        )
    return [0] * len(input_ids)


def hand_over(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
    decode: Callable[[Arguments], Any],
    checked: bool = False,
) -> Any:
    """Have transformers check and prepare a call of `generate`, and return what `decode` makes of it.

    Args:
        model: The model, or a wrapper.
        input_ids: The prompts, if they are given by this name.
        kwargs: The other arguments of the call.
        decode: Called inside of transformers' `generate`.
        checked: Whether the model has been checked for what runs it.
    """
    if checked:
        model = language_model(model)[0]
        check_wrapper(model)
    else:
        model = language_model_or_wrapper(model)
    if "inputs" in kwargs:
        if input_ids is not None:
            raise InvalidArgumentError("input_ids and inputs are two names of the same prompt; pass one of them")
        input_ids = kwargs.pop("inputs")
    rename_cache(kwargs)
    check_call(model, kwargs)
    if input_ids is not None and not is_encoder_decoder(model):  # an encoder may read something else
        check_prompt_ids(input_ids)
        input_ids = input_ids.long()  # transformers takes two types of integers alone
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
    check_wrapper(model)
    open_session(inner).check()
    return model


def check_wrapper(model: Any) -> None:
    """Refuse a model, or its wrapper, for what is around the model of transformers.

    Raises:
        UnsupportedModelError: It has an adapter that a tree cannot carry, or another `generate` was put on it.
    """
    check_adapters(model)
    if given_generate(model) is not None:
        raise UnsupportedModelError(
            f"model={type(model).__name__} has been given another `generate` than its class's, which may decode "
            "otherwise. Delete that attribute, or use model.generate"
        )


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
