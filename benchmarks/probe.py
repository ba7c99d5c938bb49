"""Parts of a probe: options, a header, and units of work that yield rows."""

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
"""Instruction sets that affect the speed of matrix products on a CPU, by the system's names."""


@dataclass(frozen=True)
class Unit:
    """Unit of work; its rows are stored together, or it is measured again.

    Attributes:
        name: Name of the unit, unique in the probe.
        measure: Function that measures, and returns rows. Field `"error"` of a row describes a wrong result.
    """

    name: str
    measure: Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Probe:
    """Units to measure, and their common settings.

    Attributes:
        units: Units in order.
        header: Settings that affect the figures, except the machine and versions of libraries.
    """

    units: Sequence[Unit]
    header: Mapping[str, Any] = field(default_factory=dict)


def option(default: Any, help: str, **more: Any) -> Any:
    """Declare a field of a probe's `Options` as an option; `more` are arguments of `add_argument`."""
    about = {"help": f"{help} ({' '.join(map(str, default)) if isinstance(default, list) else default})", **more}
    return field(default_factory=lambda: default, metadata=about)


class Turns:
    """Comparison of several ways to decode cases; the first way rotates from case to case.

    Args:
        ways: Functions by name, called with a case and its number. Texts are compared with the answer of the case, or
            with the first way's text if it has none.
        exact: Whether a different text is an error.
        repeats: Number of runs of each way; the fastest is used, as other jobs only slow it down.
    """

    def __init__(self, ways: Mapping[str, Way], exact: bool = True, repeats: int = 1) -> None:
        self._ways, self._exact, self._repeats = dict(ways), exact, repeats
        self._turn = 0

    def rows(self, case: Case) -> Iterator[Row]:
        """Yield a row for each way. Before the first case each way runs once as warm-up, which is not measured."""
        if self._turn == 0:
            yield from self._warm_up(replace(case, answer=case.answer[:WARM_UP_TOKENS]))
        names = list(self._ways)
        first = self._turn % len(names)
        runs: dict[str, list[Counts]] = {name: [] for name in names}
        for name in (*names[first:], *names[:first]) * self._repeats:
            runs[name].append(self._ways[name](case, self._turn))
        self._turn += 1
        expected = list(case.answer) or list(runs[names[0]][0].tokens)
        for name in names:
            counts = min(runs[name], key=lambda run: run.seconds)
            texts = [list(run.tokens) for run in runs[name]]
            tokens = next((text for text in texts if text != expected), texts[0])
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
                "first_difference": first_difference(tokens, expected),
                "equal": tokens == expected,
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
    """Machine of a header: processor, threads, and instruction sets of the CPU."""
    return {**describe_machine(device), "instructions": instruction_sets()}


def instruction_sets() -> list[str]:
    """Instruction sets in `FAST_PRODUCTS` that this CPU has; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split(":", 1)[1].split()}
    return [name for name in FAST_PRODUCTS if name in flags]
