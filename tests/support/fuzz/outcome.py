"""Running a case, and what came of it."""

from __future__ import annotations

import copy
import re
import traceback
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fuzz.calls import Answer, call
from fuzz.case import Case, Turn
from fuzz.families import CannotBuild, build
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError

EQUAL, NOT_BUILT, REFUSED, BOTH_RAISE, NEAR_TIE, WRONG = (
    *("equal", "not built", "refused", "both raise", "near-tie", "WRONG"),
)
KINDS = (EQUAL, NOT_BUILT, REFUSED, BOTH_RAISE, NEAR_TIE, WRONG)

TIE_MARGIN = 1e-4
"""Relative to the largest logit: what rounding in float32 may bring about in a tiny model."""
JUSTIFIED = ("is a prompt of",)
"""What an `InvalidArgumentError` may say where transformers has an answer: limits that the documentation names."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        case: The case.
        kind: One of `KINDS`.
        detail: Why it was refused, or what differs.
        tokens: New tokens that were compared.
    """

    case: Case
    kind: str
    detail: str = ""
    tokens: int = 0


def run_case(case: Case) -> Outcome:
    """Run `case`; in float32 again in float64 if something differs, to tell a bug from rounding."""
    outcome, tie = _run(case)
    if outcome.kind == WRONG and not case.double and tie:
        again, _ = _run(replace(case, double=True))
        if again.kind == EQUAL:
            return replace(outcome, kind=NEAR_TIE)
        return replace(outcome, detail=f"{outcome.detail} (float64: {again.kind} {again.detail})")
    return outcome


def _breaks_in_double(case: Case, model: PreTrainedModel) -> bool:
    """Whether transformers itself is wrong in float64: `eager` takes the softmax in float32, where the mask of a hidden
    token, the least float64, is minus infinity, and a row without anything else to see is NaN."""
    hidden = any(any(turn.padding) or turn.holes for turn in case.turns)
    return hidden and model.config.get_text_config(decoder=True)._attn_implementation == "eager"


def _run(case: Case) -> tuple[Outcome, bool]:
    """The outcome, and whether rounding could be the cause of what differs."""
    try:
        model = build(case.family, case.variant, case.attention, case.double)
        if case.double and _breaks_in_double(case, model):
            model = build(case.family, case.variant, case.attention)
    except CannotBuild as error:
        return Outcome(case, NOT_BUILT, str(error)), False
    return compare(case, model, copy.deepcopy(model))


def compare(case: Case, model: PreTrainedModel, reference: PreTrainedModel) -> tuple[Outcome, bool]:
    """Make the calls of `case` with `model`, and by transformers alone with `reference`, its copy."""
    ours: Answer | None = None
    plain: Answer | None = None
    tokens = 0
    for number, turn in enumerate(case.turns):
        place = f"turn {number + 1}: " if len(case.turns) > 1 else ""
        before = plain
        if turn.cache in ("whole", "tail"):
            before = copy.deepcopy(plain)  # a call changes the cache that it is given
        error: Exception | None = None
        failure: Exception | None = None
        try:
            ours = call(model, turn, ours, turn.ours)
        except CannotBuild as missing:
            return Outcome(case, NOT_BUILT, str(missing)), False
        except (UnsupportedModelError, UnsupportedArgumentError) as refusal:
            return Outcome(case, REFUSED, _reason(refusal), tokens), False
        except Exception as raised:
            error = raised
        try:
            plain = call(reference, turn, plain, ours=False)
        except Exception as raised:
            failure = raised
        if error is not None:
            return _after_error(case, error, failure, place, tokens), False
        assert ours is not None
        if ours.cache is None and plain is not None:  # of several rows on chains: both read the whole text anew
            plain.cache = None
        if failure is not None:
            return _after_failure(case, reference, turn, before, ours, failure, place)
        assert plain is not None
        difference = _difference(ours, plain, turn)
        if difference:
            return Outcome(case, WRONG, place + difference, tokens), _is_close(reference, turn, before, ours, plain)
        tokens += plain.new_tokens * len(plain.sequences)
    return Outcome(case, EQUAL, tokens=tokens), False


def _after_error(case: Case, error: Exception, failure: Exception | None, place: str, tokens: int) -> Outcome:
    """What it means that ours raises `error`, where transformers raises `failure` or has an answer."""
    if failure is not None:
        return Outcome(case, BOTH_RAISE, f"plain {_reason(failure)} ours {_reason(error)}", tokens)
    if isinstance(error, InvalidArgumentError) and any(words in str(error) for words in JUSTIFIED):
        return Outcome(case, REFUSED, _reason(error), tokens)
    return Outcome(case, WRONG, f"{place}raises {_reason(error)} at {_where(error)}", tokens)


def _after_failure(
    case: Case,
    reference: PreTrainedModel,
    turn: Turn,
    before: Answer | None,
    ours: Answer,
    failure: Exception,
    place: str,
) -> tuple[Outcome, bool]:
    """What it means that ours has an answer where transformers raises: right if it has the same up to there.

    At the end of a position table, transformers fails and loses the text, where ours stops.
    """
    try:
        # The end that is forced at the full length never came.
        changes = {"max_new_tokens": ours.new_tokens, "forced_eos_token_id": None}
        plain = call(reference, turn, before, ours=False, changes=changes)
    except Exception:
        return Outcome(case, BOTH_RAISE, f"plain alone: {_reason(failure)}"), False
    if torch.equal(ours.sequences, plain.sequences):
        return Outcome(case, EQUAL, tokens=plain.new_tokens * len(plain.sequences)), False
    return Outcome(case, WRONG, f"{place}plain raises, and before that {_difference(ours, plain, turn)}"), False


