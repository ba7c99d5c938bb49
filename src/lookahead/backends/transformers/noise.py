"""The noise that tokens are sampled with: of each place of the text, drawn once for all rows of a call."""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import takewhile

import torch

MOST_BYTES = 1 << 26
"""Bytes of noise that are kept for rows that lag behind: 64 MiB, 105 places of one row for a vocabulary of 152,000."""


class SamplingNoise:
    """Gives each row of a call the noise with which transformers would sample its next token.

    `torch.multinomial(p, 1)` is the argmax of `p / q`, where `q`, of the shape of `p`, is drawn from the exponential
    distribution whatever `p` is (`aten/src/ATen/native/Distributions.cpp`, the path for one sample). transformers calls
    it once for each place of the text, for all rows, `[rows, vocabulary]`, finished ones included, until all are. So
    the noise of a place depends on the generator alone. The row that comes first to a place has it drawn; what is drawn
    for the others is kept until they come. In the end the longest row has had as much drawn as transformers draws.

    What there is no room for is drawn again, from the saved state of the generator, when its row comes.

    Args:
        rows: Rows of the call.
        generator: Draws it, on the device of the probabilities; torch's default generator there if not given.
        most_bytes: Most bytes to keep, the states of the generator not counted: on a CPU 5 KB for each row and place.

    Attributes:
        drawn_again: How often noise was drawn again.
    """

    def __init__(self, rows: int = 1, generator: torch.Generator | None = None, most_bytes: int = MOST_BYTES) -> None:
        self._rows = rows
        self._generator = generator
        self._most_bytes = most_bytes
        self._places = [0] * rows  # the next one of each row
        self._passed = self._end = 0  # places that a row has come to; those that were drawn
        # A unit is the rows of a place that are drawn together. Units are numbered in the order of drawing.
        self._size = rows
        self._type: torch.dtype | None = None  # of what was drawn last, which processors decide
        self._states: dict[int, torch.Tensor] = {}  # of the generator before each unit, and behind the last one
        self._noise: dict[int, torch.Tensor] = {}  # of units, `[rows, vocabulary]`
        self.drawn_again = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of noise that are kept; units are of one size."""
        return len(self._noise) * next((noise.nbytes for noise in self._noise.values()), 0)

    def take(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The noise of the next place of `row`, `[1, vocabulary]`, as `probabilities` are."""
        if self._rows == 1 and not self._noise:
            return self._draw(probabilities)
        place = self._places[row]
        used = range(row, row + 1)
        if place == self._passed:
            self._draw_until(place + 1, probabilities)
            self._generator_of(probabilities.device).set_state(self._states[self._unit(0, place + 1)])
            self._passed += 1
            used = range(0, self._rows, self._size)  # nor do rows take it that have left
        noise = self._part(row, place, self._noise.get(self._unit(row, place)), probabilities)
        self._places[row] += 1
        self._forget_used(used, place)
        return noise

    def can_foresee(self, places: int, like: torch.Tensor) -> bool:
        """Whether so many places drawn ahead leave most of the room to rows that lag behind."""
        return self._rows == 1 or 4 * places * self._rows * like.nbytes <= self._most_bytes

    def look_ahead(self, row: int, places: int, like: torch.Tensor) -> list[torch.Tensor]:
        """The noise of the next `places` places of `row`, `[1, vocabulary]` each, none of which it takes: the generator
        is left as it is, and other rows may come to these places first. Fewer, where that is all that is kept.

        Args:
            row: Which row.
            places: How many.
            like: A row of probabilities, `[1, vocabulary]`.
        """
        first = self._places[row]
        self._draw_until(first + places, like)
        units = (self._noise.get(self._unit(row, place)) for place in range(first, first + places))
        kept = takewhile(torch.is_tensor, units)
        return [self._part(row, place, noise, like) for place, noise in enumerate(kept, first)]

    def leave(self, row: int) -> None:
        """`row` is complete, and takes no more."""
        first = self._places[row]
        self._places[row] = sys.maxsize
        for place in range(first, self._end):
            self._forget_used(range(row, row + 1), place)

    def _unit(self, row: int, place: int) -> int:
        return place * (self._rows // self._size) + row // self._size

    def _part(self, row: int, place: int, noise: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """The part of a row of the noise of its unit, which is drawn again if it was not kept."""
        if noise is None:
            generator = self._generator_of(like.device)
            unit = self._unit(row, place)
            state = generator.get_state()
            generator.set_state(self._states[unit])
            noise = self._draw(like)
            generator.set_state(state)
            self.drawn_again += 1
            self._keep(unit, noise)
        start = row % self._size
        return noise[start : start + 1]

    def _draw_until(self, end: int, like: torch.Tensor) -> None:
        """Draw places before `end`: the one that the generator stands at, and others as far as there is room."""
        self._size = 1 if draws_row_by_row(like.device, like.dtype, like.shape[-1]) else self._rows
        generator = self._generator_of(like.device)
        here = self._unit(0, self._passed)
        state = generator.get_state()
        if here not in self._states or not torch.equal(self._states[here], state) or like.dtype != self._type:
            # Somebody else has drawn since, or numbers of another type are wanted: what was drawn ahead does not come.
            for unit in [unit for unit in self._states if unit >= here]:
                del self._states[unit]
                self._noise.pop(unit, None)
            self._states[here], self._end, self._type = state, self._passed, like.dtype
        if self._end >= end:
            return
        generator.set_state(self._states[self._unit(0, self._end)])
        while self._end < end:
            if self._end > self._passed and self.kept_bytes + self._rows * like.nbytes > self._most_bytes:
                break
            for row in range(0, self._rows, self._size):
                unit = self._unit(row, self._end)
                noise = self._draw(like)
                self._states[unit + 1] = generator.get_state()
                if min(self._places[row : row + self._size]) <= self._end:  # others have left
                    self._keep(unit, noise)
            self._end += 1
        generator.set_state(state)

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((self._size, like.shape[-1])).exponential_(generator=self._generator)

    def _keep(self, unit: int, noise: torch.Tensor) -> None:
        if self.kept_bytes + noise.nbytes <= self._most_bytes:
            self._noise[unit] = noise

    def _forget_used(self, rows: range, place: int) -> None:
        """Forget the units of these rows of a place that no row is to take any more."""
        for row in rows:
            first = row - row % self._size
            unit = self._unit(row, place)
            if min(self._places[first : first + self._size]) > place:
                self._noise.pop(unit, None)
                if place < self._passed:
                    self._states.pop(unit, None)

    def _generator_of(self, device: torch.device) -> torch.Generator:
        return default_generator(device) if self._generator is None else self._generator


def default_generator(device: torch.device) -> torch.Generator:
    """What torch draws from on `device`, where nothing else is said."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


@lru_cache(maxsize=64)
def draws_row_by_row(device: torch.device, dtype: torch.dtype, vocabulary: int) -> bool:
    """Whether rows that are drawn one after another are those that are drawn together, so that one of them can be
    drawn again without the others: on CPUs whose kernel draws in order. Tried, on a generator of its own."""
    if device.type != "cpu":
        return False
    together = torch.Generator().manual_seed(0)
    in_turn = torch.Generator().manual_seed(0)
    both = torch.empty((2, vocabulary), dtype=dtype).exponential_(generator=together)
    rows = [torch.empty((1, vocabulary), dtype=dtype).exponential_(generator=in_turn) for _ in range(2)]
    return torch.equal(both, torch.cat(rows)) and torch.equal(together.get_state(), in_turn.get_state())
