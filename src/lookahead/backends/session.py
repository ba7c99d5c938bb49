"""Sessions: `open_session` opens a model of any kind; nothing else asks which kind it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.backends.llama_cpp.model import GGUFModel
from lookahead.backends.llama_cpp.runner import LlamaRowsRunner
from lookahead.backends.llama_cpp.session import GGUFSession
from lookahead.backends.prompts import Prompts
from lookahead.backends.transformers.model_watch import ModelWatch
from lookahead.backends.transformers.runner import ChainRunner, RowsRunner
from lookahead.backends.transformers.session import TransformersSession
from lookahead.config import LookaheadConfig
from lookahead.core.step import Batch

EngineRunner = RowsRunner | ChainRunner | LlamaRowsRunner
"""What runs rows that come and go."""


class Call(Protocol):
    """What one call of `generate` runs on: acquired when it begins, and released when it ends.

    Attributes:
        runner: Runs the trees, with the interface of `ModelRunner`.
        chains: Whether it runs chains alone.
        clock: The clock for its steps, in seconds.
        packs: Whether rows that come and go could run the texts as well.
        keeps_cache: Whether the cache that a call leaves can be handed on.
        most_nodes: Nodes that the tree of each row may have.
        invariant_rows: See `Statistics.invariant_rows`.
        engine: See `Statistics.engine`.
    """

    runner: Any
    chains: bool
    clock: Callable[[], float]
    packs: bool
    keeps_cache: bool
    most_nodes: int
    invariant_rows: int
    engine: str

    @property
    def state_bytes(self) -> int:
        """Bytes of running states that were copied so far."""
        ...

    def backend(self, batch: Batch, asks_others: bool) -> Any:
        """What runs the trees of `batch`, all rows of the call; `asks_others` if there are criteria that may depend on
        time or other state."""

    def restore(self, error: BaseException) -> None:
        """Put back what a call that failed, with `error`, has changed."""

    def release(self, keep_cache: bool) -> Cache | None:
        """Release the buffers; returns the caller's cache, if it is to be kept."""


class CallSession(Protocol):
    """What `generate` asks of a session: of one process, or of several ranks.

    Attributes:
        refuses_inputs: Why prompts that are more than tokens, such as images, are refused; `None` if they are not.
        speaks: Whether streamers and listeners of a call are told here.
    """

    refuses_inputs: str | None
    speaks: bool

    def settle(self, config: LookaheadConfig) -> LookaheadConfig:
        """`config` as it can be run.

        Raises:
            UnsupportedArgumentError: It cannot.
        """

    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> Call:
        """Acquire what a call needs.

        Raises:
            LookaheadError: The model or its settings cannot do what is asked for.
        """


class Session(CallSession, Protocol):
    """What can be asked of a model, whatever runs it.

    Attributes:
        clock: The clock for its steps, in seconds.
    """

    clock: Callable[[], float]

    @property
    def number_type(self) -> str:
        """Name of the type of the weights, or of their types."""

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""

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

    def open_rows(
        self, config: LookaheadConfig, max_rows: int, kv_bytes: int | None, prefix_bytes: int
    ) -> tuple[EngineRunner, int | None, int]:
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

    def watch(self, runner: Any, compares_bits: bool) -> ModelWatch | None:
        """Notices changes of the model; `None` where there can be none."""

    def keep_text(self) -> None:
        """Let calls of one row leave their text to the next, where the caller's cache does not."""

    def reused_tokens(self, cached: int) -> int:
        """Tokens of the last prompt that were not computed anew, where the caller's cache held `cached`."""

    def sharing_weights(self) -> PreTrainedModel:
        """Another object of the same model, weights shared: nothing that is kept for the one is known of it."""


def open_session(model: PreTrainedModel) -> Session:
    """How to run `model`, which may be one of transformers or a GGUF file."""
    return GGUFSession(model) if isinstance(model, GGUFModel) else TransformersSession(model)
