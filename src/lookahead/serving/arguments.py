"""The arguments of a call of `generate`, as transformers checks and prepares them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
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
from lookahead.backends.transformers.composition import own_generate
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError, not_of_signal
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
    """Arguments of a call, prepared by transformers.

    Attributes:
        model: The model.
        prompts: Prompts of the rows.
        config: Generation configuration.
        processors: Logits processors.
        criteria: Stopping criteria.
        streamer: The caller's streamer, if any.
    """

    model: PreTrainedModel
    prompts: Prompts
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None = None

    @property
    def temperature(self) -> float:
        """Temperature of sampling; 0 for greedy decoding."""
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
    """Check and collect the arguments that transformers passes to its decoding methods.

    Args:
        source_ids: Input of the encoder, if the model has one.

    Raises:
        InvalidArgumentError: An argument is invalid.
        UnsupportedArgumentError: An argument is not supported; the message names it.
    """
    check_devices(model, model_kwargs.pop("synced_gpus", False))
    check_mode(generation_config)
    check_prompt_ids(input_ids)
    source = take_source(model_kwargs) if is_encoder_decoder(model) else {}
    check_model_inputs(model, model_kwargs, generation_config.use_cache)
    prompts = read_prompts(model, input_ids, model_kwargs, generation_config)
    if source:
        tokens = source_tokens(model, source, source_ids, prompts.rows)
        prompts = replace(prompts, source=source, source_tokens=tokens)
    return Arguments(model, prompts, generation_config, logits_processor, stopping_criteria, streamer)


def read_prompts(
    model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> Prompts:
    """Check and collect the prompts of a call.

    Args:
        model: The model.
        input_ids: Token ids `[rows, tokens]`.
        model_kwargs: Inputs that transformers would pass to the model.
        config: Generation configuration.

    Raises:
        InvalidArgumentError: Prompts, mask and cache contradict each other.
        UnsupportedArgumentError: `position_ids` do not count the tokens.
    """
    mask = _whole_mask(input_ids, model_kwargs.get("attention_mask"), config)
    positions: Any = model_kwargs.get("position_ids")
    fits = positions is not None and _fits_rows(model, positions, len(input_ids))
    counts = positions is None or (fits and _count_tokens(positions, mask))
    follows_image = fits and positions.dim() == 3 and not counts
    own_prefill = bool(inputs_beside_tokens(model, model_kwargs)) or follows_image
    if not counts and not own_prefill:
        raise UnsupportedArgumentError(
            f"position_ids of shape {tuple(positions.shape)} do not count the tokens of each row 0, 1, 2, ..., which "
            "lookahead decoding needs; leave them out"
        )
    tokens = _prompt_tokens(model, input_ids, mask[:, -input_ids.shape[1] :])
    # transformers marks the caller's cache, and makes an empty one otherwise
    cache: Cache | None = model_kwargs.get(CACHE)
    cache = cache if getattr(cache, "_is_user_defined", False) else None
    _check_chunks(cache, config)
    inputs = model_kwargs if own_prefill else {}
    return Prompts(input_ids, mask, tokens, _tokens_before(cache, mask, input_ids), cache, inputs)


def _check_chunks(cache: Cache | None, config: GenerationConfig) -> None:
    """Refuse chunks of a prompt after cached text: before version 5.23 transformers decodes them wrongly."""
    if TRANSFORMERS >= (5, 23) or config.prefill_chunk_size is None or cache is None or cache.get_seq_length() == 0:
        return
    raise UnsupportedArgumentError(
        f"prefill_chunk_size={config.prefill_chunk_size} is not supported with a non-empty {CACHE}: generate of "
        "transformers before 5.23 puts the chunks at the start of the text; leave one of them out"
    )


def _fits_rows(model: PreTrainedModel, positions: torch.Tensor, rows: int) -> bool:
    """Return whether position ids have a shape that `_count_tokens` describes; one kind only if `model` makes it."""
    makers = {getattr(kind, "_prepare_position_ids_for_generation", None) for kind in (type(model), GenerationMixin)}
    is_usual = positions.dim() == 2 or (positions.dim() == 3 and (len(positions) > 1 or len(makers) > 1))
    return is_usual and positions.shape[-2] in (1, rows)


def _count_tokens(positions: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return whether position ids `[batch or 1, tokens]` count the tokens of the whole text, `mask` `[batch, tokens]`.

    Models for images have `[kinds, batch or 1, tokens]`: time, height and width, which are equal in text.
    """
    usual = mask.long().cumsum(-1) - 1
    return positions.shape[-1] == usual.shape[-1] and bool(
        ((positions.to(usual.device).expand(*positions.shape[:-2], *usual.shape) == usual) | ~mask).all()
    )


