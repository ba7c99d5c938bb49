"""Running a case, and what came of it."""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fuzz.calls import Answer, call
from fuzz.case import APART, Case, Turn
from fuzz.doors import Doors, attempt, is_beginning
from fuzz.families import CannotBuild, build
from lookahead.errors import InvalidArgumentError, ModelChangedError, UnsupportedArgumentError, UnsupportedModelError

EQUAL, NOT_BUILT, REFUSED, BOTH_RAISE, NEAR_TIE, WRONG = (
    *("equal", "not built", "refused", "both raise", "near-tie", "WRONG"),
)
KINDS = (EQUAL, NOT_BUILT, REFUSED, BOTH_RAISE, NEAR_TIE, WRONG)

TIE_MARGIN = 1e-4
"""Relative to the largest logit: what rounding in float32 may bring about in a tiny model."""
REFUSALS = (UnsupportedModelError, UnsupportedArgumentError)
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
    with warnings.catch_warnings(record=True) as heard, Doors(model, reference, case.seed) as doors:
        warnings.simplefilter("always")
        outcome, tie = _compare(case, doors)
        stopped = [str(one.message) for one in heard if "drafting stopped" in str(one.message)]
    if stopped and outcome.kind == EQUAL:  # no drafter of a case is at fault
        return replace(outcome, kind=WRONG, detail=_one_line(stopped[0])), False
    return outcome, tie


def _compare(case: Case, doors: Doors) -> tuple[Outcome, bool]:
    ours: Answer | None = None
    plain: Answer | None = None
    refused: Outcome | None = None
    tokens = 0
    for number, turn in enumerate(case.turns):
        place = f"turn {number + 1}: " if len(case.turns) > 1 else ""
        before = plain
        if turn.cache in ("whole", "tail"):
            before = copy.deepcopy(plain)  # a call changes the cache that it is given
        judge = Judge(case, doors.reference, turn, before, place, tokens)
        try:
            if turn.change and turn.change_after is None:
                doors.change(turn.change)
            if turn.entry in APART and turn.ours:
                outcome, tie = _compare_rows(judge, doors)
                ours = plain = None
            else:
                found = attempt(call, doors.model, turn, ours, turn.ours)
                expected = None if isinstance(found, REFUSALS) else attempt(call, doors.reference, turn, plain, False)
                outcome, tie = judge.judge(found, expected)
                ours, plain = (None if isinstance(one, Exception) else one for one in (found, expected))
        except CannotBuild as missing:
            return Outcome(case, NOT_BUILT, str(missing)), False
        if outcome.kind == REFUSED and any(later.change and not later.cache for later in case.turns[number + 1 :]):
            refused = outcome
        elif outcome.kind != EQUAL or (plain is None and turn.entry not in APART):
            return outcome, tie
        tokens = outcome.tokens
    return refused or Outcome(case, EQUAL, tokens=tokens), False


def _compare_rows(judge: Judge, doors: Doors) -> tuple[Outcome, bool]:
    """The outcome of a turn of which each row is a call of its own: that of its worst row."""
    turn, case = judge.turn, judge.case
    rows = turn.rows
    changes = turn.change_after is not None
    olds = [attempt(call, doors.reference, row, None, False) for row in rows] if changes else []
    served = doors.serve(turn)
    outcomes = []
    for place, (row, one) in enumerate(zip(rows, served, strict=True)):
        begun = f"{judge.place}row {place}: "
        expected = olds[place] if one.early else attempt(call, doors.reference, row, None, False)
        if isinstance(one.answer, ModelChangedError) and changes and not one.early:
            told = olds[place]
            right = isinstance(told, Exception) or is_beginning(one.tokens, told)
            kind = REFUSED if right else WRONG
            outcomes.append((Outcome(case, kind, _reason(one.answer) if right else f"{begun}other tokens told"), False))
            continue
        outcome, tie = replace(judge, turn=row, before=None, place=begun).judge(one.answer, expected)
        if outcome.kind == REFUSED and not changes and turn.entry != "threads":
            again = replace(row, entry=turn.entry, mixed=False)
            alone = doors.serve(again)[0]
            if not isinstance(alone.answer, REFUSALS):
                outcome = replace(outcome, kind=WRONG, detail=f"{begun}not alone, but beside others {outcome.detail}")
        outcomes.append((outcome, tie))
    worst = max(outcomes, key=lambda one: (EQUAL, BOTH_RAISE, REFUSED, NOT_BUILT, WRONG).index(one[0].kind))
    told = sum(outcome.tokens - judge.tokens for outcome, _ in outcomes)
    return replace(worst[0], tokens=judge.tokens + told), worst[1]


