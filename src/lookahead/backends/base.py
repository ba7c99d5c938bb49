"""What every backend gives: sessions, which say what can be asked of a model, calls, which run on it, runners and rows
of text."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.backends.forward_result import PassResult
from lookahead.config import MAX_NODES_PER_STEP, LookaheadConfig
from lookahead.core.protocols import Backend
from lookahead.core.results import JoinedOutputs
from lookahead.core.sequence import SequenceState
from lookahead.core.token_tree import TokenTree
from lookahead.errors import InvalidArgumentError


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens `model` or its decoder reads. An adapter or a wrapper in place of the embedding need not know."""
    reader = model.get_decoder() if model.config.is_encoder_decoder else model
    embedding = getattr(reader, "get_input_embeddings", model.get_input_embeddings)()
    size = getattr(embedding, "num_embeddings", None)
    if not isinstance(size, int):
        size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return size if isinstance(size, int) else len(embedding.weight)


class TextRow:
    """The state of one text between steps: keys and values, or running states. It belongs to no step.

    Attributes:
        most_pending: How many tokens of a text that is not cached yet the coming step sends at most; any number if
            `None`.
        before: How many of the tokens that are kept come before the text that is decoded.
        shift: What is added to places in the text to have positions: behind an image they may differ.
        length: Tokens that are kept.
    """

    most_pending: int | None = None
    before = shift = 0
    length: int

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.length

    def copy_start(self, other: Any, tokens: int) -> None:
        """Begin with the first `tokens` tokens of another row, which has them. Not possible with running states, of
        which there are those after the end of a text alone; see `Runner.shares_beginnings`."""
        raise NotImplementedError

    def crop(self, tokens: int) -> None:
        """Forget all behind the first `tokens` tokens; as `copy_start`."""
        raise NotImplementedError

    def set_apart(self) -> None:
        """Store a finished text where it costs running texts no time."""


_MOST_PENDING = 16
"""Pending tokens up to which a step of a model with running states may also draft; a step with more settles them."""


@dataclass
class Recorded:
    """What recording took so far.

    Attributes:
        count: Passes that were recorded.
        seconds: Time it took.
        bytes: Memory of the device that it took.
    """

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


