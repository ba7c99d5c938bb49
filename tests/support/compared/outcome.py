"""Run a case, and judge its outcome."""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compared.calls import Answer, call
from compared.case import APART, Case, Turn
from compared.doors import Doors, Served, attempt, is_beginning
from compared.models import forget, load
from lookahead.errors import InvalidArgumentError, ModelChangedError, UnsupportedArgumentError, UnsupportedModelError
from tiny.families import CannotBuild

KINDS = ("equal", "not built", "refused", "both raise", "near-tie", "WRONG")
EQUAL, NOT_BUILT, REFUSED, BOTH_RAISE, NEAR_TIE, WRONG = KINDS

TIE_MARGIN = 1e-4
"""Largest rounding error of float32 in a tiny model, relative to the largest logit."""
IMPROBABLE = -12.0
"""Log-probability below which SynthID amplifies rounding errors, as its factors nearly cancel."""
REFUSALS = (UnsupportedModelError, UnsupportedArgumentError)
JUSTIFIED = ("is a prompt of",)
"""Documented limits: parts of `InvalidArgumentError` messages that are right even if transformers has an answer."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        case: The case.
        kind: One of `KINDS`.
        detail: Reason of the refusal, or the difference.
        tokens: Number of compared new tokens.
        answers: Answers of lookahead decoding in the judged turns, or of transformers if it made the call.
        counts: Counts of events in an `Engine`.
    """

    case: Case
    kind: str
    detail: str = ""
    tokens: int = 0
    answers: list[Answer] = field(default_factory=list, compare=False, repr=False)
    counts: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def answer(self) -> Answer:
        """The first answer."""
        return self.answers[0]

    @property
    def accepted(self) -> list[int]:
        """Tokens added by each step, of all answers."""
        return [length for answer in self.answers for length in answer.accepted]


def run_case(case: Case) -> Outcome:
    """Run `case`; if a float32 result differs, run it again in float64 to distinguish bugs from rounding."""
    outcome, tie = _run(case)
    if outcome.kind == WRONG and not case.double and tie:
        again, _ = _run(replace(case, double=True))
        if again.kind == EQUAL:
            return replace(outcome, kind=NEAR_TIE)
        return replace(outcome, detail=f"{outcome.detail} (float64: {again.kind} {again.detail})")
    return outcome


def _run(case: Case) -> tuple[Outcome, bool]:
    """Return the outcome, and whether rounding could cause a difference."""
    try:
        model, reference = load(case)
    except CannotBuild as error:
        return Outcome(case, NOT_BUILT, str(error)), False
    return compare(case, model, reference)


def compare(case: Case, model: PreTrainedModel, reference: PreTrainedModel) -> tuple[Outcome, bool]:
    """Make the calls of `case` with `model`, and with only transformers on `reference`, a copy or the same model."""
    with warnings.catch_warnings(record=True) as caught, Doors(model, reference, case.seed, case.engine) as doors:
        warnings.simplefilter("always")
        outcome, tie = _compare_requests(case, doors) if case.engine else _compare(case, doors)
        stopped = [str(one.message) for one in caught if "drafting stopped" in str(one.message)]
    outcome = replace(outcome, counts=doors.counts)
    flaws = [*map(_one_line, stopped), *doors.flaws]
    if flaws and outcome.kind == EQUAL:  # drafters of cases must not fail
        return replace(outcome, kind=WRONG, detail=flaws[0]), False
    return outcome, tie


def _made(doors: Doors, turn: Turn, earlier: Answer | None, ours: bool) -> Answer | Exception:
    """Return the result of a call; a shared model is reset before it."""
    model = doors.model if ours else doors.reference
    if doors.model is doors.reference:
        forget(model)
    return attempt(call, model, turn, earlier, ours and turn.ours)


