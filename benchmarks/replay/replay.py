"""Runs methods against recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from lookahead.bench.repetition import repeated_cycle_share
from lookahead.bench.rows import Row
from lookahead.core.statistics import Statistics
from lookahead.core.step import Batch, decode
from replay.backend import ReplayBackend, replayed_sequence
from replay.methods import METHODS, MakeDrafter, Method
from replay.recordings import Recording


def replay(recording: Recording, make: MakeDrafter) -> Statistics:
    """Draft for one recorded answer; what it took."""
    text = [*recording.prompt, *recording.answer]
    sequence = replayed_sequence(recording.prompt, recording.answer, make(recording))
    batch = Batch([sequence])
    decode(ReplayBackend([text]), batch)
    assert sequence.tokens == text
    return batch.statistics


def methods_for(recordings: Sequence[Recording]) -> list[Method]:
    """Those that can be replayed: not those that expect a text, if none is known."""
    known = all(recording.expected for recording in recordings)
    return [method for method in METHODS if known or not method.expects]


def replay_rows(task: str, recordings: Sequence[Recording], method: Method) -> Iterator[Row]:
    """A row for each recording: steps and drafted tokens for each size of draft."""
    taken = [_counts(recordings, method.begin(size)) for size in method.sizes]
    for number, recording in enumerate(recordings):
        yield {
            "kind": "replay",
            "task": task,
            "id": recording.id,
            "part": number % 2,
            "method": method.name,
            "across": method.across,
            "tokens": len(recording.answer),
            "drafts": [
                {"size": size.name, "steps": counts[number][0], "drafted": counts[number][1]}
                for size, counts in zip(method.sizes, taken, strict=True)
            ],
        }


def _counts(recordings: Sequence[Recording], make: MakeDrafter) -> list[tuple[int, int]]:
    found = []
    for recording in recordings:
        nodes = replay(recording, make).nodes_per_step
        found.append((len(nodes), sum(nodes) - len(nodes)))
    return found


def text_rows(task: str, recordings: Sequence[Recording]) -> Iterator[Row]:
    """A row for each recording: lengths, and the share of the answer that lies in a repeated cycle."""
    for recording in recordings:
        yield {
            "kind": "text",
            "task": task,
            "id": recording.id,
            "prompt_tokens": len(recording.prompt),
            "tokens": len(recording.answer),
            "cycle_share": round(repeated_cycle_share(recording.answer), 3),
        }


def fingerprint(path: Path) -> str:
    """What tells a file of recordings from others."""
    return sha256(path.read_bytes()).hexdigest()[:16]