class Runner(Backend):
    """Rows of text on one model, and the trees that continue them.

    Attributes:
        model: What runs them, in the interface of transformers.
        rows: The rows of the coming step, one for each sequence of the batch: those of a call, or those given to
            `serving`.
        context: Length of the model's context, if it has one.
        last_length: Text length at which the model can read no further token; `None` for any.
        broken_after: Longest text that plain decoding reads as a whole; `None` for any.
        changes_after: Longest text of which rows of a pass may be at different places, if longer ones are read
            otherwise.
        most_nodes: Nodes that the tree of each row may have.
        is_invariant: Whether the bits of a node depend on its own text alone; see `LookaheadConfig.invariant`.
        chains: Whether it runs chains alone.
        keeps_apart: Whether finished texts take memory of their own, so that running rows cannot use it.
        shares_beginnings: Whether a row may begin with what another one has of its text.
        engine: How passes are run; see `Statistics.engine`.
        pass_sizes: Nodes over all rows that passes are padded to, ascending; none where any number is run as it is.
        recorded: What recording passes took so far.
        vocabulary: How many tokens the model reads; no others are drafted.
    """

    model: Any
    vocabulary = sys.maxsize
    rows: list[Any]
    context: int | None = None
    last_length: int | None = None
    broken_after: int | None = None
    changes_after: int | None = None
    most_nodes = MAX_NODES_PER_STEP
    is_invariant: bool = False
    chains = keeps_apart = False
    shares_beginnings = True
    engine = "dynamic"
    pass_sizes: Sequence[int] = ()

    def __init__(self) -> None:
        self.recorded = Recorded()
        self._idle = TokenTree([0])
        self._idle.needs_logits[self._idle.root] = False

    @contextmanager
    def serving(self, rows: Sequence[Any]) -> Iterator[None]:
        """Run passes over these rows, and hold none of them afterwards: others may take their memory."""
        self.rows = list(rows)
        try:
            yield
        finally:
            self.rows = []

    def take_memory(self, tokens: int | None, block: int, rows: int, nodes: int) -> None:
        """Take memory for rows that come and go, and record passes, where that is done before there are any.

        Args:
            tokens: How many there is room for; any number if `None`.
            block: Those by which a row grows.
            rows: Most rows of a step.
            nodes: Nodes of the tree of each row at most.
        """

    @abstractmethod
    def new_row(self, block: int | None = None) -> TextRow:
        """An empty row, whose room grows by `block` tokens, where that can be chosen."""

    def lengths_of(self, rows: Sequence[Any]) -> list[int]:
        """Number of cached tokens of each of some rows."""
        return [row.length for row in rows]

    def token_bytes(self) -> int:
        """Bytes that keys and values of a token take."""
        raise NotImplementedError

    def idle_tree(self) -> TokenTree:
        """The tree of a finished row while others continue: an unread token at position 0, if anything is sent at all.

        Behind its text it might stand where the model has no position, or has other ones.
        """
        return self._idle

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step of sequence `row`, whose text so far is `text`: its pending tokens.

        Where these are more than `TextRow.most_pending`, it is so many of them, and nothing is read after them. Of a
        model with running states there is no room below a prompt, whose states would have to be computed again, nor
        below many pending tokens.
        """
        kept = self.rows[row]
        pending = self._pending(kept, text)
        if kept.most_pending is not None and len(pending) > kept.most_pending:
            part = TokenTree(pending[: kept.most_pending])
            part.needs_logits[part.root] = False
            return part
        length = kept.before + len(text) - len(pending)
        deepest = self._deepest(kept.before + len(text) - 1 + kept.shift, kept.shift)
        tree = TokenTree(pending, None if deepest is None else deepest - kept.shift - length)
        tree.vocabulary = self.vocabulary
        if self.chains and not (length > 0 and len(pending) <= _MOST_PENDING):
            tree.limit(0)
        return tree

    def _pending(self, row: Any, text: Sequence[int]) -> Sequence[int]:
        """The tokens of a row's text that the model has not read."""
        return text[row.length - row.before :]

    def _deepest(self, position: int, shift: int) -> int | None:
        """The largest position in a tree whose root is at `position`, which is `shift` more than its index in the text;
        `None` for any."""
        return None if self.last_length is None else self.last_length - 1

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Send long texts ahead in chunks, so that the first step has few pending tokens.

        Args:
            texts: The text of each sequence.
            chunk_size: Tokens of each text in one pass; as many as the runner finds right if `None`.

        Returns:
            The number of forward passes it took.
        """
        return 0

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """Send all of each text but its last token, so that what is kept is what plain decoding leaves."""

    @abstractmethod
    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult | JoinedOutputs:
        """See `Backend`."""


def check_chain(tree: TokenTree) -> None:
    """Refuse a tree in which a node does not follow the one before it.

    Raises:
        InvalidArgumentError: The tree has branches.
    """
    if tree.parents != list(range(-1, len(tree) - 1)):
        raise InvalidArgumentError("trees has one with branches; a model with running states runs chains alone")


class Call:
    """The resources of one call of `generate`: acquired on creation, released when the call ends.

    Attributes:
        runner: Runs the trees.
        clock: The clock for its steps, in seconds.
        rows: The rows of the call, which each step hands to the runner; `None` if the runner has them.
        rows_leave: Whether a row takes part in no step once its text is complete, as in an `Engine`.
        keeps_cache: Whether the cache that a call leaves can be handed on.
        invariant_rows: See `Statistics.invariant_rows`.
        model_holds: Whether the model is still composed as it was when the call began.
    """

    runner: Runner
    clock: Callable[[], float]
    rows: Sequence[Any] | None = None
    rows_leave = keeps_cache = False
    invariant_rows = 0
    model_holds: Callable[[], bool] = staticmethod(lambda: True)

    @property
    def state_bytes(self) -> int:
        """Bytes of running states that were copied so far."""
        return 0

    def backend(self, sequences: Sequence[SequenceState], asks_others: bool) -> Any:
        """Return the backend of all rows of the call.

        Args:
            sequences: Their texts.
            asks_others: Whether there are stopping criteria that may depend on time or other state.
        """
        return self.runner

    def restore(self, error: BaseException) -> None:
        """Put back what a call that failed, with `error`, has changed."""

    def release(self, keep_cache: bool) -> Cache | None:
        """Release the buffers; returns the cache that the caller gets, if it is to be kept."""
        return None


class CallSession(ABC):
    """What `generate` asks of a session: of one process, or of several ranks.

    Attributes:
        refuses_inputs: Why prompts that are more than tokens, such as images, are refused; `None` if they are not.
        speaks: Whether streamers and listeners of a call are told here.
    """

    refuses_inputs: str | None = None
    speaks: bool = True

    def settle(self, config: LookaheadConfig) -> LookaheadConfig:
        """`config` as it can be run: one process may go by its own clock and memory.

        Raises:
            UnsupportedArgumentError: It cannot.
        """
        return config

    @abstractmethod
    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> Call:
        """Acquire what a call needs.

        Raises:
            LookaheadError: The model or its settings cannot do what is asked for.
        """


class Session(CallSession):
    """What can be asked of a model, whatever runs it.

    Attributes:
        clock: The clock for its steps, in seconds.
        number_type: Name of the type of the weights, or of their types.
    """

    clock: Callable[[], float]
    number_type: str

    def check(self) -> None:
        """Refuse a model that cannot be run.

        Raises:
            UnsupportedModelError: It cannot.
        """

    def prepare(self, config: LookaheadConfig) -> None:
        """Make, and try, what the first call would make.

        Raises:
            LookaheadError: The model cannot be run as `config` has it.
        """

    @abstractmethod
    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[Runner, int | None, int]:
        """What runs rows that come and go.

        Args:
            config: How the weights are set.
            max_rows: Most rows of a step.
            kv_bytes: Most bytes of keys and values; any number if `None`.
            prefix_bytes: Most bytes of finished texts.

        Returns:
            The runner, and the most bytes of keys and values, and of finished texts, that it has room for.

        Raises:
            LookaheadError: The model or the settings cannot do what is asked for.
        """

    def watch(self, runner: Any, compares_bits: bool) -> Any:
        """Notices changes of the model, as `ModelWatch`; `None` where there can be none."""
        return None

    def keep_text(self) -> None:
        """Let calls of one row leave their text to the next, where the caller's cache does not."""

    def reused_tokens(self, cached: int) -> int:
        """Tokens of the last prompt that were not computed anew, where the caller's cache held `cached`."""
        return cached

    @abstractmethod
    def sharing_weights(self) -> PreTrainedModel:
        """Another object of the same model, weights shared: nothing that is kept for the one is known of it."""