def _difference(ours: Answer, plain: Answer, turn: Turn) -> str:
    """What differs between two answers, in words; empty if nothing does."""
    if not torch.equal(ours.sequences, plain.sequences):
        if ours.sequences.shape != plain.sequences.shape:
            same = min(ours.sequences.shape[1], plain.sequences.shape[1])
            equal = torch.equal(ours.sequences[:, :same], plain.sequences[:, :same])
            begin = "the same until one ends" if equal else f"they part at {_parts(ours, plain)}"
            return f"{ours.new_tokens} new tokens instead of {plain.new_tokens}; {begin}"
        rows = (ours.sequences != plain.sequences).any(1).nonzero().flatten().tolist()
        return f"rows {rows} part at new token {_parts(ours, plain)} of {plain.new_tokens}"
    # The rows of a batch draw in another order than in transformers.
    alone = len(plain.sequences) == 1
    if turn.settings.get("do_sample") and alone and not torch.equal(ours.random_state, plain.random_state):
        return "another random state afterwards"
    if ours.streamed != plain.streamed:
        return "other values streamed"
    for name, one, two in (("scores", ours.scores, plain.scores), ("logits", ours.logits, plain.logits)):
        if (one is None) != (two is None) or len(one or ()) != len(two or ()):
            return f"{name}: {one and len(one)} instead of {two and len(two)}"
        for step, (first, second) in enumerate(zip(one or (), two or (), strict=True)):
            if first.shape != second.shape or first.dtype != second.dtype:
                return f"{name} of shape {tuple(first.shape)} {first.dtype}, not {tuple(second.shape)} {second.dtype}"
            running = _running(plain, turn, step)
            if not _same_scores(first[running], second[running]):
                return f"{name} at step {step} differ by {_largest(first[running], second[running]):.1e}"
    return ""


def _parts(ours: Answer, plain: Answer) -> int:
    same = min(ours.sequences.shape[1], plain.sequences.shape[1])
    differ = (ours.sequences[:, :same] != plain.sequences[:, :same]).any(0).nonzero()
    start = plain.sequences.shape[1] - plain.new_tokens
    return int(differ[0]) - start if len(differ) else same - start


def _running(plain: Answer, turn: Turn, step: int) -> Tensor:
    """Which rows had not ended before the token of `step`; what comes after nobody reads."""
    rows = len(plain.sequences)
    if rows == 1:
        return torch.ones(1, dtype=torch.bool)
    if any(name in turn.settings for name in ("criterion", "stop_strings")):
        return torch.zeros(rows, dtype=torch.bool)
    start = plain.sequences.shape[1] - plain.new_tokens
    ends = torch.tensor(turn.settings.get("eos", ()))
    return ~torch.isin(plain.sequences[:, start : start + step], ends).any(1)


def _same_scores(one: Tensor, two: Tensor) -> bool:
    if not torch.equal(torch.isfinite(one), torch.isfinite(two)):
        return False
    return _largest(one, two) <= TIE_MARGIN * max(1.0, _magnitude(two))


def _largest(one: Tensor, two: Tensor) -> float:
    finite = torch.isfinite(one) & torch.isfinite(two)
    return float((one[finite] - two[finite]).abs().max()) if finite.any() else 0.0


def _magnitude(scores: Tensor) -> float:
    finite = scores[torch.isfinite(scores)]
    return float(finite.abs().max()) if len(finite) else 0.0


def _is_close(reference: PreTrainedModel, turn: Turn, before: Answer | None, ours: Answer, plain: Answer) -> bool:
    """Whether a float32 comparison may have gone wrong by rounding: of two likeliest tokens, or at a cutoff."""
    if torch.equal(ours.sequences, plain.sequences):
        return ours.streamed == plain.streamed  # scores alone differ: float64 will tell
    if turn.settings.get("do_sample") and turn.settings.get("top_k") != 1:
        return True  # the race of a draw is not repeated here: float64 will tell
    step = _parts(ours, plain)
    keep = {"output_scores": True, "return_dict_in_generate": True}
    scores = call(reference, turn, before, ours=False, changes=keep).scores or ()
    place = plain.sequences.shape[1] - plain.new_tokens + step
    if step >= len(scores) or place >= ours.sequences.shape[1]:
        return False
    rows = ours.sequences[:, place] != plain.sequences[:, place]
    top = scores[step][rows].topk(2, -1).values
    return bool((top[:, 0] - top[:, 1] <= TIE_MARGIN * max(1.0, _magnitude(scores[step]))).all())


def _reason(error: Exception) -> str:
    """The error in one line, with its numbers taken out, so that the same reasons read the same."""
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", f"{type(error).__name__}: {error}")
    return " ".join(re.sub(r"(#, )+#", "#", text).split())[:220]


def _where(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/lookahead/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/lookahead/')[2]}:{frames[-1].lineno}" if frames else "?"
