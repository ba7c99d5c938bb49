"""One case of sampling: the same seed, prompt and settings, decoded by transformers and by lookahead decoding.

Both must give the same tokens and leave PyTorch's random state the same. The settings are those that change logits
before a token is named: what a user may pass to `generate`, and a processor of the user's own. Some cases are
greedy, with the processors that work there too.

A case holds only plain values, so that its `repr` is all that is needed to run it again:

    >>> from sampling_exactness import SamplingCase, run_sampling_case
    >>> print(run_sampling_case(SamplingCase("llama", (5, 9, 5, 9), {"temperature": 0.7}, seed=3)).report())
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import lookahead
from drafting_options import config_of
from exactness import MODEL_SEEDS, NEAR_TIE
from lookahead.demo import DEMO_PROMPT, demo_model_path
from model_zoo import ARCHITECTURES, VOCAB_SIZE, build, position_limit

DEMO = "demo"
"""Name of the demo model, beside those of the zoo."""
DEMO_SHARE = 0.25
"""Share of the random cases that run on the demo model, which is trained and has a vocabulary of thousands."""
GREEDY_SHARE = 0.3
"""Share of the random cases that are greedy, where the setting they are made for works there."""
NEW_TOKENS = 48
"""Most tokens that a random case generates."""


@dataclass(frozen=True)
class SamplingCase:
    """One comparison.

    Attributes:
        model: Name in the model zoo, or `DEMO`.
        prompt: Token ids of the prompt.
        settings: Arguments of `generate`, and those that `prepared` makes from plain values.
        family: The setting that the case was made for.
        seed: Seed of the draws.
        do_sample: Draw tokens, or take the likeliest.
        model_seed: Seed of the weights of a zoo model.
        attention: Attention implementation of a zoo model.
        padding: How many padding tokens, hidden by the attention mask, stand before the prompt.
        max_new_tokens: As for `generate`.
        drafting: Arguments of `LookaheadConfig`.
    """

    model: str
    prompt: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    family: str = "plain"
    seed: int = 0
    do_sample: bool = True
    model_seed: int = 0
    attention: str = "eager"
    padding: int = 0
    max_new_tokens: int = 40
    drafting: dict[str, Any] = field(default_factory=dict)


@dataclass
class SamplingOutcome:
    """What came out of one case.

    Attributes:
        case: The case.
        expected: New tokens of `model.generate`.
        got: New tokens of `lookahead.generate`.
        same_state: Whether both left the random state the same.
        accepted_lengths: Tokens that each step of `lookahead.generate` added.
        error: The traceback, if `lookahead.generate` raised.
        gap: At the first difference, how far the score of the expected token is above that of the token that came
            instead; where tokens are sampled, the scores with the noise of the draw, see `racing_scores`. Within
            `NEAR_TIE` rounding decided; otherwise there is a bug, or rounding moved a token across a cutoff.
        logit_difference: The largest difference between the raw logits of both at that place.
    """

    case: SamplingCase
    expected: tuple[int, ...]
    got: tuple[int, ...] = ()
    same_state: bool = False
    accepted_lengths: list[int] = field(default_factory=list)
    error: str | None = None
    gap: float | None = None
    logit_difference: float | None = None

    @property
    def matched(self) -> bool:
        """Whether the tokens and the random state after them are the same."""
        return self.error is None and self.got == self.expected and self.same_state

    def first_difference(self) -> int | None:
        """Place of the first token that differs; None if one text only ends before the other."""
        pairs = enumerate(zip(self.expected, self.got, strict=False))
        return next((place for place, (expected, got) in pairs if expected != got), None)

    def report(self) -> str:
        """What happened; of a mismatch, with the line that runs the case again."""
        if self.matched:
            return f"matched: {len(self.got)} tokens in {len(self.accepted_lengths)} steps"
        lines = [
            "MISMATCH",
            f"  from sampling_exactness import *; print(run_sampling_case({self.case!r}).report())",
            f"  expected {self.expected}",
            f"  got      {self.got}",
        ]
        if self.error is not None:
            return "\n".join([*lines, self.error])
        lines.append(f"  accepted {self.accepted_lengths}; same random state afterwards: {self.same_state}")
        lines.append(f"  first difference at new token {self.first_difference()}, gap between the scores {self.gap}")
        lines.append(f"  largest difference of the raw logits there {self.logit_difference}")
        if self.gap is not None and abs(self.gap) < NEAR_TIE:
            lines.append("  a near-tie, which float32 rounding decides")
        return "\n".join(lines)


class Fatigue(LogitsProcessor):  # type: ignore[misc]
    """A user's own processor, with a memory: the more often a token was written, the less likely it becomes.

    It counts the last token of the text at each call, and writes into the scores it is given. So it is right only
    if it is called once for each token, in order, with the text that was decided, and with scores that are its own.

    Args:
        strength: What each occurrence costs.
    """

    def __init__(self, strength: float) -> None:
        self._strength = strength
        self._counts: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._counts is None:
            self._counts = torch.zeros_like(scores)
        self._counts.scatter_add_(1, input_ids[:, -1:], torch.ones_like(scores))
        scores -= self._strength * self._counts
        return scores


def load(case: SamplingCase) -> PreTrainedModel:
    """The model of `case`, float32."""
    return _demo()[0] if case.model == DEMO else build(case.model, case.model_seed, case.attention)


def run_sampling_case(case: SamplingCase) -> SamplingOutcome:
    """Decode `case` with `model.generate` and with `lookahead.generate`, and compare."""
    model = load(case)
    width = case.padding + len(case.prompt)
    expected, state = _seeded(model.generate, model, case)
    outcome = SamplingOutcome(case, tuple(expected.sequences[0, width:].tolist()))
    try:
        got, state_after = _seeded(_lookahead(model, case), model, case)
    except Exception:  # a case that raises is a case that failed; the run goes on
        outcome.error = traceback.format_exc()
        return outcome
    outcome.got = tuple(got.sequences[0, width:].tolist())
    outcome.same_state = torch.equal(state, state_after)
    outcome.accepted_lengths = list(got.statistics.accepted_lengths)
    if outcome.got != outcome.expected:
        _explain(model, outcome)
    return outcome


def _lookahead(model: PreTrainedModel, case: SamplingCase) -> Callable[..., Any]:
    config = config_of(**case.drafting)
    return lambda **arguments: lookahead.generate(model, lookahead_config=config, **arguments)


def _seeded(
    generate: Callable[..., Any], model: PreTrainedModel, case: SamplingCase, **more: Any
) -> tuple[Any, torch.Tensor]:
    """What `generate` gives under the seed of `case`, and the random state after it."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        # Dynamic RoPE keeps the frequencies of the longest text it read; a short pass resets them.
        model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)
        arguments = _arguments(case)  # anew each time: processors may have a memory
        torch.manual_seed(case.seed)
        output = generate(**arguments, return_dict_in_generate=True, **more)
    return output, torch.get_rng_state()


