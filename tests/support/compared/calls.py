"""Make the calls of a case, by lookahead decoding or by transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import lookahead
from compared.case import Turn
from compared.settings import PAD_TOKEN, Recorder, arguments
from lookahead.parallel import ParallelGroup
from tiny.encoder_decoders import is_encoder_decoder, read_by
from tiny.families import CannotBuild
from tiny.images import IMAGE_TOKEN, with_images


@dataclass
class Answer:
    """The result of one call.

    Attributes:
        sequences: The texts, `[rows, tokens]`.
        mask: 0 for hidden tokens of the texts, 1 for others.
        new_tokens: Number of tokens added to each text.
        random_state: torch's random state afterwards; `None` if others drew from it too.
        streamed: Values passed to a streamer.
        scores, logits: `[rows, vocabulary]` for each token, if requested.
        cache: The returned cache, if any.
        accepted: Tokens added by each step of lookahead decoding, if statistics are returned.
        counted_tokens: Number of tokens by the statistics.
    """

    sequences: Tensor
    mask: Tensor
    new_tokens: int
    random_state: Tensor | None
    streamed: list[Any] | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    cache: Any = None
    accepted: list[int] = field(default_factory=list)
    counted_tokens: int | None = None

    @property
    def texts(self) -> list[list[int]]:
        """New tokens of each row."""
        start = self.sequences.shape[1] - self.new_tokens
        return self.sequences[:, start:].tolist()

    @property
    def text(self) -> list[int]:
        """New tokens of the first row."""
        return self.texts[0]


@dataclass(frozen=True)
class Prepared:
    """The arguments of a call.

    Attributes:
        ids, mask: The whole text so far, `[rows, tokens]`.
        passed_ids: The part of the text in the arguments.
        read, values: Inputs of the model, and other arguments.
    """

    ids: Tensor
    mask: Tensor
    passed_ids: Tensor
    read: dict[str, Any]
    values: dict[str, Any]


def call(
    model: PreTrainedModel,
    turn: Turn,
    earlier: Answer | None,
    ours: bool,
    changes: dict[str, Any] | None = None,
    group: ParallelGroup | None = None,
) -> Answer:
    """Make the call `turn`, which may continue `earlier`.

    Args:
        model: The model.
        turn: The call to make.
        earlier: The answer of the turn before, if the text continues from it.
        ours: Whether to use lookahead decoding.
        changes: Arguments that override the turn's.
        group: The ranks of this process's group.
    """
    prepared = prepare(model, turn, earlier, (changes or {}) | ({"parallel": group} if group else {}))
    torch.manual_seed(turn.settings.get("seed", 0) + (group.rank if group else 0))  # the state of rank 0 must count
    return prepared_answer(model, prepared, _result(model, turn, prepared.read | prepared.values, ours))


def _result(model: PreTrainedModel, turn: Turn, values: dict[str, Any], ours: bool) -> Any:
    if not ours:
        attached = isinstance(vars(model).get("generate"), partial)
        return type(model).generate(model, **values) if attached else model.generate(**values)
    values["lookahead_config"] = config = lookahead.LookaheadConfig(**turn.drafting)
    if turn.entry == "attach":
        lookahead.attach(model, config)
        return model.generate(**values)
    if turn.entry == "custom_generate":
        return model.generate(custom_generate=lookahead.generate, **values)
    return lookahead.generate(model, **values)


def prepare(
    model: PreTrainedModel, turn: Turn, earlier: Answer | None, changes: dict[str, Any] | None = None
) -> Prepared:
    """Prepare the arguments for `call`."""
    ids, mask = _prompt(turn, earlier)
    values = arguments(turn.settings) | (changes or {})
    if turn.images:
        ids, mask, pictures = with_images(model, ids, mask, seed=sum(turn.prompts[0]))
        values |= pictures
    passed_ids, read = ids, {"inputs": ids, "attention_mask": mask}
    if turn.cache == "empty":
        values["past_key_values"] = DynamicCache(config=model.config) if len(turn.prompts) % 2 else DynamicCache()
    elif turn.cache and earlier is not None and earlier.cache is not None:  # ours may return no cache
        values["past_key_values"] = earlier.cache
        if turn.cache == "tail":
            passed_ids = ids[:, min(earlier.cache.get_seq_length(), ids.shape[1] - 1) :]
            read["inputs"] = passed_ids
    elif turn.cache and earlier is not None and bool((ids == IMAGE_TOKEN).any()):
        raise CannotBuild("there is no cache of the text before, and an image is read once")
    if is_encoder_decoder(model):
        read = read_by(model, ids, mask)
    return Prepared(ids, mask, passed_ids, read, values)


def prepared_answer(model: PreTrainedModel, prepared: Prepared, result: Any) -> Answer:
    """Return the answer for a call's `result`."""
    ids, mask, passed_ids = prepared.ids, prepared.mask, prepared.passed_ids
    encodes = is_encoder_decoder(model)
    left_out = ids.shape[1] - passed_ids.shape[1]
    streamer = prepared.values.get("streamer")
    sequences = result if isinstance(result, Tensor) else result.sequences
    if encodes:  # the texts do not include the encoder's input
        passed_ids = sequences[:, :1]
    new_tokens = sequences.shape[1] - passed_ids.shape[1]
    repeats = sequences.shape[0] // ids.shape[0]
    if encodes:
        ids, mask, repeats = passed_ids, torch.ones_like(passed_ids), 1
    whole = torch.cat([ids[:, :left_out].repeat_interleave(repeats, 0), sequences], 1)
    grown = torch.ones(whole.shape[0], new_tokens, dtype=torch.long)
    answer = Answer(
        sequences=whole,
        mask=torch.cat([mask.repeat_interleave(repeats, 0), grown], 1),
        new_tokens=new_tokens,
        random_state=torch.get_rng_state(),
        streamed=streamer.values if isinstance(streamer, Recorder) else None,
    )
    if not isinstance(result, Tensor):
        answer.scores, answer.logits, answer.cache = result.scores, result.logits, result.past_key_values
        if (statistics := getattr(result, "statistics", None)) is not None:
            answer.accepted, answer.counted_tokens = list(statistics.accepted_lengths), statistics.tokens
    return answer


def _prompt(turn: Turn, earlier: Answer | None) -> tuple[Tensor, Tensor]:
    """Return the whole text so far and its attention mask, `[rows, tokens]` each."""
    rows = [
        ([PAD_TOKEN] * padding + list(tokens), [0] * padding + [1] * len(tokens))
        for tokens, padding in zip(turn.prompts, turn.padding, strict=True)
    ]
    ids = torch.tensor([tokens for tokens, _ in rows])
    mask = torch.tensor([hidden for _, hidden in rows])
    for place in turn.holes:
        mask[:, place] = 0
    if earlier is not None and turn.cache in ("whole", "tail"):
        ids = torch.cat([earlier.sequences, ids], 1)
        mask = torch.cat([earlier.mask, mask], 1)
    return ids, mask
