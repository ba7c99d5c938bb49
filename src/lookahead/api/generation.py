"""Entry points with transformers' arguments and outputs: `generate`, `attach`, `detach`, `forget`."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial, update_wrapper
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lookahead.api.call import GenerateCall
from lookahead.backends.session import open_session
from lookahead.backends.transformers.composition import own_generate
from lookahead.backends.transformers.model_state import state_of
from lookahead.config import LookaheadConfig, check_config
from lookahead.core.statistics import OnStep, Statistics, StepRecord
from lookahead.drafting import NGramPool
from lookahead.drafting.background import BACKGROUND
from lookahead.drafting.paper import check_pool
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError, warn_of_plain
from lookahead.serving.arguments import (
    Arguments,
    language_model,
    language_model_or_wrapper,
    prepare_call,
    read_arguments,
)
from lookahead.serving.drafting import Prediction
from lookahead.serving.output import LookaheadOutput
from lookahead.serving.refusals import ON_STEP
from lookahead.values import check_callable, require

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup

_GENERATE_ARGUMENTS = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
"""Names of the positional arguments of `model.generate`, without `self`."""


@overload
def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor | None = ...,
    *,
    lookahead_config: LookaheadConfig | None = ...,
    on_step: OnStep | None = ...,
    ngram_pool: NGramPool | None = ...,
    prediction: Prediction | None = ...,
    parallel: ParallelGroup | None = ...,
    return_dict_in_generate: Literal[True],
    **kwargs: Any,
) -> LookaheadOutput: ...


@overload
def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor | None = ...,
    *,
    lookahead_config: LookaheadConfig | None = ...,
    on_step: OnStep | None = ...,
    ngram_pool: NGramPool | None = ...,
    prediction: Prediction | None = ...,
    parallel: ParallelGroup | None = ...,
    return_dict_in_generate: Literal[False] | None = ...,
    generation_config: None = ...,
    **kwargs: Any,
) -> torch.Tensor: ...


@overload
def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor | None = ...,
    *,
    lookahead_config: LookaheadConfig | None = ...,
    on_step: OnStep | None = ...,
    ngram_pool: NGramPool | None = ...,
    prediction: Prediction | None = ...,
    parallel: ParallelGroup | None = ...,
    **kwargs: Any,
) -> torch.Tensor | LookaheadOutput: ...


def generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor | None = None,
    *,
    lookahead_config: LookaheadConfig | None = None,
    on_step: OnStep | None = None,
    ngram_pool: NGramPool | None = None,
    prediction: Prediction | None = None,
    parallel: ParallelGroup | None = None,
    **kwargs: Any,
) -> torch.Tensor | LookaheadOutput:
    """Generate text exactly as `model.generate` does, in fewer steps.

    Accepts every argument of `model.generate`; `docs/compatibility.md` lists the effect of each. The function can
    also be passed to transformers, `model.generate(..., custom_generate=lookahead.generate)`. Then transformers does
    not pass on `streamer`, `tokenizer` and `assistant_model`. For streaming and stop strings, call this function or
    `attach` it.

    Args:
        model: An unmodified causal language model of transformers.
        input_ids: Token ids of the prompts, `[batch, tokens]` int64, padded on the left to equal length. Without them
            transformers begins from the BOS token.
        lookahead_config: Drafting options, which never change the text. By default `preset="auto"`, which also drafts
            from the predictions of earlier calls with this model (`memory="process"`, 10.5 MB); `memory="request"`
            begins each call without them.
        on_step: Function called after each step with a `StepRecord` for each sequence: added tokens, nodes sent.
        ngram_pool: A pool to draft from and to fill, reusable in later calls; by default a new one for each sequence.
        prediction: Token ids of a predicted text, the file to edit for example: a list or a tensor `[tokens]`. For
            several prompts a list with one entry each, `None` for no prediction. `preset="auto"` drafts from it. It
            changes only the number of steps.
        parallel: Ranks to decode with, from `lookahead.parallel.join`; all of them make the same call. By default
            only this process decodes.
        **kwargs: Further arguments of `model.generate`.

    Returns:
        Token ids `[batch, tokens]` int64, prompts included; or a `LookaheadOutput` with `return_dict_in_generate=True`.

    Raises:
        InvalidArgumentError: An argument has an invalid value.
        UnsupportedArgumentError: Lookahead decoding does not support a valid argument.
        UnsupportedModelError: The model cannot be run on token trees.
        ParallelError: The ranks of `parallel` disagree, or a rank failed; the message names it.
    """
    start = perf_counter()
    config = check_config(lookahead_config)
    check_pool(ngram_pool, config)
    if on_step is not None:
        check_callable("on_step", on_step, 1, ON_STEP)
    joins = parallel is None or callable(getattr(parallel, "open_session", None))
    require(joins, "parallel", parallel, "is no group; pass the result of lookahead.parallel.join, or None")
    # Ranks must draft alike, so each of them waits for compilation.
    BACKGROUND.begin(config if parallel is None else replace(config, compile_in_background=False))
    falls_back = config.fallback == "plain" and parallel is None  # other ranks would not notice a fallback
    written = False  # after the first output the call cannot fall back

    def listen(record: StepRecord) -> None:
        nonlocal written
        written = True
        if on_step is not None:
            on_step(record)

    def decode(arguments: Arguments) -> torch.Tensor | LookaheadOutput:
        call = GenerateCall(arguments, config, ngram_pool, prediction, parallel)
        return call.run(start, listen if falls_back else on_step)

    try:
        if input_ids is not None and _is_prepared(kwargs):
            open_session(model).check()
            return decode(read_arguments(model, input_ids, **kwargs))
        return prepare_call(model, input_ids, dict(kwargs), decode)  # type: ignore[no-any-return]
    except (UnsupportedModelError, UnsupportedArgumentError) as refusal:
        if not falls_back or written:
            raise
        warn_of_plain(refusal, stacklevel=3)
    return _decode_plainly(model, input_ids, kwargs)  # type: ignore[no-any-return]


def attach(model: torch.nn.Module, config: LookaheadConfig | None = None) -> None:
    """Make `model.generate` decode with lookahead, on this one object, until `detach`.

    Pipelines and other callers of `model.generate` work unchanged; calls may still pass their own
    `lookahead_config`. A call with `custom_generate` runs in transformers as if the model were not attached.

    Deep copies of an attached model are attached as well, with the same configuration and their own weights. So are
    models saved whole with `pickle` or `torch.save`; loading them needs this library. A shallow copy (`copy.copy`)
    shares all of the model, `generate` included: attach it again to give it its own settings. `save_pretrained` writes
    the same files as without `attach`.

    Args:
        model: A causal language model of transformers.
        config: Drafting options; the default ones of `generate` if not given.

    Raises:
        InvalidArgumentError: `config` is no `LookaheadConfig`.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    attached = check_config(config)
    BACKGROUND.begin(attached)
    try:
        target: Any = language_model_or_wrapper(model)
    except UnsupportedModelError as refusal:
        if attached.fallback != "plain":
            raise
        warn_of_plain(refusal, stacklevel=3)
        target = language_model(model)[0]
        if own_generate(target) is not None:  # this `generate` decodes plainly and stays
            return
    # transformers binds a repository's own `generate` in the same way: an attribute that hides the class's method.
    # `copy.deepcopy` and `pickle` follow a partial's reference to the model, so in a copy it refers to the copy.
    call = partial(_generate_attached, target, config)
    target.generate = update_wrapper(call, type(target).generate, ("__name__", "__doc__"), ())


