"""Measure what several chains at once would bring on models with running states, and what they would cost.

Such a model reads one path per row of a pass. Several paths could be rows of one pass over copies of its states; the
longest accepted one counts. What that brings is replayed: recorded answers, of which a step is accepted as far as one
of its chains agrees; the drafts are those of `preset="auto"` without logits, from each recording alone or from those
before it too (`across`). Where not all of a chain was accepted, the states go back and its tokens are pending, in each
row of the next step. What it brings with logits at hand is tried on the demo model, which runs the chains as a tree.

What it costs is measured on a random hybrid: CPU time of passes with one to four rows, states copied and put back, and
the time that the replayed steps would take with as many chains and tokens as promise the most tokens per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from lookahead import LookaheadConfig
from lookahead.backends.chain_rules import has_room
from lookahead.backends.transformers import SavedState, chain_engine
from lookahead.bench.models import BenchModel
from lookahead.bench.repetition import repeated_cycle_share
from lookahead.bench.replay.backend import ReplayBackend, replayed_sequence
from lookahead.bench.replay.recordings import Recording, read_recordings
from lookahead.bench.rows import Row
from lookahead.core.decoder import Batch, decode
from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import ContextMatches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.drafting.chain import SKETCHED_NODES, seen_in_sketch
from lookahead.drafting.text_only import build_text_drafter, text_memory
from probe import Probe, Unit, generate, load_model, option, prompts_of, random_model, token_ids

ROWS = (1, 2, 4)
TOKENS = (1, 2, 4, 8, 16, 32)
"""Tokens of each row of the passes that are timed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    edits: str = option("../shared/data/code_edits.jsonl", "JSON lines with `id`, `instruction`, `input` and `output`")
    traces: str = option("../shared/data/agent_traces.jsonl", "JSON lines with `id`, `prompt` and `output`")
    answers: str = option("../shared/data/answers.jsonl", "JSON lines with `id`, `prompt` and `output`")
    count: int | None = option(None, "take the first so many recordings of each file; all if not given")
    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `prompt`, for the demo model")
    prompt_count: int = option(10, "take the first so many of them")
    new_tokens: int = option(128, "tokens of an answer to one of them")
    length: int = option(16, "tokens of a chain at most")
    layers: int | None = option(None, "layers of the hybrid; 24 if not given")
    hidden_size: int = option(1024, "its hidden size")
    dtype: str = option("bfloat16", "number type of its weights")
    context: int = option(256, "tokens of text before the passes that are timed")
    repeats: int = option(7, "passes of each size, of which the median is taken")


