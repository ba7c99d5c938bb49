"""The entry points: `generate`, `attach` and `detach`. Transformers' arguments in, transformers' outputs out."""

from __future__ import annotations

import inspect
from functools import partial, update_wrapper
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from lookahead.api.call import decode_call
from lookahead.config import LookaheadConfig
from lookahead.core.statistics import OnStep
from lookahead.drafting import NGramPool
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError, warn_of_plain
from lookahead.serving.arguments import check_config, check_pool
from lookahead.serving.output import LookaheadOutput
from lookahead.serving.prepared import hand_over, language_model, language_model_or_wrapper, read_arguments
from lookahead.serving.prompts import Prediction

if TYPE_CHECKING:
    from lookahead.parallel import ParallelGroup


from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import GENERATION_MODES_MAPPING

from lookahead.core.statistics import Statistics, StepRecord

_GENERATE_ARGUMENTS = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
"""Names of what may be passed by position, without self."""


def generate(
    model: PreTrainedModel,
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

    Takes every argument of `model.generate`; `docs/compatibility.md` says what happens to each. It can also be
    passed to transformers, `model.generate(..., custom_generate=lookahead.generate)`; but then transformers
    does not pass on `streamer`, `tokenizer` and `assistant_model`, so call this function, or `attach` it, for
    streaming and stop strings.

    Args:
        model: A causal language model of transformers, as it is.
        input_ids: Token ids of the prompts, `[batch, tokens]` int64, padded on the left where they differ in
            length. Without them transformers begins from the BOS token.
        lookahead_config: How to draft; the default configuration if not given. It never changes the text.
        on_step: Called after each step with a `StepRecord` for each sequence: the tokens it added, what it sent.
        ngram_pool: A pool to draft from and to fill, which later calls can use again; a new one for each
            sequence if not given.
        prediction: Token ids of a predicted text, such as a file that is to be edited: a list or a tensor `[tokens]`;
            for several prompts a list with one for each, `None` for no prediction. `preset="auto"` drafts from it; it
            changes the number of steps alone.
        parallel: The ranks to decode with, from `lookahead.parallel.join`; each of them makes the same call. This
            process alone if not given.
        **kwargs: As for `model.generate`.

    Returns:
        The texts `[batch, tokens]` int64, prompts included; or a `LookaheadOutput` with `return_dict_in_generate=True`.

    Raises:
        InvalidArgumentError: An argument has a value that cannot work.
        UnsupportedArgumentError: A legal argument that lookahead decoding does not support.
        UnsupportedModelError: The model cannot be run on token trees.
        ParallelError: The ranks of `parallel` disagree, or one of them failed; the message names it.
    """
    start = perf_counter()
    config = check_config(lookahead_config)
    check_pool(ngram_pool, config)
    falls_back = config.fallback == "plain" and parallel is None  # which other ranks would not know of
    first = FirstToken(on_step)
    listener = first if falls_back else on_step
    decode = partial(decode_call, config=config, on_step=listener, ngram_pool=ngram_pool, parallel=parallel)
    decode = partial(decode, prediction=prediction, start=start)
    prepared = input_ids if _is_prepared(kwargs) else None
    try:
        if prepared is not None:
            return decode(read_arguments(model, prepared, **kwargs))
        return hand_over(model, input_ids, dict(kwargs), decode)  # type: ignore[no-any-return]
    except (UnsupportedModelError, UnsupportedArgumentError) as refusal:
        if not falls_back or first.came:
            raise
        warn_of_plain(refusal, stacklevel=3)
    if prepared is not None:
        return decode_prepared_plainly(model, prepared, kwargs)  # type: ignore[no-any-return]
    return decode_plainly(model, input_ids, kwargs)  # type: ignore[no-any-return]


def attach(model: PreTrainedModel, config: LookaheadConfig | None = None) -> None:
    """Make `model.generate` itself decode with lookahead, on this one object, until `detach`.

    Pipelines and other callers of `model.generate` work unchanged; calls may still pass their own
    `lookahead_config`. A call with `custom_generate` goes to transformers as if nothing were attached.

    Deep copies of an attached model are attached as well, with the same configuration and to their own weights; so is
    what `pickle` or `torch.load` makes of one that was saved whole, which takes this library to load. A shallow copy
    (`copy.copy`) shares all of the model, `generate` included: attach it again to give it its own settings.
    It leaves no trace in what `save_pretrained` writes.

    Args:
        model: A causal language model of transformers.
        config: How to draft; the default configuration if not given.

    Raises:
        InvalidArgumentError: `config` is no `LookaheadConfig`.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    attached = check_config(config)
    try:
        model = language_model_or_wrapper(model)
    except UnsupportedModelError as refusal:
        if attached.fallback != "plain":
            raise
        warn_of_plain(refusal, stacklevel=3)
        model = language_model(model)[0]
    # The way transformers binds the `generate` of a repository: an attribute of the object, over the class's method.
    model.generate = AttachedGenerate(model, attached)


def detach(model: PreTrainedModel) -> None:
    """Restore `model`'s own `generate`. Does nothing if it is not attached.

    Raises:
        InvalidArgumentError: There is no transformers model in it.
    """
    vars(language_model(model)[0]).pop("generate", None)


class AttachedGenerate:
    """The `generate` of an attached model.

    An object, where a closure would do to call it: `copy.deepcopy` and `pickle` follow its reference to the model as
    they follow any other, so that in a copy of the model it refers to the copy.

    Args:
        model: The model whose attribute this is, or the wrapper.
        config: How to draft.
    """

    def __init__(self, model: PreTrainedModel, config: LookaheadConfig) -> None:
        self.__setstate__((model, config))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `model.generate`."""
        if kwargs.get("custom_generate") is not None:
            return type(self._model).generate(self._model, *args, **kwargs)
        kwargs.update(zip(_GENERATE_ARGUMENTS, args, strict=False))
        kwargs.setdefault("lookahead_config", self._config)
        return generate(self._model, **kwargs)

    def __getstate__(self) -> tuple[PreTrainedModel, LookaheadConfig]:
        return self._model, self._config

    def __setstate__(self, state: tuple[PreTrainedModel, LookaheadConfig]) -> None:
        self._model, self._config = state
        update_wrapper(self, type(self._model).generate)  # its name, its documentation and its signature


def _is_prepared(kwargs: dict[str, Any]) -> bool:
    """Whether transformers called us: by then it has gathered the criteria, and turned special tokens into tensors."""
    return (
        hasattr(kwargs.get("generation_config"), "_pad_token_tensor")
        and isinstance(kwargs.get("stopping_criteria"), StoppingCriteriaList)
        and isinstance(kwargs.get("logits_processor"), LogitsProcessorList)
        and "use_cache" in kwargs
    )


class FirstToken:
    """Notes that a call has written something: from then on it can only go on or fail.

    Args:
        on_step: The caller's listener, which is told as before.

    Attributes:
        came: Whether there was a step.
    """

    def __init__(self, on_step: OnStep | None) -> None:
        self._on_step = on_step
        self.came = False

    def __call__(self, record: StepRecord) -> None:
        """Listen to a step."""
        self.came = True
        if self._on_step is not None:
            self._on_step(record)


def decode_plainly(model: Any, input_ids: torch.Tensor | None, arguments: dict[str, Any]) -> Any:
    """Decode with transformers' own `generate`; a dict gets statistics that count one step for each token.

    Args:
        model: The model, or a wrapper.
        input_ids: The prompts, if they are given by this name.
        arguments: The other arguments of `model.generate`.
    """
    model = language_model(model)[0]
    if input_ids is None:
        return _with_statistics(type(model).generate(model, **arguments), arguments.get("inputs"))
    return _with_statistics(type(model).generate(model, input_ids, **arguments), input_ids)


def decode_prepared_plainly(model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
    """Decode plainly with arguments that transformers has already prepared for a decoding method."""
    mode = arguments["generation_config"].get_generation_mode()
    method = getattr(type(model), GENERATION_MODES_MAPPING[mode])
    return _with_statistics(method(model, input_ids, **arguments), input_ids)


def _with_statistics(output: Any, input_ids: torch.Tensor | None) -> Any:
    if type(output) is not GenerateDecoderOnlyOutput:
        return output
    rows, width = output.sequences.shape
    steps = width - (1 if input_ids is None else input_ids.shape[1])
    ones = [1] * (rows * steps)
    statistics = Statistics(steps=steps, tokens=len(ones), nodes_per_step=ones, accepted_lengths=ones.copy())
    return LookaheadOutput(**output, statistics=statistics)
