"""One case of a batch: ragged prompts, decoded by transformers, by lookahead decoding, and by the latter row by row.

The rows of a batch get ahead of each other, hold trees of different sizes and end at different places; none of them
may notice. What is compared, where the case asks for it: the texts, with their padding; what a streamer is given;
scores and logits; and the texts that each row has when it is decoded alone.

A case holds only plain values, so that its `repr` is all that is needed to run it again:

    >>> from batch_exactness import BatchCase, run_batch_case
    >>> print(run_batch_case(BatchCase("llama", ((5, 9, 5, 9), (7,)))).report())
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import lookahead
from drafting_options import config_of
from exactness import MODEL_SEEDS, NEAR_TIE
from lookahead.backends.transformers import TRANSFORMERS
from model_zoo import ARCHITECTURES, ROPE_CONTEXT, VOCAB_SIZE, build, position_limit
from sampling_exactness import SETTINGS, prepared

NEW_TOKENS = 32
"""Most tokens that a random case adds to each row."""
MOST_ROWS = 5
PROCESSORS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "prefix_allowed_tokens_fn",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "min_new_tokens",
    "forced_eos_token_id",
    "green list watermark",
    "SynthID watermark",
)
"""Settings of `sampling_exactness` that random cases have; several hold something for each row."""


@dataclass(frozen=True)
class BatchCase:
    """One comparison.

    Attributes:
        architecture: Name in the model zoo.
        prompts: Token ids of each row's prompt; they are padded on the left to the longest.
        model_seed: Seed of the model's weights.
        attention: Attention implementation.
        max_new_tokens: As for `generate`.
        eos: Stop tokens; none if empty.
        ends: Tokens after which a criterion of the user's own ends a row.
        settings: Further arguments of `generate`, as in `SamplingCase`; `parity` is a processor of the user's own.
        streamed: Compare what a streamer is given.
        collected: Compare scores and logits.
        returns: `num_return_sequences`. With more than one, tokens are sampled, from the likeliest one alone if
            `sampling` says nothing else.
        sampling: Arguments of `generate` to sample with; then see `run_sampled_case`.
        seed: Seed of the draws.
        drafting: Arguments of `LookaheadConfig`.
    """

    architecture: str
    prompts: tuple[tuple[int, ...], ...]
    model_seed: int = 0
    attention: str = "eager"
    max_new_tokens: int = 24
    eos: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    streamed: bool = False
    collected: bool = False
    returns: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    drafting: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Length of the prompts with their padding."""
        return max(map(len, self.prompts))

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The prompt of each row of the output."""
        return [prompt for prompt in self.prompts for _ in range(self.returns)]


@dataclass
class BatchOutcome:
    """What came out of one case.

    Attributes:
        case: The case.
        problems: What was not as it must be; empty if all was.
        checks: How many comparisons were made.
        tokens: New tokens, over all rows.
        accepted_lengths: Tokens that each step of each row added.
    """

    case: BatchCase
    problems: list[str] = field(default_factory=list)
    checks: int = 0
    tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)

    @property
    def matched(self) -> bool:
        """Whether all comparisons held."""
        return not self.problems

    def check(self, holds: bool, problem: str) -> None:
        """Count a comparison, and keep the problem if it does not hold."""
        self.checks += 1
        if not holds:
            self.problems.append(problem)

    def report(self) -> str:
        """What happened; of a mismatch, with the line that runs the case again."""
        if self.matched:
            return f"matched: {self.checks} checks, {self.tokens} tokens in {len(self.accepted_lengths)} steps of rows"
        again = f"  from batch_exactness import *; print(run_batch_case({self.case!r}).report())"
        return "\n".join(["MISMATCH", again, *(f"  {problem}" for problem in self.problems)])


class Collector(BaseStreamer):  # type: ignore[misc]
    """Keeps what a streamer is given."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


