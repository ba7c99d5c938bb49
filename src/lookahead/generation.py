"""The doors: `generate`, `attach` and `detach`. Transformers' arguments in, transformers' outputs out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from lookahead.arguments import check_config, check_mode, check_model_inputs, check_prompt_ids, prompt_tokens
from lookahead.config import LookaheadConfig
from lookahead.decoder import OnStep, decode
from lookahead.drafting import build_drafter
from lookahead.engine import ModelRunner, check_model
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.sequence import Sequence
from lookahead.statistics import Statistics, StepRecord
from lookahead.stopping import StopRule
from lookahead.verification import Target


@dataclass
class LookaheadOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `generate` returns with `return_dict_in_generate=True`.

    All fields of transformers' `GenerateDecoderOnlyOutput`, and:

    Args:
        statistics: Counts and times of the call.
    """

    statistics: Statistics | None = None


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor | None = None,
    *,
    lookahead_config: LookaheadConfig | None = None,
    on_step: OnStep | None = None,
    **kwargs: Any,
) -> torch.Tensor | LookaheadOutput:
    """Generate text exactly as `model.generate` does, in fewer steps.

    Takes every argument of `model.generate` (see `docs/compatibility.md` for those that are refused). It can
    also be handed to transformers, `model.generate(..., custom_generate=lookahead.generate)`; but transformers
    keeps `streamer`, `tokenizer` and `assistant_model` to itself there, so use this door, or `attach`, for
    streaming and stop strings.

    Args:
        model: A causal language model of transformers, as it is.
        input_ids: Token ids of the prompt, `[1, tokens]` int64. Without it transformers begins from the BOS token.
        lookahead_config: How to draft; the default configuration if not given. It never changes the text.
        on_step: Called after each step with a `StepRecord`: the tokens it added and what it sent.
        **kwargs: As for `model.generate`.

    Returns:
        The text `[1, tokens]` int64, prompt included; or a `LookaheadOutput` with `return_dict_in_generate=True`.

    Raises:
        InvalidArgumentError: An argument has a value that cannot work.
        UnsupportedArgumentError: A legal argument that lookahead decoding does not support.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    config = check_config(lookahead_config)
    if input_ids is not None and _is_prepared(kwargs.get("generation_config")):
        return _decode_prepared(model, input_ids, config=config, on_step=on_step, **kwargs)
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
    decode_here = partial(_decode_prepared, config=config, on_step=on_step, streamer=streamer)
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


def _decode_prepared(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    config: LookaheadConfig,
    on_step: OnStep | None,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | LookaheadOutput:
    """Decode with arguments that transformers has checked and prepared, as its own decoding methods do."""
    if model_kwargs.pop("synced_gpus", False):
        raise UnsupportedArgumentError("synced_gpus=True is not supported; gather the model on one device first")
    check_mode(generation_config)
    check_prompt_ids(input_ids)
    check_model_inputs(model_kwargs)
    check_model(model)
    tokens = prompt_tokens(model, input_ids, model_kwargs)
    runner = ModelRunner(model, batch_size=1)
    if runner.context is not None and len(tokens) > runner.context:
        raise InvalidArgumentError(
            f"input_ids is a prompt of {len(tokens)} tokens, but the model's context holds {runner.context}; shorten it"
        )
    keep = bool(generation_config.return_dict_in_generate)
    target = Target(
        processor=logits_processor if len(logits_processor) else None,
        sample=bool(generation_config.do_sample),
        keep_logits=keep and bool(generation_config.output_logits),
        keep_scores=keep and bool(generation_config.output_scores),
    )
    sequence = Sequence(input_ids, tokens, build_drafter(config), target)
    statistics = Statistics()

    def after_step(record: StepRecord) -> None:
        if on_step is not None:
            on_step(record)
        if streamer is not None:
            for token in record.tokens:
                streamer.put(torch.tensor([token]))

    if streamer is not None:
        streamer.put(input_ids.cpu())
    with torch.no_grad():
        decode(runner, [sequence], StopRule(stopping_criteria, runner.last_length), statistics, after_step)
    if streamer is not None:
        streamer.end()
    text = sequence.ids.clone()
    if not generation_config.return_dict_in_generate:
        return text
    return LookaheadOutput(
        sequences=text,
        scores=None if target.scores is None else tuple(target.scores),
        logits=None if target.logits is None else tuple(target.logits),
        past_key_values=runner.cache if generation_config.use_cache else None,
        statistics=statistics,
    )
