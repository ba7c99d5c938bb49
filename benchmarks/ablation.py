"""Measure what each part of `preset="auto"` brings: steps without one source, rule or memory in turn.

For each prompt plain greedy `model.generate` runs once, then each variant of the drafter at each number of nodes; every
output is compared with the plain one, token for token. Rows are those of `lookahead bench run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lookahead.api.prompt_warm_up import MOST_READ
from lookahead.backends.transformers import ModelRunner, engine_model
from lookahead.backends.transformers.sampler import TextSampler
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.bench.machine import describe_machine
from lookahead.bench.method_runner import MethodRunner, Run, timed
from lookahead.bench.models import BenchModel
from lookahead.bench.prompts import Prompt, encode, read_prompts
from lookahead.bench.rows import Request, Row, build_row
from lookahead.bench.suite import MethodSpec, TaskSpec
from lookahead.cli import process
from lookahead.core.decoder import Batch, decode
from lookahead.core.statistics import Statistics
from lookahead.drafting import AutoDrafter, ContextMatches, DraftMemory, NGramMemory
from probe import Probe, Unit, load_model, option

PLAIN = MethodSpec("transformers")
"""What all is compared with."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option("demo", "`demo`, or the folder of a model")
    prompts: str = option("../shared/data/humaneval.jsonl", "JSON lines with `id`, and `prompt` or `turns`")
    task: str = option("HumanEval", "what rows call the prompts")
    limit: int = option(8, "take the first so many prompts")
    max_new_tokens: int = option(128, "tokens to generate at most")
    nodes: tuple[int, ...] = option((16, 32, 64), "nodes of a step")


@dataclass(frozen=True)
class Variant:
    """A drafter like that of `preset="auto"`, but for what is said here.

    Attributes:
        matches: Draft from earlier occurrences in the text.
        orders: Longest context of the n-gram memory; 0 for no memory.
        explores: Try recent predictions with the nodes that are left.
        keeps: Keep the memory from prompt to prompt.
        continuations: Draft from what followed the tokens that stood in the root's place.
        warm_up: Most tokens of the prompt that are read.
        old_share: How far the prediction after a single token keeps what it was.
    """

    matches: bool = True
    orders: int = 4
    explores: bool = True
    keeps: bool = False
    continuations: bool = True
    warm_up: int = MOST_READ
    old_share: float = 0.3

    def memory(self) -> DraftMemory | None:
        """A new memory, if there is to be one."""
        if not self.orders:
            return None
        return DraftMemory(NGramMemory(self.orders, old_share=self.old_share))

    def drafter(self, nodes: int, memory: DraftMemory | None) -> AutoDrafter:
        """A drafter for one text, with so many nodes a step."""
        return AutoDrafter(
            memory,
            ContextMatches() if self.matches else None,
            nodes,
            explore=self.explores,
            warm_up=self.warm_up if self.orders else 0,
            continuations=self.continuations,
        )


VARIANTS: dict[str, Variant] = {
    "all": Variant(),
    "no context matches": Variant(matches=False),
    "no n-gram memory": Variant(orders=0, explores=False),
    "contexts of 1 token": Variant(orders=1),
    "contexts of 1 to 3 tokens": Variant(orders=3),
    "no exploring": Variant(explores=False),
    "no rejected-sibling continuations": Variant(continuations=False),
    "prompt not read": Variant(warm_up=0),
    "newest prediction alone after one token": Variant(old_share=0.0),
    "none of these three": Variant(continuations=False, warm_up=0, old_share=0.0),
    "memory kept across prompts": Variant(keeps=True),
}


@dataclass(frozen=True)
class VariantSpec(MethodSpec):
    """A variant at a number of nodes, as a method of a benchmark."""

    variant: str = "all"
    nodes: int = 0

    def settings(self) -> dict[str, Any]:
        """What the measured figures depend on."""
        return {"name": self.name, "variant": self.variant, "nodes": self.nodes, **asdict(VARIANTS[self.variant])}


@dataclass
class Ablation:
    """All variants on the prompts of one task."""

    loaded: BenchModel
    task: TaskSpec
    methods: Sequence[VariantSpec]
    kept: dict[str, DraftMemory | None] = field(default_factory=dict)

    def rows(self, prompts: Sequence[Prompt], keeps: bool) -> Iterator[Row]:
        """Variants on prompts, in order: those that keep what earlier prompts taught them, or plain decoding and those
        that do not."""
        machine = {"machine": describe_machine(torch.device("cpu")), "versions": process.versions()}
        plain = MethodRunner(self.loaded, PLAIN)
        for prompt in prompts:
            ids = encode(prompt, self.task, self.loaded.tokenizer, self.loaded.context)
            expected = plain.run(ids, self.task, prompt.number)
            runs: list[tuple[int, MethodSpec, Run]] = [] if keeps else [(0, PLAIN, expected)]
            runs += [
                (order, method, self.run(method, ids))
                for order, method in enumerate(self.methods, start=1)
                if VARIANTS[method.variant].keeps == keeps
            ]
            for order, method, run in runs:
                row = build_row(Request(self.loaded, self.task, prompt, method, order, 0, ids), run, machine)
                wrong = run.output != expected.output
                yield {**row, **({"error": f"{method.name} on {prompt.id}: another text"} if wrong else {})}

    def run(self, method: VariantSpec, input_ids: torch.Tensor) -> Run:
        """Greedy decoding with a variant; input_ids: [1, S]."""
        variant = VARIANTS[method.variant]
        memory = variant.memory() if method.name not in self.kept else self.kept[method.name]
        if variant.keeps:
            self.kept[method.name] = memory
        drafter = variant.drafter(method.nodes, memory)
        return decode_with(drafter, self.loaded.model, input_ids, self.task.max_new_tokens)


def decode_with(drafter: AutoDrafter, model: Any, input_ids: torch.Tensor, max_new_tokens: int) -> Run:
    """Greedy decoding with a drafter; input_ids: [1, S]."""
    prompt = input_ids[0].tolist()
    ends = model.generation_config.eos_token_id
    eos = set(ends) if isinstance(ends, list) else {ends}
    longest = len(prompt) + max_new_tokens
    statistics = Statistics()

    def is_complete(text: TextSequence) -> bool:
        return text.tokens[-1] in eos or len(text.tokens) >= longest

    def call() -> list[int]:
        text = TextSequence(input_ids, prompt, drafter, TextSampler(), is_complete)
        with torch.no_grad():
            decode(ModelRunner(engine_model(model), 1), Batch([text], statistics))
        return text.tokens[len(prompt) :]

    output, cpu, wall = timed(call)
    lengths, nodes = statistics.accepted_lengths, statistics.nodes_per_step
    return Run(output, len(lengths), nodes, lengths, cpu, wall)


def probe(options: Options) -> Probe:
    """The units: each prompt, then all prompts for the variants that keep their memory."""
    task = TaskSpec(options.task, Path(options.prompts), max_new_tokens=options.max_new_tokens)
    methods = [
        VariantSpec(f"{variant}, {nodes} nodes", variant=variant, nodes=nodes)
        for nodes in options.nodes
        for variant in VARIANTS
    ]
    loaded = load_model(options.model, "float32")
    prompts = read_prompts(task, options.limit)
    ablation = Ablation(loaded, task, methods)
    units = [Unit(f"{task.name}, {one.id}", partial(ablation.rows, [one], False)) for one in prompts]
    return Probe([*units, Unit(f"{task.name}, memory kept", partial(ablation.rows, prompts, True))])
