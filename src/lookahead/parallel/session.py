"""A model that several ranks run together, as a session like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lookahead.backends.prompts import Prompts
from lookahead.backends.session import Call, open_session
from lookahead.config import LookaheadConfig
from lookahead.core.step import Batch
from lookahead.parallel.runner import ParallelRunner

if TYPE_CHECKING:
    from lookahead.parallel.group import ParallelGroup


class RanksSession:
    """What `generate` asks of a session, answered by a group.

    Args:
        group: The ranks.
        model: The model of this one.

    Attributes:
        speaks: Whether this rank serves streamers and `on_step`.
    """

    refuses_inputs: str | None = "one process has to read it; leave parallel out"

    def __init__(self, group: ParallelGroup, model: PreTrainedModel) -> None:
        self._group, self._model = group, model
        self.speaks = group.rank == 0

    def settle(self, config: LookaheadConfig) -> LookaheadConfig:
        """See `ParallelGroup.drafting`."""
        return self._group.drafting(config)

    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> RanksCall:
        """Acquire what a call needs on this rank, and see that it is the same call on all of them.

        Raises:
            UnsupportedArgumentError: Ranks cannot share out the steps.
            ParallelError: The ranks disagree.
        """
        local = open_session(self._model).begin(prompts, config, generation_config)
        self._group.check(self._model, local.runner)
        self._group.begin(self._model, config, generation_config, (prompts.input_ids, prompts.mask))
        return RanksCall(self._group, local)


class RanksCall:
    """What a call runs on; see `Call`.

    Args:
        group: The ranks.
        local: What this one runs.
    """

    packs = False
    chains = False

    def __init__(self, group: ParallelGroup, local: Call) -> None:
        self._group, self._local = group, local
        self.runner: Any = local.runner
        self.clock: Callable[[], float] = local.clock
        self.keeps_cache, self.most_nodes = local.keeps_cache, local.most_nodes
        self.invariant_rows, self.state_bytes = local.invariant_rows, 0

    def backend(self, batch: Batch, asks_others: bool) -> ParallelRunner:
        """See `ParallelGroup.backend`."""
        return self._group.backend(self.runner, batch, asks_others)

    def restore(self, error: BaseException) -> None:
        """Put back what the call has changed, and let the other ranks know."""
        self._local.restore(error)
        self._group.fail(error)

    def release(self, keep_cache: bool) -> Cache | None:
        """Release what this rank has."""
        return self._local.release(keep_cache)
