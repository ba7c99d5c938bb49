"""Arguments of `generate` that are drawn, as plain values, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lookahead.backends.transformers.miniature import VOCABULARY

PAD_TOKEN = 0


class Tiring(LogitsProcessor):  # type: ignore[misc]
    """A user's processor: tokens of the last few places become less likely, and those with a low id as well."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        recent = torch.nn.functional.one_hot(input_ids[:, -5:], scores.shape[-1]).sum(1)
        return scores - 0.7 * recent - 0.01 * (input_ids.sum(-1, keepdim=True) % 7)


class Typed(Tiring):
    """The same, with scores of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return super().__call__(input_ids, scores).to(self.dtype)


class Counting(LogitsProcessor):  # type: ignore[misc]
    """A processor with a state for each row of the batch, as those of grammars: one call for each token."""

    def __init__(self, length: int = 0) -> None:
        self.length, self.states = length, [0, 3, 6, 9]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.length not in (0, input_ids.shape[1]):
            raise RuntimeError("a token was not told")
        self.length = input_ids.shape[1] + 1
        likelier = torch.zeros_like(scores)
        for row, text in enumerate(input_ids.tolist()):
            self.states[row % 4] = (3 * self.states[row % 4] + text[-1] + 1) % 11
            likelier[row, self.states[row % 4] % scores.shape[1] :: 11] = 3.0
        return scores + likelier


class Uncopied(Counting):
    """The same, of which there is no copy."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it cannot be copied")


class RowRule(LogitsProcessor):  # type: ignore[misc]
    """Favours other tokens in each row, by its place in the batch."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        size = scores.shape[1]
        rule = torch.tensor([[(token + 5 * row) % 7 == 0 for token in range(size)] for row in range(len(scores))])
        return scores + 4.0 * rule


class Pads(LogitsProcessor):  # type: ignore[misc]
    """Has the pad token, a token like others to the model, at every fourth place."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] % 4:
            return scores
        forced = torch.full_like(scores, -1e9)
        forced[:, PAD_TOKEN] = 0.0
        return forced


class EndsOnSum(StoppingCriteria):  # type: ignore[misc]
    """A user's criterion: a text is complete where its last three ids add up to a multiple of 17."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return input_ids[:, -3:].sum(-1) % 17 == 0


class EndsByRow(StoppingCriteria):  # type: ignore[misc]
    """Ends each row at another length, by its place in the batch."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return input_ids.shape[1] >= 20 + 5 * torch.arange(len(input_ids))


