"""`pack_weights=True` packs if packed products are faster, by times measured once."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers import findings, packed_linear
from lookahead.backends.transformers.engine_model import engine_model, rows_runner
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.packed_linear import PACKED_WEIGHT, PackedLinear
from lookahead.errors import UnsupportedArgumentError
from quick import diagonal

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
GREEDY = {"max_new_tokens": 16, "do_sample": False}
CONFIG = LookaheadConfig(pack_weights=True)
FASTER, SLOWER = (2.0, 1.0), (1.0, 1.5)  # seconds of plain and of packed products
OUTCOMES = [
    ([FASTER] * 5, 1),
    ([SLOWER, FASTER, FASTER, FASTER, FASTER], 2),
    ([SLOWER, FASTER, SLOWER, FASTER, FASTER], 8),
    ([FASTER, FASTER, FASTER, FASTER, SLOWER], 0),
    ([(1.0, 1.0)] * 5, 0),
]
"""Times, and the resulting smallest number of rows for packed products; 0 for none."""


class Clock:
    """Replace the measurement by fixed times, and count its calls."""

    def __init__(self) -> None:
        self.seconds = [FASTER] * 5
        self.runs = 0

    def __call__(self, layers: packed_linear.Layers) -> dict[int, tuple[float, float]]:
        assert all(isinstance(layer, torch.nn.Linear) for group in layers.values() for layer in group)
        self.runs += 1
        return dict(zip((1, 2, 4, 8, 16), self.seconds, strict=True))


@pytest.fixture
def clock(_product_clocks: list[Any], own_findings: Path) -> Iterator[Clock]:
    _product_clocks.append(Clock())
    yield _product_clocks[-1]
    _product_clocks.pop()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


def llama(hidden_size: int = 64) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": hidden_size, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


def packed_from(layer: torch.nn.Module) -> int:
    """Return the smallest number of rows for packed products of a layer; 0 for none."""
    return vars(layer)[PACKED_WEIGHT].min_rows if type(layer) is PackedLinear else 0


@pytest.mark.parametrize(("seconds", "least"), OUTCOMES)
def test_products_that_are_slower_are_not_used(clock: Clock, seconds: list[tuple[float, float]], least: int) -> None:
    clock.seconds = seconds
    model = llama()
    assert packed_from(engine_model(model, pack_weights=True).lm_head) == least
    assert packed_from(rows_runner(model, pack_weights=True).model.lm_head) == least


@pytest.mark.parametrize(
    ("seconds", "preset"), diagonal([seconds for seconds, _ in OUTCOMES[:4]], ["auto", "autoregressive"])
)
def test_the_text_is_that_of_transformers_whichever_is_used(
    clock: Clock, seconds: list[tuple[float, float]], preset: str
) -> None:
    clock.seconds = seconds
    model = llama()
    config = LookaheadConfig(preset=preset, pack_weights=True)
    expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(lookahead.generate(model, PROMPT, lookahead_config=config, **GREEDY), expected)
    with lookahead.Engine(model, config) as engine:
        assert engine.submit(PROMPT[0].tolist(), **GREEDY).result().tolist() == expected.tolist()
    assert clock.runs == 1


def test_few_rows_have_the_bits_of_the_plain_layer_where_they_are_not_packed(clock: Clock) -> None:
    clock.seconds = [SLOWER, SLOWER, FASTER, FASTER, FASTER]
    model = llama()
    layer, plain = engine_model(model, pack_weights=True).lm_head, model.lm_head
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(layer(rows[None, :3]), plain(rows[None, :3]))
        assert torch.allclose(layer(rows), plain(rows), atol=1e-5)


def test_times_are_taken_once_for_a_kind_of_model(clock: Clock) -> None:
    clock.seconds = [SLOWER] * 5
    first = llama()
    for _ in range(2):
        engine_model(first, pack_weights=True)
    clock.seconds = [FASTER] * 5
    second = copy.deepcopy(first)
    assert type(engine_model(second, pack_weights=True).lm_head) is torch.nn.Linear
    assert clock.runs == 1
    assert [made for what, made in state_of(second).trials.made.items() if what[0] == "packing"] == [0]


def test_times_are_taken_anew_for_another_processor(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.seconds = [SLOWER] * 5
    engine_model(llama(), pack_weights=True)
    clock.seconds = [FASTER] * 5
    monkeypatch.setattr(findings, "device_name", lambda device: "another processor")
    assert type(engine_model(llama(), pack_weights=True).lm_head) is PackedLinear
    assert clock.runs == 2


def test_times_are_taken_anew_for_other_shapes_and_after_a_file_that_cannot_be_read(
    clock: Clock, tmp_path: Path
) -> None:
    engine_model(llama(), pack_weights=True)
    engine_model(llama(hidden_size=32), pack_weights=True)
    assert clock.runs == 2
    for file in tmp_path.rglob("*.json"):
        file.write_text("{", encoding="utf-8")
    engine_model(llama(), pack_weights=True)
    assert clock.runs == 3


def test_times_are_taken_anew_for_another_number_of_threads(clock: Clock, request: pytest.FixtureRequest) -> None:
    model = llama()
    engine_model(model, pack_weights=True)
    request.getfixturevalue("two_threads")
    clock.seconds = [SLOWER] * 5
    assert type(engine_model(model, pack_weights=True).lm_head) is torch.nn.Linear
    assert clock.runs == 2


@pytest.mark.slow_by_nature("finds the rules of invariant products")
def test_no_time_chooses_the_bits_of_invariant_passes(clock: Clock) -> None:
    clock.seconds = [SLOWER] * 5
    assert isinstance(engine_model(llama(), pack_weights=True, invariant=True).lm_head, PackedLinear)
    assert clock.runs == 0


def test_a_model_that_cannot_be_packed_is_refused_whichever_is_faster(clock: Clock) -> None:
    for clock.seconds in ([FASTER] * 5, [SLOWER] * 5):
        model = llama()
        plain = model.model.layers[1].forward
        model.model.layers[1].forward = lambda *args, plain=plain, **kwargs: plain(*args, **kwargs)
        with pytest.raises(UnsupportedArgumentError, match="pack_weights=True"):
            engine_model(model, pack_weights=True)


def test_few_rows_and_sixteen_are_timed() -> None:
    model = llama()
    layers = {(97, 64): [model.lm_head], (128, 64): [layer.mlp.up_proj for layer in model.model.layers]}
    seconds = packed_linear.product_seconds(layers)
    assert list(seconds) == [1, 2, 4, 8, 16]
    assert all(0 < value < float("inf") for pair in seconds.values() for value in pair)