class EndsAfter(StoppingCriteria):  # type: ignore[misc]
    """A user's own criterion: a row ends with one of these tokens. It knows nothing of end-of-sequence tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self._tokens)


class Parity(LogitsProcessor):  # type: ignore[misc]
    """A user-defined processor that treats each row by itself: holds down tokens as odd or even as the last one."""

    def __init__(self, strength: float) -> None:
        self._strength = strength

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        same = (torch.arange(scores.shape[1]) + input_ids[:, -1:]) % 2 == 0
        return scores - self._strength * same  # writing into them would reach the `logits` that transformers returns


def run_batch_case(case: BatchCase) -> BatchOutcome:
    """Decode `case` in the three ways, and compare."""
    if case.sampling:
        return run_sampled_case(case)
    outcome = BatchOutcome(case)
    model = build(case.architecture, case.model_seed, case.attention)
    plain_columns, columns, packed_columns = Collector(), Collector(), Collector()
    expected = _run(model.generate, case, plain_columns)
    try:
        got = _run(_lookahead(model, case), case, columns)
        # A call that leaves no cache need not pad its rows.
        packed = _run(_lookahead(model, case), _without_scores(case), packed_columns, return_dict_in_generate=False)
        alone = [_run_alone(model, case, row) for row in range(len(case.rows))]
    except Exception:  # a case that raises is a case that failed; the run goes on
        outcome.problems.append(traceback.format_exc())
        return outcome
    outcome.accepted_lengths = list(got.statistics.accepted_lengths)
    outcome.tokens = got.statistics.tokens
    shape, wanted = tuple(got.sequences.shape), tuple(expected.sequences.shape)
    outcome.check(shape == wanted, f"texts of shape {shape}, expected {wanted}")
    if shape[0] != wanted[0]:
        return outcome
    _compare_texts(outcome, model, expected.sequences, got.sequences)
    _compare_texts(outcome, model, expected.sequences, packed)
    outcome.check(packed_columns.puts == columns.puts, f"without a cache streamed {packed_columns.puts}")
    _compare_rows(outcome, model, got.sequences, alone)
    lengths = _lengths(case, got.sequences, alone)
    outcome.check(outcome.tokens == sum(lengths), f"counted {outcome.tokens} tokens, not {sum(lengths)}")
    if case.streamed:
        outcome.check(columns.puts == plain_columns.puts, f"streamed {columns.puts}, expected {plain_columns.puts}")
        outcome.check(columns.ended == 1, f"the streamer was ended {columns.ended} times")
    if case.collected:
        for name in ("scores", "logits"):
            _compare_collected(outcome, name, expected[name], got[name], lengths)
    return outcome


def _without_scores(case: BatchCase) -> BatchCase:
    return replace(case, collected=False)


def run_sampled_case(case: BatchCase) -> BatchOutcome:
    """Sample the rows of `case` with transformers and, padded and packed, with lookahead decoding, under one seed.

    Texts, scores and what a streamer is given must be the same, and so must the random state afterwards.
    """
    outcome = BatchOutcome(case)
    model = build(case.architecture, case.model_seed, case.attention)
    plain_columns, columns, packed_columns = Collector(), Collector(), Collector()
    expected, state = _seeded(model.generate, case, plain_columns)
    try:
        got, state_after = _seeded(_lookahead(model, case), case, columns)
        packed, packed_state = _seeded(
            _lookahead(model, case), _without_scores(case), packed_columns, return_dict_in_generate=False
        )
    except Exception:
        outcome.problems.append(traceback.format_exc())
        return outcome
    outcome.accepted_lengths, outcome.tokens = list(got.statistics.accepted_lengths), got.statistics.tokens
    for name, texts in (("padded", got.sequences), ("packed", packed)):
        same = torch.equal(expected.sequences, texts)
        outcome.check(same, f"{name}: {'' if same else _sampled_gap(case, model, expected.sequences, texts)}")
    outcome.check(torch.equal(state, state_after), "another random state after padded rows")
    outcome.check(torch.equal(state, packed_state), "another random state after packed rows")
    if case.streamed:
        outcome.check(columns.puts == plain_columns.puts, f"streamed {columns.puts}, expected {plain_columns.puts}")
        outcome.check(packed_columns.puts == plain_columns.puts, f"packed rows streamed {packed_columns.puts}")
    if case.collected and not outcome.problems:
        lengths = [_sampled_length(case, row) for row in got.sequences[:, case.width :].tolist()]
        for name in ("scores", "logits"):
            _compare_collected(outcome, name, expected[name], got[name], lengths)
    return outcome


def _seeded(
    generate: Callable[..., Any], case: BatchCase, streamer: Collector, **more: Any
) -> tuple[Any, torch.Tensor]:
    """What `generate` gives under the seed of `case`, and the random state after it."""
    torch.manual_seed(case.seed)
    return _run(generate, case, streamer, **more), torch.get_rng_state()


def _sampled_length(case: BatchCase, tokens: list[int]) -> int:
    """New tokens of a row up to the one that ended it; all, where rows go on after their end."""
    stops = (*case.eos, *case.ends) if case.eos else ()
    return next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))


def _sampled_gap(case: BatchCase, model: PreTrainedModel, expected: torch.Tensor, got: torch.Tensor) -> str:
    """The first difference of each row, and how far apart the race of scores and noise is there."""
    scores = _seeded(model.generate, case, Collector(), output_scores=True)[0].scores
    torch.manual_seed(case.seed)
    races = [score.log_softmax(-1) - torch.empty_like(score).exponential_().log() for score in scores]
    lines = []
    for row, (wanted, text) in enumerate(zip(expected[:, case.width :], got[:, case.width :], strict=True)):
        if wanted.tolist() != text.tolist():
            gap = _gap(wanted.tolist(), text.tolist(), lambda place, row=row: races[place][row])
            lines.append(f"row {row}: expected {wanted.tolist()}\n         got      {text.tolist()}\n    {gap}")
    return "\n".join(lines)


def _compare_texts(outcome: BatchOutcome, model: PreTrainedModel, expected: torch.Tensor, got: torch.Tensor) -> None:
    if torch.equal(expected, got):
        outcome.check(True, "")
        return
    case = outcome.case
    scores = _run(model.generate, case, Collector(), output_scores=True).scores
    width = case.width
    for row, (wanted, text) in enumerate(zip(expected[:, width:].tolist(), got[:, width:].tolist(), strict=True)):
        gap = _gap(wanted, text, lambda place, row=row: scores[place][row])
        outcome.check(wanted == text, f"row {row}: expected {wanted}\n         got      {text}\n    {gap}")


def _compare_rows(
    outcome: BatchOutcome, model: PreTrainedModel, got: torch.Tensor, alone: list[tuple[int, ...]]
) -> None:
    """Each row must be what it is alone, and nothing but padding after that, unless it goes on without a stop token."""
    case = outcome.case
    for row, wanted in enumerate(alone):
        text = got[row, case.width :].tolist()
        head, rest = text[: len(wanted)], text[len(wanted) :]
        if list(wanted) != head:
            scores = _run_alone(model, case, row, scores=True)
            gap = _gap(list(wanted), head, lambda place, scores=scores: scores[place][0])
            outcome.check(False, f"row {row}: alone {list(wanted)}\n         got   {head}\n    {gap}")
        else:
            outcome.check(not case.eos or not any(rest), f"row {row} goes on with {rest} after its end")


def _gap(expected: list[int], got: list[int], scores: Callable[[int], torch.Tensor]) -> str:
    """How far the score of the expected token is above the other at the first difference, in words."""
    pairs = enumerate(zip(expected, got, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), None)
    if place is None:
        return "one text ends before the other"
    there = scores(place)
    gap = float(there[expected[place]] - there[got[place]])
    verdict = ", a near-tie, which float32 rounding decides" if abs(gap) < NEAR_TIE else ""
    return f"first difference at new token {place}, gap between the scores {gap}{verdict}"


def _lengths(case: BatchCase, got: torch.Tensor, alone: list[tuple[int, ...]]) -> list[int]:
    """New tokens of each row that the target named: all, where rows go on after their end."""
    return [len(tokens) if case.eos else got.shape[1] - case.width for tokens in alone]


def _compare_collected(
    outcome: BatchOutcome,
    name: str,
    expected: tuple[torch.Tensor, ...],
    got: tuple[torch.Tensor, ...],
    lengths: list[int],
) -> None:
    """Scores or logits: the same shapes; the same numbers, but for rounding, where a row has not ended; zero after.

    An infinite score, of a token that is ruled out, must be as infinite.
    """
    shapes, wanted = [tuple(part.shape) for part in got], [tuple(part.shape) for part in expected]
    outcome.check(shapes == wanted, f"{name} of shapes {shapes}, expected {wanted}")
    if shapes != wanted:
        return
    ours, theirs = torch.stack(got), torch.stack(expected)
    close = torch.isclose(ours, theirs, atol=2e-4, rtol=1e-4)
    if name == "scores" and "synthid" in outcome.case.settings:
        close |= _next_to_impossible(ours, theirs)
    unfinished = torch.tensor([[place < length for length in lengths] for place in range(len(got))])
    far = (unfinished & ~close.all(dim=-1)).nonzero().tolist()
    outcome.check(not far, f"{name} differ at (token, row) {far}")
    outcome.check(not ours[~unfinished].any(), f"{name} of rows that have ended must be zero")


def _next_to_impossible(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Where SynthID may make much of rounding: its factors cancel nearly, and the logarithm shows how nearly."""
    improbable = torch.maximum(ours.log_softmax(dim=-1), theirs.log_softmax(dim=-1)) < -12
    return improbable & (ours.isinf() == theirs.isinf())


