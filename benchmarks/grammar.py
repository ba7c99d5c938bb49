"""Measure answers that follow a JSON schema: steps with what the grammar knows, and without.

Each schema's answer is decoded by `model.generate` with a processor that allows what the grammar allows, and by
`preset="auto"` with the same processor: without a word from the grammar, with the tokens that it forces as a source of
drafts, and besides without the tokens that it forbids. Schemas are random ones of the kinds that programs use. Every
second answer is sampled. Each text is compared with that of `model.generate`, and validated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from time import process_time
from typing import Any

import jsonschema
import torch
from transformers import LogitsProcessorList

from lookahead import LookaheadConfig
from lookahead.bench.models import sharing_weights
from lookahead.bench.rows import Row
from lookahead.server.grammar import GrammarProcessor, GrammarSource, GrammarState, compact, grammar_tokenizer
from probe import Probe, Unit, generate, load_model, option, token_ids
from random_schemas import random_schema

PLAIN, DRAFTS, FORCED, PERMITTED = "transformers", "auto", "auto, forced tokens", "auto, forced and permitted tokens"
METHODS = (PLAIN, DRAFTS, FORCED, PERMITTED)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    model: str = option("demo", "`demo`, or the folder of a model")
    dtype: str = option("float32", "number type of the weights")
    prompt: str = option("def add(a, b):", "what the answers follow")
    schemas: int = option(100, "how many random schemas")
    nodes: int = option(16, "nodes of a step")
    max_new_tokens: int = option(300, "tokens to generate at most")


class Blind(GrammarSource):
    """The source without a say in what is impossible."""

    permits = None  # type: ignore[assignment]


class Silent(GrammarSource):
    """A source that follows the grammar, and says nothing."""

    permits = None  # type: ignore[assignment]

    def propose(self) -> Any:
        """See `Source`."""
        return type(super().propose())([], [], [])


SOURCES: dict[str, Callable[[GrammarState], GrammarSource]] = {DRAFTS: Silent, FORCED: Blind, PERMITTED: GrammarSource}


class Bench:
    """The methods on one model, each with a model object of its own, whose memory lasts from text to text."""

    def __init__(self, options: Options) -> None:
        self._options = options
        loaded = load_model(options.model, options.dtype)
        self.settings, self._tokenizer = loaded.settings(), loaded.tokenizer
        self._models = {name: sharing_weights(loaded.model) for name in METHODS}
        self._ids = token_ids(loaded.tokenizer, loaded.model, options.prompt)
        vocabulary = loaded.model.get_input_embeddings().num_embeddings
        self._end = loaded.model.generation_config.eos_token_id
        ends = [self._end] if isinstance(self._end, int) else self._end
        self._grammar_tokenizer = grammar_tokenizer(loaded.tokenizer, vocabulary, ends)

    def rows(self, number: int) -> Iterator[Row]:
        """A row for each method."""
        schema = random_schema(Random(number))
        expected: list[int] = []
        for name in METHODS:
            tokens, steps, seconds = self._run(
                name, number, json.dumps({"grammars": [{"json_schema": compact(schema)}]})
            )
            expected = expected or tokens
            row: Row = {"kind": "run", "schema": number, "sampled": bool(number % 2), "method": name}
            row |= {"tokens": len(tokens), "steps": steps, "cpu_seconds": seconds, "equal": tokens == expected}
            row["valid"] = self._is_valid(tokens, schema)
            if not (row["equal"] and row["valid"]):
                row["error"] = f"{name}, schema {number}: another text than plain decoding's, or one that is not valid"
            yield row

    def _run(self, name: str, number: int, grammar: str) -> tuple[list[int], int, float]:
        state = GrammarState(self._grammar_tokenizer, grammar)
        sources = (lambda: SOURCES[name](state),) if name in SOURCES else ()
        config = LookaheadConfig(step_budget=self._options.nodes, memory="process", sources=sources)
        sampling = {"do_sample": True, "temperature": 0.9, "top_k": 0} if number % 2 else {}
        torch.manual_seed(number)
        begin = process_time()
        tokens, output = generate(
            self._models[name],
            self._ids,
            None if name == PLAIN else config,
            max_new_tokens=self._options.max_new_tokens,
            logits_processor=LogitsProcessorList([GrammarProcessor(state, self._ids.shape[1])]),
            pad_token_id=0,
            **sampling,
        )
        return tokens, len(tokens) if name == PLAIN else output.statistics.steps, process_time() - begin

    def _is_valid(self, tokens: list[int], schema: Any) -> bool:
        try:
            jsonschema.validate(json.loads(self._tokenizer.decode(tokens, skip_special_tokens=True)), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True


def probe(options: Options) -> Probe:
    """The units: each schema."""
    bench = Bench(options)
    units = [Unit(f"schema {number}", partial(bench.rows, number)) for number in range(options.schemas)]
    about = {"prompt": options.prompt, "nodes": options.nodes, "methods": list(METHODS)}
    return Probe(units, {"model": bench.settings, **about})
