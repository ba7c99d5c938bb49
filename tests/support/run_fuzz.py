"""Compare lookahead decoding with `model.generate` on every family of models, in random cases.

    python tests/support/run_fuzz.py --cases 3000            # seeds 0 to 2999
    python tests/support/run_fuzz.py --seed 123              # one of them again, in words
    python tests/support/run_fuzz.py --family qwen3 --cases 50
    python tests/support/run_fuzz.py --running-states --equal 500
    python tests/support/run_fuzz.py --encoders --equal 300
    python tests/support/run_fuzz.py --indexed --equal 200 --each
    python tests/support/run_fuzz.py --faults --cases 1000   # changed models, small vocabularies, own loops, ...
    python tests/support/run_fuzz.py --images --equal 200 --output benchmarks/results/fuzz.jsonl

A case is made from one number alone. The last lines count what came of the cases; the exit code is 1 if any was wrong.
Interrupted with Ctrl-C, the report is about what was run so far. `--equal` runs as many cases as it takes for so many
to have been run and found equal. With `--output` each case is a row of a file at once, and cases that are in it count
and are not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
from transformers.utils import logging

from fuzz.case import Case, draw_case
from fuzz.encoder_decoders import encoder_families
from fuzz.families import INDEXED, family_names, image_families, keeps_running_state
from fuzz.faults import draw_fault
from fuzz.outcome import EQUAL, WRONG, Outcome, run_case
from fuzz.report import describe, report
from fuzz.rows import CaseRows, reason_not_to_run
from fuzz.shrink import shrink
from lookahead.drafting import compile_loops

FAMILIES: dict[str, Callable[[], list[str]]] = {
    "images": image_families,
    "encoders": encoder_families,
    "indexed": lambda: list(INDEXED),
}
"""From what cases of a kind are drawn; others are drawn from all families."""
SAME_REASON = 2
"""After how many cases with the same reason a family is left out."""


def main() -> int:
    """Run the cases that the command line asks for."""
    compile_loops()  # no case is to go without drafts, as first ones might
    arguments = _parse()
    families = FAMILIES.get(arguments.of, family_names)()
    if arguments.seed is not None:
        outcome = run_case(next(draw_cases(arguments.seed, families, of=arguments.of)))
        print("\n".join(describe(outcome)))
        if arguments.shrink and outcome.kind == WRONG:
            print("\n".join(["simplified:", *describe(shrink(outcome))]))
        return 1 if outcome.kind == WRONG else 0
    cases = draw_cases(arguments.seed_start, families, arguments.family, arguments.of)
    if arguments.of == "running states":
        cases = (case for case in cases if keeps_running_state(case.family))
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        rows = stack.enter_context(CaseRows(arguments.output, arguments.of)) if arguments.output else None
        try:
            enough = Enough(arguments.cases, arguments.equal, families if arguments.each else [])
            run_all(cases, enough, outcomes, skips=arguments.family is None and arguments.of != "faults", rows=rows)
        except KeyboardInterrupt:
            print("\ninterrupted")
    print(report(outcomes))
    return 1 if any(outcome.kind == WRONG for outcome in outcomes) else 0


def draw_cases(start: int, families: list[str], family: str | None = None, of: str = "all") -> Iterator[Case]:
    """The cases from number `start` on; those of `family` alone if given."""
    draw = draw_fault if of == "faults" else partial(draw_case, families=families, images=of == "images")
    cases = (draw(seed) for seed in count(start))
    return (case for case in cases if family is None or case.family == family)


@dataclass(frozen=True)
class Enough:
    """When to stop.

    Attributes:
        cases: After so many cases, if `equal` is not given.
        equal: After so many that were equal.
        families: Each of which has to have so many; none if it is all together.
    """

    cases: int
    equal: int | None = None
    families: Sequence[str] = ()

    def is_reached(self, ran: int, equal: Counter[str]) -> bool:
        """Whether so many cases, and of each family so many equal ones, are enough."""
        if self.equal is None:
            return ran >= self.cases
        if self.families:
            return all(self.has_enough(equal, family) for family in self.families)
        return equal.total() >= self.equal

    def has_enough(self, equal: Counter[str], family: str) -> bool:
        """Whether no further case of `family` is needed."""
        return family in self.families and self.equal is not None and equal[family] >= self.equal


def run_all(
    cases: Iterator[Case], enough: Enough, outcomes: list[Outcome], skips: bool, rows: CaseRows | None = None
) -> None:
    """Run as many of `cases` as are `enough`, each into `outcomes` as it is done; failures and progress are printed.

    If `skips`, a family that gave nothing but the same reason not to run it is left out after a few cases. Cases that
    are in `rows` are left out as well, and the others go there.
    """
    begin = time.monotonic()
    reasons: dict[str, list[str]] = defaultdict(list) if rows is None else rows.reasons()
    equal = Counter() if rows is None else rows.equal()
    for case in cases:
        if enough.is_reached(len(outcomes), equal):
            break
        if (rows is not None and case.seed in rows) or enough.has_enough(equal, case.family):
            continue
        if skips and _is_hopeless(reasons[case.family]):
            continue
        outcome = run_case(case)
        outcomes.append(outcome)
        equal[case.family] += outcome.kind == EQUAL
        if rows is not None:
            rows.add(outcome)
        reasons[case.family].append(reason_not_to_run(outcome))
        if outcome.kind == WRONG:
            print("\n".join(describe(outcome)), flush=True)
        if len(outcomes) % 100 == 0:
            kinds = Counter(outcome.kind for outcome in outcomes)
            counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
            print(f"{len(outcomes)} cases, {time.monotonic() - begin:.0f} s: {counts}", flush=True)


def _is_hopeless(reasons: list[str]) -> bool:
    """Whether cases were not run for one reason each time; `reasons` has an empty one for a case that was."""
    return len(reasons) >= SAME_REASON and len(set(reasons)) == 1 and reasons[0] != ""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=300, help="how many cases to run (default: 300)")
    parser.add_argument("--equal", type=int, help="how many cases have to be equal, instead of --cases")
    parser.add_argument("--seed-start", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--seed", type=int, help="run the case with this number alone")
    parser.add_argument("--shrink", action="store_true", help="with --seed: look for a simpler case that fails")
    parser.add_argument(
        "--family", choices=[*family_names(), *encoder_families()], metavar="NAME", help="only cases with this family"
    )
    parser.add_argument("--each", action="store_true", help="--equal is of each family, not of all together")
    kinds = {
        "running states": "only cases of families with running states",
        "images": "only prompts with images, of classes that see them",
        "encoders": "only models with an encoder for text or speech",
        "indexed": "only models whose layers pick the keys they attend to",
        "faults": "changed models, small vocabularies, own loops, calls without a cache, images in engines, processors",
    }
    for kind, what in kinds.items():
        flag = f"--{kind.replace(' ', '-')}"
        parser.add_argument(flag, dest="of", action="store_const", const=kind, default="all", help=what)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines: a row for each case, added at once")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the Makefile: models this small only lose by a second one
    logging.set_verbosity(logging.CRITICAL)  # transformers' remarks on odd settings
    sys.exit(main())
