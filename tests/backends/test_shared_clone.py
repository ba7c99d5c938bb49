"""The shared clone of a model follows all changes of the model between two calls."""

import copy
import gc
import operator
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers.attention import INVARIANT
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.packed_linear import PACKED_WEIGHT, PackedLinear
from lookahead.backends.transformers.shared_clone import SharedClone
from lookahead.backends.transformers.snapshots import fingerprint, preserved_state
from quick import diagonal, quickly

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
PACKED = LookaheadConfig(pack_weights=True)
CONTEXT = 48
LENGTHS = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0],
        "original_max_position_embeddings": CONTEXT,
    },
}


def llama(tied: bool = False, vocabulary: int = 97, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tied,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


def ours(model: PreTrainedModel, config: LookaheadConfig | None = None, new: int = 24) -> torch.Tensor:
    return lookahead.generate(model, PROMPT, lookahead_config=config, max_new_tokens=new, do_sample=False)


def plain(model: PreTrainedModel, new: int = 24) -> torch.Tensor:
    return model.generate(PROMPT, max_new_tokens=new, do_sample=False)


def tokens_of(model: PreTrainedModel) -> list[int]:
    """Return the tokens of the model's text; a change of their rows changes the text."""
    return sorted(set(plain(model)[0, PROMPT.shape[1] :].tolist()))


def row_through_data(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[tokens_of(model)[0]] = 0


def row_without_gradients(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight[tokens_of(model)[0]] = 0


def row_through_numpy(model: PreTrainedModel) -> None:
    model.lm_head.weight.detach().numpy()[tokens_of(model)[0]] = 0


def swapped_rows(model: PreTrainedModel) -> None:
    rows = tokens_of(model)[:2]
    model.lm_head.weight.data[rows] = model.lm_head.weight.data[rows[::-1]]


def columns_in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        model.lm_head.weight[:, 20:40] *= -1


def signs(model: PreTrainedModel) -> None:
    """Flip the sign of every second column, which only changes the highest bit of 64-bit words."""
    model.lm_head.weight.data[:, 1::2] *= -1


def other_memory(model: PreTrainedModel) -> None:
    weight = model.lm_head.weight
    weight.data = weight.data.flip(0).contiguous()


def other_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))


def loaded(model: PreTrainedModel) -> None:
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    state["lm_head.weight"][tokens_of(model)] = 0
    model.load_state_dict(state)


def optimiser_step(model: PreTrainedModel) -> None:
    optimiser = torch.optim.SGD([model.lm_head.weight], lr=0.5)
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    optimiser.step()


CHANGES = [
    row_through_data,
    row_without_gradients,
    row_through_numpy,
    swapped_rows,
    columns_in_inference_mode,
    signs,
    other_memory,
    other_parameter,
    loaded,
    optimiser_step,
]


@pytest.mark.parametrize("change", quickly(CHANGES, CHANGES[::2]))
def test_a_partly_changed_packed_weight_is_packed_anew(change: Callable[[PreTrainedModel], None]) -> None:
    model = llama(vocabulary=1000)  # a row is a small part of the weight
    before = plain(model)
    assert torch.equal(ours(model, PACKED), before)
    change(model)
    expected = plain(model)
    assert not torch.equal(expected, before), "the change must change the text"
    assert torch.equal(ours(model, PACKED), expected)


def test_a_packed_weight_is_tied_to_the_embedding() -> None:
    model = llama(tied=True, vocabulary=1000)
    before = ours(model, PACKED)
    model.get_input_embeddings().weight.data[tokens_of(model)[0]] *= -1
    assert not torch.equal(plain(model), before)
    assert torch.equal(ours(model, PACKED), plain(model))


def test_weights_of_inference_mode() -> None:
    """Such weights have no version counter to reveal a change."""
    with torch.inference_mode():
        model = llama(vocabulary=1000)
        before = ours(model, PACKED)
        row_through_data(model)
        expected = plain(model)
        assert not torch.equal(expected, before)
        assert torch.equal(ours(model, PACKED), expected)


class Flipped(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.flip(0)


def test_a_layer_that_becomes_another() -> None:
    """The change is in place: the same object gets another class, without a weight."""
    model = llama()
    before = ours(model, PACKED)
    torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Flipped())
    assert not torch.equal(plain(model), before)
    assert torch.equal(ours(model, PACKED), plain(model))
    assert not isinstance(engine_model(model, pack_weights=True).lm_head, PackedLinear)


def packed(layer: torch.nn.Module) -> Any:
    """The packed weight of a layer."""
    return vars(layer)[PACKED_WEIGHT]


def test_only_changed_weights_are_packed_again() -> None:
    model = llama()
    clone = engine_model(model, pack_weights=True)
    up = clone.model.layers[0].mlp.up_proj
    head, other = packed(clone.lm_head), packed(up)
    assert engine_model(model, pack_weights=True) is clone
    assert packed(clone.lm_head) is head
    row_through_data(model)
    assert engine_model(model, pack_weights=True) is clone
    assert packed(clone.lm_head) is not head
    assert packed(up) is other


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor packs one type alone")
def test_one_set_of_packed_weights_at_a_time() -> None:
    model = llama()
    layers = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        layer = engine_model(model.to(dtype), pack_weights=True).lm_head
        assert packed(layer).values.dtype == dtype
        layers.append(weakref.ref(layer))
        del layer
    gc.collect()
    assert [layer() is None for layer in layers] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 1000), (64, 1024)])
