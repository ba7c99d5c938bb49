"""Noise taken by each row at its own pace gives the same tokens as `torch.multinomial` for all rows at once."""

from __future__ import annotations

from random import Random

import pytest
import torch

import lookahead.backends.transformers.noise as noise_module
from lookahead.backends.transformers.noise import SamplingNoise, TextNoise, draws_row_by_row
from lookahead.backends.transformers.sampler import TextSampler

VOCABULARY = 700
PLACES = 30


def distributions(rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random probabilities, `[indices, rows, vocabulary]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((PLACES, rows, VOCABULARY), generator=generator, dtype=dtype).mul(3).softmax(-1)


def at_once(probabilities: torch.Tensor, seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Sample like transformers; return the tokens of each row, and the generator's state afterwards."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.multinomial(place, 1, generator=generator)[:, 0] for place in probabilities])
    return tokens.T.tolist(), generator.get_state()


def in_any_order(
    probabilities: torch.Tensor, noise: SamplingNoise, lengths: list[int], random: Random, most_bytes: int
) -> list[list[int]]:
    """Return the tokens of each row; rows advance in random order, and leave after their `lengths`."""
    tokens: list[list[int]] = [[] for _ in lengths]
    speeds = [random.randint(1, 5) for _ in lengths]
    while left := [row for row, length in enumerate(lengths) if len(tokens[row]) < length]:
        row = random.choices(left, [speeds[row] for row in left])[0]
        place = len(tokens[row])
        tokens[row].append(
            int((probabilities[place, row] / noise.take(row, probabilities[place, row : row + 1])).argmax())
        )
        assert noise.stored_bytes <= most_bytes
        if len(tokens[row]) == lengths[row]:
            noise.leave(row)
    return tokens


@pytest.fixture(params=["by row", "whole"])
def drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is drawn alone or, as on a GPU, none without the others."""
    if request.param == "whole":
        monkeypatch.setattr(noise_module, "draws_row_by_row", lambda *_: False)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most_bytes", [1 << 26, 40_000, 0])
def test_rows_take_the_noise_of_multinomial(dtype: torch.dtype, most_bytes: int) -> None:
    for seed in range(10):
        random = Random(seed)
        rows = random.randint(2, 6)
        probabilities = distributions(rows, dtype, seed)
        expected, state = at_once(probabilities, seed)
        lengths = [PLACES, *(random.randint(1, PLACES) for _ in range(rows - 1))]
        random.shuffle(lengths)
        generator = torch.Generator().manual_seed(seed)
        noise = SamplingNoise(rows, generator, most_bytes)
        got = in_any_order(probabilities, noise, lengths, random, most_bytes)
        assert got == [row[:length] for row, length in zip(expected, lengths, strict=True)]
        assert torch.equal(generator.get_state(), state)
        assert noise.stored_bytes == 0
        assert noise.drawn_again > 0 or most_bytes > 0


def test_nothing_is_drawn_again_where_there_is_room() -> None:
    probabilities = distributions(3, torch.float32, 0)
    noise = SamplingNoise(3, torch.Generator().manual_seed(0))
    in_any_order(probabilities, noise, [PLACES] * 3, Random(0), 1 << 26)
    assert noise.drawn_again == 0


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("most_bytes", [1 << 26, 8 * VOCABULARY])
def test_noise_drawn_ahead_is_used_later(rows: int, most_bytes: int) -> None:
    random = Random(rows)
    probabilities = distributions(rows, torch.float32, 0)
    expected, state = at_once(probabilities, 0)
    generator = torch.Generator().manual_seed(0)
    noise = SamplingNoise(rows, generator, most_bytes)
    tokens: list[list[int]] = [[] for _ in range(rows)]
    while any(len(row) < PLACES for row in tokens):
        row = random.choice([row for row, chosen in enumerate(tokens) if len(chosen) < PLACES])
        before = generator.get_state()
        places = random.randint(1, min(5, PLACES - len(tokens[row])))
        first = len(tokens[row])
        ahead = noise.look_ahead(row, places, probabilities[0, :1])
        assert torch.equal(generator.get_state(), before), "nothing is taken yet"
        assert len(ahead) == places or most_bytes < 1 << 26
        for place in range(first, first + random.randint(0, places)):
            taken = noise.take(row, probabilities[place, row : row + 1])
            assert all(torch.equal(taken, seen) for seen in ahead[place - first : place - first + 1])
            tokens[row].append(int((probabilities[place, row] / taken).argmax()))
    assert tokens == expected
    assert torch.equal(generator.get_state(), state)
    assert noise.drawn_again == 0 or most_bytes < 1 << 26


def test_noise_drawn_ahead_is_dropped_when_the_generator_moves() -> None:
    probabilities = distributions(1, torch.float32, 0)
    generator, other = (torch.Generator().manual_seed(0) for _ in range(2))
    noise = SamplingNoise(1, generator)
    noise.look_ahead(0, 3, probabilities[0])
    for each in (generator, other):
        torch.rand(5, generator=each)
    assert torch.equal(
        noise.take(0, probabilities[0]), probabilities[0].new_empty((1, VOCABULARY)).exponential_(generator=other)
    )
    assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize("seed", range(5))
def test_a_text_with_its_own_generator_draws_early_and_changes_its_number_type_or_vocabulary(seed: int) -> None:
    single, double = (torch.float32, VOCABULARY), (torch.float64, VOCABULARY)
    kinds = [single] * 4 + [double] * 3 + [single] * 3 + [(torch.float32, VOCABULARY - 5)] * 3
    reference, generator = (torch.Generator().manual_seed(0) for _ in range(2))
    expected = [torch.empty((1, size), dtype=dtype).exponential_(generator=reference) for dtype, size in kinds]
    noise = TextNoise(generator)
    place = 0
    random = Random(seed)
    while place < len(kinds):
        dtype, size = kinds[place]
        like = torch.empty((1, size), dtype=dtype)
        count = random.randint(1, 5)
        ahead = noise.look_ahead(0, count, like)
        assert len(ahead) == count
        same = [kind == kinds[place] for kind in kinds[place : place + len(ahead)]]
        known = [*same, False].index(False)
        assert all(map(torch.equal, ahead[:known], expected[place : place + known]))
        if random.random() < 0.5:
            noise.advance(0, known, like)
            place += known
        else:
            assert torch.equal(noise.take(0, like), expected[place])
            place += 1


def test_the_cpu_draws_row_by_row() -> None:
    # torch does not promise this; otherwise dropped noise is drawn again for all rows.
    assert draws_row_by_row(torch.device("cpu"), torch.float32, VOCABULARY)


def test_the_default_generator_draws_if_none_is_given() -> None:
    probabilities = distributions(2, torch.float32, 1)
    expected, _ = at_once(probabilities, 5)
    torch.manual_seed(5)
    assert in_any_order(probabilities, SamplingNoise(2), [PLACES] * 2, Random(0), 1 << 26) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_invalid_probabilities_are_refused_as_by_multinomial(value: float) -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = value
    sampler = TextSampler(noise=SamplingNoise())
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        sampler.choose(None, logits)


class Fixed(SamplingNoise):
    """Noise with fixed values."""

    def __init__(self, noise: torch.Tensor) -> None:
        super().__init__()
        self._fixed = noise

    def take(self, row: int, probabilities: torch.Tensor) -> torch.Tensor:
        return self._fixed


def test_a_noise_of_zero_selects_the_token_of_multinomial() -> None:
    torch.manual_seed(0)
    for zero in range(20):
        scores = torch.randn(1, VOCABULARY)
        scores[0, zero] = -torch.inf
        noise = torch.rand(1, VOCABULARY) + 0.1
        noise[0, zero] = 0
        sampler = TextSampler(noise=Fixed(noise))
        expected = int((scores.softmax(-1) / noise).argmax())  # the computation of `multinomial`
        assert sampler.choose(None, scores) == expected == zero