def _compare(case: Case, doors: Doors) -> tuple[Outcome, bool]:
    ours: Answer | None = None
    plain: Answer | None = None
    refused: Outcome | None = None
    tokens, answers = 0, list[Answer]()
    for number, turn in enumerate(case.turns):
        place = f"turn {number + 1}: " if len(case.turns) > 1 else ""
        before = plain
        if turn.cache in ("whole", "tail"):
            before = copy.deepcopy(plain)  # a call changes its cache
        judge = Judge(case, doors.reference, turn, before, place, tokens)
        try:
            if turn.change and turn.change_after is None:
                doors.change(turn.change)
            if turn.entry in APART and turn.ours:
                outcome, tie = _compare_rows(judge, doors)
                ours = plain = None
            else:
                answer = _made(doors, turn, ours, True)
                expected = None if isinstance(answer, REFUSALS) else _made(doors, turn, plain, False)
                outcome, tie = judge.judge(answer, expected)
                ours, plain = (None if isinstance(one, Exception) else one for one in (answer, expected))
                answers += [replace(ours, scores=None, logits=None, cache=None)] if ours else []
        except CannotBuild as missing:
            return Outcome(case, NOT_BUILT, str(missing)), False
        if outcome.kind == REFUSED and any(later.change and not later.cache for later in case.turns[number + 1 :]):
            refused = outcome
        elif outcome.kind != EQUAL or (plain is None and turn.entry not in APART):
            return replace(outcome, answers=answers), tie
        tokens = outcome.tokens
    return refused or Outcome(case, EQUAL, tokens=tokens, answers=answers), False


def _compare_rows(judge: Judge, doors: Doors) -> tuple[Outcome, bool]:
    """Return the worst outcome of a turn with a call per row."""
    turn = judge.turn
    rows = turn.rows
    changes = turn.change_after is not None
    olds = [_made(doors, row, None, False) for row in rows] if changes else []
    served = doors.serve(turn)
    outcomes = []
    for place, (row, one) in enumerate(zip(rows, served, strict=True)):
        begun = f"{judge.place}row {place}: "
        expected = olds[place] if one.early else _made(doors, row, None, False)
        if isinstance(one.answer, ModelChangedError) and changes and not one.early:
            right = isinstance(olds[place], Exception) or is_beginning(one.tokens, olds[place])
            kind = REFUSED if right else WRONG
            detail = _reason(one.answer) if right else f"{begun}other tokens told"
            outcomes.append((Outcome(judge.case, kind, detail), False))
            continue
        outcome, tie = replace(judge, turn=row, before=None, place=begun).judge(one.answer, expected)
        if outcome.kind == REFUSED and not changes and turn.entry != "threads":
            again = replace(row, entry=turn.entry, mixed=False, arrival=0)
            alone = doors.serve(again)[0]
            if not isinstance(alone.answer, REFUSALS):
                outcome = replace(outcome, kind=WRONG, detail=f"{begun}not alone, but beside others {outcome.detail}")
        outcomes.append((outcome, tie))
    return _worst(outcomes, judge.tokens)


def _compare_requests(case: Case, doors: Doors) -> tuple[Outcome, bool]:
    """Return the worst outcome of a case with a request per turn, all to one `Engine`."""
    served = doors.serve(replace(case.turns[0], entry="engine"), list(case.turns))
    outcomes = []
    for number, (turn, one) in enumerate(zip(case.turns, served, strict=True)):
        judge = Judge(case, doors.reference, turn, None, f"request {number}: ", 0)
        outcomes.append(_judge_request(judge, one, _made(doors, turn, None, False)))
    return _worst(outcomes)


def _judge_request(judge: Judge, one: Served, expected: Answer | Exception) -> tuple[Outcome, bool]:
    if judge.turn.cancelled is None or not isinstance(one.answer, CancelledError):
        return judge.judge(one.answer, expected)
    right = isinstance(expected, Answer) and is_beginning(one.tokens, expected)
    detail = "" if right else f"{judge.place}cancelled after other tokens"
    return Outcome(judge.case, EQUAL if right else WRONG, detail, len(one.tokens)), False