def _arguments(case: SamplingCase) -> dict[str, Any]:
    """What both are called with."""
    arguments: dict[str, Any] = {
        "input_ids": torch.tensor([(0,) * case.padding + case.prompt]),
        "attention_mask": torch.tensor([(0,) * case.padding + (1,) * len(case.prompt)]),
        "max_new_tokens": case.max_new_tokens,
        "do_sample": case.do_sample,
        "pad_token_id": 0,
    }
    if case.do_sample:
        arguments["top_k"] = 0  # transformers would fill in 50
    for name, value in case.settings.items():
        arguments.update(prepared(name, value))
    return arguments


def prepared(name: str, value: Any) -> dict[str, Any]:
    """The argument of `generate` that a setting stands for."""
    if name == "green_list":
        return {"watermarking_config": WatermarkingConfig(**value)}
    if name == "synthid":
        return {"watermarking_config": SynthIDTextWatermarkingConfig(**value)}
    if name == "allowed":
        return {"prefix_allowed_tokens_fn": allowed_tokens(*value)}
    if name == "fatigue":
        return {"logits_processor": [Fatigue(value)]}
    if name == "negative_prompt_ids":
        return {name: torch.tensor([value])}
    return {name: value}


def allowed_tokens(vocabulary: int, modulus: int) -> Callable[[int, torch.Tensor], list[int]]:
    """A `prefix_allowed_tokens_fn`: all but every `modulus`-th token, counted from one that the text and row name."""

    def allowed(batch_id: int, text: torch.Tensor) -> list[int]:
        first = int(text[-1]) + len(text) + batch_id
        return [token for token in range(vocabulary) if (token + first) % modulus]

    return allowed


