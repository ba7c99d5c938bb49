"""Keys and values of all requests: how many bytes they take, which finished texts are kept, who begins with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookahead.backends.base import Runner, TextRow
from lookahead.backends.transformers.tree_cache import whole_blocks
from lookahead.core.sequence import common_start, may_share_more
from lookahead.errors import InvalidArgumentError

if TYPE_CHECKING:
    from lookahead.serving.request import Request


BLOCK = 64
"""Tokens by which the room of a row grows, at most. Growing copies the row, which takes about as long as reading it
once."""

FEWEST_BLOCKS = 64
"""Blocks that there are, at least, where memory is limited."""

PREFIX_BYTES = 1 << 30
"""Bytes of finished texts that are kept where nothing is said about it and memory is not limited."""

LEAST = 16
"""Tokens that two texts must begin with in common, or nothing is reused."""


@dataclass(eq=False)
class Prefix:
    """A finished text that is kept: its token ids, and the row of their keys and values."""

    tokens: list[int]
    row: TextRow


class KVMemory:
    """Room for keys and values, in tokens: those of running requests, and of finished texts, the least recently used
    first, which requests that begin alike copy from.

    Args:
        runner: What runs the rows. Where it `keeps_apart`, finished texts come on top of `kv_bytes`; else they take
            what running requests leave of it.
        kv_bytes: Most bytes to hold at once, any number if `None`.
        prefix_bytes: Most bytes of finished texts; `None` if requests do not begin with the keys and values of others.

    Attributes:
        tokens: Most tokens to hold at once, any number if `None`.
        most_bytes: Most bytes to hold at once, those of finished texts included; any number if `None`.
        block: Tokens by which the room of a row grows.
        token_bytes: Bytes that a token takes.
    """

    def __init__(self, runner: Runner, kv_bytes: int | None, prefix_bytes: int | None) -> None:
        self.runner = runner
        self.token_bytes = token_bytes = runner.token_bytes()
        self.tokens = None if kv_bytes is None else kv_bytes // token_bytes
        if self.tokens == 0:
            raise InvalidArgumentError(
                f"kv_bytes={kv_bytes} is too small: keys and values of one token take {token_bytes} bytes"
            )
        self.block = BLOCK if self.tokens is None else min(max(self.tokens // FEWEST_BLOCKS, 1), BLOCK)
        self._reuses = prefix_bytes is not None
        self._prefixes: list[Prefix] = []
        self._prefix_tokens = (prefix_bytes or 0) // token_bytes
        kept_on_top = self._prefix_tokens if runner.keeps_apart else 0
        self.most_bytes = None if self.tokens is None else (self.tokens + kept_on_top) * token_bytes

    def new_row(self) -> TextRow:
        """An empty row."""
        return self.runner.new_row(self.block)

    def lengths(self, requests: Sequence[Request]) -> list[int]:
        """Number of cached tokens of each request."""
        return self.runner.lengths_of([request.row for request in requests])

    def drop(self, request: Request) -> None:
        """Forget keys and values of a request; they will be computed anew."""
        request.row = self.new_row()

    def reserved(self, tokens: int) -> int:
        """Tokens of room that a row of `tokens` tokens takes."""
        return whole_blocks(tokens, self.block)

    @property
    def kept(self) -> int:
        """Tokens that the rows of finished texts have room for."""
        return sum(prefix.row.capacity for prefix in self._prefixes)

    def forget(self) -> None:
        """Forget all finished texts."""
        self._prefixes.clear()

    def settle(self, running: Sequence[Request]) -> None:
        """Evict finished texts until running requests have room."""
        self._evict(self._room(running))

    def keep(self, request: Request, running: Sequence[Request]) -> None:
        """Keep the text of a request that has ended, as long as there is room beside those that are running."""
        row, room = request.row, self._room(running)
        tokens = request.sequence.tokens[: row.length]
        if not self._reuses or request.reads_inputs or len(tokens) < LEAST or row.capacity > room:
            return
        for prefix in list(self._prefixes):
            size = min(len(tokens), len(prefix.tokens))
            if may_share_more(tokens, prefix.tokens, size - 1) and tokens[:size] == prefix.tokens[:size]:
                if size == len(tokens):
                    return  # it has all of this one
                self._prefixes.remove(prefix)  # this one has all of it
        row.set_apart()
        self._prefixes.append(Prefix(tokens, row))
        self._evict(room)

    def begin(self, request: Request, running: Sequence[Request]) -> bool:
        """Start a request from the keys and values of the text, finished or running, with the longest common prefix.

        Args:
            request: One of `running`.
            running: All that run, the most urgent first.

        Returns:
            Whether it takes part in the coming step; else a more urgent one is about to compute what it can use.
        """
        if not self._reuses or request.reads_inputs:
            return True
        text = request.sequence.tokens
        prefix, common = self._longest(text)
        row = None if prefix is None else prefix.row
        ahead = True
        for other in running:
            ahead = ahead and other is not request
            if other is request or other.reads_inputs:
                continue
            if not may_share_more(text, other.sequence.tokens, common):
                continue
            shared = common_start(text, other.sequence.tokens)
            ready = min(shared, other.cached)
            if ahead and shared > max(ready, common) + LEAST:
                return False
            if ready > common:
                prefix, row, common = None, other.row, ready
        common = min(common, len(text) - 1)
        if row is not None and common >= LEAST:
            self._start(request, row, common, prefix, self._room(running))
        return True

    def _start(self, request: Request, row: TextRow, common: int, prefix: Prefix | None, room: int) -> None:
        """Start a request from the first `common` tokens of `row`, that of `prefix` unless its text runs."""
        self._evict(room, but=prefix)
        if self.kept <= room:
            request.row.copy_start(row, common)
        elif prefix is not None:  # there is room for one of them alone
            self._prefixes.remove(prefix)
            if row.capacity <= self.reserved(request.reach):
                row.crop(common)
                request.row = row

    def _longest(self, text: Sequence[int]) -> tuple[Prefix | None, int]:
        """The finished text with the longest common prefix with `text`, now used last, and the length of that."""
        most, place = 0, 0
        for other, prefix in enumerate(self._prefixes):
            if may_share_more(text, prefix.tokens, most):
                common = common_start(text, prefix.tokens)
                most, place = max((most, place), (common, other))
        if most < LEAST:
            return None, 0
        self._prefixes.append(self._prefixes.pop(place))
        return self._prefixes[-1], most

    def _evict(self, room: int, but: Prefix | None = None) -> None:
        """Evict the least recently used finished texts, except `but`, until they hold at most `room` tokens."""
        excess = self.kept - room
        for prefix in list(self._prefixes):
            if excess > 0 and prefix is not but:
                self._prefixes.remove(prefix)
                excess -= prefix.row.capacity

    def _room(self, running: Sequence[Request]) -> int:
        """Tokens of finished texts that there is room for."""
        if self.tokens is None or self.runner.keeps_apart:
            return self._prefix_tokens
        return min(self.tokens - sum(self.reserved(request.reach) for request in running), self._prefix_tokens)
