"""What is replayed: published rules and this library's drafts that need no logits, as chains and as trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lookahead.config import LookaheadConfig
from lookahead.drafting import PredictedText, build_chain_drafter, build_drafter
from lookahead.drafting.chain import SKETCHED_NODES, ChainDrafter
from lookahead.drafting.text_only import build_text_chain_drafter, build_text_drafter, text_memory
from replay.lookup_rules import BestCopy, FirstOccurrence, RecycledText
from replay.recordings import Recording
from replay.suffix_decoding import SuffixDecoding, SuffixText

MakeDrafter = Callable[[Recording], Any]


@dataclass(frozen=True)
class Size:
    """How much is drafted.

    Attributes:
        name: What to call it.
        tokens: Tokens drafted at most.
        branches: Whether drafts are trees; else chains.
        least: Least probability of a drafted token, for methods that say one.
    """

    name: str
    tokens: int
    branches: bool
    least: float = 0.0


SIZES = (
    *(Size(f"chain of {tokens}", tokens, False) for tokens in (4, 8, 16)),
    *(Size(f"tree of {nodes}", nodes - 1, True) for nodes in (16, 32, 64)),
)
"""Drafts of at most so many tokens; the nodes of a tree have its root among them."""

LIKELY = tuple(Size(f"{least:.0%} likely", 63, True, least) for least in (0.5, 0.3, 0.2, 0.15, 0.1, 0.06))
"""Trees of tokens that are likely enough, at most 64 nodes."""


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        name: What to call it.
        across: Whether requests draft from those before them in the file.
        expects: Whether it is told what text to expect, so that it is replayed where one is known.
        begin: For drafts of one size, what makes the drafter of each request in the order of the file.
        sizes: Those that it is replayed with.
    """

    name: str
    across: bool
    expects: bool
    begin: Callable[[Size], MakeDrafter]
    sizes: tuple[Size, ...] = SIZES


def _each(make: Callable[[Size], Any]) -> Callable[[Size], MakeDrafter]:
    """A drafter that knows nothing but its request."""
    return lambda size: lambda recording: make(size)


def _recycled(size: Size) -> Any:
    return (
        RecycledText(size.tokens) if size.branches else ChainDrafter(RecycledText(SKETCHED_NODES - 1), size.tokens + 1)
    )


def _matches(size: Size) -> Any:
    config = LookaheadConfig(preset="context_matches", step_budget=size.tokens + 1)
    return build_drafter(config) if size.branches else build_chain_drafter(config)


def _suffixes(factor: float, across: bool) -> Callable[[Size], MakeDrafter]:
    def begin(size: Size) -> MakeDrafter:
        outputs = SuffixText() if across else None
        return lambda recording: SuffixDecoding(size.tokens, outputs, size.branches, factor)

    return begin


def _auto(across: bool, expects: bool) -> Callable[[Size], MakeDrafter]:
    def begin(size: Size) -> MakeDrafter:
        memory = text_memory() if across else None
        build = partial(build_text_drafter, least=size.least) if size.branches else build_text_chain_drafter

        def make(recording: Recording) -> Any:
            predicted = PredictedText(recording.expected) if expects else None
            return build(size.tokens + 1, memory, predicted)

        return make

    return begin


def _best_copy(size: Size) -> MakeDrafter:
    return lambda recording: BestCopy(size.tokens, recording.expected, recording.answer)


METHODS = (
    Method("prompt lookup (transformers)", False, False, _each(lambda size: FirstOccurrence(size.tokens, 1, 2))),
    Method("n-gram (vLLM)", False, False, _each(lambda size: FirstOccurrence(size.tokens, 2, 4))),
    Method("token recycling, text only", False, False, _each(_recycled)),
    Method("context matches", False, False, _each(_matches)),
    Method("suffix decoding", False, False, _suffixes(1, False)),
    Method("suffix decoding", True, False, _suffixes(1, True)),
    Method("suffix decoding, factor 4", False, False, _suffixes(4, False)),
    Method("suffix decoding, factor 4", True, False, _suffixes(4, True)),
    Method("auto, text only", False, False, _auto(False, False)),
    Method("auto, text only", True, False, _auto(True, False)),
    Method("auto, text only, likely tokens", False, False, _auto(False, False), LIKELY),
    Method("auto, text only, likely tokens", True, False, _auto(True, False), LIKELY),
    Method("auto, predicted text", False, True, _auto(False, True)),
    Method("auto, predicted text", True, True, _auto(True, True)),
    Method("bound: best copy of the predicted text", False, True, _best_copy),
)