# --- mismatches -----------------------------------------------------------------------------------------------


def racing_scores(scores: torch.Tensor, seed: int, place: int) -> torch.Tensor:
    """The scores `[1, vocabulary]` of new token number `place` with the noise of its draw, under `seed`.

    On the CPU PyTorch draws one token by a race: the likeliest of p / q wins, where q are exponential random
    numbers, one for each token of the vocabulary. In logarithms that is scores with noise added, so the distance
    between two of them is one of logits, and a rounding of logits matters where they are as close.
    """
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    for _ in range(place + 1):
        noise = torch.empty_like(scores).exponential_()
    torch.set_rng_state(state)
    return torch.log_softmax(scores, dim=-1) - noise.log()


def _explain(model: PreTrainedModel, outcome: SamplingOutcome) -> None:
    """Fill in the gap and the difference of the logits, from both runs again, with their logits kept."""
    place = outcome.first_difference()
    if place is None:
        return
    case, keep = outcome.case, {"output_scores": True, "output_logits": True}
    plain, _ = _seeded(model.generate, model, case, **keep)
    ours, _ = _seeded(_lookahead(model, case), model, case, **keep)
    outcome.logit_difference = float((plain.logits[place] - ours.logits[place]).abs().max())
    scores = plain.scores[place]
    if case.do_sample:
        scores = racing_scores(scores, case.seed, place)
    outcome.gap = float(scores[0, outcome.expected[place]] - scores[0, outcome.got[place]])


# --- drawing cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setting:
    """How to draw the value of a setting: from a random state, the prompt, and the size of the vocabulary.

    Attributes:
        draw: Draws it; all the arguments that it takes.
        greedy: Whether it has an effect without sampling.
        needs_eos: Whether it means nothing without an end-of-sequence token.
    """

    draw: Callable[[Random, tuple[int, ...], int], dict[str, Any]]
    greedy: bool = True
    needs_eos: bool = False


def _number(name: str, low: float, high: float) -> Callable[[Random, tuple[int, ...], int], dict[str, Any]]:
    return lambda random, prompt, vocabulary: {name: round(random.uniform(low, high), 4)}


def _whole(name: str, low: int, high: int) -> Callable[[Random, tuple[int, ...], int], dict[str, Any]]:
    return lambda random, prompt, vocabulary: {name: random.randint(low, high)}


def _flag(name: str) -> Callable[[Random, tuple[int, ...], int], dict[str, Any]]:
    return lambda random, prompt, vocabulary: {name: True}


def _tokens(name: str, most: int) -> Callable[[Random, tuple[int, ...], int], dict[str, Any]]:
    return lambda random, prompt, vocabulary: {
        name: sorted({_text_token(random, prompt, vocabulary) for _ in range(random.randint(1, most))})
    }


def _text_token(random: Random, prompt: tuple[int, ...], vocabulary: int) -> int:
    """A token of the text, where it matters, or any other; not one of the first four, which may be stop tokens."""
    token = random.choice(prompt) if random.random() < 0.6 else random.randrange(vocabulary)
    return max(token, 4)


def _words(random: Random, prompt: tuple[int, ...], vocabulary: int) -> list[list[int]]:
    """Short runs of tokens, some of the prompt and some at random."""
    words = []
    for _ in range(random.randint(1, 6)):
        length = random.randint(1, 3)
        start = random.randrange(len(prompt))
        word = list(prompt[start : start + length]) if random.random() < 0.6 else []
        words.append(word or [_text_token(random, prompt, vocabulary) for _ in range(length)])
    return words