class Costs:
    """CPU seconds of passes of some rows with some tokens each, measured when they are first asked for."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loaded: BenchModel | None = None
        self._seconds: dict[int, NDArray[np.float64]] = {}
        self.states = 0
        """Bytes of states that a pass with the most rows copies."""

    @property
    def loaded(self) -> BenchModel:
        """The hybrid."""
        if self._loaded is None:
            options = self._options
            self._loaded = random_model("granite", options.layers, options.hidden_size, options.dtype)
        return self._loaded

    def seconds(self, rows: int) -> NDArray[np.float64]:
        """Seconds of a pass with so many rows, by the tokens of a row up to the most of `TOKENS`; `[tokens + 1]`."""
        if not self._seconds:
            self._measure()
        return self._seconds[rows]

    @torch.no_grad()
    def _measure(self) -> None:
        engine = chain_engine(self.loaded.model)
        for rows in ROWS:
            cache = DynamicCache(config=engine.config)
            prompt = torch.randint(3, 1000, (rows, self._options.context))
            self.loaded.model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
            medians = [self._one(engine, cache, torch.randint(3, 1000, (rows, tokens))) for tokens in TOKENS]
            rising = np.maximum.accumulate(medians)
            self._seconds[rows] = np.interp(np.arange(TOKENS[-1] + 1), TOKENS, rising)

    def _one(self, engine: Any, cache: DynamicCache, ids: torch.Tensor) -> float:
        taken, buffers = [], []
        for _ in range(self._options.repeats + 1):
            begin = process_time()
            saved = SavedState(cache, buffers)
            engine(ids, past_key_values=cache, use_cache=True)
            saved.restore()
            taken.append(process_time() - begin)
            self.states = saved.copied_bytes
        return median(taken[1:])  # the first makes the buffers


class SeveralChains:
    """Sends several paths of what a drafter proposes (`Drafter`): as one tree, whose nodes are told apart as in rows.

    Args:
        drafter: Proposes trees.
        most: Chains of a step at most.
        length: Tokens of a chain at most.
        costs: Sends as many chains and tokens as promise the most tokens per second; all if not given.
    """

    def __init__(self, drafter: AutoDrafter, most: int, length: int, costs: Costs | None = None) -> None:
        self._drafter = drafter
        self._most, self._length, self._costs = most, length, costs
        self._sketch, self._places = TokenTree([0]), [0]
        self._tree: TokenTree | None = None
        self._prompt_read = False
        self.passes: Counter[tuple[int, int]] = Counter()
        """Steps after the prompt, by rows and tokens of a row."""

    @property
    def top_k(self) -> int:
        """See `Drafter`."""
        return self._drafter.top_k

    def start(self, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self._drafter.start(prompt)
        self._prompt_read = False

    def propose(self, tree: TokenTree) -> None:
        """See `Drafter`."""
        self._sketch = sketch = TokenTree(tree.tokens, tree.depths[tree.root] + tree.room)
        self._drafter.propose(sketch)
        chains = best_chains(sketch, self._drafter.path_probabilities, self._most, self._length)
        if self._costs is not None and chains:
            chains = self._paying(chains, tree.root + 1)
        self._places = list(range(sketch.root + 1))
        for chain in chains:
            self._places += [node for node in chain if node not in self._places]
            tree.add_candidates([sketch.tokens[node] for node in chain])
        self._tree = tree
        if self._prompt_read:
            rows = next(rows for rows in ROWS if rows >= len(chains))  # those that are timed
            self.passes[rows, tree.root + 1 + max(map(len, chains), default=0)] += 1
        self._prompt_read = True

    def observe(self, result: StepResult) -> None:
        """See `Drafter`."""
        mine = result.tree is self._tree
        self._drafter.observe(seen_in_sketch(result, self._sketch, self._places) if mine else result)
        self._tree = None

    def statistics(self) -> dict[str, Any]:
        """See `Drafter`."""
        return {}

    def _paying(self, chains: list[list[int]], pending: int) -> list[list[int]]:
        assert self._costs is not None
        scores = np.concatenate([np.zeros(self._sketch.root + 1), self._drafter.path_probabilities])
        best, rate = [], 1.02 / float(self._costs.seconds(1)[pending])
        one = self._costs.seconds(1)
        for rows in (rows for rows in ROWS if rows <= max(self._most, 1)):
            seconds = self._costs.seconds(rows)
            for length in range(1, min(self._length, len(seconds) - 1 - pending) + 1):
                cut = [chain[:length] for chain in chains[:rows]]
                accepted = float(scores[sorted({node for chain in cut for node in chain})].sum())
                whole = float(scores[sorted({chain[-1] for chain in cut if chain})].sum())
                again = (1 - whole) * pending + max(accepted - whole * length, 0)
                price = (one[pending + length] - one[1]) / (pending + length - 1)
                promised = (1 + accepted) / float(seconds[pending + length] + price * again)
                if promised > rate:
                    best, rate = cut, promised
        return best


def best_chains(tree: TokenTree, probabilities: NDArray[np.float64], most: int, length: int) -> list[list[int]]:
    """Paths of a tree, each the one that adds the most accepted tokens to those before it; cut to `length` tokens."""
    first = tree.root + 1
    left = np.concatenate([np.zeros(first), probabilities])
    chains = []
    while len(chains) < most:
        gain = np.zeros(len(tree))
        for node in range(first, len(tree)):
            deep = tree.depths[node] - tree.depths[tree.root] > length
            gain[node] = 0 if deep else gain[tree.parents[node]] + left[node]
        node = int(gain.argmax())
        if gain[node] <= 0:
            break
        chain = []
        while node >= first:
            chain.append(node)
            left[node] = 0
            node = tree.parents[node]
        chains.append(chain[::-1])
    return chains


class PendingBackend(ReplayBackend):
    """Recorded texts as a model with running states answers them: what is not accepted as a whole is sent again."""

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """See `Backend`; a prompt and many pending tokens leave no room for a draft."""
        pending = text[self._cached[row] :]
        full = not has_room(self._cached[row], len(pending))
        return TokenTree(pending, len(pending) - 1 if full else None)

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> Any:
        """See `Backend`."""
        self._trees = trees
        return super().forward(trees, top_k)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """See `Backend`: states stay where a chain was accepted as a whole."""
        whole = [nodes[-1] not in tree.parents for nodes, tree in zip(kept, self._trees, strict=True)]
        super().commit([nodes if stays else [] for nodes, stays in zip(kept, whole, strict=True)])


def cost_rows(costs: Costs) -> Iterator[Row]:
    """A row for each size of a pass."""
    one = costs.seconds(1)[1]
    for rows in ROWS:
        for tokens in TOKENS:
            seconds = float(costs.seconds(rows)[tokens])
            yield {
                "kind": "cost",
                "rows": rows,
                "tokens": tokens,
                "ms": 1000 * seconds,
                "over_one": seconds / one,
                "state_bytes_most": costs.states,
            }


def replay_rows(task: str, recordings: Sequence[Recording], options: Options, costs: Costs) -> Iterator[Row]:
    """Rows of one file: fixed numbers of chains and tokens, and as many as pay."""
    for across in (False, True):
        for paying in (False, True):
            for most in ROWS:
                taken = _replayed(recordings, most, options.length, across, costs, paying)
                yield {"kind": "replay", "task": task, "across": across, "chains": most, **taken}


def demo_rows(options: Options) -> Iterator[Row]:
    """What several chains bring where a model's predictions are drafted from: on a tree of them, which the demo model
    can run and a hybrid cannot."""
    loaded = load_model("demo", "float32")
    prompts = [
        token_ids(loaded.tokenizer, loaded.model, each.text)
        for each in prompts_of(Path(options.prompts), options.prompt_count)
    ]
    for most in ROWS:
        steps = tokens = 0
        cycles = 0.0
        config = LookaheadConfig(drafter=partial(_auto_chains, most, options.length))
        for ids in prompts:
            text, output = generate(loaded.model, ids, config, max_new_tokens=options.new_tokens)
            tokens, steps = tokens + len(text), steps + output.statistics.steps
            cycles += len(text) * repeated_cycle_share(text)
        row: Row = {"kind": "demo", "task": "demo model", "chains": most, "prompts": len(prompts), "tokens": tokens}
        yield row | {"steps": steps, "S": tokens / steps, "cycle_share": cycles / tokens}


def _auto_chains(most: int, length: int) -> SeveralChains:
    drafter = AutoDrafter(DraftMemory(), ContextMatches(), SKETCHED_NODES, explore=False)
    return SeveralChains(drafter, most, length)


def _replayed(recordings: Sequence[Recording], most: int, length: int, across: bool, costs: Costs, paying: bool) -> Row:
    memory = text_memory() if across else None
    tokens = steps = 0
    passes: Counter[tuple[int, int]] = Counter()
    for recording in recordings:
        drafter = SeveralChains(build_text_drafter(SKETCHED_NODES, memory), most, length, costs if paying else None)
        text = [*recording.prompt, *recording.answer]
        sequence = replayed_sequence(recording.prompt, recording.answer, drafter)
        batch = Batch([sequence])
        decode(PendingBackend([text]), batch)
        assert sequence.tokens == text
        tokens += len(recording.answer)
        steps += batch.statistics.steps
        passes += drafter.passes
    widest = len(costs.seconds(1)) - 1
    seconds = sum(count * float(costs.seconds(rows)[min(width, widest)]) for (rows, width), count in passes.items())
    several = sum(count for (rows, _), count in passes.items() if rows > 1) / max(sum(passes.values()), 1)
    row: Row = {"paying": paying, "recordings": len(recordings), "tokens": tokens, "steps": steps}
    return row | {"S": tokens / steps, "several": several, "seconds": seconds, "tokens_per_second": tokens / seconds}


def probe(options: Options) -> Probe:
    """The units: passes, and each file."""
    costs = Costs(options)

    def encode(text: str) -> list[int]:
        ids: list[int] = costs.loaded.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    units = [Unit("passes", partial(cost_rows, costs))]
    for task, path in (("edits", options.edits), ("traces", options.traces), ("answers", options.answers)):
        recordings = read_recordings(Path(path), encode, options.count)
        units.append(Unit(task, partial(replay_rows, task, recordings, options, costs)))
    units.append(Unit("demo model", partial(demo_rows, options)))
    return Probe(units, {"model": costs.loaded.settings(), "methods": "auto, text only"})
