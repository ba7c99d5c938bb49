"""The doors: `generate`, `attach` and `detach`. Transformers' arguments in, transformers' outputs out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from lookahead.arguments import check_config, check_pool, check_prompt_ids
from lookahead.config import LookaheadConfig
from lookahead.decoder import OnStep
from lookahead.drafting import NGramPool
from lookahead.engine import check_model
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.output import LookaheadOutput
from lookahead.request import decode_request


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    *,
    lookahead_config: LookaheadConfig | None = None,
    on_step: OnStep | None = None,
    ngram_pool: NGramPool | None = None,
    **kwargs: Any,
) -> torch.Tensor | LookaheadOutput:
    """Generate text exactly as `model.generate` does, in fewer steps.

    Takes every argument of `model.generate` (see `docs/compatibility.md` for those that are refused). It can
    also be handed to transformers, `model.generate(..., custom_generate=lookahead.generate)`; but transformers
    keeps `streamer`, `tokenizer` and `assistant_model` to itself there, so use this door, or `attach`, for
    streaming and stop strings.

    Args:
        model: A causal language model of transformers, as it is.
        input_ids: Token ids of the prompts, `[batch, tokens]` int64, padded on the left where they differ in
            length. Without them transformers begins from the BOS token.
        lookahead_config: How to draft; the default configuration if not given. It never changes the text.
        on_step: Called after each step with a `StepRecord` for each sequence: the tokens it added, what it sent.
        ngram_pool: A pool to draft from and to fill, to be handed to later calls again; a new one for each
            sequence if not given.
        **kwargs: As for `model.generate`.

    Returns:
        The texts `[batch, tokens]` int64, prompts included; or a `LookaheadOutput` with `return_dict_in_generate=True`.

    Raises:
        InvalidArgumentError: An argument has a value that cannot work.
        UnsupportedArgumentError: A legal argument that lookahead decoding does not support.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    config = check_config(lookahead_config)
    check_pool(ngram_pool, config)
    if input_ids is not None and _is_prepared(kwargs.get("generation_config")):
        return decode_request(model, input_ids, config=config, on_step=on_step, ngram_pool=ngram_pool, **kwargs)
    check_model(_language_model(model))
    if input_ids is not None:
        check_prompt_ids(input_ids)
    if kwargs.pop("custom_generate", None) is not None:
        raise InvalidArgumentError("custom_generate cannot be combined with lookahead.generate; leave it out")
    if kwargs.pop("assistant_model", None) is not None:
        raise UnsupportedArgumentError(
            "assistant_model is another way to draft; leave it out, or use the model's own generate"
        )
    if kwargs.pop("synced_gpus", None):
        raise UnsupportedArgumentError(
            "synced_gpus=True is not supported: devices would need different numbers of steps; gather the model first"
        )
    # transformers drops these two on their way to a custom generate function, so they go around it
    streamer = kwargs.pop("streamer", None)
    _take_stop_strings(model, kwargs)
    decode_here = partial(decode_request, config=config, on_step=on_step, ngram_pool=ngram_pool, streamer=streamer)
    return type(model).generate(model, input_ids, custom_generate=decode_here, **kwargs)  # type: ignore[no-any-return]


def attach(model: PreTrainedModel, config: LookaheadConfig | None = None) -> None:
    """Make `model.generate` itself decode with lookahead, on this one object, until `detach`.

    Pipelines and other callers of `model.generate` work on unchanged; calls may still pass their own
    `lookahead_config`. A call with `custom_generate` goes to transformers as if nothing were attached.

    Args:
        model: A causal language model of transformers.
        config: How to draft; the default configuration if not given.

    Raises:
        InvalidArgumentError: `config` is no `LookaheadConfig`.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    attached = check_config(config)
    check_model(_language_model(model))
    plain: Callable[..., Any] = type(model).generate

    @wraps(plain)
    def generate_with_lookahead(inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("custom_generate") is not None:
            return plain(model, inputs, *args, **kwargs)
        input_ids = kwargs.pop("input_ids", None)
        kwargs.setdefault("lookahead_config", attached)
        return generate(model, inputs if inputs is not None else input_ids, **kwargs)

    # The way transformers binds the `generate` of a repository: an attribute of the object, over the class's method.
    model.generate = generate_with_lookahead


def detach(model: PreTrainedModel) -> None:
    """Give `model` its own `generate` back. A model that nothing is attached to stays as it is."""
    model.__dict__.pop("generate", None)


def _is_prepared(config: object) -> bool:
    """Whether transformers called us: by then it has turned the special tokens of its configuration into tensors."""
    return isinstance(config, GenerationConfig) and hasattr(config, "_pad_token_tensor")


def _language_model(model: Any) -> PreTrainedModel:
    """The transformers model inside a wrapper such as a PEFT model, or `model` itself.

    Raises:
        InvalidArgumentError: There is none.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel) or not hasattr(inner, "generate"):
        raise InvalidArgumentError(
            f"model={type(model).__name__} is no transformers language model; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    return inner


def _take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Turn stop strings and their tokenizer into a criterion, as transformers would if it had the tokenizer here."""
    tokenizer = kwargs.pop("tokenizer", None)
    given: GenerationConfig | None = kwargs.get("generation_config")
    stop_strings = kwargs.get("stop_strings")
    if stop_strings is None and given is not None:
        stop_strings = given.stop_strings
    if stop_strings is None:
        stop_strings = model.generation_config.stop_strings
    if stop_strings is None:
        return
    if tokenizer is None:
        raise InvalidArgumentError(f"stop_strings={stop_strings!r} needs the model's tokenizer: pass tokenizer=...")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    kwargs["stopping_criteria"] = criteria
    kwargs.pop("stop_strings", None)
    if given is not None and given.stop_strings is not None:
        kwargs["generation_config"] = copy.deepcopy(given)
        kwargs["generation_config"].stop_strings = None
    if model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None  # the model's own would be filled in again
