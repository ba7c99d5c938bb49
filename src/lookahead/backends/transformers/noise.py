"""The noise that tokens are sampled with: of each place of the text, drawn once for all rows of a call."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

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
        self._drawn = 0  # places that a row has come to
        # Of the generator: before each place behind those that was drawn ahead, and after the last of them.
        self._ahead: deque[torch.Tensor] = deque()
        self.kept_bytes = self.drawn_again = 0

    def take(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        """The noise of the next place of `row`, `[1, vocabulary]`, as `probabilities` are."""
        if self._rows == 1 and len(self._ahead) < 2:
            return self._draw_rows(1, probabilities)
        place = self._places[row]
        if place == self._drawn:
            self._begin_place(row, probabilities)
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
        first = self._places[row]
        self._draw_ahead(range(first, first + places), like)
        found: list[torch.Tensor] = []
        for place in range(first, first + places):
            part = self._parts.get((place, row))
            if part is None or part.noise is None:
                break
            found.append(part.noise[row - part.rows.start : row - part.rows.start + 1])
        return found

    def leave(self, row: int) -> None:
        """`row` is complete, and takes no more."""
        self._left.add(row)
        for place in range(self._places[row], self._end):
            part = self._parts.pop((place, row))
            part.waiting.discard(row)
            if not part.waiting:
                self._forget(part)

    @property
    def _end(self) -> int:
        """The first place that was not drawn."""
        return self._drawn + max(len(self._ahead) - 1, 0)

    def _begin_place(self, first: int, like: torch.Tensor) -> None:
        """Draw the noise of the next place, to which row `first` has come, unless that was done ahead. Where it is too
        much, keep that of the rows close behind."""
        generator = self._generator_of(like.device)
        if self._is_ahead_of(generator.get_state()):
            self._ahead.popleft()
            generator.set_state(self._ahead[0])
        else:
            self._draw(self._drawn, like)
        for row in sorted(range(self._rows), key=self._places.__getitem__):
            part = self._parts.get((self._drawn, row))
            if self.kept_bytes > self._most_bytes and part is not None and first not in part.waiting:
                self._forget(part)
        self._drawn += 1

    def _draw_ahead(self, places: range, like: torch.Tensor) -> None:
        """Have the noise of these places, as far as there is room for it, or of the first one."""
        generator = self._generator_of(like.device)
        state = generator.get_state()
        if not self._is_ahead_of(state):
            self._ahead = deque([state])
        generator.set_state(self._ahead[-1])
        for place in range(self._end, places.stop):
            if place > places.start and self.kept_bytes + self._rows * like.nbytes > self._most_bytes:
                break
            self._draw(place, like)
            self._ahead.append(generator.get_state())
        generator.set_state(state)

    def _is_ahead_of(self, state: torch.Tensor) -> bool:
        """Whether places were drawn from this state of the generator on. If somebody else has drawn since, they are
        forgotten."""
        if self._ahead and not torch.equal(self._ahead[0], state):
            for place in range(self._drawn, self._end):
                for part in [self._parts.pop((place, row)) for row in range(self._rows) if row not in self._left]:
                    self._forget(part)
            self._ahead.clear()
        return len(self._ahead) > 1

    def _draw(self, place: int, like: torch.Tensor) -> None:
        """Draw the noise of a place for all rows, from the state that the generator is in."""
        generator = self._generator_of(like.device)
        size = 1 if draws_row_by_row(like.device, like.dtype, like.shape[-1]) else self._rows
        for start in range(0, self._rows, size):
            rows, state = range(start, start + size), generator.get_state()
            noise = self._draw_rows(size, like)
            if waiting := set(rows) - self._left:
                part = _Part(rows, state, waiting, noise)
                self.kept_bytes += noise.nbytes
                self._parts.update(((place, row), part) for row in waiting)

    def _draw_rows(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((rows, like.shape[-1])).exponential_(generator=self._generator)

    def _draw_again(self, part: _Part, like: torch.Tensor) -> torch.Tensor:
        generator = self._generator_of(like.device)
        state = generator.get_state()
        generator.set_state(part.state)
        part.noise = noise = self._draw_rows(len(part.rows), like)
        generator.set_state(state)
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
