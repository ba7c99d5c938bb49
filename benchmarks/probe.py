"""What a probe is: options, a header, and units of work that yield rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cases import Case, Counts
from lookahead.bench.rows import Row, describe_machine
from lookahead.bench.summary import first_difference, repeated_cycle_share
from lookahead.errors import LookaheadError

Way = Callable[[Case, int], Counts]

WARM_UP_TOKENS = 8

FAST_PRODUCTS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
"""Instruction sets that decide how fast a CPU multiplies matrices, as the system names them."""


@dataclass(frozen=True)
class Unit:
    """Work that is done as a whole: its rows are kept together, or it is done again.

    Attributes:
        name: What tells it from other units of the probe.
        measure: Does it, and gives its rows. A row with a text under `"error"` says what is wrong with what it found.
    """

    name: str
    measure: Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Probe:
    """What is to be measured.

    Attributes:
        units: In the order in which they are done.
        header: What the figures depend on besides the machine and the versions of libraries.
    """

    units: Sequence[Unit]
    header: Mapping[str, Any] = field(default_factory=dict)


def option(default: Any, help: str) -> Any:
    """An option of a probe, for a field of its `Options`; lists are given with blanks between their elements."""
    return field(default=default, metadata={"help": help})


class Turns:
    """Decodes cases in several ways, which take turns: each case begins with another one.

    Args:
        ways: By name. They take a case and its number. The texts of the first one are those that the others are
            compared with, where a case has no answer.
        exact: Whether another text is an error.
        repeats: How often each case is decoded in each way; the fastest counts, as other jobs only make it slower.
    """

    def __init__(self, ways: Mapping[str, Way], exact: bool = True, repeats: int = 1) -> None:
        self._ways, self._exact, self._repeats = dict(ways), exact, repeats
        self._turn = 0

    def rows(self, case: Case) -> Iterator[Row]:
        """A row for each way. Before the first case each runs once unmeasured: models are checked, loops compiled."""
        if self._turn == 0:
            yield from self._warm_up(replace(case, answer=case.answer[:WARM_UP_TOKENS]))
        names = list(self._ways)
        first = self._turn % len(names)
        runs: dict[str, list[Counts]] = {name: [] for name in names}
        for name in (*names[first:], *names[:first]) * self._repeats:
            runs[name].append(self._ways[name](case, self._turn))
        self._turn += 1
        wanted = list(case.answer) or list(runs[names[0]][0].tokens)
        for name in names:
            counts = min(runs[name], key=lambda run: run.seconds)
            texts = [list(run.tokens) for run in runs[name]]
            tokens = next((text for text in texts if text != wanted), texts[0])
            row: Row = {
                "kind": "run",
                "id": case.id,
                "method": name,
                "prompt_tokens": len(case.prompt),
                "tokens": len(tokens),
                "steps": counts.steps,
                "nodes": counts.nodes,
                "cpu_seconds": round(counts.seconds, 5),
                "cycle_tokens": round(repeated_cycle_share(tokens) * len(tokens), 3),
                "first_difference": first_difference(tokens, wanted),
                "equal": tokens == wanted,
            }
            if self._exact and not row["equal"]:
                row["error"] = f"{name} on {case.id}: another text"
            yield row

    def _warm_up(self, case: Case) -> Iterator[Row]:
        for name, way in list(self._ways.items()):
            try:
                way(case, 0)
            except LookaheadError as error:
                del self._ways[name]
                yield {"kind": "refused", "method": name, "reason": str(error)}


def machine_of(device: torch.device) -> Row:
    """The machine of a header: the processor that does the work, and what its CPU multiplies fast by."""
    return {**describe_machine(device), "instructions": instruction_sets()}


def instruction_sets() -> list[str]:
    """Those of `FAST_PRODUCTS` that this CPU has; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split(":", 1)[1].split()}
    return [name for name in FAST_PRODUCTS if name in flags]