# --- running --------------------------------------------------------------------------------------------------


def _lookahead(model: PreTrainedModel, case: BatchCase) -> Callable[..., Any]:
    config = config_of(**case.drafting)
    return lambda **arguments: lookahead.generate(model, lookahead_config=config, **arguments)


def _run(generate: Callable[..., Any], case: BatchCase, streamer: Collector, **more: Any) -> Any:
    arguments = {**_inputs(case), **_arguments(case), "num_return_sequences": case.returns}
    if case.streamed:
        arguments["streamer"] = streamer
    if case.collected:
        arguments.update(output_scores=True, output_logits=True)
    return _quietly(generate, **{**arguments, **more})


def _run_alone(model: PreTrainedModel, case: BatchCase, row: int, scores: bool = False) -> Any:
    """New tokens of one row that is decoded by itself, or the scores they were chosen by."""
    inputs = {name: values[row // case.returns : row // case.returns + 1] for name, values in _inputs(case).items()}
    if not case.settings:  # processors look at padding as well
        is_text = inputs["attention_mask"].bool()
        inputs = {name: values[is_text][None] for name, values in inputs.items()}
    arguments = {**inputs, **_arguments(case, row), "output_scores": scores}
    output = _quietly(_lookahead(model, case), **arguments)
    return output.scores if scores else tuple(output.sequences[0, inputs["input_ids"].shape[1] :].tolist())


def _quietly(generate: Callable[..., Any], **arguments: Any) -> Any:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        return generate(**{"return_dict_in_generate": True} | arguments)


def _inputs(case: BatchCase) -> dict[str, torch.Tensor]:
    paddings = [case.width - len(prompt) for prompt in case.prompts]
    rows = list(zip(paddings, case.prompts, strict=True))
    return {
        "input_ids": torch.tensor([(0,) * padding + prompt for padding, prompt in rows]),
        "attention_mask": torch.tensor([(0,) * padding + (1,) * len(prompt) for padding, prompt in rows]),
    }


def _arguments(case: BatchCase, row: int | None = None) -> dict[str, Any]:
    """All arguments but the prompts, for the whole batch or for one row alone."""
    arguments: dict[str, Any] = {"max_new_tokens": case.max_new_tokens, "do_sample": False, "pad_token_id": 0}
    if case.returns > 1 or case.sampling:
        arguments.update(do_sample=True, **(case.sampling or {"top_k": 1}))
    if case.eos:
        arguments["eos_token_id"] = list(case.eos)
    if case.ends:
        arguments["stopping_criteria"] = [EndsAfter(case.ends)]
    for name, value in case.settings.items():
        arguments.update({"logits_processor": [Parity(value)]} if name == "parity" else prepared(name, value))
    if row is not None and "prefix_allowed_tokens_fn" in arguments:
        allowed = arguments["prefix_allowed_tokens_fn"]
        number = row // case.returns if TRANSFORMERS >= (5, 24) else row  # of the prompt, or of the text
        arguments["prefix_allowed_tokens_fn"] = lambda _, text: allowed(number, text)
    return arguments


# --- drawing cases --------------------------------------------------------------------------------------------


def random_batch_case(random: Random, architecture: str | None = None) -> BatchCase:
    """Draw a case, of `architecture` if given."""
    name = architecture or random.choice(sorted(ARCHITECTURES))
    longest = random.randint(1, 20)
    prompts = tuple(_random_prompt(random, longest) for _ in range(random.randint(2, MOST_ROWS)))
    eos = _some_tokens(random) if random.random() < 0.5 else ()
    return BatchCase(
        architecture=name,
        prompts=prompts,
        model_seed=random.randrange(MODEL_SEEDS),
        attention=random.choice(ARCHITECTURES[name].attention),
        max_new_tokens=_fitting(name, longest, random.randint(6, NEW_TOKENS)),
        eos=eos,
        ends=_some_tokens(random) if random.random() < 0.25 else (),
        settings=_random_settings(random, prompts, eos) if random.random() < 0.5 else {},
        streamed=random.random() < 0.3,
        collected=random.random() < 0.3,
        returns=random.choice((1, 1, 1, 1, 2, 3)),
        drafting=_random_drafting(random),
    )


def random_sampled_case(random: Random, architecture: str | None = None) -> BatchCase:
    """Draw a case whose rows are sampled, of `architecture` if given."""
    case = random_batch_case(random, architecture)
    sampling = {"temperature": random.choice((0.3, 0.7, 1.0, 1.5)), "top_k": random.choice((0, 0, 5, 20))}
    sampling |= random.choice(({}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.8}))
    return replace(case, sampling=sampling, seed=random.randrange(1000))


def _random_prompt(random: Random, longest: int) -> tuple[int, ...]:
    """Up to `longest` random tokens, half of the time a short motif again and again."""
    length = random.randint(1, longest)
    motif = random.choices(range(1, VOCAB_SIZE), k=random.choice((length, random.randint(1, 4))))
    return tuple((motif * length)[:length])


def _some_tokens(random: Random) -> tuple[int, ...]:
    """Tokens to stop at, of which some rows will meet one soon, and others late or never."""
    return tuple(sorted(random.sample(range(1, VOCAB_SIZE), random.randint(1, 6))))


def _random_settings(random: Random, prompts: tuple[tuple[int, ...], ...], eos: tuple[int, ...]) -> dict[str, Any]:
    possible = [name for name in PROCESSORS if eos or not SETTINGS[name].needs_eos]
    settings: dict[str, Any] = {"parity": round(random.uniform(0.5, 3.0), 2)} if random.random() < 0.2 else {}
    every_token = tuple(token for prompt in prompts for token in prompt)
    for name in random.sample(possible, random.choice((1, 1, 2, 3))):
        settings.update(SETTINGS[name].draw(random, every_token, VOCAB_SIZE))
    if "green_list" in settings:
        settings.pop("synthid", None)  # there is one argument for both
    return settings


def _random_drafting(random: Random) -> dict[str, Any]:
    return {
        "preset": random.choices(("auto", "paper", "jacobi", "autoregressive"), weights=(4, 4, 1, 1))[0],
        "step_budget": random.choice((None, None, 3, 20)),
        "window_size": random.randint(1, 10),
        "ngram_size": random.randint(2, 5),
        "guess_set_size": random.randint(1, 10),
        "pool_from_prompt": random.random() < 0.75,
        "pool_from_output": random.random() < 0.75,
        "share_pool": random.random() < 0.5,
        "block_size": random.randint(1, 10),
        "seed": random.randrange(1000),
    }


def _fitting(name: str, length: int, new_tokens: int) -> int:
    """`new_tokens` after `length` others, or as many as leave the positions of the model as they are.

    Where RoPE depends on the length of the longest row, a row of a batch is not what it is alone, in transformers as
    here; such models are compared only as long as they have not come there.
    """
    limit = ROPE_CONTEXT if "rope_parameters" in ARCHITECTURES[name].overrides else position_limit(name)
    return new_tokens if limit is None else min(new_tokens, limit + 1 - length)  # the last token is not read