def _worst(outcomes: list[tuple[Outcome, bool]], before: int = 0) -> tuple[Outcome, bool]:
    """Return the worst outcome, with the tokens of all; each outcome's count already includes `before`."""
    worst = max(outcomes, key=lambda one: (EQUAL, BOTH_RAISE, REFUSED, NOT_BUILT, WRONG).index(one[0].kind))
    return replace(worst[0], tokens=before + sum(outcome.tokens - before for outcome, _ in outcomes)), worst[1]


@dataclass(frozen=True)
class Judge:
    """Judge the outcome of one turn.

    Attributes:
        case: The case of the turn.
        reference: The model of transformers' answers.
        turn: The turn.
        before: The answer of the turn before.
        place: Name of the turn and row, for messages.
        tokens: Number of new tokens compared before.
    """

    case: Case
    reference: PreTrainedModel
    turn: Turn
    before: Answer | None
    place: str
    tokens: int

    def judge(self, ours: Answer | Exception, plain: Answer | Exception | None) -> tuple[Outcome, bool]:
        """Return the outcome for the answers of both, and whether rounding could cause a difference."""
        if isinstance(ours, CannotBuild):
            raise ours
        if isinstance(ours, REFUSALS):
            return Outcome(self.case, REFUSED, _reason(ours), self.tokens), False
        if isinstance(ours, Exception):
            return self._after_error(ours, plain), False
        if isinstance(plain, Exception):
            return self._after_failure(ours, plain)
        assert plain is not None
        if ours.cache is None:  # several rows without trees return no cache: both prefill the next turn's whole text
            plain.cache = None
        description = difference(ours, plain, self.turn)
        if description:
            close = _is_close(self.reference, self.turn, self.before, ours, plain)
            return Outcome(self.case, WRONG, self.place + description, self.tokens), close
        return Outcome(self.case, EQUAL, tokens=self.tokens + plain.new_tokens * len(plain.sequences)), False

    def _after_error(self, error: Exception, plain: Answer | Exception | None) -> Outcome:
        """Return the outcome if ours raises `error`, and transformers raises too or has an answer."""
        if isinstance(plain, Exception):
            return Outcome(self.case, BOTH_RAISE, f"plain {_reason(plain)} ours {_reason(error)}", self.tokens)
        if isinstance(error, InvalidArgumentError) and any(words in str(error) for words in JUSTIFIED):
            return Outcome(self.case, REFUSED, _reason(error), self.tokens)
        return Outcome(self.case, WRONG, f"{self.place}raises {_reason(error)} at {_where(error)}", self.tokens)

    def _after_failure(self, ours: Answer, failure: Exception) -> tuple[Outcome, bool]:
        """Return the outcome if ours has an answer and transformers raises: right if equal up to the failure.

        At the end of a position table, transformers fails and loses the text; ours stops.
        """
        # The forced end at full length was never reached.
        changes = {"max_new_tokens": ours.new_tokens, "forced_eos_token_id": None}
        plain = attempt(call, self.reference, self.turn, self.before, False, changes)
        if isinstance(plain, Exception):
            return Outcome(self.case, BOTH_RAISE, f"plain alone: {_reason(failure)}"), False
        if torch.equal(ours.sequences, plain.sequences):
            return Outcome(self.case, EQUAL, tokens=plain.new_tokens * len(plain.sequences)), False
        detail = f"{self.place}plain raises, and before that {difference(ours, plain, self.turn)}"
        return Outcome(self.case, WRONG, detail), False


