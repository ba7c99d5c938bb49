"""Random arguments of `generate` as plain values, and their conversion."""

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
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from lookahead.backends.transformers.miniature import VOCABULARY

PAD_TOKEN = 0


class Tiring(LogitsProcessor):  # type: ignore[misc]
    """A user's processor: the last few tokens become less likely, and tokens with low ids too."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        recent = torch.nn.functional.one_hot(input_ids[:, -5:], scores.shape[-1]).sum(1)
        return scores - 0.7 * recent - 0.01 * (input_ids.sum(-1, keepdim=True) % 7)


class Typed(Tiring):
    """The same processor, with scores of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return super().__call__(input_ids, scores).to(self.dtype)


class Fatigue(LogitsProcessor):  # type: ignore[misc]
    """A processor with a state: each occurrence of a token makes it less likely.

    Each call counts the last token of the text, and changes the scores in place. This is right only with one call
    per token, in order, with the decided text and with the processor's own copy of the scores.
    """

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self._counts is None:
            self._counts = torch.zeros_like(scores)
        self._counts.scatter_add_(1, input_ids[:, -1:], torch.ones_like(scores))
        scores -= 2.0 * self._counts
        return scores


class Counting(LogitsProcessor):  # type: ignore[misc]
    """A processor with a state for each row of the batch, like a grammar's: one call per token."""

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
    """The same processor, which cannot be copied."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("it cannot be copied")


class RowRule(LogitsProcessor):  # type: ignore[misc]
    """Favour other tokens in each row, by its index in the batch."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        size = scores.shape[1]
        rule = torch.tensor([[(token + 5 * row) % 7 == 0 for token in range(size)] for row in range(len(scores))])
        return scores + 4.0 * rule


class Pads(LogitsProcessor):  # type: ignore[misc]
    """Force the pad token, which is not special for the model, at every fourth index."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] % 4:
            return scores
        forced = torch.full_like(scores, -1e9)
        forced[:, PAD_TOKEN] = 0.0
        return forced


class EndsOnSum(StoppingCriteria):  # type: ignore[misc]
    """A user's criterion: a text is complete if the sum of its last three ids is a multiple of 17."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return input_ids[:, -3:].sum(-1) % 17 == 0


class EndsByRow(StoppingCriteria):  # type: ignore[misc]
    """End each row at another length, by its index in the batch."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return input_ids.shape[1] >= 20 + 5 * torch.arange(len(input_ids))


class EndsAfter(StoppingCriteria):  # type: ignore[misc]
    """End a row after one of some tokens, independently of end-of-sequence tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.isin(input_ids[:, -1], self._tokens)


class Recorder(BaseStreamer):  # type: ignore[misc]
    """A streamer that stores its values."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def allowed_tokens(vocabulary: int, modulus: int) -> Callable[[int, torch.Tensor], list[int]]:
    """Return a `prefix_allowed_tokens_fn` that forbids every `modulus`-th token, from a start set by text and row."""

    def allowed(batch_id: int, text: torch.Tensor) -> list[int]:
        first = int(text[-1]) + len(text) + batch_id
        return [token for token in range(vocabulary) if (token + first) % modulus]

    return allowed


def draw_settings(random: Random, rows: int, most_tokens: int) -> dict[str, Any]:
    """Draw settings for a call with `rows` rows."""
    settings: dict[str, Any] = {"max_new_tokens": random.choice((1, 2, random.randint(3, 20), *[most_tokens] * 3))}
    if random.random() < 0.35:
        settings["do_sample"] = True
        settings["seed"] = random.randrange(1 << 16)
        if rows > 1:  # rows of a batch draw in another order, so each may have only one choice
            settings["top_k"] = 1
        elif random.random() < 0.08:
            settings |= {"num_return_sequences": random.randint(2, 3), "top_k": 1}
        else:
            settings |= _some(random, WARPERS, 0.5)
    settings |= _some(random, PROCESSORS, 0.3)
    settings |= _some(random, STOPPING, 0.35)
    settings |= _some(random, _OTHERS, 0.35)
    if any(name in settings for name in NEED_AN_END):
        settings.setdefault("eos", _tokens(random, 6))
    if rows > 1 or "num_return_sequences" in settings:
        settings.pop("streamer", None)
    if settings.get("use_cache") is False:
        settings.pop("prefill_chunk_size", None)
    return settings


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate`, with new processors and criteria."""
    values = {name: value for name, value in settings.items() if name not in _MADE}
    values["do_sample"] = settings.get("do_sample", False)
    values["pad_token_id"] = PAD_TOKEN
    for name, make in _MADE.items():
        if name in settings:
            values |= make(settings[name])
    if settings.get("output_scores") or settings.get("output_logits"):
        values["return_dict_in_generate"] = True
    return values


USERS_PROCESSORS: dict[Any, Callable[[], LogitsProcessor]] = {
    True: lambda: Tiring(),  # looked up late, as tests replace it
    **{str(dtype): partial(Typed, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)},
    "counting": Counting,
    "uncopied": Uncopied,
    "row rule": RowRule,
    "pads": Pads,
}
"""Processors by value of the setting `processor`; the value `"fatigue"` changes transformers' returned scores."""