class Recorder(BaseStreamer):  # type: ignore[misc]
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def draw_settings(random: Random, rows: int, most_tokens: int) -> dict[str, Any]:
    """Settings for a call with `rows` rows."""
    settings: dict[str, Any] = {"max_new_tokens": random.choice((1, 2, random.randint(3, 20), *[most_tokens] * 3))}
    if random.random() < 0.35:
        settings["do_sample"] = True
        settings["seed"] = random.randrange(1 << 16)
        if rows > 1:  # the rows of a batch draw in another order, so that only one token may be left to each
            settings["top_k"] = 1
        elif random.random() < 0.08:
            settings |= {"num_return_sequences": random.randint(2, 3), "top_k": 1}
        else:
            settings |= _some(random, _WARPERS, 0.5)
    settings |= _some(random, _PROCESSORS, 0.3)
    settings |= _some(random, _STOPPING, 0.35)
    settings |= _some(random, _OTHERS, 0.35)
    if any(name in settings for name in ("min_new_tokens", "min_length", "exponential_decay_length_penalty")):
        settings.setdefault("eos", _tokens(random, 6))
    if rows > 1 or "num_return_sequences" in settings:
        settings.pop("streamer", None)
    if settings.get("use_cache") is False:
        settings.pop("prefill_chunk_size", None)
    return settings


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`, with processors and criteria made anew."""
    values = {name: value for name, value in settings.items() if name not in _MADE}
    values["do_sample"] = settings.get("do_sample", False)
    values["pad_token_id"] = PAD_TOKEN
    if "eos" in settings:
        values["eos_token_id"] = list(settings["eos"])
    if "sequence_bias" in settings:
        values["sequence_bias"] = [[list(tokens), bias] for tokens, bias in settings["sequence_bias"]]
    for name in ("bad_words_ids",):
        if name in settings:
            values[name] = [list(tokens) for tokens in settings[name]]
    if "processor" in settings:
        values["logits_processor"] = LogitsProcessorList([USERS_PROCESSORS[settings["processor"]]()])
    if "criterion" in settings:
        values["stopping_criteria"] = StoppingCriteriaList([_CRITERIA[settings["criterion"]]()])
    if "stop_strings" in settings:
        values["tokenizer"] = _tokenizer()
    if "streamer" in settings:
        values["streamer"] = Recorder()
    if settings.get("output_scores") or settings.get("output_logits"):
        values["return_dict_in_generate"] = True
    return values


USERS_PROCESSORS: dict[Any, Callable[[], LogitsProcessor]] = {
    True: lambda: Tiring(),  # whatever a test puts in its place
    **{str(dtype): partial(Typed, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)},
    "counting": Counting,
    "uncopied": Uncopied,
    "row rule": RowRule,
    "pads": Pads,
}
"""What a setting `processor` may be, and what makes it."""

_CRITERIA: dict[Any, type[StoppingCriteria]] = {True: EndsOnSum, "by row": EndsByRow}
_MADE = ("seed", "eos", "processor", "criterion", "streamer")


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["abcdef", *(f"w{number}" for number in range(1, VOCABULARY))]  # the first: transformers tries it
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _some(random: Random, choices: dict[str, Any], share: float) -> dict[str, Any]:
    """One to three of `choices`, drawn, in that share of the cases."""
    if random.random() >= share:
        return {}
    names = random.sample(list(choices), random.choice((1, 1, 2, 3)))
    return {name: choices[name](random) for name in names}


def _token(random: Random) -> int:
    return random.randrange(VOCABULARY)


def _tokens(random: Random, most: int) -> tuple[int, ...]:
    return tuple(_token(random) for _ in range(random.randint(1, most)))


_WARPERS = {
    "temperature": lambda random: random.choice((0.2, 0.7, 1.0, 1.5)),
    "top_k": lambda random: random.choice((1, 2, 5, 20, 50)),
    "top_p": lambda random: random.choice((0.1, 0.5, 0.9, 0.99)),
    "min_p": lambda random: random.choice((0.01, 0.1, 0.5)),
    "typical_p": lambda random: random.choice((0.2, 0.5, 0.9)),
    "epsilon_cutoff": lambda random: random.choice((1e-3, 0.02)),
    "eta_cutoff": lambda random: random.choice((1e-3, 0.02)),
    "top_h": lambda random: random.choice((0.3, 0.6)),
    "renormalize_logits": lambda random: True,
}
_PROCESSORS = {
    "repetition_penalty": lambda random: random.choice((0.8, 1.1, 1.5)),
    "no_repeat_ngram_size": lambda random: random.randint(1, 4),
    "bad_words_ids": lambda random: tuple(_tokens(random, 3) for _ in range(random.randint(1, 20))),
    "sequence_bias": lambda random: tuple((_tokens(random, 2), random.uniform(-5, 5)) for _ in range(8)),
    "suppress_tokens": lambda random: list(_tokens(random, 40)),
    "begin_suppress_tokens": lambda random: list(_tokens(random, 60)),
    "encoder_repetition_penalty": lambda random: random.choice((0.8, 1.3)),
    "encoder_no_repeat_ngram_size": lambda random: random.randint(2, 4),
    "remove_invalid_values": lambda random: True,
    "guidance_scale": lambda random: 1.5,
    "processor": lambda random: True,
}
_STOPPING = {
    "eos": lambda random: tuple(_tokens(random, 6)),
    "min_new_tokens": lambda random: random.randint(1, 40),
    "min_length": lambda random: random.randint(1, 70),
    "exponential_decay_length_penalty": lambda random: (random.randint(1, 20), 1.1),
    "forced_eos_token_id": lambda random: _token(random),
    "forced_bos_token_id": lambda random: _token(random),
    "criterion": lambda random: True,
    "stop_strings": lambda random: [f"w{_token(random)}" for _ in range(random.randint(1, 3))],
}
_OTHERS = {
    "output_scores": lambda random: True,
    "output_logits": lambda random: True,
    "return_dict_in_generate": lambda random: True,
    "use_cache": lambda random: False,
    "prefill_chunk_size": lambda random: random.choice((1, 3, 8, 32)),
    "streamer": lambda random: True,
}