def _prompt_tokens(model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Return the tokens of each row's prompt without hidden tokens.

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
            "least one token. Without an attention_mask, transformers hides tokens that equal pad_token_id"
        )
    return [row[visible].tolist() for row, visible in zip(input_ids, mask, strict=True)]


def unknown_token(token: int, vocabulary: int) -> InvalidArgumentError:
    """Return the error for a prompt with a token id outside the vocabulary."""
    return InvalidArgumentError(
        f"input_ids has the token id {token}, but the model's vocabulary has {vocabulary} entries; use the tokenizer "
        "that belongs to the model"
    )


def _whole_mask(
    input_ids: torch.Tensor, mask: torch.Tensor | None, generation_config: GenerationConfig
) -> torch.Tensor:
    """Return the mask of the whole text, cached tokens included, `[batch, tokens]` bool.

    Raises:
        InvalidArgumentError: The mask has another shape than the prompt, and is not longer.
        UnsupportedArgumentError: It has other values than 0 and 1.
    """
    rows, tokens = input_ids.shape
    if mask is None:
        # transformers drops a mask of ones, and keeps its length
        tokens = getattr(generation_config, "_mask_length", None) or tokens
        return torch.ones(rows, tokens, dtype=torch.bool, device=input_ids.device)
    if mask.dim() != 2 or len(mask) != rows or mask.shape[1] < tokens:
        raise InvalidArgumentError(
            f"attention_mask of shape {tuple(mask.shape)} does not fit input_ids of shape {tuple(input_ids.shape)}; "
            "give one of the same shape, longer only by cached text"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise UnsupportedArgumentError("attention_mask has values beside 0 and 1, which shift positions; use 0 and 1")
    return mask.to(input_ids.device).bool()


def _tokens_before(cache: Cache | None, mask: torch.Tensor, input_ids: torch.Tensor) -> list[int]:
    """Return the number of visible tokens before each row's prompt: the cached ones, or 0 if the prompt repeats them.

    As in transformers, an attention mask longer than the prompt means that the prompt has only new text.

    Raises:
        InvalidArgumentError: Cache and prompt contradict each other.
        UnsupportedArgumentError: Cache and mask have different numbers of tokens.
    """
    cached = 0 if cache is None else cache.get_seq_length()
    earlier = mask.shape[1] - input_ids.shape[1]
    if earlier:
        if earlier != cached:
            refusal = UnsupportedArgumentError if cached else InvalidArgumentError
            raise refusal(
                f"attention_mask counts {earlier} tokens before input_ids, but {CACHE} has {cached}; give a mask as "
                "long as input_ids, or as the cached text and input_ids together"
            )
        return [int(count) for count in mask[:, :earlier].sum(dim=1)]
    if cached >= input_ids.shape[1]:
        raise InvalidArgumentError(
            f"{CACHE} has {cached} tokens, but input_ids has {input_ids.shape[1]}: give the whole text with at least "
            "one new token, or only new tokens with an attention_mask over the whole text"
        )
    return [0] * len(input_ids)


def prepare_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
    decode: Callable[[Arguments], Any],
    checked: bool = False,
) -> Any:
    """Let transformers check and prepare a call of `generate`, and return the result of `decode`.

    Args:
        model: The model, or a wrapper.
        input_ids: Prompts, if passed by this name.
        kwargs: Other arguments of the call.
        decode: Function called inside transformers' `generate`.
        checked: Whether the model has been checked already.
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
    if input_ids is not None and not is_encoder_decoder(model):  # encoders may have other inputs
        check_prompt_ids(input_ids)
        input_ids = input_ids.long()  # transformers accepts only two integer types
    source_ids = input_ids if input_ids is not None else kwargs.get("input_ids")
    # transformers drops these before a custom generate function, so they bypass it
    streamer = kwargs.pop("streamer", None)
    _take_stop_strings(model, kwargs)

    # transformers passes the arguments named in this signature, and refuses unknown ones.
    def decode_here(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
        return decode(read_arguments(model, input_ids, streamer=streamer, source_ids=source_ids, **prepared))

    prompt = () if input_ids is None else (input_ids,)  # some models name it differently
    return type(model).generate(model, *prompt, custom_generate=decode_here, **kwargs)


def prepare_request(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Arguments:
    """Let transformers prepare a call of `generate` for a checked model, and return its arguments.

    Raises:
        UnsupportedModelError: The class's own `generate` makes several calls, or processes their output.
    """
    prepared: list[Arguments] = []

    def keep(arguments: Arguments) -> Arguments:
        prepared.append(arguments)
        return arguments

    raised = None
    try:
        returned = prepare_call(model, input_ids, kwargs, keep, checked=True)
    except Exception as error:
        if not prepared:
            raise
        raised = not_of_signal(error)
    if raised is not None or returned is not prepared[0] or len(prepared) > 1:
        raise UnsupportedModelError(
            f"model={type(model).__name__} has its own `generate` that goes on after decoding, which an Engine cannot "
            "follow; use model.generate"
        ) from raised
    return prepared.pop()


def language_model_or_wrapper(model: Any) -> Any:
    """Return the object with `generate`, after a check of the transformers model in it.

    Raises:
        InvalidArgumentError: It contains no transformers model.
        UnsupportedModelError: The model does not support token trees.
    """
    model, inner = language_model(model)
    check_wrapper(model)
    open_session(inner).check()
    return model


def check_wrapper(model: Any) -> None:
    """Refuse unsupported adapters, and a replaced `generate`.

    Raises:
        UnsupportedModelError: An adapter does not support trees, or `generate` was replaced.
    """
    check_adapters(model)
    if own_generate(model) is not None:
        raise UnsupportedModelError(
            f"model={type(model).__name__} has an attribute `generate` that replaces its class's and may decode "
            "differently; delete the attribute, or use model.generate"
        )


def language_model(model: Any) -> tuple[Any, PreTrainedModel]:
    """Return the object with `generate`, and the transformers model in it.

    Raises:
        InvalidArgumentError: It contains no transformers model.
    """
    model = getattr(model, "_orig_mod", model)  # transformers too uses the model inside a compiled one
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel) or not hasattr(inner, "generate"):
        raise InvalidArgumentError(
            f"model={type(model).__name__} is not a transformers language model; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    return model, inner


def _take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Convert stop strings and their tokenizer to a criterion: transformers has no tokenizer here."""
    tokenizer = kwargs.pop("tokenizer", None)
    config: GenerationConfig | None = kwargs.get("generation_config")
    stop_strings = effective_setting(model, kwargs, "stop_strings")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise InvalidArgumentError(f"stop_strings={stop_strings!r} needs the model's tokenizer: pass tokenizer=...")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    # As in transformers, the caller's criterion has precedence.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    kwargs["stopping_criteria"] = criteria
    kwargs.pop("stop_strings", None)
    if config is not None and config.stop_strings is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
    if model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None  # otherwise transformers fills in the model's
