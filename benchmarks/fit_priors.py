"""Fit the weights with which `preset="auto"` begins, from steps of greedy decoding, and write them as its priors.

    python benchmarks/fit_priors.py --run demo PROMPTS.jsonl --run ../models/stories260k STORIES.jsonl \\
        --output src/lookahead/drafting/auto/priors.py

Each prompt is decoded with all sources while nothing is learned; what they said of each proposal and what the model
said are recorded, as `Acceptance.learn` gets them. The weights of each length of the longest known context are then
those of greatest likelihood, each model counting the same; they are drawn towards the present ones, so that what was
never seen stays. A source added to the library takes part by itself; one of your own is named by
`--source package.module:factory`.
Prompts are JSON lines with `id`, and `prompt` or `turns`. Fit and judge on different prompts.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ablation import decode_with
from lookahead.backends.transformers.model_state import neighbours
from lookahead.drafting import AutoDrafter, ContextMatches, DraftMemory, NGramMemory
from lookahead.drafting.auto.scorer import Acceptance, Lessons
from lookahead.drafting.auto.source import CheckedSource
from probe import load_model, prompts_of, token_ids

ORDERS = 4
PROMPT_READ = 256


class Recorder(Acceptance):
    """Weighs as the priors do, learns nothing, and keeps all lessons."""

    def __init__(self) -> None:
        super().__init__(ORDERS)
        self.lessons: list[Lessons] = []

    def learn(self, lessons: Lessons) -> None:
        """Keep what came of one step; its arrays are used again."""
        if len(lessons.starts):
            self.lessons.append(Lessons(*map(np.copy, lessons)))


def record(name: str, prompts: Path, options: argparse.Namespace) -> Recorder:
    """The lessons of decoding prompts with a model."""
    loaded, recorder = load_model(name, "float32"), Recorder()
    loaded.model.generation_config.eos_token_id = None
    near = neighbours(loaded.model)
    for prompt in prompts_of(prompts, options.skip + options.limit)[options.skip :]:
        ids = token_ids(loaded.tokenizer, loaded.model, prompt.text)
        if loaded.context is None or ids.shape[1] + options.max_new_tokens <= loaded.context:
            memory, sources = (
                DraftMemory(NGramMemory(ORDERS), recorder),
                [CheckedSource(make()) for make in options.source],
            )
            drafter = AutoDrafter(
                memory, ContextMatches(), options.nodes, warm_up=PROMPT_READ, neighbours=near, sources=sources
            )
            decode_with(drafter, loaded.model, ids, options.max_new_tokens)
    return recorder


def select(recorder: Recorder, known: int) -> tuple[torch.Tensor, ...]:
    """Features, outcomes and node of each proposal, and the count of each node, where the longest known context is so
    long."""
    columns = len(recorder.names)
    features, outcomes, nodes, counts = [np.zeros((0, columns))], [np.zeros(0)], [np.zeros(0, dtype=np.int64)], []
    for lessons in recorder.lessons:
        ends = np.append(lessons.starts[1:], len(lessons.estimates))
        for node in np.flatnonzero(lessons.known == known):
            part = slice(lessons.starts[node], ends[node])
            features.append(lessons.features[part])
            outcomes.append(lessons.outcomes[part])
            nodes.append(np.full(part.stop - part.start, len(counts)))
            counts.append(lessons.counts[node])
    arrays = (*(np.concatenate(each) for each in (features, outcomes, nodes)), np.array(counts, dtype=np.float64))
    return tuple(map(torch.from_numpy, arrays))


def loss(weights: torch.Tensor, data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean negative log-likelihood of the tokens that came; column 0 is the weight of all that nobody proposed."""
    features, outcomes, nodes, counts = data
    scores = features @ weights
    sums = torch.zeros_like(counts).index_add(0, nodes, scores.exp()) + weights[0].exp()
    came = torch.zeros_like(counts).index_add(0, nodes, outcomes * scores)
    nothing = 1 - torch.zeros_like(counts).index_add(0, nodes, outcomes)
    return (counts * (sums.log() - came - nothing * weights[0])).sum() / counts.sum()


def fit(recorders: list[Recorder], known: int, pull: float) -> np.ndarray:
    """The likeliest weights for one length of the longest known context; `pull` draws them to the present ones."""
    prior = torch.from_numpy(recorders[0].weights[known].copy())
    parts = [data for data in (select(recorder, known) for recorder in recorders) if len(data[3])]
    weights = prior.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = pull * (weights - prior).square().sum() + sum(loss(weights, data) for data in parts) / len(parts)
        value.backward()
        return value

    if parts:
        optimizer.step(step)
        with torch.no_grad():
            before, after = (float(sum(loss(each, data) for data in parts)) / len(parts) for each in (prior, weights))
        print(f"{known} tokens known: {sum(len(data[3]) for data in parts)} nodes, loss {before:.4f} to {after:.4f}")
    return weights.detach().numpy()


def write(path: Path, names: list[str], weights: list[np.ndarray], command: str, table: str = "PRIORS") -> None:
    """Write the priors as a module."""
    lines = [
        '"""Where learning begins: a weight of each feature for each length of the longest known context.\n',
        "Written by:\n",
        *textwrap.wrap(command, 110, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False),
        '"""\n\nfrom __future__ import annotations\n',
        f"{table}: dict[str, tuple[float, ...]] = {{",
    ]
    for column, name in enumerate(names):
        values = ", ".join(f"{row[column] + 0.0:.2f}" for row in weights)
        lines.append(f'    "{name}": ({values}),')
    path.write_text("\n".join([*lines, "}\n"]).replace("-0.00", "0.00"))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", nargs=2, action="append", required=True, metavar=("MODEL", "PROMPTS"), help="what to decode with what")
    add("--output", type=Path, required=True, help="module to write")
    add("--limit", type=int, default=40, help="prompts of each run (40)")
    add("--skip", type=int, default=0, help="first prompts of each file that are left out (0)")
    add("--max-new-tokens", type=int, default=128, help="tokens of each (128)")
    add("--nodes", type=int, default=32, help="nodes of a step (32)")
    add("--pull", type=float, default=1e-3, help="how strongly present weights hold (0.001)")
    add("--source", type=load, action="append", default=[], help="what makes a source of your own, module:name")
    options = parser.parse_args()
    recorders = [record(name, Path(prompts), options) for name, prompts in options.run]
    weights = [fit(recorders, known, options.pull) for known in range(ORDERS + 1)]
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    write(options.output, recorders[0].names, weights, shlex.join(["python", "benchmarks/fit_priors.py", *words]))
    return 0


def load(name: str) -> Callable[[], Any]:
    """What `package.module:name` names."""
    module, _, member = name.partition(":")
    make: Callable[[], Any] = getattr(import_module(module), member)
    return make


if __name__ == "__main__":
    sys.exit(main())
