"""One exactness case: the same model, prompt and limits, decoded by transformers and by lookahead decoding.

A case holds only plain numbers, so that its `repr` is all that is needed to run it again:

    >>> from exactness import Case, run_case
    >>> print(run_case(Case("llama", prompt=(5, 9, 5, 9))).report())
"""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

import lookahead
from drafting_options import config_of
from lookahead.config import PRESETS
from model_zoo import ARCHITECTURES, VOCAB_SIZE, build, greedy, position_limit

NEW_TOKENS = 60
"""Most tokens that a random case generates."""
NEAR_TIE = 1e-4
"""Gap between two logits below which rounding may decide; logits of the zoo differ by up to about 2e-5."""
MODEL_SEEDS = 4
"""How many sets of weights of each architecture are drawn from."""


PRESET_WEIGHTS = {"auto": 8, "paper": 8, "jacobi": 2, "token_recycling": 1, "context_matches": 1, "autoregressive": 1}
assert tuple(PRESET_WEIGHTS) == PRESETS


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        architecture: Name in the model zoo.
        prompt: Token ids of the prompt.
        model_seed: Seed of the model's weights.
        attention: Attention implementation.
        continued: How many tokens of the model's own greedy text are added to the prompt first. Text that has
            begun to repeat itself is where long candidates are accepted.
        padding: How many padding tokens, hidden by the attention mask, stand before the prompt.
        max_new_tokens: As for `generate`.
        eos_at: Places in the text that the model would write without a stop token, whose tokens are the
            stop tokens. Places beyond that text count from its beginning again.
        preset, window_size, ngram_size, guess_set_size, pool_from_prompt, pool_from_output, block_size,
            max_iterations, seed, engine, step_budget: As for `LookaheadConfig`.
    """

    architecture: str
    prompt: tuple[int, ...]
    model_seed: int = 0
    attention: str = "eager"
    continued: int = 0
    padding: int = 0
    max_new_tokens: int = 40
    eos_at: tuple[int, ...] = ()
    preset: str = "paper"
    window_size: int = 6
    ngram_size: int = 4
    guess_set_size: int = 6
    pool_from_prompt: bool = False
    pool_from_output: bool = False
    block_size: int = 8
    max_iterations: int | None = None
    seed: int = 0
    engine: str = "dynamic"
    step_budget: int | None = None

    def config(self) -> lookahead.LookaheadConfig:
        """The configuration of the lookahead run."""
        return config_of(
            preset=self.preset,
            window_size=self.window_size,
            ngram_size=self.ngram_size,
            guess_set_size=self.guess_set_size,
            pool_from_prompt=self.pool_from_prompt,
            pool_from_output=self.pool_from_output,
            block_size=self.block_size,
            max_iterations=self.max_iterations,
            seed=self.seed,
            engine=self.engine,
            step_budget=self.step_budget,
        )


@dataclass
class Outcome:
    """What came out of one case.

    Attributes:
        case: The case.
        prompt: The prompt that was used, with the continuation.
        eos: The stop tokens that were used.
        expected: New tokens of `model.generate`.
        got: New tokens of `lookahead.generate`.
        accepted_lengths: Tokens that each step of `lookahead.generate` added.
        error: The traceback, if `lookahead.generate` raised.
        gap: At the first difference, how far the model's logit of the expected token is above that of the
            token that came instead. Within `NEAR_TIE` rounding decided; otherwise there is a bug.
    """

    case: Case
    prompt: tuple[int, ...]
    eos: tuple[int, ...]
    expected: tuple[int, ...]
    got: tuple[int, ...] = ()
    accepted_lengths: list[int] = field(default_factory=list)
    error: str | None = None
    gap: float | None = None

    @property
    def matched(self) -> bool:
        """Whether both texts are the same, token by token."""
        return self.error is None and self.got == self.expected

    @property
    def step_compression(self) -> float:
        """Mean number of tokens that a step added."""
        return len(self.got) / len(self.accepted_lengths) if self.accepted_lengths else 0.0

    def first_difference(self) -> int | None:
        """Place of the first token that differs; None if one text only ends before the other."""
        pairs = enumerate(zip(self.expected, self.got, strict=False))
        return next((place for place, (expected, got) in pairs if expected != got), None)

    def report(self) -> str:
        """What happened; of a mismatch, with the line that runs the case again."""
        if self.matched:
            return f"matched: {len(self.got)} tokens, step compression {self.step_compression:.2f}"
        lines = ["MISMATCH", f"  from exactness import Case, run_case; print(run_case({self.case!r}).report())"]
        lines += [f"  prompt   {self.prompt}", f"  eos      {self.eos}"]
        lines += [f"  expected {self.expected}", f"  got      {self.got}"]
        if self.error is not None:
            return "\n".join([*lines, self.error])
        lines.append(f"  accepted {self.accepted_lengths}")
        lines.append(f"  first difference at new token {self.first_difference()}, logit gap {self.gap}")
        if self.gap is not None and abs(self.gap) < NEAR_TIE:
            lines.append("  a near-tie, which float32 rounding decides")
        return "\n".join(lines)


def run_case(case: Case) -> Outcome:
    """Decode `case` with `model.generate` and with `lookahead.generate`, and compare."""
    model = build(case.architecture, case.model_seed, case.attention)
    outcome = replace(_reference(case))
    arguments = _arguments(case, outcome.prompt, outcome.eos)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        _forget(model)
        try:
            output = lookahead.generate(
                model, lookahead_config=case.config(), return_dict_in_generate=True, **arguments
            )
        except Exception:  # a case that raises is a case that failed; the run goes on
            outcome.error = traceback.format_exc()
            return outcome
    outcome.got = tuple(output.sequences[0, arguments["input_ids"].shape[1] :].tolist())
    outcome.accepted_lengths = list(output.statistics.accepted_lengths)
    if not outcome.matched:
        outcome.gap = _logit_gap(model, outcome)
    return outcome


@lru_cache(maxsize=64)
def _reference(case: Case) -> Outcome:
    """The outcome with the text of `model.generate` alone; tests of faults run cases several times."""
    model = build(case.architecture, case.model_seed, case.attention)
    prompt = case.prompt + greedy(model, case.prompt, case.continued)
    eos = _stop_tokens(model, case, prompt)
    arguments = _arguments(case, prompt, eos)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        _forget(model)
        expected = model.generate(**arguments)[0, arguments["input_ids"].shape[1] :].tolist()
    return Outcome(case, prompt, eos, tuple(expected))


@torch.inference_mode()
def logit_difference(case: Case) -> float:
    """Largest difference between the logits that both runs of `case` chose their tokens from.

    Finer than comparing tokens: a wrong mask may change logits and yet no token.
    """
    model = build(case.architecture, case.model_seed, case.attention)
    arguments = _arguments(case, case.prompt + greedy(model, case.prompt, case.continued), ())
    arguments.update(return_dict_in_generate=True, output_logits=True)
    _forget(model)
    expected = model.generate(**arguments).logits
    _forget(model)
    got = lookahead.generate(model, lookahead_config=case.config(), **arguments).logits
    return float((torch.cat(expected) - torch.cat(got)).abs().max())


def random_case(random: Random, architecture: str | None = None) -> Case:
    """Draw a case, of `architecture` if given."""
    name = architecture or random.choice(sorted(ARCHITECTURES))
    prompt = _random_prompt(random)
    continued = random.choice((0, 0, random.randint(1, 24)))
    padding = random.choice((0, 0, 0, random.randint(1, 6)))
    return Case(
        architecture=name,
        prompt=prompt,
        model_seed=random.randrange(MODEL_SEEDS),
        attention=random.choice(ARCHITECTURES[name].attention),
        continued=continued,
        padding=padding,
        max_new_tokens=_fitting(name, len(prompt) + continued + padding, random.randint(20, NEW_TOKENS)),
        eos_at=tuple(random.randint(10, NEW_TOKENS) for _ in range(random.choice((0, 0, 0, 0, 1, 3)))),
        preset=random.choices(PRESETS, weights=tuple(PRESET_WEIGHTS.values()))[0],
        step_budget=random.choice((None, None, 2, 9, 33)),
        window_size=random.randint(1, 16),
        ngram_size=random.randint(2, 6),
        guess_set_size=random.randint(1, 16),
        pool_from_prompt=random.random() < 0.5,
        pool_from_output=random.random() < 0.5,
        block_size=random.randint(1, 16),
        max_iterations=random.choice((None, random.randint(1, 8))),
        seed=random.randrange(1000),
    )


@st.composite
def cases(draw: st.DrawFn, architecture: str | None = None) -> Case:
    """Hypothesis strategy for cases, of `architecture` if given; shrinks to short texts and small windows."""
    name = architecture or draw(st.sampled_from(sorted(ARCHITECTURES)))
    motif = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12))
    prompt = tuple(motif * draw(st.integers(1, 3)))
    continued = draw(st.integers(0, 16))
    padding = draw(st.integers(0, 4))
    return Case(
        architecture=name,
        prompt=prompt,
        model_seed=draw(st.integers(0, MODEL_SEEDS - 1)),
        attention=draw(st.sampled_from(ARCHITECTURES[name].attention)),
        continued=continued,
        padding=padding,
        max_new_tokens=_fitting(name, len(prompt) + continued + padding, draw(st.integers(1, NEW_TOKENS))),
        eos_at=tuple(draw(st.lists(st.integers(0, NEW_TOKENS), max_size=3))),
        preset=draw(st.sampled_from(PRESETS)),
        step_budget=draw(st.sampled_from((None, 2, 9, 33))),
        window_size=draw(st.integers(1, 16)),
        ngram_size=draw(st.integers(2, 6)),
        guess_set_size=draw(st.integers(1, 16)),
        pool_from_prompt=draw(st.booleans()),
        pool_from_output=draw(st.booleans()),
        block_size=draw(st.integers(1, 16)),
        max_iterations=draw(st.none() | st.integers(1, 8)),
        seed=draw(st.integers(0, 1000)),
    )


def _random_prompt(random: Random) -> tuple[int, ...]:
    """Random tokens, half of the time a short motif again and again."""
    motif = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 12))]
    return tuple(motif * random.choice((1, random.randint(2, 3))))


def _fitting(architecture: str, length: int, new_tokens: int) -> int:
    """`new_tokens` after `length` others, or as many as the model has positions for."""
    limit = position_limit(architecture)
    return new_tokens if limit is None else min(new_tokens, limit - length)


def _forget(model: PreTrainedModel) -> None:
    """Make the model forget the texts before: dynamic RoPE keeps the frequencies of the longest one it read.

    Without this `model.generate` itself does not write the same text twice. A short pass resets them.
    """
    model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)


def _stop_tokens(model: PreTrainedModel, case: Case, prompt: tuple[int, ...]) -> tuple[int, ...]:
    if not case.eos_at:
        return ()
    text = greedy(model, prompt, case.max_new_tokens)
    return tuple(sorted({text[place % len(text)] for place in case.eos_at}))


def _arguments(case: Case, prompt: tuple[int, ...], eos: tuple[int, ...]) -> dict[str, Any]:
    """What both runs are called with."""
    arguments: dict[str, Any] = {
        "input_ids": torch.tensor([(0,) * case.padding + prompt]),
        "attention_mask": torch.tensor([(0,) * case.padding + (1,) * len(prompt)]),
        "max_new_tokens": case.max_new_tokens,
        "do_sample": False,
    }
    if eos:
        arguments["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
        arguments["pad_token_id"] = 0
    return arguments


@torch.inference_mode()
def _logit_gap(model: PreTrainedModel, outcome: Outcome) -> float | None:
    """The gap at the first difference, from one plain forward pass; None if a text only ends elsewhere."""
    place = outcome.first_difference()
    if place is None:
        return None
    text = outcome.prompt + outcome.expected[:place]
    logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
    return float(logits[outcome.expected[place]] - logits[outcome.got[place]])