@dataclass(frozen=True)
class Prompts:
    """What the rows of a call begin with.

    Attributes:
        input_ids: As the caller gave them, `[batch, tokens]`.
        mask: Which tokens of the whole text count, `[batch, columns]` bool: of what is cached and left out of
            `input_ids`, too.
        tokens: The tokens of each row of `input_ids` that count.
        before: How many tokens that count come before them, per row.
        cache: What the caller passed to go on from, if anything.
        inputs: What transformers would hand to the model, if that is more than tokens: images, say, or positions that
            follow an image. Then the prompt is read by the model's own prefill.
        source: What an encoder has read before, for all rows, as arguments of each pass of its decoder.
        source_tokens: The token ids that it read, for each row; empty where these were none.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor
    tokens: list[list[int]]
    before: list[int]
    cache: Cache | None
    inputs: dict[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    source_tokens: Sequence[Sequence[int]] = ()

    @cached_property
    def all_count(self) -> bool:
        """Whether no token is hidden, neither of the prompts nor of what is cached."""
        return bool(self.mask.all())

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Tokens of each row of `input_ids`, padding included."""
        return self.input_ids.shape[1]

    @property
    def padding(self) -> list[int]:
        """Hidden tokens of each row of `input_ids`."""
        return [self.width - len(row) for row in self.tokens]

    @property
    def longest(self) -> int:
        """Tokens that count of the longest row, those before `input_ids` included."""
        return max(earlier + len(row) for earlier, row in zip(self.before, self.tokens, strict=True))
