"""Answers that follow a grammar: a processor that forbids, and a source of drafts that foresees."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance import hf as llguidance_hf
from llguidance import numpy as llguidance_numpy
from numpy.typing import NDArray
from transformers import LogitsProcessor

from lookahead.core.protocols import StepResult
from lookahead.drafting.auto.sources import TokenPaths
from lookahead.server.errors import refused
from lookahead.server.token_bytes import token_bytes

_FORCED = 0.99
"""How likely a token is that has to follow one which is not certain."""

_FEW = 8
"""Most tokens to choose from for each to be drafted."""

_ALL_SENT = 16
"""Where all that may follow comes to so many tokens at most, it is sent: one way through it is sure to save a step."""


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


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema for values as `json.dumps` writes them. Free white space would let a model write nothing else."""
    return schema | {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


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
        self._ahead = self._matcher  # behind the certain tokens
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

    def certain(self) -> list[int]:
        """The tokens that have to follow, as far as there is no choice."""
        self._ahead, chain = _forced(self._matcher)
        return chain

    def alternatives(self) -> list[list[int]]:
        """Paths of which one follows the certain tokens: each token that is allowed, with what has to follow it, and so
        on as long as all that may follow is few."""
        paths, room = [], _ALL_SENT
        ends: deque[tuple[list[int], LLMatcher]] = deque([([], self._ahead)])
        while ends:
            path, matcher = ends.popleft()
            branches = self._branches(matcher)
            size = sum(len(branch) for branch, _ in branches)
            if branches and size <= room:
                room -= size
                ends += [([*path, *branch], behind) for branch, behind in branches]
            elif path:
                paths.append(path)
        return paths

    def paths(self) -> TokenPaths:
        """Each of a few tokens that may follow the certain ones, with what has to follow it."""
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        branches = self._branches(self._ahead)
        for branch, _ in branches:
            parents += [-1, *range(len(tokens), len(tokens) + len(branch) - 1)]
            tokens += branch
            probabilities += [1 / len(branches), *[_FORCED] * (len(branch) - 1)]
        return TokenPaths(tokens, parents, probabilities)

    def _branches(self, matcher: LLMatcher) -> list[tuple[list[int], LLMatcher]]:
        """What may follow, with the grammar behind it, if there are few choices."""
        branches = []
        for choice in _choices(matcher, self._mask):
            after = matcher.deep_copy()
            after.consume_token(choice)
            after, chain = _forced(after)
            branches.append(([choice, *chain], after))
        return branches

    def permitted(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a draft behind the certain tokens the grammar allows; see `Permits` of the drafter."""
        leaves = set(range(1, len(tokens) + 1)).difference(parents)
        may = [False] * len(tokens)
        for leaf in leaves:
            path = []
            node = leaf
            while node:
                path.append(node)
                node = parents[node - 1]
            path.reverse()
            for node in path[: self._ahead.validate_tokens([tokens[node - 1] for node in path])]:
                may[node - 1] = True
        return may


def _forced(matcher: LLMatcher) -> tuple[LLMatcher, list[int]]:
    """The tokens that have to follow, without one that ends the answer, and the grammar behind them."""
    chain = [] if matcher.is_stopped() else list(matcher.compute_ff_tokens())
    if chain:
        matcher = matcher.deep_copy()
        matcher.consume_tokens(chain)
    return matcher, chain


def _choices(matcher: LLMatcher, mask: NDArray[np.int32]) -> list[int]:
    """The tokens that may follow if these are few, else none; none behind the end."""
    if matcher.is_stopped():
        return []
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
        """Logits `[1, vocabulary]`, minus infinity where the grammar forbids a token."""
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
        """See `lookahead.drafting.auto.sources.Source`."""

    def certain(self) -> list[int]:
        """See `Source`."""
        return self._state.certain()

    def alternatives(self) -> list[list[int]]:
        """See `Source`."""
        return self._state.alternatives()

    def propose(self) -> TokenPaths:
        """See `Source`."""
        return self._state.paths()

    def permits(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """See `lookahead.drafting.auto.sources.permitted`."""
        return self._state.permitted(tokens, parents)

    def observe(self, result: StepResult) -> None:
        """See `Source`."""
        self._tokens += len(result.tokens)
        late = self._tokens - self._state.tokens  # the processor has seen all but the last
        self._state.take(result.tokens[len(result.tokens) - late :])
