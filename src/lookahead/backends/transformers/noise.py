"""The noise that tokens are sampled with: of each place of the text, drawn once for all rows of a call."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch

MOST_BYTES = 1 << 26
"""Bytes of noise that are kept for rows that lag behind: 64 MiB, 105 places of one row for a vocabulary of 152,000."""


@dataclass
class _Part:
    """The noise of one place, for some rows.

    Attributes:
        rows: Which rows, by number.
        state: Of the generator before it was drawn.
        waiting: Those of the rows that have not come to this place.
        noise: `[rows, vocabulary]`; `None` where it is to be drawn again, from `state`.
    """

    rows: range
    state: torch.Tensor
    waiting: set[int]
    noise: torch.Tensor | None


class _Ahead(NamedTuple):
    """The noise of a place that no row has come to, `[rows, vocabulary]`, with the states of the generator before and
    after."""

    before: torch.Tensor
    noise: torch.Tensor
    after: torch.Tensor


class SamplingNoise:
    """Gives each row of a call the noise with which transformers would sample its next token.

    `torch.multinomial(p, 1)` is the argmax of `p / q`, where `q`, of the shape of `p`, is drawn from the exponential
    distribution whatever `p` is (`aten/src/ATen/native/Distributions.cpp`, the path for one sample). transformers calls
    it once for each place of the text, for all rows, `[rows, vocabulary]`, finished ones included, until all are. So
    the noise of a place depends on the generator alone. The row that comes first to a place has it drawn; what is drawn
    for the others is kept until they come. In the end the longest row has had as much drawn as transformers draws.

    Beyond `most_bytes` the noise of rows that lag furthest behind is dropped, and drawn again from the saved state of
    the generator when they come.

    Args:
        rows: Rows of the call.
        generator: Draws it, on the device of the probabilities; torch's default generator there if not given.
        most_bytes: Most bytes to keep, the states of the generator not counted: on a CPU 5 KB for each row and place.
    """

    def __init__(self, rows: int = 1, generator: torch.Generator | None = None, most_bytes: int = MOST_BYTES) -> None:
        self._rows = rows
        self._generator = generator
        self._most_bytes = most_bytes
        self._places = [0] * rows  # the next one of each row
        self._left: set[int] = set()
        self._parts: dict[tuple[int, int], _Part] = {}  # by place and row
        self._drawn = 0  # places
        self._ahead: deque[_Ahead] = deque()  # of the places behind those
        self.kept_bytes = self.drawn_again = 0

    def take(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The noise of the next place of `row`, `[1, vocabulary]`, as `probabilities` are."""
        if self._rows == 1:
            return self._draw_all(probabilities)
        place = self._places[row]
        if place == self._drawn:
            self._draw(row, probabilities)
        self._places[row] += 1
        part = self._parts.pop((place, row))
        noise = self._draw_again(part, probabilities) if part.noise is None else part.noise
        part.waiting.discard(row)
        if not part.waiting or self.kept_bytes > self._most_bytes:
            self._forget(part)
        return noise[row - part.rows.start : row - part.rows.start + 1]

    def can_foresee(self, places: int, like: torch.Tensor) -> bool:
        """Whether so many places drawn ahead leave most of the room to rows that lag behind. What is dropped for them
        has to be drawn again for all rows."""
        return self._rows == 1 or 4 * places * self._rows * like.nbytes <= self._most_bytes

    def look_ahead(self, row: int, places: int, like: torch.Tensor) -> list[torch.Tensor]:
        """The noise of the next `places` places of `row`, `[1, vocabulary]` each, none of which it takes: the generator
        is left as it is, and other rows may come to these places first. Fewer, where that is all that is kept.

        Args:
            row: Which row.
            places: How many.
            like: A row of probabilities, `[1, vocabulary]`.
        """
        found: list[torch.Tensor] = []
        first = self._places[row] if self._rows > 1 else self._drawn
        for place in range(first, min(first + places, self._drawn)):
            part = self._parts[place, row]
            if part.noise is None:
                return found
            found.append(part.noise[row - part.rows.start : row - part.rows.start + 1])
        self._draw_ahead(first + places - self._drawn, like)
        return found + [ahead.noise[row : row + 1] for ahead in islice(self._ahead, places - len(found))]

    def _draw_ahead(self, places: int, like: torch.Tensor) -> None:
        """Have the noise of so many places behind those that were drawn, as far as there is room for it."""
        generator = self._generator_of(like.device)
        state = generator.get_state()
        if self._ahead and not torch.equal(self._ahead[0].before, state):  # somebody else has drawn
            self._ahead.clear()
        most = max(self._most_bytes // (self._rows * like.nbytes), 1)
        last = self._ahead[-1].after if self._ahead else state
        if len(self._ahead) < min(places, most):
            generator.set_state(last)
            for _ in range(len(self._ahead), min(places, most)):
                noise = like.new_empty((self._rows, like.shape[-1])).exponential_(generator=generator)
                self._ahead.append(_Ahead(last, noise, generator.get_state()))
                last = self._ahead[-1].after
            generator.set_state(state)

    def _draw_all(self, like: torch.Tensor) -> torch.Tensor:
        """Draw the noise of the next place for all rows, unless that was done ahead."""
        if self._ahead:
            generator, ahead = self._generator_of(like.device), self._ahead.popleft()
            if torch.equal(generator.get_state(), ahead.before):
                generator.set_state(ahead.after)
                return ahead.noise
            self._ahead.clear()
        return like.new_empty((self._rows, like.shape[-1])).exponential_(generator=self._generator)

    def leave(self, row: int) -> None:
        """`row` is complete, and takes no more."""
        self._left.add(row)
        for place in range(self._places[row], self._drawn):
            part = self._parts.pop((place, row))
            part.waiting.discard(row)
            if not part.waiting:
                self._forget(part)

    def _draw(self, first: int, probabilities: torch.Tensor) -> None:
        """Draw the noise of the next place, to which row `first` has come, for all rows; where it is too much, keep
        that of the rows close behind."""
        device, vocabulary = probabilities.device, probabilities.shape[-1]
        generator = self._generator_of(device)
        # What was drawn ahead is of all rows.
        size = 1 if not self._ahead and draws_row_by_row(device, probabilities.dtype, vocabulary) else self._rows
        parts = []
        for start in range(0, self._rows, size):
            rows = range(start, start + size)
            state = generator.get_state()
            if size == self._rows:
                noise = self._draw_all(probabilities)
            else:
                noise = probabilities.new_empty((size, vocabulary)).exponential_(generator=generator)
            if waiting := set(rows) - self._left:
                parts.append(_Part(rows, state, waiting, noise))
                self.kept_bytes += noise.nbytes
                self._parts.update(((self._drawn, row), parts[-1]) for row in waiting)
        for part in sorted(parts, key=lambda part: max(self._places[row] for row in part.waiting)):
            if self.kept_bytes <= self._most_bytes:
                break
            if first not in part.waiting:
                self._forget(part)
        self._drawn += 1

    def _draw_again(self, part: _Part, probabilities: torch.Tensor) -> torch.Tensor:
        generator = self._generator_of(probabilities.device)
        state = generator.get_state()
        generator.set_state(part.state)
        noise = probabilities.new_empty((len(part.rows), probabilities.shape[-1])).exponential_(generator=generator)
        generator.set_state(state)
        part.noise = noise
        self.kept_bytes += noise.nbytes
        self.drawn_again += 1
        return noise

    def _forget(self, part: _Part) -> None:
        if part.noise is not None:
            self.kept_bytes -= part.noise.nbytes
            part.noise = None

    def _generator_of(self, device: torch.device) -> torch.Generator:
        if self._generator is not None:
            return self._generator
        if device.type == "cuda":
            return torch.cuda.default_generators[device.index or 0]
        return torch.default_generator


@lru_cache(maxsize=64)
def draws_row_by_row(device: torch.device, dtype: torch.dtype, vocabulary: int) -> bool:
    """Whether rows that are drawn one after another are those that are drawn together, so that one of them can be
    drawn again without the others: on CPUs whose kernel draws in order. Tried, on a generator of its own."""
    if device.type != "cpu":
        return False
    together, in_turn = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    both = torch.empty((2, vocabulary), dtype=dtype).exponential_(generator=together)
    rows = [torch.empty((1, vocabulary), dtype=dtype).exponential_(generator=in_turn) for _ in range(2)]
    return torch.equal(both, torch.cat(rows)) and torch.equal(together.get_state(), in_turn.get_state())
