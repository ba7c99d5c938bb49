"""Answers that follow a grammar: a processor that forbids, and a source of drafts that foresees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance import hf as llguidance_hf
from llguidance import numpy as llguidance_numpy
from transformers import LogitsProcessor

from lookahead.core.outputs import StepResult
from lookahead.drafting.auto.source import TokenPaths
from lookahead.server.errors import refused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes. Free white space would let a model write nothing else."""


def grammar_tokenizer(tokenizer: Any, vocabulary: int, ends: Collection[int]) -> LLTokenizer:
    """The tokens of a model as grammars see them. Takes about a second for a large vocabulary.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: How many tokens the model knows.
        ends: Those that end an answer.
    """
    return llguidance_hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends) or None)


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of the JSON values that a schema allows.

    Raises:
        ApiError: The schema cannot be read.
    """
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, _COMPACT))
    except (ValueError, TypeError, RecursionError) as error:
        raise refused("response_format", f"response_format: the schema cannot be read: {error}") from error


def check_grammar(grammar: str, tokenizer: LLTokenizer, field: str) -> None:
    """Refuse a grammar that cannot be met.

    Raises:
        ApiError: It is no grammar, or asks for what is not supported; `field` named it.
    """
    error = LLMatcher(tokenizer, grammar, log_level=0).get_error()
    if error:
        raise refused(field, f"{field}: {' '.join(error.split())[:500]}")


class GrammarState:
    """How far an answer has come in its grammar.

    Args:
        tokenizer: Of the model.
        grammar: The grammar.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._mask = llguidance_numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
        self.tokens = 0

    def take(self, tokens: Sequence[int]) -> None:
        """Go on by tokens of the answer."""
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self.tokens += len(tokens)

    def allowed(self, count: int) -> torch.Tensor:
        """Which of `count` tokens may follow, `[count]` bool."""
        llguidance_numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        bits = np.unpackbits(self._mask[0].view(np.uint8), bitorder="little")
        allowed = np.zeros(count, dtype=bool)
        allowed[: min(count, len(bits))] = bits[:count]
        return torch.from_numpy(allowed)

    def forced(self) -> list[int]:
        """The tokens that have to follow, as far as there is no choice."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]
    """Forbids tokens that the grammar does not allow.

    Args:
        state: Of this answer.
        prompt_length: Tokens before the answer.
    """

    def __init__(self, state: GrammarState, prompt_length: int) -> None:
        self._state, self._prompt_length = state, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._state.take(input_ids[0, self._prompt_length + self._state.tokens :].tolist())
        allowed = self._state.allowed(scores.shape[1])
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


class GrammarSource:
    """Drafts the tokens that the grammar forces.

    Args:
        state: Of this answer.
    """

    name = "grammar"

    def __init__(self, state: GrammarState) -> None:
        self._state = state
        self._tokens = 0

    def start(self, prompt: Sequence[int]) -> None:
        """See `lookahead.drafting.auto.source.Source`."""

    def propose(self) -> TokenPaths:
        """See `Source`."""
        return TokenPaths.chain(self._state.forced(), 0.99)

    def observe(self, result: StepResult) -> None:
        """See `Source`."""
        self._tokens += len(result.tokens)
        late = self._tokens - self._state.tokens  # the processor has seen all but the last
        self._state.take(result.tokens[len(result.tokens) - late :])
