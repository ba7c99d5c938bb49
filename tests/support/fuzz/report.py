"""What the fuzzer found, in text."""

from __future__ import annotations

from collections import Counter, defaultdict

from fuzz.outcome import BOTH_RAISE, EQUAL, KINDS, NEAR_TIE, NOT_BUILT, REFUSED, WRONG, Outcome


def report(outcomes: list[Outcome]) -> str:
    """Counts, families, reasons, and failures with the command that repeats each."""
    lines: list[str] = []
    lines += _families(outcomes)
    lines += _reasons("Not built", outcomes, NOT_BUILT)
    lines += _reasons("Refused", outcomes, REFUSED)
    lines += _reasons("Both raise, or plain alone", outcomes, BOTH_RAISE)
    for kind in (NEAR_TIE, WRONG):
        chosen = [outcome for outcome in outcomes if outcome.kind == kind]
        lines += ["", f"{kind}: {len(chosen)}"] if chosen else []
        lines += [line for outcome in chosen for line in describe(outcome)]
    tokens = sum(outcome.tokens for outcome in outcomes if outcome.kind == EQUAL)
    lines += ["", f"{tokens} tokens compared"]
    for fault in sorted({outcome.case.fault for outcome in outcomes} - {""}):
        lines.append(_counted(fault, [outcome for outcome in outcomes if outcome.case.fault == fault]))
    return "\n".join([*lines, _counted("cases", outcomes)])


def _counted(name: str, outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.kind for outcome in outcomes)
    return f"{len(outcomes)} {name}: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def describe(outcome: Outcome) -> list[str]:
    """A failure: what it was, and how to run it again."""
    case = outcome.case
    of = " FUZZ=--faults" if case.fault else " FUZZ=--images" if any(turn.images for turn in case.turns) else ""
    return [f"  make fuzz SEED={case.seed}{of}   {outcome.kind}: {outcome.detail}", f"      {case.describe()}"]


def _families(outcomes: list[Outcome]) -> list[str]:
    exact: Counter[str] = Counter()
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        exact[outcome.case.family] += outcome.kind == EQUAL
        if outcome.kind in (NOT_BUILT, REFUSED):
            reasons[outcome.case.family][outcome.kind] += 1
    covered = {name: count for name, count in exact.items() if count}
    listed = " ".join(f"{name}:{count}" for name, count in sorted(covered.items()))
    never = sorted(name for name in exact if name not in covered)
    kinds = " ".join(f"{name}({' '.join(reasons[name]) or 'no equal case'})" for name in never)
    return [
        f"{len(covered)} families with equal cases (family:cases)",
        f"  {listed}",
        f"{len(never)} without",
        f"  {kinds}",
    ]


def _reasons(title: str, outcomes: list[Outcome], kind: str) -> list[str]:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.kind == kind:
            groups[outcome.detail].append(outcome)
    lines = ["", f"{title}: {sum(map(len, groups.values()))}"] if groups else []
    for reason, group in sorted(groups.items(), key=lambda entry: -len(entry[1])):
        names = sorted({outcome.case.family for outcome in group})
        some = " ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        lines.append(f"  {len(group)} x {reason} [{some}; SEED={group[0].case.seed}]")
    return lines
