"""Noise of sampling: random numbers for each index of the text, of one text or of all rows of a call."""

from __future__ import annotations

import sys
from collections import deque
from functools import lru_cache
from itertools import islice, takewhile

import torch

MAX_BYTES = 1 << 26
"""Bytes of noise kept for slower rows: 64 MiB, or 105 tokens of one row with a vocabulary of 152,000."""


class SamplingNoise:
    """Random numbers that transformers would use to sample the tokens of each row.

    `torch.multinomial(p, 1)` is the argmax of `p / q`, where `q` has the shape of `p` and an exponential distribution
    independent of `p` (`aten/src/ATen/native/Distributions.cpp`, the path for one sample). transformers draws `q`
    `[rows, vocabulary]` once for each index of the text, finished rows included, so it depends only on the generator
    and the index. The first row at an index draws the noise of all rows; it is kept for the others. The total equals
    transformers' draws.

    Noise beyond `max_bytes` is not kept, but drawn again from the saved state of the generator.

    Args:
        rows: Number of rows of the call.
        generator: Generator on the device of the probabilities; torch's default generator if not given.
        max_bytes: Limit for kept noise, without the states of the generator (on a CPU 5 KB for each row and index).

    Attributes:
        drawn_again: Number of repeated draws.
    """

    def __init__(self, rows: int = 1, generator: torch.Generator | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._rows = rows
        self._generator = generator
        self._max_bytes = max_bytes
        self._indices = [0] * rows  # next index of each row
        self._passed = 0  # end of the indices that a row has reached
        self._end = 0  # end of the drawn indices
        # A unit is the rows of an index that are drawn together. Units are numbered in the order of drawing.
        self._size = rows
        self._type: torch.dtype | None = None  # of the last draw; processors may change it
        self._states: dict[int, torch.Tensor] = {}  # state of the generator before each unit, and after the last one
        self._noise: dict[int, torch.Tensor] = {}  # of units, `[rows, vocabulary]`
        self.drawn_again = 0

    @property
    def seed(self) -> int | None:
        """Seed of the generator; `None` for torch's default generator."""
        return None if self._generator is None else self._generator.initial_seed()

    @property
    def stored_bytes(self) -> int:
        """Bytes of kept noise; all units have the same size."""
        return len(self._noise) * next((noise.nbytes for noise in self._noise.values()), 0)

    def take(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the noise `[1, vocabulary]` of the next index of `row`, and advance."""
        if self._rows == 1 and not self._noise:
            return self._draw(probabilities)
        index = self._indices[row]
        used = range(row, row + 1)
        if index == self._passed:
            self._draw_until(index + 1, probabilities)
            self._generator_of(probabilities.device).set_state(self._states[self._unit(0, index + 1)])
            self._passed += 1
            used = range(0, self._rows, self._size)  # complete rows may be alone in a unit
        noise = self._part(row, index, self._noise.get(self._unit(row, index)), probabilities)
        self._indices[row] += 1
        self._forget_used(used, index)
        return noise

    def can_foresee(self, count: int, like: torch.Tensor) -> bool:
        """Return whether noise of `count` further indices leaves most of the memory to slower rows."""
        return self._rows == 1 or 4 * count * self._rows * like.nbytes <= self._max_bytes

    def look_ahead(self, row: int, count: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the noise of the next `count` indices of `row` without advancing; fewer if memory is short.

        The state of the generator does not change, and other rows may reach these indices first.

        Args:
            row: The row.
            count: Number of indices.
            like: A row of probabilities, `[1, vocabulary]`.
        """
        first = self._indices[row]
        self._draw_until(first + count, like)
        units = (self._noise.get(self._unit(row, index)) for index in range(first, first + count))
        stored = takewhile(torch.is_tensor, units)
        return [self._part(row, index, noise, like) for index, noise in enumerate(stored, first)]

    def advance(self, row: int, count: int, like: torch.Tensor) -> None:
        """Skip the noise of the next `count` indices of `row`, which `look_ahead` has returned."""
        for _ in range(count):
            self.take(row, like)

    def leave(self, row: int) -> None:
        """Release the noise of a complete row."""
        first = self._indices[row]
        self._indices[row] = sys.maxsize
        for index in range(first, self._end):
            self._forget_used(range(row, row + 1), index)

    def _unit(self, row: int, index: int) -> int:
        return index * (self._rows // self._size) + row // self._size

    def _part(self, row: int, index: int, noise: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Return the part of a row in the noise of its unit; draw it again if it was not kept."""
        if noise is None:
            generator = self._generator_of(like.device)
            unit = self._unit(row, index)
            state = generator.get_state()
            generator.set_state(self._states[unit])
            noise = self._draw(like)
            generator.set_state(state)
            self.drawn_again += 1
            self._keep(unit, noise)
        start = row % self._size
        return noise[start : start + 1]

    def _draw_until(self, end: int, like: torch.Tensor) -> None:
        """Draw noise for the current index, and further ones before `end` while memory permits."""
        self._size = 1 if draws_row_by_row(like.device, like.dtype, like.shape[-1]) else self._rows
        generator = self._generator_of(like.device)
        here = self._unit(0, self._passed)
        state = generator.get_state()
        if here not in self._states or not torch.equal(self._states[here], state) or like.dtype != self._type:
            # The generator was used elsewhere, or the number type has changed: noise ahead is invalid.
            for unit in [unit for unit in self._states if unit >= here]:
                del self._states[unit]
                self._noise.pop(unit, None)
            self._states[here] = state
            self._end = self._passed
            self._type = like.dtype
        if self._end >= end:
            return
        generator.set_state(self._states[self._unit(0, self._end)])
        while self._end < end:
            if self._end > self._passed and self.stored_bytes + self._rows * like.nbytes > self._max_bytes:
                break
            for row in range(0, self._rows, self._size):
                unit = self._unit(row, self._end)
                noise = self._draw(like)
                self._states[unit + 1] = generator.get_state()
                if min(self._indices[row : row + self._size]) <= self._end:  # not if all these rows are complete
                    self._keep(unit, noise)
            self._end += 1
        generator.set_state(state)

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((self._size, like.shape[-1])).exponential_(generator=self._generator)

    def _keep(self, unit: int, noise: torch.Tensor) -> None:
        if self.stored_bytes + noise.nbytes <= self._max_bytes:
            self._noise[unit] = noise

    def _forget_used(self, rows: range, index: int) -> None:
        """Forget the units of these rows at an index that no row will use again."""
        for row in rows:
            first = row - row % self._size
            unit = self._unit(row, index)
            if min(self._indices[first : first + self._size]) > index:
                self._noise.pop(unit, None)
                if index < self._passed:
                    self._states.pop(unit, None)

    def _generator_of(self, device: torch.device) -> torch.Generator:
        return default_generator(device) if self._generator is None else self._generator


class TextNoise(SamplingNoise):
    """Noise of one text whose generator nobody else uses, so that noise may be drawn early.

    Args:
        generator: Generator on the device of the probabilities.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(1, generator)
        self._own = generator
        self._early: deque[torch.Tensor] = deque()
        """Noise of the next indices."""
        self._like: torch.Tensor | None = None
        """Probabilities of the last draw, for their type and vocabulary."""
        self._state: torch.Tensor | None = None
        """State of the generator before the first draw for them."""
        self._used = 0
        """Number of used indices after this state."""

    def take(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        """See `SamplingNoise`."""
        self._begin(probabilities)
        self._used += 1
        return self._early.popleft() if self._early else self._draw(probabilities)

    def can_foresee(self, count: int, like: torch.Tensor) -> bool:
        """See `SamplingNoise`."""
        return True

    def look_ahead(self, row: int, count: int, like: torch.Tensor) -> list[torch.Tensor]:
        """See `SamplingNoise`."""
        self._begin(like)
        fits = max(self._max_bytes // (like.shape[-1] * like.element_size()), 1)
        for _ in range(min(count, fits) - len(self._early)):
            self._early.append(self._draw(like))
        return list(islice(self._early, count))

    def advance(self, row: int, count: int, like: torch.Tensor) -> None:
        """See `SamplingNoise`."""
        self._used += count
        for _ in range(count):
            self._early.popleft()

    def leave(self, row: int) -> None:
        """See `SamplingNoise`."""
        self._early.clear()

    def _begin(self, like: torch.Tensor) -> None:
        """Note the type and vocabulary of the probabilities; if they are new, drop early noise."""
        before = self._like
        if before is not None and before.dtype == like.dtype and before.shape[-1] == like.shape[-1]:
            return
        if before is not None and self._early and self._state is not None:
            self._own.set_state(self._state)
            for _ in range(self._used):
                self._draw(before)
            self._early.clear()
        self._like = like.new_empty(1).expand(like.shape)
        self._state = self._own.get_state()
        self._used = 0


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator on `device`."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@lru_cache(maxsize=64)
def draws_row_by_row(device: torch.device, dtype: torch.dtype, vocabulary: int) -> bool:
    """Return whether rows drawn separately equal rows drawn together, so that one can be drawn again by itself.

    That holds on CPUs with a kernel that draws in order; a trial with its own generator decides.
    """
    if device.type != "cpu":
        return False
    together = torch.Generator().manual_seed(0)
    in_turn = torch.Generator().manual_seed(0)
    both = torch.empty((2, vocabulary), dtype=dtype, device=device).exponential_(generator=together)
    row = torch.empty((1, vocabulary), dtype=dtype, device=device)
    rows = [torch.empty_like(row).exponential_(generator=in_turn) for _ in range(2)]
    return torch.equal(both, torch.cat(rows)) and torch.equal(together.get_state(), in_turn.get_state())