@dataclass(frozen=True)
class Judge:
    """Says what came of one turn.

    Attributes:
        case: Of which it is one.
        reference: The model of transformers' answers.
        turn: The turn.
        before: The answer of the turn before.
        place: Where this is, for messages.
        tokens: New tokens compared before.
    """

    case: Case
    reference: PreTrainedModel
    turn: Turn
    before: Answer | None
    place: str
    tokens: int

    def judge(self, ours: Answer | Exception, plain: Answer | Exception | None) -> tuple[Outcome, bool]:
        """What it means that lookahead decoding and transformers gave these; and whether it may be by rounding."""
        if isinstance(ours, CannotBuild):
            raise ours
        if isinstance(ours, REFUSALS):
            return Outcome(self.case, REFUSED, _reason(ours), self.tokens), False
        if isinstance(ours, Exception):
            return self._after_error(ours, plain), False
        if isinstance(plain, Exception):
            return self._after_failure(ours, plain)
        assert plain is not None
        if ours.cache is None:  # of several rows on chains: both read the whole text anew
            plain.cache = None
        difference = _difference(ours, plain, self.turn)
        if difference:
            close = _is_close(self.reference, self.turn, self.before, ours, plain)
            return Outcome(self.case, WRONG, self.place + difference, self.tokens), close
        return Outcome(self.case, EQUAL, tokens=self.tokens + plain.new_tokens * len(plain.sequences)), False

    def _after_error(self, error: Exception, plain: Answer | Exception | None) -> Outcome:
        """What it means that ours raises `error`, where transformers raises as well or has an answer."""
        if isinstance(plain, Exception):
            return Outcome(self.case, BOTH_RAISE, f"plain {_reason(plain)} ours {_reason(error)}", self.tokens)
        if isinstance(error, InvalidArgumentError) and any(words in str(error) for words in JUSTIFIED):
            return Outcome(self.case, REFUSED, _reason(error), self.tokens)
        return Outcome(self.case, WRONG, f"{self.place}raises {_reason(error)} at {_where(error)}", self.tokens)

    def _after_failure(self, ours: Answer, failure: Exception) -> tuple[Outcome, bool]:
        """What it means that ours has an answer where transformers raises: right if it has the same up to there.

        At the end of a position table, transformers fails and loses the text, where ours stops.
        """
        # The end that is forced at the full length never came.
        changes = {"max_new_tokens": ours.new_tokens, "forced_eos_token_id": None}
        plain = attempt(call, self.reference, self.turn, self.before, False, changes)
        if isinstance(plain, Exception):
            return Outcome(self.case, BOTH_RAISE, f"plain alone: {_reason(failure)}"), False
        if torch.equal(ours.sequences, plain.sequences):
            return Outcome(self.case, EQUAL, tokens=plain.new_tokens * len(plain.sequences)), False
        detail = f"{self.place}plain raises, and before that {_difference(ours, plain, self.turn)}"
        return Outcome(self.case, WRONG, detail), False


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
    alone = len(plain.sequences) == 1 and ours.random_state is not None and plain.random_state is not None
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
    ends_unknown = turn.change == "end in the generation configuration"
    if ends_unknown or any(name in turn.settings for name in ("criterion", "stop_strings")):
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
    return _one_line(re.sub(r"(#, )+#", "#", text))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:220]


def _where(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/lookahead/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/lookahead/')[2]}:{frames[-1].lineno}" if frames else "?"
