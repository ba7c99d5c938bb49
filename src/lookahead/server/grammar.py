"""Answers that follow a grammar: a processor that forbids, and a source of drafts that foresees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance import hf as llguidance_hf
from llguidance import numpy as llguidance_numpy
from numpy.typing import NDArray
from transformers import LogitsProcessor

from lookahead.core.outputs import StepResult
from lookahead.drafting.auto.source import TokenPaths
from lookahead.server.errors import refused
from lookahead.server.token_bytes import token_bytes

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes. Free white space would let a model write nothing else."""


_FORCED = 0.99
"""How likely a forced token is; the same characters may be written in other tokens."""

_FEW = 4
"""Most tokens to choose from for each to be drafted."""


def grammar_tokenizer(tokenizer: Any, vocabulary: int, ends: Collection[int]) -> LLTokenizer:
    """The tokens of a model as grammars see them. Takes about a second for a large vocabulary.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: How many tokens the model knows.
        ends: Those that end an answer.
    """
    if not tokenizer.is_fast:  # of a GGUF file, say
        return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, vocabulary, ends)), n_vocab=vocabulary)
    return llguidance_hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends) or None)


class _Tokens:
    """What llguidance asks of a tokenizer that it does not know.

    Args:
        tokenizer: The tokenizer.
        vocabulary: How many tokens the model knows.
        ends: Those that end an answer; at least one.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        names = tokenizer.convert_ids_to_tokens(list(range(vocabulary)))
        self.tokens = [token_bytes(tokenizer.decode([token]), name) for token, name in enumerate(names)]
        self.eos_token_id = min(ends)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *ends})

    def __call__(self, text: str | bytes) -> list[int]:
        known = text.decode(errors="replace") if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer(known, add_special_tokens=False)["input_ids"]
        return ids


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
        self._end = tokenizer.eos_token
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

    def paths(self) -> TokenPaths:
        """The tokens that have to follow, as far as there is no choice; behind them each of a few choices."""
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []

        def add(chain: Sequence[int], parent: int, first: float) -> int:
            for place, token in enumerate(chain):
                parents.append(parent)
                parent = len(tokens)
                tokens.append(token)
                probabilities.append(_FORCED if place else first)
            return parent

        matcher, chain = _forced(self._matcher, self._end)
        end = add(chain, -1, _FORCED)
        if matcher is not None:
            choices = _choices(matcher, self._mask)
            for token in choices:
                after = matcher.deep_copy()
                after.consume_token(token)
                add([token, *_forced(after, self._end)[1]], end, 1 / len(choices))
        return TokenPaths(tokens, parents, probabilities)

    def permitted(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a draft the grammar allows; see `lookahead.drafting.auto.permits.Permits`."""
        leaves = set(range(1, len(tokens) + 1)).difference(parents)
        may = [False] * len(tokens)
        for leaf in leaves:
            path = []
            node = leaf
            while node:
                path.append(node)
                node = parents[node - 1]
            path.reverse()
            for node in path[: self._matcher.validate_tokens([tokens[node - 1] for node in path])]:
                may[node - 1] = True
        return may


def _forced(matcher: LLMatcher, end: int) -> tuple[LLMatcher | None, list[int]]:
    """The tokens that have to follow, and the grammar behind them; `None` where the answer ends."""
    if matcher.is_stopped():
        return None, [end]
    chain = list(matcher.compute_ff_tokens())
    after = matcher.deep_copy()
    after.consume_tokens(chain)
    return (None, [*chain, end]) if after.is_stopped() else (after, chain)


def _choices(matcher: LLMatcher, mask: NDArray[np.int32]) -> list[int]:
    """The tokens that may follow if these are few, else none."""
    llguidance_numpy.fill_next_token_bitmask(matcher, mask, 0)
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist() if bits.sum() <= _FEW else []


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
    """Drafts the tokens that the grammar forces, and keeps those that it forbids out of the tree.

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
        return self._state.paths()

    def permits(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """See `lookahead.drafting.auto.permits.Permits`."""
        return self._state.permitted(tokens, parents)

    def observe(self, result: StepResult) -> None:
        """See `Source`."""
        self._tokens += len(result.tokens)
        late = self._tokens - self._state.tokens  # the processor has seen all but the last
        self._state.take(result.tokens[len(result.tokens) - late :])
