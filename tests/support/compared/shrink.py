"""Simplify a failing case while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from compared.case import Case, Turn
from compared.outcome import WRONG, Outcome, run_case
from tiny.variant import Variant


def shrink(outcome: Outcome, run: Callable[[Case], Outcome] = run_case) -> Outcome:
    """Return the outcome of the simplest case that `run` still judges wrong, by successive simplifications."""
    changed = True
    while changed:
        changed = False
        for case in _simpler(outcome.case):
            tried = run(case)
            if tried.kind == WRONG:
                outcome, changed = tried, True
                break
    return outcome


def _simpler(case: Case) -> Iterator[Case]:
    """Yield copies of `case`, each simpler in one respect."""
    if len(case.turns) > 1:
        yield replace(case, turns=case.turns[:-1])
        if not any(turn.cache in ("whole", "tail") for turn in case.turns[1:]):
            yield replace(case, turns=case.turns[1:])
    for number, turn in enumerate(case.turns):
        for simpler in _simpler_turns(turn, alone=len(case.turns) == 1):
            yield replace(case, turns=(*case.turns[:number], simpler, *case.turns[number + 1 :]))
    plain = Variant(seed=case.variant.seed, pick=case.variant.pick)
    for entry in fields(Variant):
        value = getattr(plain, entry.name)
        if getattr(case.variant, entry.name) != value:
            yield replace(case, variant=replace(case.variant, **{entry.name: value}))
    if case.attention != "eager":
        yield replace(case, attention="eager")


def _simpler_turns(turn: Turn, alone: bool) -> Iterator[Turn]:
    rows = range(len(turn.prompts))
    if alone and len(rows) > 1:
        for row in rows:
            yield replace(turn, prompts=(turn.prompts[row],), padding=(turn.padding[row],))
    if turn.holes:
        yield replace(turn, holes=())
    if any(turn.padding):
        lengths = [len(prompt) + padding for prompt, padding in zip(turn.prompts, turn.padding, strict=True)]
        filled = tuple((prompt * length)[-length:] for prompt, length in zip(turn.prompts, lengths, strict=True))
        yield replace(turn, padding=(0,) * len(turn.padding), prompts=filled)
    if turn.cache == "empty":
        yield replace(turn, cache="")
    for name in turn.settings:
        if name != "max_new_tokens" and not (name == "return_dict_in_generate" and not alone):
            yield replace(turn, settings={key: value for key, value in turn.settings.items() if key != name})
    if turn.drafting != {"preset": "autoregressive"} and turn.ours:
        yield replace(turn, drafting={"preset": "autoregressive"})
        if turn.drafting != {"preset": "auto", "step_budget": 8, "memory": "request"}:
            yield replace(turn, drafting={"preset": "auto", "step_budget": 8, "memory": "request"})
