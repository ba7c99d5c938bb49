"""Base classes of backends: sessions, calls, runners and rows of text."""

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
    """Return the vocabulary size of `model` or its decoder. An adapter in place of the embedding may not have it."""
    reader = model.get_decoder() if model.config.is_encoder_decoder else model
    embedding = getattr(reader, "get_input_embeddings", model.get_input_embeddings)()
    size = getattr(embedding, "num_embeddings", None)
    if not isinstance(size, int):
        size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return size if isinstance(size, int) else len(embedding.weight)


class TextRow:
    """Keys and values, or running states, of one text between steps.

    Attributes:
        most_pending: Maximum number of pending tokens in the next step; any number if `None`.
        before: Number of cached tokens before the decoded text.
        shift: Position id minus index in the text; not 0 after an image, for example.
        length: Number of cached tokens.
    """

    most_pending: int | None = None
    before = shift = 0
    length: int

    @property
    def capacity(self) -> int:
        """Capacity in tokens."""
        return self.length

    def copy_start(self, other: Any, tokens: int) -> None:
        """Copy the first `tokens` tokens of another row. Running states cannot, see `Runner.shares_beginnings`."""
        raise NotImplementedError

    def crop(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens. Running states cannot."""
        raise NotImplementedError

    def declare_prompt(self, tokens: int) -> None:
        """Declare the length of the prompt before its first part, for layers that keep all of it."""

    def set_apart(self) -> None:
        """Store a finished text where it costs running texts no time."""


_MOST_PENDING = 16
"""Maximum number of pending tokens in a step that drafts, for models with running states."""


@dataclass
class Recorded:
    """Costs of recording passes so far.

    Attributes:
        count: Number of recorded passes.
        seconds: Time of recording.
        bytes: Memory of recorded passes on the device.
    """

    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


class Runner(Backend):
    """Runs the trees of rows of text on one model.

    Attributes:
        model: Model with the interface of transformers.
        rows: Rows of the next step, one per sequence of the batch: the rows of the call, or the arguments of `serving`.
        context: Length of the model's context, if it has one.
        last_length: Text length at which the model cannot read another token; `None` without a limit.
        broken_after: Longest text that plain decoding reads as a whole; `None` without a limit.
        changes_after: Longest text in a pass with rows of different lengths, if longer texts are read differently.
        most_nodes: Maximum number of nodes of the tree of a row.
        is_invariant: Whether the bits of a node depend only on its own text; see `LookaheadConfig.invariant`.
        chains: Whether it runs only chains.
        keeps_apart: Whether finished texts have their own memory, which running rows cannot use.
        shares_beginnings: Whether a row can copy the beginning of another row.
        shares_pages: Whether it then takes no memory for it.
        is_asynchronous: Whether the host may work while a pass runs.
        engine: Engine of the passes; see `Statistics.engine`.
        pass_sizes: Sizes of padded passes in nodes over all rows, ascending; empty if passes are not padded.
        recorded: Costs of recording passes so far.
        vocabulary: Vocabulary size of the model; larger token ids are not drafted.
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
    chains = keeps_apart = is_asynchronous = False
    shares_beginnings = True
    shares_pages = False
    engine = "dynamic"
    pass_sizes: Sequence[int] = ()

    def __init__(self) -> None:
        self.recorded = Recorded()
        self._idle = TokenTree([0])
        self._idle.needs_logits[self._idle.root] = False

    @contextmanager
    def serving(self, rows: Sequence[Any]) -> Iterator[None]:
        """Run passes over these rows, and release them at the end, as other rows may take their memory."""
        self.rows = list(rows)
        try:
            yield
        finally:
            self.rows = []

    def take_memory(self, tokens: int | None, block: int, rows: int, nodes: int) -> None:
        """Allocate memory for rows that join and leave, and record passes, if the backend does so in advance.

        Args:
            tokens: Capacity in tokens; unlimited if `None`.
            block: Growth of a row in tokens.
            rows: Maximum number of rows of a step.
            nodes: Maximum number of nodes of the tree of a row.
        """

    def grow(self, tokens: int) -> int:
        """Grow the memory of all rows to a number of tokens, and return its capacity, smaller if that is impossible.

        Rows with their own memory have no common capacity.
        """
        return sys.maxsize

    @abstractmethod
    def new_row(self, block: int | None = None) -> TextRow:
        """Return an empty row; it grows by `block` tokens if the backend supports that."""

    def lengths_of(self, rows: Sequence[Any]) -> list[int]:
        """Number of cached tokens of each of some rows."""
        return [row.length for row in rows]

    def shared_tokens(self, rows: Sequence[Any], with_others: bool = False) -> int:
        """Return the part of the summed capacity of rows that takes no memory, because several of them hold it.

        Args:
            rows: The rows.
            with_others: Whether to count what other rows hold as well.
        """
        return 0

    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token."""
        raise NotImplementedError

    def idle_tree(self) -> TokenTree:
        """Return the tree of a finished row while others continue: an unread token at position 0, if anything is sent.

        Behind its text the model might have no position.
        """
        return self._idle

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """Return the tree of pending tokens of `row`, given its text so far.

        A tree of `TextRow.most_pending` tokens, if there are more, reads nothing. With running states no draft fits
        below a prompt or many pending tokens: after a rejection their states would have to be computed again.
        """
        state = self.rows[row]
        pending = self._pending(state, text)
        if state.most_pending is not None and len(pending) > state.most_pending:
            part = TokenTree(pending[: state.most_pending])
            part.needs_logits[part.root] = False
            return part
        length = state.before + len(text) - len(pending)
        deepest = self._deepest(state.before + len(text) - 1 + state.shift, state.shift)
        tree = TokenTree(pending, None if deepest is None else deepest - state.shift - length)
        tree.vocabulary = self.vocabulary
        if self.chains and not (length > 0 and len(pending) <= _MOST_PENDING):
            tree.limit(0)
        return tree

    def _pending(self, row: Any, text: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a row's text that are not cached."""
        return text[row.length - row.before :]

    def _deepest(self, position: int, shift: int) -> int | None:
        """Return the largest position of a tree with its root at `position`; `None` without a limit.

        Args:
            position: Position of the root.
            shift: `position` minus the index of the root in its text.
        """
        return None if self.last_length is None else self.last_length - 1

    def wants_draft(self, tree: TokenTree) -> bool:
        """Return whether a prediction follows `tree`."""
        return tree.reads_root

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Process long texts in chunks, so that the first step has few pending tokens.

        Args:
            texts: Text of each sequence.
            chunk_size: Tokens of each text in a pass; by default the runner chooses.

        Returns:
            Number of forward passes.
        """
        return 0

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """Process all tokens of each text but the last one, as plain decoding leaves its cache."""

    @abstractmethod
    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult | JoinedOutputs:
        """See `Backend`."""


def check_chain(tree: TokenTree) -> None:
    """Refuse a tree with branches.

    Raises:
        InvalidArgumentError: The tree has branches.
    """
    if tree.parents != list(range(-1, len(tree) - 1)):
        raise InvalidArgumentError("trees has one with branches; a model with running states runs chains alone")


def check_settings(config: LookaheadConfig, model: str) -> None:
    """Refuse settings that only apply to models of transformers.

    Args:
        config: The settings.
        model: Kind of the model, for the message.

    Raises:
        InvalidArgumentError: A setting does not apply.
    """
    for name, is_set in (
        ("pack_weights", config.pack_weights),
        ("invariant", config.invariant),
        ("engine", config.engine not in ("auto", "dynamic")),
    ):
        if is_set:
            raise InvalidArgumentError(
                f"{name}={getattr(config, name)!r} applies to models of transformers only, but this is {model}; leave "
                "it out"
            )


class Call:
    """Resources of one call of `generate`, acquired on creation and released at the end.

    Attributes:
        runner: Runs the trees.
        clock: Clock of the steps in seconds.
        rows: Rows of the call, which complete texts leave, as in an `Engine`; `None` if the runner holds them.
        keeps_cache: Whether the cache of the call can be returned.
        invariant_rows: See `Statistics.invariant_rows`.
        model_holds: Whether the model is composed as at the beginning of the call.
    """

    runner: Runner
    clock: Callable[[], float]
    rows: Sequence[Any] | None = None
    keeps_cache = False
    invariant_rows = 0
    model_holds: Callable[[], bool] = staticmethod(lambda: True)

    @property
    def state_bytes(self) -> int:
        """Bytes of running states copied so far."""
        return 0

    def backend(self, sequences: Sequence[SequenceState], asks_others: bool) -> Any:
        """Return the backend of all rows of the call.

        Args:
            sequences: Their texts.
            asks_others: Whether there are stopping criteria that may depend on time or other state.
        """
        return self.runner

    def restore(self, error: BaseException) -> None:
        """Undo the changes of a call that failed with `error`."""

    def release(self, keep_cache: bool) -> Cache | None:
        """Release the buffers; return the caller's cache if `keep_cache`."""
        return None


class CallSession(ABC):
    """Session of one process or of several ranks, as `generate` uses it.

    Attributes:
        refuses_inputs: Reason to refuse prompts with images or other inputs; `None` if they are accepted.
        speaks: Whether streamers and listeners of a call are notified by this process.
    """

    refuses_inputs: str | None = None
    speaks: bool = True

    def settle(self, config: LookaheadConfig) -> LookaheadConfig:
        """Return `config` as this session can run it.

        Raises:
            UnsupportedArgumentError: The session cannot run it.
        """
        return config

    @abstractmethod
    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> Call:
        """Acquire the resources of a call.

        Raises:
            LookaheadError: The model or its settings do not support the call.
        """


class Session(CallSession):
    """Session of a model in one process.

    Attributes:
        clock: Clock of the steps in seconds.
    """

    clock: Callable[[], float]

    @property
    @abstractmethod
    def number_type(self) -> str:
        """Name of the number type of the weights, or of their types."""

    def check(self) -> None:
        """Refuse a model that cannot be run.

        Raises:
            UnsupportedModelError: It cannot be run.
        """

    def prepare(self, config: LookaheadConfig) -> None:
        """Prepare the first call: trials and clones.

        Raises:
            LookaheadError: The model cannot be run with `config`.
        """

    @abstractmethod
    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[Runner, int | None, int]:
        """Open a runner of rows that join and leave.

        Args:
            config: Settings of the weights.
            max_rows: Maximum number of rows of a step.
            kv_bytes: Maximum bytes of keys and values; unlimited if `None`.
            prefix_bytes: Maximum bytes of finished texts.

        Returns:
            The runner, and its maximum bytes of keys and values and of finished texts.

        Raises:
            LookaheadError: The model or the settings do not support such rows.
        """

    def selector(self, processors: Sequence[Any], samples: bool, seed: int | None, rows: int) -> Any:
        """Return an object that selects the tokens of a text as the model's engine does; `None` if transformers does.

        Args:
            processors: Logits processors of the text.
            samples: Whether tokens are sampled.
            seed: Seed of the text; by default the engine's own random numbers.
            rows: Number of rows of the call.
        """
        return None

    def seed(self, seed: int) -> None:
        """Seed the random numbers of calls without a seed of their own."""
        torch.manual_seed(seed)

    def watch(self, runner: Any, compares_bits: bool) -> Any:
        """Return a watch for changes of the model, like `ModelWatch`; `None` if there can be none."""
        return None

    def keep_text(self) -> None:
        """Keep the text of calls of one row for the next call, if no cache of the caller does."""

    def reused_tokens(self, cached: int) -> int:
        """Return the number of reused tokens of the last prompt, if the caller's cache held `cached` tokens."""
        return cached

    @abstractmethod
    def sharing_weights(self) -> PreTrainedModel:
        """Return another object of the same model with the same weights, and with no kept state."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of the rows of a call.

    Attributes:
        input_ids: Token ids from the caller, `[batch, tokens]`.
        mask: Whether each token of the whole text is visible, cached ones included, `[batch, columns]` bool.
        tokens: Visible tokens of each row of `input_ids`.
        before: Number of visible tokens before them, per row.
        cache: Cache from the caller, if any.
        inputs: Arguments of the model by name, if the prompt has more than tokens, for example images or positions
            after an image. The model's own prefill then reads the prompt.
        source: Outputs of an encoder for all rows, as arguments of each pass of the decoder.
        source_tokens: Token ids that the encoder read, per row; empty if it read other inputs.
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
        """Whether no token is hidden, neither in the prompts nor in the cache."""
        return bool(self.mask.all())

    @property
    def rows(self) -> int:
        """Number of rows."""
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
