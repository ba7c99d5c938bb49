"""The golden record: drafts of all drafters, step by step, for recorded predictions of models.

    python tools/golden.py            compare; prints the first step of each scenario that differs
    python tools/golden.py --update   run the models again, and write the record

A comparison runs no model; only the drafters compute. It does not depend on the clock either: the number of nodes is
fixed, or chosen with a table of times. `--update` also needs `golden_models.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from golden_record import NotRecordedError, Recording, load, pack, save, unpack
from lookahead import LookaheadConfig
from lookahead.core.pace import Pace
from lookahead.core.shared_pace import SharedPace
from lookahead.core.step import Batch, step
from lookahead.core.step_costs import StepCosts
from lookahead.core.step_time import StepTimer
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.drafting import AutoDrafter, DraftMemory, PredictedText, TokenPaths, build_drafter
from playback import PlayedBackend, PlayedRow, Script, TextScript, VLLMLoop, played_sequence, vllm_config

FOLDER = Path(__file__).resolve().parents[1] / "tests/golden"
SAID, SENT = FOLDER / "said.json.xz", FOLDER / "sent.json.xz"

PRICES = {"cheap": (1.0, 0.002), "dear": (1.0, 0.12)}
"""Seconds of a plain step, and of each further node."""

Recordings = Mapping[str, Recording]
Drafts = dict[str, list[Any]]


@dataclass(frozen=True)
class Sent:
    """Draft of one row in a step, and its outcome.

    Attributes:
        tokens: Tokens below the root; `-1 - token` for nodes of the lookahead window.
        parents: Index of each token's parent in `tokens`, -1 for the root.
        accepted: Number of accepted tokens; -1 while unknown.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: int


