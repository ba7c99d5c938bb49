"""Fit the weights with which drafts of texts alone begin, and write them as priors.

    python benchmarks/fit_text_priors.py agent_traces.jsonl code_edits.jsonl answers.jsonl \\
        --output src/lookahead/drafting/auto/text_priors.py

Every second recording of each file is replayed (`lookahead bench replay`) while nothing is learned, with a memory of
its own and with one for all, edits also with a predicted text; what the sources said of each proposal is recorded. The
weights of each length of the longest known context are then those of greatest likelihood.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fit_priors import fit, write
from lookahead.bench.replay.recordings import Recording, read_recordings, tokenizer_of
from lookahead.bench.replay.replay import replay
from lookahead.drafting import DraftMemory, NGramMemory, PredictedText
from lookahead.drafting.auto.scorer import Acceptance, Lessons
from lookahead.drafting.text_only import OLD_SHARE, build_text_drafter

NODES = 32
PULL = 1e-3


class PathRecorder(Acceptance):
    """Weighs as the first priors do, learns nothing, and keeps the lessons of what is known of texts: the path."""

    def __init__(self, orders: int) -> None:
        super().__init__(orders)
        self.column(PredictedText.name)
        self.lessons: list[Lessons] = []

    def learn(self, lessons: Lessons) -> None:
        """Keep what came of one step, but for nodes of which nothing is known."""
        read = lessons.counts > 0
        ends = np.append(lessons.starts[1:], len(lessons.estimates))
        sizes = (ends - lessons.starts)[read]
        kept = np.repeat(read, ends - lessons.starts)
        if read.any():
            told = lessons.features[kept], lessons.estimates[kept], lessons.outcomes[kept]
            begins = np.cumsum(sizes) - sizes
            self.lessons.append(Lessons(*told, begins, lessons.known[read], lessons.counts[read]))


def record(recordings: list[Recording], orders: int, across: bool, expects: bool) -> PathRecorder:
    """The lessons of drafting for recordings."""
    recorder = PathRecorder(orders)

    def new_memory() -> DraftMemory:
        return DraftMemory(NGramMemory(orders, old_share=OLD_SHARE, observed=True), recorder)

    shared = new_memory() if across else None

    def make(recording: Recording) -> Any:
        predicted = PredictedText(recording.expected) if expects else None
        return build_text_drafter(NODES, shared or new_memory(), predicted)

    for recording in recordings:
        replay(recording, make)
    return recorder


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path, help="JSON lines of prompts and recorded answers")
    parser.add_argument("--output", type=Path, required=True, help="module to write")
    parser.add_argument("--orders", type=int, default=6, help="longest context of the memory (6)")
    parser.add_argument("--tokenizer", type=Path, help="as for `lookahead bench replay`")
    options = parser.parse_args()
    _, encode = tokenizer_of(options.tokenizer)
    merged = PathRecorder(options.orders)
    for path in options.recordings:
        own = read_recordings(path, encode)[::2]
        for expects in (False, True) if own[0].expected else (False,):
            for across in (False, True):
                merged.lessons += record(own, options.orders, across, expects).lessons
    weights = [fit([merged], known, PULL) for known in range(options.orders + 1)]
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", "benchmarks/fit_text_priors.py", *words])
    write(options.output, merged.names, weights, command, "TEXT_PRIORS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
