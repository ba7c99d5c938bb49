"""Tables of replays: S, and how methods compare at equal limits and at equal numbers of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lookahead.bench.rows import Row

Table = tuple[list[str], list[list[str]]]

_RIVALS = ("n-gram (vLLM)", "suffix decoding", "suffix decoding, factor 4")
_OWN = "auto, text only"
_LIKELY = "auto, text only, likely tokens"


@dataclass
class Total:
    """Tokens, steps and drafted tokens of several recordings."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0

    @property
    def drafts(self) -> float:
        """Tokens drafted in a step."""
        return self.drafted / self.steps

    @property
    def compression(self) -> float:
        """S."""
        return self.tokens / self.steps


Totals = dict[tuple[str, str, bool], dict[str, Total]]
"""By task, method and whether requests drafted from those before, then by size."""


def totals(rows: Sequence[Row], part: int | None = None) -> Totals:
    """What replays came to; of every second recording alone if `part` is given."""
    found: Totals = {}
    for row in rows:
        if row["kind"] == "replay" and part in (None, row["part"]):
            sizes = found.setdefault((row["task"], row["method"], row["across"]), {})
            for draft in row["drafts"]:
                total = sizes.setdefault(draft["size"], Total())
                total.tokens += row["tokens"]
                total.steps += draft["steps"]
                total.drafted += draft["drafted"]
    return found


def _limited(found: Totals) -> Totals:
    """Without the drafts whose tokens are limited by their probability."""
    return {key: sizes for key, sizes in found.items() if key[1] != _LIKELY}


def _lines(found: Totals) -> Iterator[tuple[list[str], dict[str, Total]]]:
    tasks = list(dict.fromkeys(task for task, _, _ in found))
    for (task, method, across), sizes in sorted(found.items(), key=lambda item: tasks.index(item[0][0])):
        yield [*([task] if len(tasks) > 1 else []), method, "file" if across else "request"], sizes


def _titles(found: Totals) -> list[str]:
    named = ["file", "method", "memory"] if len({task for task, _, _ in found}) > 1 else ["method", "memory"]
    return named + list(next(iter(found.values())))


def compressions(rows: Sequence[Row]) -> Table:
    """S of each method and size."""
    found = _limited(totals(rows))
    lines = [[*names, *(f"{total.compression:.2f}" for total in sizes.values())] for names, sizes in _lines(found)]
    return _titles(found), lines


def ratios(rows: Sequence[Row]) -> Table:
    """S of `auto` over that of others with the same limit of drafted tokens; in brackets on the recordings alone that
    its weights were not fitted to."""
    whole, unseen = totals(rows), totals(rows, part=1)
    titles = ["file", "memory", "over", *next(iter(whole.values()))]
    lines = []
    for (task, method, across), sizes in whole.items():
        rivals = [name for name in _RIVALS if (task, name, across) in whole] if method == _OWN else []
        for rival in rivals:
            cells = []
            for size in sizes:
                both = (each[task, _OWN, across][size].compression for each in (whole, unseen))
                other = (each[task, rival, across][size].compression for each in (whole, unseen))
                ratio, held_out = (own / beside for own, beside in zip(both, other, strict=True))
                cells.append(f"{ratio:.2f} ({held_out:.2f})")
            lines.append([task, "file" if across else "request", rival, *cells])
    return titles, lines


def equal_drafts(rows: Sequence[Row]) -> Table:
    """S of others, and of `auto` where it drafts as many tokens in a step as they do.

    The latter is read off the straight lines between the drafts of tokens that are likely enough.
    """
    found = totals(rows)
    lines = []
    for (task, method, across), sizes in found.items():
        if method not in _RIVALS or (task, _LIKELY, across) not in found:
            continue
        curve = sorted((total.drafts, total.compression) for total in found[task, _LIKELY, across].values())
        drafted, compressed = zip((0.0, 1.0), *curve, strict=True)
        cells = []
        for total in sizes.values():
            own = float(np.interp(total.drafts, drafted, compressed))
            is_known = total.drafts <= drafted[-1]
            cells.append(f"{own:.2f} / {total.compression:.2f} ({own / total.compression:.2f})" if is_known else "–")
        lines.append([task, "file" if across else "request", method, *cells])
    return ["file", "memory", "beside", *next(iter(_limited(found).values()))], lines


def texts(rows: Sequence[Row]) -> Table:
    """Lengths of prompts and answers, and the share of the answers in repeated cycles."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows if row["kind"] == "text"):
        own = [row for row in rows if row["kind"] == "text" and row["task"] == task]
        tokens = sum(row["tokens"] for row in own)
        cycles = sum(row["tokens"] * row["cycle_share"] for row in own) / tokens
        prompt = sum(row["prompt_tokens"] for row in own) / len(own)
        lines.append([task, str(len(own)), f"{prompt:.0f}", f"{tokens / len(own):.0f}", f"{tokens:,}", f"{cycles:.1%}"])
    titles = ["file", "recordings", "tokens of a prompt", "tokens of an answer", "all answers", "in cycles"]
    return titles, lines
