r"""Fit the weights of the sources of `preset="auto"`, and print the table for `drafting/auto/weights.py`.

    python tools/fit_weights.py --run demo humaneval.jsonl --run demo gsm8k.jsonl --run demo spec_bench.jsonl \
        --run ../shared/models/pycode-6m humaneval.jsonl --skip 40 --limit 10 \
        --run ../shared/models/stories260k benchmarks/prompts/story_beginnings.jsonl \
        --kept ../shared/models/stories260k   # MODEL_WEIGHTS
    python tools/fit_weights.py --recordings agent_traces.jsonl code_edits.jsonl answers.jsonl   # TEXT_WEIGHTS

With `--run`, prompts are decoded greedily and at temperature 0.8, with separate memories and with a shared one.
`--skip` and `--limit` select prompts in files with more than 30. With `--recordings`, every second recorded answer is
replayed, with separate memories and with a shared one. Features of each proposal and the correct token are recorded.
The fit maximises the likelihood of the tokens, separately for each length of the longest known context. Each model has
the same total weight. Greedy texts of the model `--kept` with a shared memory count three times. A penalty pulls
weights towards the present ones, so that weights without data stay. Prompts are JSON lines with `id`, and `prompt` or
`turns`. Fit and evaluate on different prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import lookahead

sys.path += [str(Path(__file__).parents[1] / "benchmarks")]
from cases import encoder_of, read_cases, tokenizer_of
from lookahead.config import LookaheadConfig
from lookahead.core.compiled import compiled
from lookahead.core.results import StepResult
from lookahead.drafting import AutoDrafter, DraftMemory, compile_loops
from lookahead.drafting.auto.batch import DraftBatch
from lookahead.drafting.auto.ngrams import Entries, look_up
from lookahead.drafting.auto.texts import MATCH_CLASSES
from lookahead.drafting.auto.weights import MATCHES, all_weights, feature_names
from models import load_model, load_tokenizer
from playback import play_text

OFF_PATH = 0.3
"""Weight of a node beside the accepted path: its next token is the model's prediction and not part of the text."""

PULL = 1e-3
"""Strength of the penalty that pulls weights towards the present ones."""

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}

KEPT_COUNTS = 3.0
"""Weight of greedy texts with a shared memory, for the model `--kept`. Its texts are alike, and profit most from the
memory. With 1, such stories lose 0.1 and 1.1 % S (16, 64 nodes); with 3 for all models 1.4 and 1.4 %."""

MOST_WHOLE = 30
"""Most prompts of a file that is used completely."""


class Lesson(NamedTuple):
    """Training example of one node.

    Attributes:
        features: Features of its proposals, `[proposals, columns]`.
        outcomes: 1 for the correct proposal, 0 for others, `[proposals]`.
        length: Length of its longest known context, in tokens.
        count: Weight of the example.
    """

    features: NDArray[np.float64]
    outcomes: NDArray[np.float64]
    length: int
    count: float


class RecordingDrafter(AutoDrafter):
    """`AutoDrafter` that records a lesson of each node with a known next token."""

    lessons: list[Lesson]

    def observe(self, result: StepResult) -> None:
        """Record lessons, then learn."""
        if self._batch is not None and not self.budget.backs_off:
            selected = dict(zip(result.selected_after, result.tokens, strict=True))
            for row in range(int(self._batch.sent[self.place]) + 1):
                node = result.tree.root + row
                predicted = int(result.top_ids[node, 0]) if result.top_ids.shape[1] else -1
                token = selected.get(node, predicted)
                tokens, features, length = candidates_of(self._batch, self.place, row)
                if len(tokens) and token >= 0:
                    outcomes = (tokens == token).astype(np.float64)
                    weight = 1.0 if node in selected else OFF_PATH
                    self.lessons.append(Lesson(features, outcomes, length, weight))
        super().observe(result)


@compiled
def _look_up(context: NDArray[np.int64], entries: Entries, slots: NDArray[np.int64]) -> int:
    return look_up(context, len(context), entries, slots)


def candidates_of(batch: DraftBatch, place: int, row: int) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """Collect the proposals of the memory and of text matches after a node of a draft.

    Returns:
        The proposed tokens, `[tokens]`; their features in the columns of the weights, `[tokens, columns]`; and the
        length of the longest known context, in tokens.
    """
    memory, nodes, node = batch.memory, batch.state.trees[place], row
    path = []
    while node > 0:
        path.append(int(nodes["token"][node]))
        node = int(nodes["parent"][node])
    text = batch.state.texts.tokens[place, : batch.state.texts.lengths[place]]
    path += text[::-1][: memory.orders].tolist()
    slots = np.zeros(memory.orders, dtype=np.int64)
    length = _look_up(np.array(path[: memory.orders]), memory.entries, slots)
    columns: dict[int, NDArray[np.float64]] = {}
    empty = np.zeros(1 + memory.orders + len(MATCHES))
    empty[1 : 1 + length] = memory.entries.heads["floor"][np.arange(length), slots[:length]]
    for order in range(length):
        for follower in memory.entries.followers[order, slots[order]]:
            if follower["token"] >= 0:
                columns.setdefault(int(follower["token"]), empty.copy())[1 + order] = follower["log"]
    for occurrence in batch.room.followed[row, : nodes["matches"][row]]:
        of_token = columns.setdefault(int(text[occurrence["place"]]), empty.copy())[1 + memory.orders :]
        kind = int(np.searchsorted(MATCH_CLASSES, occurrence["length"], side="right")) - 1
        kind = max(kind, int(of_token.argmax()) if of_token.any() else 0)
        of_token[:] = np.arange(len(MATCHES)) == kind
    features = np.stack([*columns.values()]) if columns else empty[None, :0]
    return np.array([*columns], dtype=np.int64), features, length