def detach(model: torch.nn.Module) -> None:
    """Restore `model`'s own `generate`. Does nothing if the model is not attached.

    Raises:
        InvalidArgumentError: `model` contains no transformers model.
    """
    vars(language_model(model)[0]).pop("generate", None)


def forget(model: torch.nn.Module) -> None:
    """Discard every trial and timing of `model` in this process; the next call repeats them.

    Needed after a change that calls cannot detect: of a variable in a closure, or of an attribute of a hook. Calls
    detect added, removed or replaced hooks, modules, methods, modes and configurations. The memory of
    `memory="process"` stays. A running `Engine` keeps its own trials.

    Raises:
        InvalidArgumentError: `model` contains no transformers model.
    """
    state_of(language_model(model)[1]).forget()


def _generate_attached(model: Any, config: LookaheadConfig | None, /, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `model.generate` of a model attached with `config`."""
    if kwargs.get("custom_generate") is not None:
        return type(model).generate(model, *args, **kwargs)
    kwargs.update(zip(_GENERATE_ARGUMENTS, args, strict=False))
    kwargs.setdefault("lookahead_config", config)
    return generate(model, **kwargs)


def _is_prepared(kwargs: dict[str, Any]) -> bool:
    """Whether transformers called us: then it has prepared the criteria and the special token tensors."""
    return (
        hasattr(kwargs.get("generation_config"), "_pad_token_tensor")
        and isinstance(kwargs.get("stopping_criteria"), StoppingCriteriaList)
        and isinstance(kwargs.get("logits_processor"), LogitsProcessorList)
        and "use_cache" in kwargs
    )


def _decode_plainly(model: Any, input_ids: torch.Tensor | None, arguments: dict[str, Any]) -> Any:
    """Decode with transformers' own `generate`; a dict output gets statistics with one step for each token."""
    model = language_model(model)[0]
    prompt = () if input_ids is None else (input_ids,)
    method = "generate"
    if prompt and _is_prepared(arguments):
        method = GENERATION_MODES_MAPPING[arguments["generation_config"].get_generation_mode()]
    own = own_generate(model) if method == "generate" else None
    output = own(*prompt, **arguments) if own else getattr(type(model), method)(model, *prompt, **arguments)
    if type(output) is not GenerateDecoderOnlyOutput:
        return output
    prompts = arguments.get("inputs") if input_ids is None else input_ids
    rows, width = output.sequences.shape
    ones = [1] * (rows * (width - (1 if prompts is None else prompts.shape[1])))
    statistics = Statistics(len(ones) // rows, tokens=len(ones), nodes_per_step=ones, accepted_lengths=ones.copy())
    return LookaheadOutput(**output, statistics=statistics)