def _draw_top_k(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    return {"top_k": random.choice((random.randint(1, 5), random.randint(1, 40)))}


def _draw_bad_words(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    return {"bad_words_ids": _words(random, prompt, vocabulary)}


def _draw_sequence_bias(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    words = {tuple(word): round(random.uniform(-6, 4), 3) for word in _words(random, prompt, vocabulary)}
    return {"sequence_bias": [[list(word), bias] for word, bias in words.items()]}


def _draw_decay(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    return {"exponential_decay_length_penalty": (random.randint(0, 12), round(random.uniform(1.01, 1.2), 3))}


def _draw_green_list(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    return {
        "green_list": {
            "greenlist_ratio": round(random.uniform(0.1, 0.6), 2),
            "bias": round(random.uniform(0.5, 4.0), 2),
            "seeding_scheme": random.choice(("lefthash", "selfhash")),
            "context_width": random.randint(1, 3),
        }
    }


def _draw_synthid(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    return {
        "synthid": {
            "ngram_len": random.randint(2, 6),
            "keys": [random.randrange(1000) for _ in range(random.randint(2, 12))],
            "context_history_size": random.choice((4, 64)),
            "skip_first_ngram_calls": random.random() < 0.5,
        }
    }


def _draw_guidance(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"guidance_scale": round(random.uniform(0.5, 3.0), 2)}
    if random.random() < 0.5:
        settings["negative_prompt_ids"] = tuple(random.choices(prompt, k=random.randint(1, 6)))
    return settings


def _draw_allowed(random: Random, prompt: tuple[int, ...], vocabulary: int) -> dict[str, Any]:
    return {"allowed": (vocabulary, random.randint(2, 7))}


SETTINGS: dict[str, _Setting] = {
    "temperature": _Setting(_number("temperature", 0.3, 2.0), greedy=False),
    "top_k": _Setting(_draw_top_k, greedy=False),
    "top_p": _Setting(_number("top_p", 0.2, 0.99), greedy=False),
    "min_p": _Setting(_number("min_p", 0.005, 0.3), greedy=False),
    "typical_p": _Setting(_number("typical_p", 0.2, 0.98), greedy=False),
    "epsilon_cutoff": _Setting(_number("epsilon_cutoff", 0.0005, 0.1), greedy=False),
    "eta_cutoff": _Setting(_number("eta_cutoff", 0.0005, 0.1), greedy=False),
    "top_h": _Setting(_number("top_h", 0.2, 0.9), greedy=False),
    "repetition_penalty": _Setting(_number("repetition_penalty", 0.7, 2.0)),
    "no_repeat_ngram_size": _Setting(_whole("no_repeat_ngram_size", 2, 5)),
    "bad_words_ids": _Setting(_draw_bad_words),
    "suppress_tokens": _Setting(_tokens("suppress_tokens", 8)),
    "begin_suppress_tokens": _Setting(_tokens("begin_suppress_tokens", 60)),
    "forced_eos_token_id": _Setting(lambda *_: {"forced_eos_token_id": 1}, needs_eos=True),
    "min_new_tokens": _Setting(_whole("min_new_tokens", 2, 30), needs_eos=True),
    "min_length": _Setting(_whole("min_length", 10, 60), needs_eos=True),
    "sequence_bias": _Setting(_draw_sequence_bias),
    "exponential_decay_length_penalty": _Setting(_draw_decay, needs_eos=True),
    "renormalize_logits": _Setting(_flag("renormalize_logits")),
    "remove_invalid_values": _Setting(_flag("remove_invalid_values")),
    "encoder_repetition_penalty": _Setting(_number("encoder_repetition_penalty", 0.7, 2.0)),
    "encoder_no_repeat_ngram_size": _Setting(_whole("encoder_no_repeat_ngram_size", 1, 3)),
    "green list watermark": _Setting(_draw_green_list),
    "SynthID watermark": _Setting(_draw_synthid),
    "guidance_scale": _Setting(_draw_guidance),
    "prefix_allowed_tokens_fn": _Setting(_draw_allowed),
    "own processor": _Setting(_number("fatigue", 0.2, 3.0)),
}
"""What changes logits in transformers, by the name of the argument."""

FAMILIES = ("plain", "plain with eos", *SETTINGS)
"""What a case can be made for: a setting, or none."""

_WATERMARKS = ("green list watermark", "SynthID watermark")


def random_sampling_case(random: Random, family: str | None = None, model: str | None = None) -> SamplingCase:
    """Draw a case for `family` on `model`, each drawn as well if not given."""
    family = family or random.choice(FAMILIES)
    name = model or (DEMO if random.random() < DEMO_SHARE else random.choice(sorted(ARCHITECTURES)))
    vocabulary = _demo()[0].config.vocab_size if name == DEMO else VOCAB_SIZE
    prompt = _demo_prompt(random) if name == DEMO else _zoo_prompt(random)
    do_sample = (family in SETTINGS and not SETTINGS[family].greedy) or random.random() > GREEDY_SHARE
    drawn = _mix(random, family, do_sample) if family in SETTINGS else []
    settings: dict[str, Any] = {}
    for kind in drawn:
        settings.update(SETTINGS[kind].draw(random, prompt, vocabulary))
    if family == "plain with eos" or any(SETTINGS[kind].needs_eos for kind in drawn) or random.random() < 0.2:
        settings["eos_token_id"] = _stop_tokens(random, prompt, vocabulary)
    # transformers itself counts padding when it decides to compute Phi-3's cache anew
    padding = 0 if name == "phi3_long_rope" else random.choice((0, 0, 0, random.randint(1, 5)))
    return SamplingCase(
        model=name,
        prompt=prompt,
        settings=settings,
        family=family,
        seed=random.randrange(2**31),
        do_sample=do_sample,
        model_seed=random.randrange(MODEL_SEEDS),
        attention="sdpa" if name == DEMO else random.choice(ARCHITECTURES[name].attention),
        padding=padding,
        max_new_tokens=_fitting(name, len(prompt) + padding, random.randint(12, NEW_TOKENS)),
        drafting=_random_drafting(random),
    )


def _mix(random: Random, leading: str, do_sample: bool) -> list[str]:
    """The leading setting, and others to go with it."""
    if leading == "remove_invalid_values":
        return [leading]  # what it puts for minus infinity makes others overflow, in transformers as well
    possible = {name for name, setting in SETTINGS.items() if do_sample or setting.greedy}
    possible -= {leading, "remove_invalid_values"}
    names = [leading, *random.sample(sorted(possible), random.choice((0, 0, 1, 2, 3, 5)))]
    watermarks = [name for name in names if name in _WATERMARKS]
    return [name for name in names if name not in watermarks[1:]]  # there is one argument for both


def _stop_tokens(random: Random, prompt: tuple[int, ...], vocabulary: int) -> int | list[int]:
    """The token 1, or a few more: of the prompt, which may well come again, and others."""
    if random.random() < 0.3:
        return 1
    return sorted({1, *(random.choice((random.choice(prompt), random.randrange(vocabulary))) for _ in range(3))})


def _random_drafting(random: Random) -> dict[str, Any]:
    return {
        "preset": random.choices(("auto", "paper", "jacobi"), weights=(4, 4, 1))[0],
        "step_budget": random.choice((None, None, 3, 20)),
        "window_size": random.randint(1, 10),
        "ngram_size": random.randint(2, 5),
        "guess_set_size": random.randint(1, 10),
        "pool_from_prompt": random.random() < 0.75,
        "pool_from_output": random.random() < 0.5,
        "block_size": random.randint(1, 10),
        "seed": random.randrange(1000),
    }


def _zoo_prompt(random: Random) -> tuple[int, ...]:
    """Random tokens, half of the time a short motif again and again."""
    motif = [random.randrange(4, VOCAB_SIZE) for _ in range(random.randint(1, 10))]
    return tuple(motif * random.choice((1, random.randint(2, 3))))


def _demo_prompt(random: Random) -> tuple[int, ...]:
    """A piece of the code that the demo model continues."""
    tokens = _demo()[1]
    start = random.randrange(len(tokens) - 8)
    return tokens[start : start + random.randint(8, 80)]


@cache
def _demo() -> tuple[PreTrainedModel, tuple[int, ...]]:
    """The demo model in float32, and the tokens of its prompt."""
    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = None  # as in the zoo: cases name their own
    return model.eval(), tuple(AutoTokenizer.from_pretrained(path, local_files_only=True)(DEMO_PROMPT).input_ids)


def _fitting(model: str, length: int, new_tokens: int) -> int:
    """`new_tokens` after `length` others, or as many as the model has positions for."""
    limit = None if model == DEMO else position_limit(model)
    return new_tokens if limit is None else min(new_tokens, limit - length)