def test_fingerprints_tell_tensors_apart(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    first = fingerprint(tensor)
    assert np.array_equal(first, fingerprint(tensor.clone()))
    assert np.array_equal(first, fingerprint(tensor.t().contiguous().t())), "the same values, however they lie"
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        changed = tensor.clone()
        changed.view(-1)[place] *= -1
        assert not np.array_equal(first, fingerprint(changed))
    for step in range(1, 5):
        for begin in range(step):
            changed = tensor.clone()
            changed.view(-1)[begin::step] *= -1
            assert torch.equal(changed, tensor) == np.array_equal(first, fingerprint(changed))


def test_fingerprints_equal_a_brute_force_sum() -> None:
    words = np.random.default_rng(0).integers(1 << 32, size=(7, 1024), dtype=np.uint32)
    keys = fingerprint(torch.eye(1024, dtype=torch.int32))[:-1].tolist()
    assert all(key % 2 for key in keys)
    expected = [sum(map(operator.mul, row, keys)) % (1 << 64) for row in words.tolist()]
    assert fingerprint(torch.from_numpy(words.view(np.int32))).tolist() == [*expected, 0]


def assigned(rotary: torch.nn.Module) -> None:
    rotary.inv_freq = rotary.inv_freq * 3


def registered(rotary: torch.nn.Module) -> None:
    rotary.register_buffer("inv_freq", rotary.inv_freq * 3, persistent=False)


def in_place(rotary: torch.nn.Module) -> None:
    rotary.inv_freq *= 3


def scaled(rotary: torch.nn.Module) -> None:
    rotary.attention_scaling = 1.5


@pytest.mark.parametrize(("config", "change"), diagonal([None, PACKED], [assigned, registered, in_place, scaled]))
def test_buffers_are_the_models(change: Callable[[torch.nn.Module], None], config: LookaheadConfig | None) -> None:
    model = llama()
    before = plain(model)
    assert torch.equal(ours(model, config), before)
    change(model.model.rotary_emb)
    assert not torch.equal(plain(model), before), "the change must change the text"
    assert torch.equal(ours(model, config), plain(model))


class Scaled(torch.nn.Linear):
    """A layer with a weight, a buffer and a submodule."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features)
        self.inner = inner
        self.register_buffer("factor", torch.ones(()), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(input) * self.factor
        return output


@pytest.mark.parametrize("config", [None, PACKED], ids=["default", "packed"])
def test_buffers_beside_weights_are_the_models(config: LookaheadConfig | None) -> None:
    model = llama()
    model.model.layers[0].mlp.down_proj = Scaled(model.model.layers[0].mlp.down_proj)
    before = ours(model, config)
    assert torch.equal(before, plain(model))
    model.model.layers[0].mlp.down_proj.factor = torch.tensor(-3.0)
    assert not torch.equal(plain(model), before)
    assert torch.equal(ours(model, config), plain(model))


@pytest.mark.parametrize("config", [None, PACKED], ids=["default", "packed"])
def test_another_number_type_and_back(config: LookaheadConfig | None) -> None:
    model = llama()
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        if config is None or dtype is not torch.float64:
            with torch.no_grad():
                engine = engine_model(model, pack_weights=config is not None)
                difference = engine(input_ids=PROMPT).logits - model(input_ids=PROMPT).logits
            assert float(difference.abs().max()) <= (0 if config is None else 64 * torch.finfo(dtype).eps)
            assert engine.model.rotary_emb.inv_freq.dtype == model.model.rotary_emb.inv_freq.dtype
        if dtype is torch.float32:
            assert torch.equal(ours(model, config), plain(model))


def rope_state(model: PreTrainedModel) -> dict[str, Any]:
    rotary = model.model.rotary_emb
    state = {**vars(rotary), **rotary._buffers}
    names = ("inv_freq", "original_inv_freq", "max_seq_len_cached", "attention_scaling")
    return {name: torch.as_tensor(state[name]).clone() for name in names if name in state}


@pytest.mark.parametrize("config", [None, PACKED], ids=["default", "packed"])
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("seed", quickly(range(2), [0]))
def test_frequencies_that_follow_the_text(kind: str, seed: int, config: LookaheadConfig | None) -> None:
    """Our calls and plain calls, in any order, leave the same state as only plain calls."""
    model = llama(max_position_embeddings=CONTEXT, rope_parameters=LENGTHS[kind])
    reference = copy.deepcopy(model)
    choose = random.Random(seed)
    prompts = torch.randint(97, (1, 64), generator=torch.Generator().manual_seed(seed))
    for _ in range(5):
        # Prompts longer than the context are refused.
        options = {"max_new_tokens": choose.choice([4, 20, 40]), "do_sample": False}
        ids = prompts[:, : choose.choice([5, 12, 30])]
        expected = reference.generate(ids, **options)
        if choose.random() < 0.6:
            text = lookahead.generate(model, ids, lookahead_config=config, **options)
        else:
            text = model.generate(ids, **options)
        assert torch.equal(text, expected)
        for name, value in rope_state(reference).items():
            assert torch.equal(rope_state(model)[name], value), name


def test_a_check_pass_does_not_put_frequencies_back() -> None:
    model = llama(max_position_embeddings=CONTEXT, rope_parameters=LENGTHS["dynamic"])
    plain(model, new=100)
    before = rope_state(model)
    engine_model(model, pack_weights=True)
    engine_model(model)
    assert all(torch.equal(rope_state(model)[name], value) for name, value in before.items())


def test_preserved_state_restores_buffers_and_attributes() -> None:
    model = llama()
    rotary = model.model.rotary_emb
    buffer, values = rotary.inv_freq, rotary.inv_freq.clone()
    with preserved_state(model):
        rotary.inv_freq *= 2
        rotary.inv_freq = values * 3
        rotary.register_buffer("another", values)
        model.counter = 1
        model.model.layers[0].training = True
    assert rotary.inv_freq is buffer
    assert torch.equal(buffer, values)
    assert "another" not in rotary._buffers
    assert not hasattr(model, "counter")
    assert not model.model.layers[0].training


class Counting(torch.nn.Linear):
    """A layer with an output that depends on the number of its calls."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input)


def test_a_model_that_keeps_a_state_among_weights_has_no_clone() -> None:
    model = llama()
    layer = Counting(64, 97, bias=False)
    layer.weight = model.lm_head.weight
    model.lm_head = layer
    assert engine_model(model) is model


def test_attributes_that_are_removed_are_gone() -> None:
    model = llama()
    model.model.layers[0].note = "set"
    clone = engine_model(model)
    assert clone.model.layers[0].note == "set"
    del model.model.layers[0].note
    assert engine_model(model) is clone
    assert not hasattr(clone.model.layers[0], "note")


def test_a_module_at_a_reused_address_is_noticed() -> None:
    """Python reuses ids, so an id must not identify a module."""
    model = llama()
    for seed in (6, 10, 11):  # seeds without near-ties
        ours(model)
        torch.manual_seed(seed)
        layer = torch.nn.Linear(64, 97, bias=False)
        del model.lm_head
        model.lm_head = layer
        del layer
        assert torch.equal(ours(model), plain(model))
        assert torch.equal(ours(model, PACKED), plain(model))


def test_calls_leave_nothing_behind() -> None:
    """The memory for a model does not grow with the number of calls."""

    def bytes_alive() -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
        return sum(tensor.nbytes for tensor in tensors)

    model = llama()
    ours(model, PACKED, new=4)
    before = bytes_alive()
    for length in range(2, 14):
        ids = torch.arange(length)[None]
        lookahead.generate(model, ids, lookahead_config=PACKED, max_new_tokens=4, do_sample=False)
    del ids
    assert bytes_alive() == before


def test_a_clones_configuration_equals_the_models() -> None:
    """All names work, also GPT-2's translated ones, and later changes are visible."""
    settings = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=None)
    model = GPT2LMHeadModel(settings).eval()
    clone = SharedClone(model, INVARIANT).module
    assert clone is not model
    assert type(clone.config).__getattribute__ is object.__getattribute__
    assert isinstance(clone.config, GPT2Config)
    assert clone.config.to_dict() == model.config.to_dict()
    for name in GPT2Config.attribute_map:
        assert getattr(clone.config, name) == getattr(model.config, name)
    clone.config.num_hidden_layers = 5
    assert clone.config.n_layer == clone.config.num_hidden_layers == 5
    assert model.config.n_layer == 2
    assert type(model.config) is GPT2Config
    assert copy.deepcopy(clone.config).hidden_size == 32
