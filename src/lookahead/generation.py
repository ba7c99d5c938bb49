"""The doors: `generate`, `attach` and `detach`. Transformers' arguments in, transformers' outputs out."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from lookahead.arguments import (
    check_config,
    check_mode,
    check_model_inputs,
    check_pool,
    check_prompt_ids,
    prompt_tokens,
)
from lookahead.config import LookaheadConfig
from lookahead.decoder import OnStep, decode
from lookahead.drafting import NGramPool, build_drafter
from lookahead.engine import ModelRunner, TreeCache, adopt_cache, check_model, return_cache
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.output import LookaheadOutput, stack_collected, stack_texts
from lookahead.processors import row_processors
from lookahead.sequence import Sequence
from lookahead.statistics import Statistics, StepRecord
from lookahead.stopping import StopRule
from lookahead.streaming import StreamFeeder
from lookahead.verification import Target


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
        return _decode_prepared(model, input_ids, config=config, on_step=on_step, ngram_pool=ngram_pool, **kwargs)
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
    decode_here = partial(_decode_prepared, config=config, on_step=on_step, ngram_pool=ngram_pool, streamer=streamer)
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
    ngram_pool: NGramPool | None,
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
    rows = len(input_ids)
    mask = model_kwargs.get("attention_mask")
    given_cache: Cache | None = model_kwargs.get("past_key_values")
    cache = adopt_cache(given_cache) if getattr(given_cache, "_is_user_defined", False) else TreeCache()
    own_mask = None if mask is None else mask[:, -input_ids.shape[1] :]
    tokens = prompt_tokens(model, input_ids, own_mask, model_kwargs.get("position_ids"))
    before = _tokens_before(cache, tokens, mask, input_ids)
    runner = ModelRunner(model, rows, cache, before)
    _check_context(runner, tokens, before)
    pool = ngram_pool
    if pool is None and config.share_pool:
        pool = NGramPool(config.ngram_size, config.guess_set_size)
    sequences = [
        Sequence(
            input_ids[row : row + 1],
            tokens[row],
            build_drafter(config, pool),
            _target(row_processors(logits_processor, row, rows), generation_config),
        )
        for row in range(rows)
    ]
    rule = StopRule(stopping_criteria, runner.last_length, before)
    pad_token = generation_config._pad_token_tensor if rule.has_eos else None
    pad = None if pad_token is None else int(pad_token)
    feeder = None if streamer is None else StreamFeeder(streamer, rows, pad)
    statistics = Statistics()

    def after_step(record: StepRecord) -> None:
        if on_step is not None:
            on_step(record)
        if feeder is not None:
            feeder.add(record)

    if feeder is not None:
        feeder.start(input_ids)
    with torch.no_grad():
        statistics.prefill_passes = runner.prefill(tokens, generation_config.prefill_chunk_size)
        decode(runner, sequences, rule, statistics, after_step, config.tie_margin)
        if not rule.has_eos:
            _even_out(runner, sequences, statistics, after_step, config.tie_margin)
    if feeder is not None:
        feeder.end()
    if given_cache is not None and cache is not given_cache and getattr(given_cache, "_is_user_defined", False):
        return_cache(cache, given_cache)
        cache = given_cache
    texts = stack_texts(sequences, pad)
    if not generation_config.return_dict_in_generate:
        return texts
    return LookaheadOutput(
        sequences=texts,
        scores=stack_collected([sequence.target.scores for sequence in sequences]),
        logits=stack_collected([sequence.target.logits for sequence in sequences]),
        past_key_values=cache if generation_config.use_cache else None,
        statistics=statistics,
    )


def _target(processors: LogitsProcessorList, config: GenerationConfig) -> Target:
    keep = bool(config.return_dict_in_generate)
    return Target(
        processor=processors if len(processors) else None,
        sample=bool(config.do_sample),
        keep_logits=keep and bool(config.output_logits),
        keep_scores=keep and bool(config.output_scores),
    )


def _tokens_before(
    cache: TreeCache, tokens: list[list[int]], mask: torch.Tensor | None, input_ids: torch.Tensor
) -> list[int]:
    """How many tokens of the cache come before each row's prompt: all, or none if the prompt repeats them.

    As in transformers, an attention mask that is longer than the prompt says that the prompt is new text alone.

    Raises:
        InvalidArgumentError: The cache does not fit the prompt.
    """
    lengths = cache.lengths(len(tokens))
    if len(lengths) != len(tokens):
        raise InvalidArgumentError(
            f"past_key_values holds {len(lengths)} rows, but input_ids has {len(tokens)}; they must be the same texts"
        )
    if mask is not None and mask.shape[1] > input_ids.shape[1]:
        earlier = mask[:, : -input_ids.shape[1]].sum(dim=1).tolist()
        if earlier != lengths:
            raise InvalidArgumentError(
                f"attention_mask counts {earlier} tokens before input_ids, but past_key_values holds {lengths}"
            )
        return lengths
    for length, row in zip(lengths, tokens, strict=True):
        if length >= len(row):
            raise InvalidArgumentError(
                f"past_key_values holds {length} tokens, but input_ids has {len(row)}: give the whole text with at "
                "least one new token, or new tokens alone with an attention_mask over the whole text"
            )
    return [0] * len(tokens)


def _check_context(runner: ModelRunner, tokens: list[list[int]], before: list[int]) -> None:
    longest = max(earlier + len(row) for earlier, row in zip(before, tokens, strict=True))
    if runner.context is not None and longest > runner.context:
        raise InvalidArgumentError(
            f"input_ids is a prompt of {longest} tokens, but the model's context holds {runner.context}; shorten it"
        )


def _even_out(
    runner: ModelRunner, sequences: list[Sequence], statistics: Statistics, on_step: OnStep, tie_margin: float
) -> None:
    """Go on with rows that ended before others: without an end-of-sequence token nothing is padded in transformers."""
    longest = max(sequence.ids.shape[1] for sequence in sequences)
    for sequence in sequences:
        sequence.finished = sequence.ids.shape[1] >= longest
    decode(runner, sequences, lambda text: text.ids.shape[1] >= longest, statistics, on_step, tie_margin)
