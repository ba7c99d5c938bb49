"""The keys and values of all requests: how many bytes they may take, and who begins with those of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lookahead.backends.transformers.rows import Row
from lookahead.backends.transformers.tree_cache import whole_blocks
from lookahead.errors import InvalidArgumentError
from lookahead.serving.prefix_cache import LEAST, PrefixCache, TextRow, common_start

if TYPE_CHECKING:
    from lookahead.serving.request import Request

BLOCK = 64
"""Tokens by which the room of a row grows, at most. Growing copies the row, which takes about as long as reading it
once."""

FEWEST_BLOCKS = 64
"""Blocks that there are, at least, where memory is limited."""

PREFIX_BYTES = 1 << 30
"""Bytes of finished texts that are kept where nothing is said about it and memory is not limited."""


class KVMemory:
    """Room for keys and values, in tokens.

    Args:
        token_bytes: Bytes that a token takes.
        kv_bytes: Most bytes to hold at once, any number if `None`.
        reuses: Whether requests begin with the keys and values of others.
        prefix_bytes: Most bytes of finished texts.
        make_row: Makes an empty row, whose room grows by so many tokens.
        apart: Whether finished texts come on top of `kv_bytes`; else they take what running requests leave of it.

    Attributes:
        tokens: Most tokens to hold at once, any number if `None`.
        most_bytes: Most bytes to hold at once, those of finished texts included; any number if `None`.
        block: Tokens by which the room of a row grows.
        token_bytes: As given.
        asked: Tokens of all texts that began.
        reused: Those that another text had.
    """

    def __init__(
        self,
        token_bytes: int,
        kv_bytes: int | None,
        reuses: bool,
        prefix_bytes: int,
        make_row: Callable[[int], TextRow] = Row,
        apart: bool = False,
    ) -> None:
        self.token_bytes = token_bytes
        self.tokens = None if kv_bytes is None else kv_bytes // token_bytes
        if self.tokens == 0:
            raise InvalidArgumentError(
                f"kv_bytes={kv_bytes} is too small: keys and values of one token take {token_bytes} bytes"
            )
        self.block = BLOCK if self.tokens is None else min(max(self.tokens // FEWEST_BLOCKS, 1), BLOCK)
        self._prefixes = PrefixCache() if reuses else None
        self._prefix_tokens = prefix_bytes // token_bytes
        self._apart = apart
        kept_on_top = self._prefix_tokens if apart else 0
        self.most_bytes = None if self.tokens is None else (self.tokens + kept_on_top) * token_bytes
        self._make_row = make_row
        self.asked = self.reused = 0

    def new_row(self) -> TextRow:
        """An empty row."""
        return self._make_row(self.block)

    def drop(self, request: Request) -> None:
        """Forget keys and values of a request; they will be computed anew."""
        request.row = self.new_row()

    def reserved(self, tokens: int) -> int:
        """Tokens that a row takes which comes to `tokens`."""
        return whole_blocks(tokens, self.block)

    @property
    def kept(self) -> int:
        """Tokens of finished texts."""
        return 0 if self._prefixes is None else self._prefixes.held

    def forget(self) -> None:
        """Forget all finished texts."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def settle(self, running: Sequence[Request]) -> None:
        """Forget finished texts for which running requests leave no room."""
        if self._prefixes is not None:
            self._prefixes.shrink(self._room(running))

    def keep(self, request: Request, running: Sequence[Request]) -> None:
        """Keep the text of a request that does not run any more."""
        if self._prefixes is not None and not request.reads_inputs:
            self._prefixes.keep(request.sequence.tokens, request.row, self._room(running))

    def begin(self, request: Request, running: Sequence[Request]) -> bool:
        """Let a request that has no keys and values begin with those of a text that begins alike.

        Args:
            request: One of `running`.
            running: All that run, the most urgent first.

        Returns:
            Whether it takes part in the coming step; else a more urgent one is about to compute what it can use.
        """
        text = request.sequence.tokens
        if self._prefixes is not None and not request.reads_inputs:
            prefix, common = self._prefixes.find(text)
            row = None if prefix is None else prefix.row
            ahead = True
            for other in running:
                ahead = ahead and other is not request
                if other is request or other.reads_inputs:
                    continue
                shared = common_start(text, other.sequence.tokens)
                ready = min(shared, other.cached)
                if ahead and shared > max(ready, common) + LEAST:
                    return False
                if ready > common:
                    prefix, row, common = None, other.row, ready
            common = min(common, len(text) - 1)
            if row is not None and common >= LEAST:
                room = self._room(running)
                self._prefixes.shrink(room, but=prefix)
                if self._prefixes.held <= room:
                    request.row.copy_start(row, common)
                elif prefix is not None:  # there is room for one of them alone
                    self._prefixes.remove(prefix)
                    if row.capacity <= self.reserved(request.reach):
                        row.crop(common)
                        request.row = row
        self.asked += len(text)
        self.reused += request.cached
        request.handle.statistics.reused_tokens = request.cached
        return True

    def _room(self, running: Sequence[Request]) -> int:
        """Tokens of finished texts that there is room for."""
        if self.tokens is None or self._apart:
            return self._prefix_tokens
        return min(self.tokens - sum(self.reserved(request.reach) for request in running), self._prefix_tokens)