CRITERIA: dict[Any, type[StoppingCriteria]] = {True: EndsOnSum, "by row": EndsByRow}
"""Criteria by value of the setting `criterion`; a tuple of tokens means `EndsAfter`."""


def _processor(value: Any) -> LogitsProcessor:
    return Fatigue() if value == "fatigue" else USERS_PROCESSORS[value]()


def _criterion(value: Any) -> StoppingCriteria:
    return EndsAfter(value) if isinstance(value, tuple) else CRITERIA[value]()


_MADE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "seed": lambda value: {},
    "eos": lambda value: {"eos_token_id": list(value) if isinstance(value, tuple) else value},
    "bad_words_ids": lambda value: {"bad_words_ids": [list(tokens) for tokens in value]},
    "sequence_bias": lambda value: {"sequence_bias": [[list(tokens), bias] for tokens, bias in value]},
    "processor": lambda value: {"logits_processor": LogitsProcessorList([_processor(value)])},
    "criterion": lambda value: {"stopping_criteria": StoppingCriteriaList([_criterion(value)])},
    "stop_strings": lambda value: {"stop_strings": value, "tokenizer": words()},
    "streamer": lambda value: {"streamer": Recorder()},
    "allowed": lambda value: {"prefix_allowed_tokens_fn": allowed_tokens(*value)},
    "negative_prompt_ids": lambda value: {"negative_prompt_ids": torch.tensor([value])},
    "green list": lambda value: {"watermarking_config": WatermarkingConfig(**value)},
    "SynthID": lambda value: {"watermarking_config": SynthIDTextWatermarkingConfig(**value)},
}
"""Functions that convert a setting to arguments, unless it is an argument itself."""


@cache
def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `w1`, `w2`, ... for models of any vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["abcdef", *(f"w{number}" for number in range(1, VOCABULARY))]  # transformers tries the first word
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_tokens(settings: dict[str, Any], change: Callable[[int], int]) -> dict[str, Any]:
    """Return the settings with `change` applied to each token id."""
    return settings | {name: in_any_depth(settings[name], change) for name in _TOKENS if name in settings}


def in_any_depth(value: Any, change: Callable[[int], int]) -> Any:
    """Return the same tuples and lists with `change` applied to their integers."""
    if isinstance(value, tuple | list):
        return type(value)(in_any_depth(part, change) for part in value)
    return change(value) if isinstance(value, int) else value


_TOKENS = (
    *("eos", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_eos_token_id", "forced_bos_token_id", "negative_prompt_ids"),
)
"""Settings with token ids."""


def _some(random: Random, choices: dict[str, Any], share: float) -> dict[str, Any]:
    """Draw one to three of `choices`, in this share of the cases."""
    if random.random() >= share:
        return {}
    names = random.sample(list(choices), random.choice((1, 1, 2, 3)))
    return {name: choices[name](random) for name in names}


def _token(random: Random) -> int:
    return random.randrange(VOCABULARY)


def _tokens(random: Random, most: int) -> tuple[int, ...]:
    return tuple(_token(random) for _ in range(random.randint(1, most)))


Draws = dict[str, Callable[[Random], Any]]
"""Functions that draw values of settings."""

WARPERS: Draws = {
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
"""Settings that only affect sampling."""

PROCESSORS: Draws = {
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
STOPPING: Draws = {
    "eos": lambda random: _tokens(random, 6),
    "min_new_tokens": lambda random: random.randint(1, 40),
    "min_length": lambda random: random.randint(1, 70),
    "exponential_decay_length_penalty": lambda random: (random.randint(1, 20), 1.1),
    "forced_eos_token_id": lambda random: _token(random),
    "forced_bos_token_id": lambda random: _token(random),
    "criterion": lambda random: True,
    "stop_strings": lambda random: [f"w{_token(random)}" for _ in range(random.randint(1, 3))],
}
_OTHERS: Draws = {
    "output_scores": lambda random: True,
    "output_logits": lambda random: True,
    "return_dict_in_generate": lambda random: True,
    "use_cache": lambda random: False,
    "prefill_chunk_size": lambda random: random.choice((1, 3, 8, 32)),
    "streamer": lambda random: True,
}
WATERMARKS: Draws = {
    "green list": lambda random: {
        "greenlist_ratio": round(random.uniform(0.1, 0.6), 2),
        "bias": round(random.uniform(0.5, 4.0), 2),
        "seeding_scheme": random.choice(("lefthash", "selfhash")),
        "context_width": random.randint(1, 3),
    },
    "SynthID": lambda random: {
        "ngram_len": random.randint(2, 6),
        "keys": [random.randrange(1000) for _ in range(random.randint(2, 12))],
        "context_history_size": random.choice((4, 64)),
        "skip_first_ngram_calls": random.random() < 0.5,
    },
}
"""Both set the same argument."""

NEED_AN_END = ("min_new_tokens", "min_length", "exponential_decay_length_penalty")
"""Settings that need a stop token."""
