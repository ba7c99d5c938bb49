"""mlx-lm's `stream_generate` with lookahead decoding: the same arguments, responses and text, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.backends.base import check_settings
from lookahead.backends.mlx.model import MLXModel
from lookahead.backends.session import open_session
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.config import LookaheadConfig, check_config
from lookahead.core.sequence import SequenceState
from lookahead.core.statistics import Statistics
from lookahead.drafting.background import BACKGROUND
from lookahead.errors import UnsupportedArgumentError
from lookahead.serving.drafting import Drafting, draft_pace
from lookahead.serving.request import Steps
from lookahead.values import check_callable, require, whole_number

_OPTIONS = {
    *("sampler", "logits_processors", "prompt_cache", "max_kv_size", "prefill_step_size", "prompt_progress_callback")
}
"""Arguments of `mlx_lm.stream_generate` that are supported."""

_REFUSED = {
    "draft_model": "drafts come from the text; leave it out",
    "kv_bits": "quantised keys and values cannot run on trees; leave it out",
    "input_embeddings": "texts are token ids; give them as prompt",
}
"""Remedies for other arguments of mlx-lm."""


@dataclass
class _Text:
    """A text in decoding, with the members of a `Request` that steps use."""

    sequence: SequenceState
    drafting: Drafting
    temperature: float = 0.0
    row: Any = None


def stream_generate(
    model: MLXModel,
    tokenizer: Any,
    prompt: str | Sequence[int] | Any,
    max_tokens: int = 256,
    *,
    lookahead_config: LookaheadConfig | None = None,
    statistics: Statistics | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Generate text exactly as `mlx_lm.stream_generate` does, in fewer steps.

    Under the same `mx.random.seed`, sampled texts are equal too. A prompt cache ends with the same tokens.

    Args:
        model: The model, from `lookahead.load_mlx`.
        tokenizer: Its tokenizer; `model.mlx_tokenizer`, or another one of mlx-lm.
        prompt: Text or token ids of the prompt.
        max_tokens: Maximum number of tokens; -1 for no limit.
        lookahead_config: Drafting options; the default configuration if not given. They never change the text.
        statistics: Counts of the call are added to it.
        **options: `sampler`, `logits_processors`, `prompt_cache`, `max_kv_size`, `prefill_step_size` and
            `prompt_progress_callback` of `mlx_lm.stream_generate`.

    Yields:
        `mlx_lm.generate.GenerationResponse` for each token; `from_draft` says whether it was drafted.

    Raises:
        InvalidArgumentError: An argument has an invalid value.
        UnsupportedArgumentError: Lookahead decoding does not support an argument.
    """
    require(isinstance(model, MLXModel), "model", model, "is no model of lookahead.load_mlx; pass one")
    max_tokens = whole_number("max_tokens", max_tokens, -1)
    require(max_tokens != 0, "max_tokens", max_tokens, "must not be 0; use -1 for no limit")
    config = check_config(lookahead_config)
    for name in options:
        if name not in _OPTIONS:
            remedy = _REFUSED.get(name, "leave it out")
            raise UnsupportedArgumentError(f"{name} is not supported by lookahead decoding: {remedy}")
    _check_options(options)
    return _stream(model, tokenizer, prompt, max_tokens, config, statistics or Statistics(), options)


def _check_options(options: dict[str, Any]) -> None:
    """Refuse invalid values of mlx-lm's arguments.

    Raises:
        InvalidArgumentError: A value is invalid.
    """
    for name, arguments in (("sampler", 1), ("prompt_progress_callback", 2)):
        if options.get(name) is not None:
            check_callable(name, options[name], arguments, f"must be a function of {arguments} arguments")
    processors = options.get("logits_processors") or ()
    is_list = isinstance(processors, (list, tuple)) and all(map(callable, processors))
    require(
        is_list, "logits_processors", processors, "must be a list of functions, as make_logits_processors returns it"
    )
    if options.get("max_kv_size") is not None:
        whole_number("max_kv_size", options["max_kv_size"], 1)
    whole_number("prefill_step_size", options.get("prefill_step_size", 2048), 1)


def _stream(
    model: MLXModel,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int,
    config: LookaheadConfig,
    statistics: Statistics,
    options: dict[str, Any],
) -> Iterator[Any]:
    from lookahead.backends.mlx.stream import Stream  # late, as mlx is an extra

    check_settings(config, "a model of MLX")
    BACKGROUND.begin(config)
    stream = Stream(model, tokenizer, prompt, options)
    runner = stream.runner
    temperature = 0.0 if options.get("sampler") is None else 1.0
    pace = draft_pace(model, config, 1, temperature, runner.chains) if config.chooses_nodes else None
    drafting = Drafting(model, config, pace, None, runner.most_nodes, runner.chains)
    max_length = None if max_tokens < 0 else len(stream.tokens) + max_tokens

    def is_complete(sequence: SequenceState) -> bool:
        return sequence.tokens[-1] in stream.ends or len(sequence.tokens) == max_length

    sampler = TextSampler(selector=stream)
    sequence = SequenceState(stream.tokens, drafting.drafter(None), sampler, is_complete, most_tokens=max_length)
    steps = Steps(runner, open_session(model).clock, pace)
    requests: Any = [_Text(sequence, drafting, temperature)]
    _prefill(runner, stream.tokens, options)
    try:
        while not sequence.finished:
            steps.run(requests, statistics)
            if sequence.error is not None:
                raise sequence.error
            yield from stream.responses(sequence.finished)
    finally:
        stream.close(sequence.tokens)
        drafting.save()
        drafting.release()


def _prefill(runner: Any, tokens: Sequence[int], options: dict[str, Any]) -> None:
    """Read the prompt but its last token, in the parts of mlx-lm, and report the progress."""
    report = options.get("prompt_progress_callback") or (lambda read, total: None)
    size = int(options.get("prefill_step_size", 2048))
    report(0, len(tokens))
    for begin in range(0, len(tokens) - 1, size):
        end = min(begin + size, len(tokens) - 1)
        runner.prefill([tokens[: end + 1]], size)
        report(end, len(tokens))
    report(len(tokens), len(tokens))