@dataclass
class Notes:
    """Drafts that were sent, in order."""

    sent: list[Sent] = field(default_factory=list)

    def draft(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Record a draft."""
        self.sent.append(Sent(tuple(tokens), tuple(parents), -1))

    def outcome(self, place: int, accepted: int) -> None:
        """Record the number of accepted nodes of a draft; `place` is its index from the end, -1 for the last one."""
        self.sent[place] = replace(self.sent[place], accepted=accepted)


def difference(sent: Sequence[Sent], recorded: Sequence[Sent]) -> str:
    """Describe the first draft that differs; empty if there is none."""
    for place, (one, other) in enumerate(zip_longest(sent, recorded)):
        if one != other:
            return f"draft {place} differs\n  sent     {one}\n  recorded {other}"
    return ""


class NotingBackend(PlayedBackend):
    """`PlayedBackend` that records drafts, and has a clock that advances by a table of times.

    Args:
        notes: Recorder of the drafts.
        resends: Argument of `PlayedBackend`.
        prices: Seconds of a plain step, and of each further node.
    """

    def __init__(self, notes: Notes, resends: bool = False, prices: tuple[float, float] = (1.0, 0.0)) -> None:
        super().__init__((), resends)
        self._notes, self._prices = notes, prices
        self._roots: list[int] = []
        self.now = 0.0

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Any:
        """See `Backend`."""
        plain, node = self._prices
        self.now += plain + node * (sum(map(len, trees)) - len(trees))
        self._roots = [tree.root for tree in trees]
        for tree in trees:
            below = range(tree.root + 1, len(tree))
            tokens = [-1 - tree.tokens[at] if tree.kinds[at] is NodeKind.WINDOW else tree.tokens[at] for at in below]
            self._notes.draft(tokens, [max(tree.parents[at] - tree.root - 1, -1) for at in below])
        return super().forward(trees, top_k)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """See `Backend`."""
        for row, (nodes, root) in enumerate(zip(kept, self._roots, strict=True)):
            self._notes.outcome(row - len(kept), max(len(nodes) - root - 1, 0))
        super().commit(kept)


def run(
    texts: Sequence[tuple[Recording, Script]], make: Callable[[], Any], notes: Notes, resends: bool = False
) -> None:
    """Decode texts one after another, each with a new drafter."""
    for recording, script in texts:
        sequence = played_sequence(recording.prompt, recording.answer, make(), recording.sampling is not None)
        backend, batch = NotingBackend(notes, resends), Batch([sequence])
        backend.rows = [PlayedRow(script)]
        while not batch.finished:
            step(backend, batch)


def run_priced(recording: Recording, prices: str, chains: bool, notes: Notes) -> None:
    """Decode a text with the number of nodes that is fastest by a table of times."""
    pace = Pace(StepCosts())
    drafter = build_drafter(LookaheadConfig(), pace=pace, chains=chains)
    backend = NotingBackend(notes, chains, PRICES[prices])
    sequence = played_sequence(recording.prompt, recording.answer, drafter, recording.sampling is not None)
    batch = Batch([sequence])
    backend.rows = [PlayedRow(recording)]
    while not batch.finished:
        _paced_step(backend, batch, pace)


def _paced_step(backend: NotingBackend, batch: Batch, pace: Pace | SharedPace) -> None:
    timer = StepTimer(lambda: backend.now, lambda: backend.now, is_padded=not pace.is_shared)
    timer.begin(batch)
    done = step(backend, batch)
    pace.book(timer.end(batch, done, pace.searches))


def run_engine(recordings: Sequence[Recording], nodes: int | None, prices: str, notes: Notes) -> None:
    """Start a request every tenth step, at most three at a time; they share a memory and the nodes of a step."""
    memory, shared = DraftMemory(), SharedPace(lambda load, temperature: Pace(StepCosts(), load), nodes)
    backend = NotingBackend(notes, prices=PRICES[prices])
    waiting, running = list(recordings), list[tuple[Any, PlayedRow, float]]()
    for number in range(10_000):
        while waiting and len(running) < 3 and len(recordings) - len(waiting) <= number // 10:
            recording = waiting.pop(0)
            heat = 0.0 if recording.sampling is None else recording.sampling.temperature
            drafter = build_drafter(LookaheadConfig(), memory=memory, pace=shared)
            sequence = played_sequence(recording.prompt, recording.answer, drafter, recording.sampling is not None)
            running.append((sequence, PlayedRow(recording), heat))
        if not running:
            return
        heats = [heat for _, _, heat in running]
        shared.begin_step(len(running), sum(heats) / len(heats))
        backend.rows = [row for _, row, _ in running]
        batch = Batch([sequence for sequence, _, _ in running])
        _paced_step(backend, batch, shared)
        running = [one for one in running if not one[0].finished]


class ExpectedText:
    """A user's own source: proposes the tokens that followed the last three tokens in another text."""

    name = "expected text"

    def __init__(self, text: Sequence[int]) -> None:
        self._text = list(text)
        self._places = {tuple(text[place - 3 : place]): place for place in range(3, len(text))}

    def start(self, prompt: Sequence[int]) -> None:
        """See `Source`."""
        self._last = tuple(prompt[-3:])

    def propose(self) -> TokenPaths:
        """See `Source`."""
        place = self._places.get(self._last, len(self._text))
        return TokenPaths.chain(self._text[place : place + 16])

    def observe(self, result: Any) -> None:
        """See `Source`."""
        self._last = (*self._last, *result.tokens)[-3:]


def run_vllm(recordings: Sequence[Recording], drafted: int, reads: bool, notes: Notes) -> None:
    """Serve requests that start together, with vLLM's proposer."""
    import torch  # the proposer reads logits as tensors

    from lookahead.integrations.vllm import LookaheadProposer

    room, vocabulary = 512, 512
    head = _Head()
    settings = {} if reads else {"learn": "tokens"}
    proposer = LookaheadProposer(vllm_config(vocabulary, drafted, len(recordings), room, **settings))
    proposer.load_model(head if reads else None)

    def read(texts: list[list[int]], drafts: list[list[int]]) -> None:
        if not reads:
            return
        listings = []
        for text, draft in zip(texts, drafts, strict=True):
            recording = next(one for one in recordings if one.text[: len(text)] == text)
            tree = TokenTree(text[-1:])
            tree.add_candidates(draft)
            try:
                listings += recording.listed(len(text) - 1, tree).values()
            except NotRecordedError:
                loop.steps.append([(draft, -1) for draft in drafts])  # so that a comparison shows the step
                raise
        # Multiples of 1/1024, which all processors round alike.
        logits = np.full((len(listings), vocabulary), -1e4, dtype=np.float32)
        for row, (tokens, likely) in enumerate(listings):
            logits[row, tokens] = np.round(1024 * np.log(np.maximum(likely, 1e-7))) / 1024
        head.compute_logits(torch.from_numpy(logits))

    loop = VLLMLoop(proposer, room, read)
    try:
        loop.run([recording.prompt for recording in recordings], [recording.answer for recording in recordings])
    finally:
        for draft, accepted in (row for rows in loop.steps for row in rows):
            notes.draft(draft, range(-1, len(draft) - 1))
            if accepted >= 0:
                notes.outcome(-1, accepted)


class _Head:
    """Stand-in for vLLM's model, with the method that the proposer wraps."""

    def compute_logits(self, logits: Any) -> Any:
        """Return the given logits."""
        return logits


Scenario = Callable[[Notes], None]


def scenarios(recordings: Recordings) -> Iterator[tuple[str, Scenario]]:
    """All scenarios, by name."""

    def one(name: str, make: Callable[[], Any], resends: bool = False) -> Scenario:
        return lambda notes: run([(recordings[name], recordings[name])], make, notes, resends)

    for name in ("demo", "demo sampled", "stories", "stories sampled"):
        for nodes in (4, 16, 64):
            config = LookaheadConfig(step_budget=nodes)
            yield f"{name}, tree of {nodes}", one(name, partial(build_drafter, config))
    for name in ("demo", "stories sampled", "hybrid", "hybrid sampled", "gguf"):
        for nodes in (4, 16):
            config = LookaheadConfig(step_budget=nodes)
            yield (f"{name}, chain of {nodes}", one(name, partial(build_drafter, config, chains=True), True))
    yield "gguf, tree of 16", one("gguf", partial(build_drafter, LookaheadConfig(step_budget=16)))
    for config in (
        LookaheadConfig(preset="context_matches", step_budget=16),
        LookaheadConfig(preset="token_recycling", step_budget=16),
        LookaheadConfig(preset="jacobi", block_size=8),
        LookaheadConfig(preset="paper", window_size=5, ngram_size=4, guess_set_size=5, pool_from_prompt=True),
    ):
        yield f"demo, {config.preset}", one("demo", partial(build_drafter, config))
    expecting = LookaheadConfig(step_budget=16, sources=(lambda: ExpectedText(recordings["demo sampled"].text),))
    yield "demo, own source", one("demo", partial(build_drafter, expecting))
    yield "stories, memory kept", partial(_kept, [recordings[name] for name in ("stories", "stories sampled", "gguf")])
    for prices in PRICES:
        for name in ("demo", "stories sampled", "hybrid"):
            priced = partial(run_priced, recordings[name], prices, name == "hybrid")
            yield f"{name}, {prices} nodes", priced
    rows = [recordings[name] for name in ("stories", "stories sampled", "gguf", "stories again")]
    for nodes, prices in ((24, "cheap"), (None, "cheap"), (None, "dear")):
        amount = f"{nodes or prices} nodes"
        yield f"engine, {amount}", partial(run_engine, rows, nodes, prices)
    for drafted in (4, 8):
        yield f"vLLM, logits, {drafted} drafted", partial(run_vllm, [rows[0], *rows[2:]], drafted, True)
        yield f"vLLM, tokens, {drafted} drafted", partial(run_vllm, rows, drafted, False)
    yield from _replays(recordings)


def _kept(recordings: Sequence[Recording], notes: Notes) -> None:
    memory = DraftMemory()
    make = partial(build_drafter, LookaheadConfig(step_budget=16), memory=memory)
    run([(one, one) for one in recordings], make, notes)


def _of_texts(nodes: int, **options: Any) -> AutoDrafter:
    return AutoDrafter(DraftMemory.of_texts(), nodes, **options)


def _replays(recordings: Recordings) -> Iterator[tuple[str, Scenario]]:
    texts = [(one, TextScript(one.text)) for name, one in recordings.items() if name.startswith("replay")]
    for nodes in (16, 64):
        yield f"replay, tree of {nodes}", partial(run, texts, partial(_of_texts, nodes))
    for nodes in (4, 16):
        yield f"replay, chain of {nodes}", partial(run, texts, partial(_of_texts, nodes, chains=True))
    yield "replay, memory kept", partial(run, texts, partial(AutoDrafter, DraftMemory.of_texts(), 32))
    expected = recordings["replay edit"].prompt
    yield ("replay edit, predicted", partial(run, texts[:1], partial(_of_texts, 16, predicted=PredictedText(expected))))


def compare(names: Callable[[str], bool] = lambda name: True, sent: Drafts | None = None) -> Counter[str]:
    """Play the scenarios selected by `names`, and print differences from `sent`, by default the record.

    Returns:
        Number of `equal` drafts, and number of `different` scenarios.
    """
    recordings, sent = unpack(load(SAID)), sent or load(SENT)
    counts: Counter[str] = Counter()
    for name, play in scenarios(recordings):
        if not names(name):
            continue
        if name not in sent:
            print(f"{name}: was not recorded")
            counts["different"] += 1
            continue
        notes, missing = Notes(), ""
        try:
            play(notes)
        except NotRecordedError as error:  # another draft led to a text that was not recorded
            missing = str(error)
        if (
            found := difference(notes.sent, [Sent(tuple(one[0]), tuple(one[1]), one[2]) for one in sent[name]])
            or missing
        ):
            print(f"{name}: {found}")
            counts["different"] += 1
        else:
            counts["equal"] += len(notes.sent)
    return counts


def update(shared: Path) -> None:
    """Run the models, and write their predictions and the drafts of all scenarios."""
    from golden_models import record

    recordings = record(shared)
    sent: Drafts = {}
    for name, play in scenarios(recordings):
        notes = Notes()
        play(notes)
        sent[name] = list(map(astuple, notes.sent))
        accepted = sum(one.accepted for one in notes.sent)
        print(f"{name:36} {len(notes.sent):5} drafts, S {1 + accepted / len(notes.sent):.2f}", flush=True)
    save(SAID, pack(recordings))
    save(SENT, sent)
    print(f"{sum(path.stat().st_size for path in (SAID, SENT)):,} bytes")


def main() -> int:
    """Run the command; return its exit status, 1 if a scenario differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="run the models again, and write the record")
    parser.add_argument("--shared", type=Path, default=FOLDER.parents[2] / "shared", help="folder of data and models")
    options = parser.parse_args()
    if options.update:
        update(options.shared)
        return 0
    counts = compare()
    print(f"{counts['equal']} drafts are equal, {counts['different']} scenarios differ")
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