class Part(NamedTuple):
    """Lessons of one kind, and their total weight."""

    lessons: list[Lesson]
    weight: float = 1.0


def decode(name: str, path: Path, options: argparse.Namespace, share: float) -> list[Part]:
    """Decode texts with a model, and return their lessons in parts of weight `share`."""
    model, parts, is_special = load_model(name, ends=False), list[Part](), name == options.kept
    context = model.config.max_position_embeddings
    prompts = read_cases(path, encoder_of(load_tokenizer(name)))
    if len(prompts) > MOST_WHOLE:
        prompts = prompts[options.skip : options.skip + options.limit]
    for is_kept, sampling in product((False, True), ({"do_sample": False}, SAMPLED)):
        shared, lessons = DraftMemory() if is_kept else None, list[Lesson]()
        parts.append(
            Part(lessons, share * (KEPT_COUNTS if is_kept and is_special and not sampling["do_sample"] else 1.0))
        )
        for prompt in prompts:
            ids = torch.tensor([prompt.prompt])
            if ids.shape[1] + options.max_new_tokens <= context:
                drafter = RecordingDrafter(shared or DraftMemory(), options.nodes)
                drafter.lessons = lessons
                config = LookaheadConfig(drafter=lambda drafter=drafter: drafter, step_budget=options.nodes)
                arguments = {"max_new_tokens": options.max_new_tokens, **sampling}
                torch.manual_seed(0)
                lookahead.generate(model, ids, lookahead_config=config, **arguments)
    return parts


def replay_file(path: Path, across: bool, options: argparse.Namespace) -> list[Lesson]:
    """Replay every second recording of a file, and return its lessons."""
    lessons, shared = list[Lesson](), DraftMemory.of_texts() if across else None

    for recording in read_cases(path, tokenizer_of(options.tokenizer)[1])[::2]:
        drafter = RecordingDrafter(shared or DraftMemory.of_texts(), options.nodes, explore=False)
        drafter.lessons = lessons
        play_text(recording.prompt, recording.answer, drafter)
    return lessons


def loss(weights: torch.Tensor, lessons: Sequence[Lesson]) -> torch.Tensor:
    """Mean negative log-likelihood of the next tokens; column 0 is the weight of all tokens without a proposal."""
    sizes = [len(lesson.outcomes) for lesson in lessons]
    nodes = torch.repeat_interleave(torch.arange(len(lessons)), torch.tensor(sizes))
    features, outcomes = (torch.from_numpy(np.concatenate(parts)) for parts in list(zip(*lessons, strict=True))[:2])
    counts = torch.tensor([lesson.count for lesson in lessons], dtype=torch.float64)
    scores = features @ weights
    sums = torch.zeros_like(counts).index_add(0, nodes, scores.exp()) + weights[0].exp()
    came = torch.zeros_like(counts).index_add(0, nodes, outcomes * scores)
    nothing = 1 - torch.zeros_like(counts).index_add(0, nodes, outcomes)
    return (counts * (sums.log() - came - nothing * weights[0])).sum() / counts.sum()


def fit(every: Sequence[Part], length: int, present: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit the weights for one length of the longest known context, `[columns]`, starting from the present ones."""
    chosen = [Part([lesson for lesson in part.lessons if lesson.length == length], part.weight) for part in every]
    parts = [part for part in chosen if part.lessons]
    total = sum(part.weight for part in parts)

    def loss_of_all(weights: torch.Tensor) -> torch.Tensor:
        return sum(part.weight / total * loss(weights, part.lessons) for part in parts)  # type: ignore[return-value]

    start = torch.from_numpy(present.copy())
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = PULL * (weights - start).square().sum() + loss_of_all(weights)
        value.backward()
        return value

    if parts:
        optimizer.step(step)
        before, after = (float(loss_of_all(at)) for at in (start, weights.detach()))
        nodes = sum(len(part.lessons) for part in parts)
        print(f"{length} tokens known: {nodes} nodes, loss {before:.4f} to {after:.4f}", file=sys.stderr)
    return weights.detach().numpy()


def main() -> int:
    """Run the command."""
    compile_loops()  # otherwise the first texts might have no drafts
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", nargs=2, action="append", default=[], metavar=("MODEL", "PROMPTS"), help="a model and its prompts")
    add("--recordings", nargs="+", type=Path, default=[], help="recorded answers to replay")
    add("--tokenizer", type=Path, help="as for `python benchmarks replay`")
    add("--kept", metavar="MODEL", help="the model whose greedy texts with a kept memory count more")
    add("--limit", type=int, default=40, help="prompts of each run (40)")
    add("--skip", type=int, default=0, help="first prompts of each file that are left out (0)")
    add("--max-new-tokens", type=int, default=128, help="tokens of each (128)")
    add("--nodes", type=int, default=32, help="nodes of a step (32)")
    options = parser.parse_args()
    runs = Counter(name for name, _ in options.run)
    parts = [part for name, prompts in options.run for part in decode(name, Path(prompts), options, 1 / runs[name])]
    for path, across in product(options.recordings, (False, True)):
        parts.append(Part(replay_file(path, across, options)))
    memory = DraftMemory.of_texts() if options.recordings else DraftMemory()
    fitted = [fit(parts, length, row) for length, row in enumerate(all_weights(memory.orders)[int(memory.observed)])]
    for column, name in enumerate(feature_names(memory.orders)):
        print(f'    "{name}": ({", ".join(f"{row[column] + 0.0:.2f}" for row in fitted)}),'.replace("-0.00", "0.00"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
