"""Memory for keys and values of all requests: its size, and the prefix cache of finished texts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lookahead.backends.base import Runner, TextRow
from lookahead.backends.machine import SHARE
from lookahead.backends.transformers.tree_cache import whole_blocks
from lookahead.core.sequence import common_start, may_share_more
from lookahead.errors import InvalidArgumentError, LookaheadWarning

if TYPE_CHECKING:
    from lookahead.serving.request import Request


BLOCK = 64
"""Growth of a row's capacity in tokens. Growth copies the row."""

MIN_BLOCKS = 64
"""Smallest number of blocks of a limited memory; blocks become smaller for it."""

PREFIX_BYTES = 1 << 30
"""Default limit of the prefix cache if memory is unlimited, in bytes."""

MIN_COMMON = 16
"""Shortest common prefix that is reused, in tokens."""


@dataclass(eq=False)
class Prefix:
    """Finished text in the prefix cache: its token ids, the row of its keys and values, and its tenant."""

    tokens: list[int]
    row: TextRow
    tenant: object


class KVMemory:
    """Accounting of keys and values in tokens: running requests, and finished texts, least recently used first.

    Args:
        runner: Runner of the rows. If it `keeps_apart`, finished texts have their own memory; else the rest of
            `kv_bytes`.
        kv_bytes: Limit in bytes; a part of the free memory if `None`.
        prefix_bytes: Limit of finished texts in bytes; `None` disables their reuse.
        free_bytes: Free memory of the device in bytes.

    Attributes:
        tokens: Limit of `kv_bytes` in tokens; longer texts are refused. `None` without it.
        capacity: Tokens that fit. It becomes smaller if the runner's memory cannot grow so far.
        block: Growth of a row's capacity in tokens.
        reuses: Whether finished texts are reused.
        token_bytes: Bytes of keys and values of a token.
    """

    def __init__(self, runner: Runner, kv_bytes: int | None, prefix_bytes: int | None, free_bytes: int) -> None:
        self.runner = runner
        self.token_bytes = token_bytes = max(runner.token_bytes(), 1)  # 0 without layers
        self.tokens = None if kv_bytes is None else kv_bytes // token_bytes
        if self.tokens == 0:
            raise InvalidArgumentError(
                f"kv_bytes={kv_bytes} is too small: keys and values of one token take {token_bytes} bytes; give more"
            )
        self.block = BLOCK if self.tokens is None else min(max(self.tokens // MIN_BLOCKS, 1), BLOCK)
        self.reuses = prefix_bytes is not None
        self._prefixes: list[Prefix] = []
        self._max_prefix_tokens = (prefix_bytes or 0) // token_bytes
        apart = self._max_prefix_tokens if runner.keeps_apart else 0
        self.capacity = max(free_bytes // SHARE // token_bytes, 1) if self.tokens is None else self.tokens
        self._bytes_apart = apart * token_bytes
        self._fits_for = 0  # steps in which running and finished texts surely fit
        # Tokens that each request, until it starts, is expected to share with a running one.
        self._expected: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    @property
    def limit_bytes(self) -> int:
        """Limit in bytes including finished texts."""
        return self.capacity * self.token_bytes + self._bytes_apart

    def lengths(self, requests: Sequence[Request]) -> list[int]:
        """Number of cached tokens of each request."""
        return self.runner.lengths_of([request.row for request in requests])

    def drop(self, request: Request) -> None:
        """Drop the keys and values of a request, if it has any: they are computed (again) later."""
        request.row = self.runner.new_row(self.block)
        request.row.declare_prompt(len(request.arguments.prompts.tokens[0]))
        self._expected.pop(request, None)

    def reserved(self, tokens: int) -> int:
        """Return the capacity of a row for `tokens` tokens."""
        return whole_blocks(tokens, self.block)

    @property
    def prefix_tokens(self) -> int:
        """Memory of finished texts in tokens, without pages that running ones hold."""
        rows = [prefix.row for prefix in self._prefixes]
        return sum(row.capacity for row in rows) - self.runner.shared_tokens(rows, with_others=True)

    def used_bytes(self, requests: Sequence[Request]) -> int:
        """Return the bytes that running requests have taken."""
        rows: list[TextRow] = [request.row for request in requests]
        return (sum(row.capacity for row in rows) - self.runner.shared_tokens(rows)) * self.token_bytes

    def forget(self) -> None:
        """Forget all finished texts."""
        self._prefixes.clear()

    def fits(self, requests: Sequence[Request]) -> bool:
        """Return whether requests fit, without finished texts. The runner's memory grows for them if it can."""
        needed = self._needed(requests)
        total = min(needed + (0 if self.runner.keeps_apart else self.prefix_tokens), self.capacity)
        grown = min(self.runner.grow(total), self.capacity)
        if grown < total:
            self.capacity = grown
            warnings.warn(
                f"keys and values cannot grow beyond {grown} tokens, {grown * self.token_bytes} bytes: the device has "
                "no more memory. Further requests wait; an Engine takes its memory at the start if the device has it",
                LookaheadWarning,
                stacklevel=2,
            )
        growth = sum(self.reserved(request.drafting.max_nodes) for request in requests)
        self._fits_for = (grown - total) // max(growth, 1)
        return needed <= self.capacity

    def _needed(self, requests: Sequence[Request]) -> int:
        """Return the tokens of memory of requests and the trees of their next step."""
        needed = sum(self.reserved(request.reach) for request in requests)
        if not self.runner.shares_pages:
            return needed
        for place, request in enumerate(requests):
            if request not in self._expected:
                self._expected[request] = self._sharable(request, requests[:place])
        fresh = sum(self._expected[request] for request in requests if not request.cached)
        return needed - fresh - self.runner.shared_tokens([request.row for request in requests])

    def _sharable(self, request: Request, others: Sequence[Request]) -> int:
        """Return the tokens of whole pages that a new request will share with another one."""
        if not self.reuses or request.reads_inputs:
            return 0
        common = 0
        text = request.sequence.tokens[:-1]
        for other in [one for one in others if one.tenant == request.tenant and not one.reads_inputs]:
            if may_share_more(text, other.sequence.tokens, common):
                common = common_start(text, other.sequence.tokens)
        return common // self.block * self.block if common >= MIN_COMMON else 0

    def still_fits(self, running: Sequence[Request]) -> bool:
        """Return whether the running requests fit in this step. Texts are counted only if they may have outgrown it."""
        self._fits_for -= 1
        return self._fits_for >= 0 or self.fits(running)

    def settle(self, running: Sequence[Request]) -> None:
        """Evict finished texts until running requests fit."""
        if self._prefixes and self._fits_for <= 0:
            self._evict(self._prefix_capacity(running))

    def keep(self, request: Request, running: Sequence[Request]) -> None:
        """Add the text of a request that has ended to the prefix cache, if it fits beside the running ones."""
        row = request.row
        capacity = self._prefix_capacity(running)
        tokens = request.sequence.tokens[: row.length]
        size = row.capacity - self.runner.shared_tokens([row], with_others=True)
        if not self.reuses or request.reads_inputs or len(tokens) < MIN_COMMON or size > capacity:
            return
        for prefix in [prefix for prefix in self._prefixes if prefix.tenant == request.tenant]:
            size = min(len(tokens), len(prefix.tokens))
            if may_share_more(tokens, prefix.tokens, size - 1) and tokens[:size] == prefix.tokens[:size]:
                if size == len(tokens):
                    return  # already contained
                self._prefixes.remove(prefix)  # contained in the new one
        row.set_apart()
        self._fits_for = 0
        self._prefixes.append(Prefix(tokens, row, request.tenant))
        self._evict(capacity)

    def begin(self, request: Request, running: Sequence[Request]) -> bool:
        """Start a request from the keys and values of the finished or running text with the longest common prefix.

        Args:
            request: One of `running`.
            running: Running requests, most urgent first.

        Returns:
            Whether the request takes part in the next step. It waits if a more urgent one computes its prefix now, or
            if it does not fit because it shares less than expected.
        """
        if not self.reuses or request.reads_inputs:
            return True
        text = request.sequence.tokens
        prefix, common = self._longest(text, request.tenant)
        row = None if prefix is None else prefix.row
        ahead = True
        for other in running:
            ahead = ahead and other is not request
            if other is request or other.reads_inputs or other.tenant != request.tenant:
                continue
            if not may_share_more(text, other.sequence.tokens, common):
                continue
            shared = common_start(text, other.sequence.tokens)
            ready = min(shared, other.cached)
            if ahead and shared > max(ready, common) + MIN_COMMON:
                return False
            if ready > common:
                prefix, row, common = None, other.row, ready
        common = min(common, len(text) - 1)
        if row is not None and common >= MIN_COMMON:
            self._start(request, row, common, prefix, running)
        if request.row.capacity < self._expected.get(request, 0) and len(running) > 1:
            self._expected[request] = 0
            return self.fits(running)
        return True

    def _start(
        self, request: Request, row: TextRow, common: int, prefix: Prefix | None, running: Sequence[Request]
    ) -> None:
        """Start a request from the first `common` tokens of `row`, the row of `prefix` or of a running text."""
        capacity = 0
        if not self.runner.shares_pages:
            capacity = self._prefix_capacity(running)
            self._evict(capacity, but=prefix)
        if self.runner.shares_pages or self.prefix_tokens <= capacity:
            request.row.copy_start(row, common)
        elif prefix is not None:  # only one of the two rows fits
            self._prefixes.remove(prefix)
            if row.capacity <= self.reserved(request.reach):
                row.crop(common)
                request.row = row

    def _longest(self, text: Sequence[int], tenant: object) -> tuple[Prefix | None, int]:
        """Return the finished text of the tenant with the longest common prefix, and its length; mark it as used."""
        longest, index = 0, 0
        for other, prefix in enumerate(self._prefixes):
            if prefix.tenant == tenant and may_share_more(text, prefix.tokens, longest):
                common = common_start(text, prefix.tokens)
                longest, index = max((longest, index), (common, other))
        if longest < MIN_COMMON:
            return None, 0
        self._prefixes.append(self._prefixes.pop(index))
        return self._prefixes[-1], longest

    def _evict(self, capacity: int, but: Prefix | None = None) -> None:
        """Evict the least recently used finished texts, except `but`, until they fit into `capacity` tokens."""
        for prefix in [one for one in self._prefixes if one is not but]:
            if self.prefix_tokens <= capacity:
                return
            self._prefixes.remove(prefix)

    def _prefix_capacity(self, running: Sequence[Request]) -> int:
        """Return the number of tokens of finished texts that fit beside running requests."""
        if self.runner.keeps_apart:
            return self._max_prefix_tokens
        return min(self.capacity - self._needed(running), self._max_prefix_tokens)