def difference(ours: Answer, plain: Answer, turn: Turn) -> str:
    """Describe the difference of two answers; empty if they are equal."""
    if not torch.equal(ours.sequences, plain.sequences):
        if ours.sequences.shape != plain.sequences.shape:
            same = min(ours.sequences.shape[1], plain.sequences.shape[1])
            equal = torch.equal(ours.sequences[:, :same], plain.sequences[:, :same])
            begin = "the same until one ends" if equal else f"they part at {_parts(ours, plain)}"
            return f"{ours.new_tokens} new tokens instead of {plain.new_tokens}; {begin}"
        rows = (ours.sequences != plain.sequences).any(1).nonzero().flatten().tolist()
        return f"rows {rows} part at new token {_parts(ours, plain)} of {plain.new_tokens}"
    known = ours.random_state is not None and plain.random_state is not None
    if turn.settings.get("do_sample") and known and not torch.equal(ours.random_state, plain.random_state):
        return "another random state afterwards"
    if ours.streamed != plain.streamed:
        return "other values streamed"
    running = _running(plain, turn)
    if ours.counted_tokens is not None and running is not None and ours.counted_tokens != int(running.sum()):
        return f"{ours.counted_tokens} tokens counted instead of {int(running.sum())}"
    for name, one, two in (("scores", ours.scores, plain.scores), ("logits", ours.logits, plain.logits)):
        if (one is None) != (two is None) or len(one or ()) != len(two or ()):
            return f"{name}: {one and len(one)} instead of {two and len(two)}"
        for step, (first, second) in enumerate(zip(one or (), two or (), strict=True)):
            if name == "scores" and "SynthID" in turn.settings:
                first, second = _probable(first, second)
            if description := _difference_of_scores(first, second, None if running is None else running[:, step]):
                return f"{name} at step {step} {description}"
    return ""


def _difference_of_scores(one: Tensor, two: Tensor, running: Tensor | None) -> str:
    """Describe the difference of one step's scores, in rows that are known to be running."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"of shape {tuple(one.shape)} {one.dtype}, not {tuple(two.shape)} {two.dtype}"
    if running is None:
        return ""
    if not _same_scores(one[running], two[running]):
        return f"differ by {_largest(one[running], two[running]):.1e}"
    if torch.equal(one, two):  # decoded by transformers, which appends padding
        return ""
    return "of rows that have ended are not zero" if one[~running].any() else ""


def _parts(ours: Answer, plain: Answer) -> int:
    same = min(ours.sequences.shape[1], plain.sequences.shape[1])
    differ = (ours.sequences[:, :same] != plain.sequences[:, :same]).any(0).nonzero()
    start = plain.sequences.shape[1] - plain.new_tokens
    return int(differ[0]) - start if len(differ) else same - start


def _running(plain: Answer, turn: Turn) -> Tensor | None:
    """Return whether each row was still running before each new token, `[rows, tokens]`; `None` if unknown.

    Without a stop token nothing is padded, and all rows continue until the last one ends.
    """
    criterion = turn.settings.get("criterion", ())
    new = plain.sequences[:, plain.sequences.shape[1] - plain.new_tokens :]
    if len(new) == 1:
        return torch.ones(new.shape, dtype=torch.bool)
    if turn.change == "end in the generation configuration" or "stop_strings" in turn.settings:
        return None
    if not isinstance(criterion, tuple):
        return None
    eos = turn.settings.get("eos", ())
    eos = eos if isinstance(eos, tuple) else (eos,)
    ended = torch.isin(new, torch.tensor(eos + criterion if eos else ())).cumsum(1)
    return torch.cat([torch.zeros(len(new), 1), ended], 1)[:, :-1] == 0


def _probable(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Return both scores with improbable tokens set to 0, as rounding may dominate these."""
    improbable = torch.maximum(one.log_softmax(-1), two.log_softmax(-1)) < IMPROBABLE
    improbable &= one.isfinite() & two.isfinite()
    return one.masked_fill(improbable, 0), two.masked_fill(improbable, 0)


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
    """Return whether rounding may have changed a float32 text, between the two likeliest tokens or at a cutoff."""
    if torch.equal(ours.sequences, plain.sequences):
        return ours.streamed == plain.streamed  # only scores differ: float64 will decide
    if turn.settings.get("do_sample") and turn.settings.get("top_k") != 1:
        return True  # draws are not repeated here: float64 will decide
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
    """Return the error in one line without numbers, so that equal reasons have equal texts."""
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", f"{type(error).__name__}: {error}")
    return _one_line(re.sub(r"(#, )+#", "#", text))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:220]


def _where(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/lookahead/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/lookahead/')[2]}:{frames[-1].lineno}" if frames else "?"
