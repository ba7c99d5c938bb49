"""Runs an unmodified transformers model on chains of tokens, with states that are put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.backends.chain_rules import has_room, only_chain
from lookahead.backends.forward_result import ForwardResult, forward_result
from lookahead.backends.transformers.chain_cache import ChainCache
from lookahead.backends.transformers.forward_arguments import forward_arguments
from lookahead.backends.transformers.position_limit import PositionLimit
from lookahead.backends.transformers.saved_state import SavedState
from lookahead.core.token_tree import TokenTree, lay_out
from lookahead.errors import InvalidArgumentError

SHORT = 64
"""Tokens up to which a chain is a draft rather than a prompt."""


class ChainRunner:
    """One sequence on a model whose states cannot take back a token.

    The pass over a draft goes on from the states as they are. If all of the draft is accepted they stay; if not, the
    states of before the pass are put back, and the accepted tokens are sent again in front of the next draft, as
    pending tokens.

    Args:
        model: A causal language model of transformers that `runs_on_chains`.
        cache: The states of the beginning of the text; empty ones if not given.
        before: How many tokens of the cache come before the text that `begin_tree` will be given.
        device: Where inputs go if the model cannot say, because its weights are loaded when they are needed.
        positions_end: See `PositionLimit`.
        engine: Runs chains of at most `SHORT` tokens; the model itself if not given.

    Attributes:
        cache: The states of the text so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: ChainCache | None = None,
        before: int = 0,
        device: torch.device | None = None,
        positions_end: bool = True,
        engine: PreTrainedModel | None = None,
    ) -> None:
        self.model = model
        self._engine = model if engine is None else engine
        self.cache = ChainCache(model) if cache is None else cache
        self._before = before
        on_meta = model.device.type == "meta"
        self._device = (device or torch.device("cpu")) if on_meta else model.device
        self._limit = PositionLimit(model.config, positions_end)
        arguments = forward_arguments(model)
        self._keeps_logits = "logits_to_keep" in arguments
        self._takes_positions = "position_ids" in arguments
        self._sent = 0
        self._shift = 0

    @property
    def last_length(self) -> int | None:
        """Text length at which the model can read no further token, if there is one."""
        return self._limit.last_length

    @property
    def context(self) -> int | None:
        """Positions the model was made for, if its configuration says so."""
        return self._limit.context

    @property
    def changes_after(self) -> int | None:
        """Longest text that is read with the positions for short texts; `None` if there are no others."""
        return self._limit.changes_after

    @property
    def broken_after(self) -> int | None:
        """Longest text that plain decoding of the model reads as a whole; `None` for any."""
        return self._limit.broken_after

    def idle_tree(self) -> TokenTree:
        """There is one row alone, and it is not finished."""
        raise InvalidArgumentError("trees has a row that is finished; chains are run for one row")

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tree of the coming step, `text` being the text so far: its pending tokens.

        There is no room below a prompt, whose states would have to be computed again, nor below many pending tokens.
        """
        pending = text[self.cache.length - self._before :]
        deepest = self._limit.deepest(self._before + len(text) - 1 + self._shift)
        if not has_room(self.cache.length, len(pending)):
            return TokenTree(pending, len(pending) - 1)
        return TokenTree(pending, None if deepest is None else deepest - self._shift - self.cache.length)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Drafters are always asked; where nothing may be drafted, `tree` has no room."""
        return True

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> list[ForwardResult]:
        """Run the model on one chain; what it does to the states waits for `commit`.

        Args:
            trees: One, whose nodes follow one another.
            top_k: How many of the likeliest tokens after each node that is read are wanted, with probabilities.

        Raises:
            InvalidArgumentError: The tree has branches.
        """
        tree = only_chain(trees)
        if not tree.is_chain:
            self.cache.save()
        self._sent = len(tree)
        layout = lay_out(tree)
        keep = layout.read_slots
        inputs: dict[str, object] = {"input_ids": torch.from_numpy(layout.tokens)[None].to(self._device)}
        if self._takes_positions:
            first = self.cache.length + self._shift
            inputs["position_ids"] = torch.arange(first, first + len(tree), device=self._device)[None]
        if self._keeps_logits:
            # A number keeps the last ones, without the copy that picking them takes.
            tail = len(keep) > 0 and len(tree) - int(keep[0]) == len(keep)
            inputs["logits_to_keep"] = len(keep) if tail else torch.from_numpy(keep).to(self._device)
        module = self._engine if len(tree) <= SHORT else self.model
        outputs = module(**inputs, **self.cache.arguments(), use_cache=True, return_dict=True)
        self.cache.keep(outputs)
        logits = outputs.logits[0]
        if not self._keeps_logits:
            logits = logits[torch.from_numpy(keep).to(logits.device)]
        # transformers chooses tokens from float32 logits whatever the model's own type
        return [forward_result(len(tree), keep, logits.float(), top_k)]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the states if all nodes of the last tree are `kept`; else go back to those of before it."""
        if len(kept[0]) == self._sent:
            self.cache.length += self._sent
        else:
            self.cache.restore()

    @property
    def prompt_cache(self) -> Any:
        """See `PromptReader`."""
        return self.cache.content

    def plain_step(self, model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
        """See `PromptReader`."""
        saved = SavedState(inputs[self.cache.name], [])
        logits: torch.Tensor = model(**inputs, return_dict=True).logits[:, -1].float()
        saved.restore()
        return logits

    def try_step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `PromptReader`."""
        self.cache.save()
        result = self.forward([TokenTree(tokens)])[0]
        self.cache.restore()
        return result.logits_after(0)

    def take_prompt(self, outputs: object, mask: torch.Tensor, shifts: Sequence[int]) -> None:
        """See `PromptReader`."""
        self.cache.keep(outputs)
        self.cache.length = mask.shape[1]
        (self._shift,) = shifts

    def prefill(self, texts: Sequence[Sequence[int]], chunk_size: int | None) -> int:
        """Send a long text ahead in chunks of `chunk_size` tokens, if given; returns how many passes that took."""
        passes = 0
        while chunk_size is not None:
            pending = self.begin_tree(0, texts[0]).tokens
            if len(pending) <= chunk_size:
                break
            self._settle(pending[:chunk_size])
            passes += 1
        return passes

    def complete(self, texts: Sequence[Sequence[int]]) -> None:
        """Send all of the text but its last token, so that the cache holds what plain decoding leaves there."""
        pending = texts[0][self.cache.length - self._before : -1]
        if pending:
            self._settle(pending)

    def _settle(self, tokens: Sequence[int]) -> None:
        self.forward([TokenTree(tokens)])
        self.commit([range(len(tokens))])
