"""The engine's clone of a model: faster, with equal numbers; the model itself stays unchanged."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.session import open_session
from lookahead.backends.transformers.attention import FOLDED_SDPA
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.packed_linear import PackedLinear, can_pack
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.core.token_tree import TokenTree
from lookahead.errors import UnsupportedArgumentError
from model_zoo import ARCHITECTURES, build
from quick import REPRESENTATIVES, diagonal, quickly

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
GREEDY = {"max_new_tokens": 16, "do_sample": False}
PACKED = LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True, pack_weights=True)


def grouped_llama(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def state_of(model: PreTrainedModel) -> list[object]:
    """Return everything that may change in a model, by identity."""
    state: list[object] = [str(model.config), model.config._attn_implementation]
    for name, module in model.named_modules():
        state.append((name, type(module), id(module), sorted(vars(module))))
        state.extend((key, id(value)) for key, value in module._parameters.items())
        state.extend((key, id(value)) for key, value in module._buffers.items())
    return state


def drafted_tree(tokens: list[int]) -> TokenTree:
    tree = TokenTree(tokens)
    tree.add_candidates([5, 6, 7])
    tree.add_candidates([5, 9])
    tree.add_window_node(11, tree.root, needs_logits=True)
    return tree


@pytest.mark.parametrize("pack_weights", [False, True])
def test_the_model_itself_is_not_touched(pack_weights: bool) -> None:
    model = grouped_llama()
    before = state_of(model)
    clone = engine_model(model, pack_weights)
    assert clone is not model
    assert clone.config._attn_implementation == FOLDED_SDPA
    packs = pack_weights and can_pack(model.lm_head)  # the processor must support the number type
    assert any(isinstance(module, PackedLinear) for module in clone.modules()) == packs
    lookahead.generate(model, PROMPT, lookahead_config=LookaheadConfig(pack_weights=pack_weights), **GREEDY)
    assert state_of(model) == before


@pytest.mark.parametrize(("pack_weights", "text_length"), diagonal([False, True], [1, 5, 300]))
def test_bfloat16_numbers_are_the_same_bits(pack_weights: bool, text_length: int) -> None:
    model = grouped_llama()
    text = torch.randint(400, (text_length + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    outcomes = []
    with torch.no_grad():
        for module in (model, engine_model(model, pack_weights)):
            runner = ModelRunner(module, batch_size=1)
            prefill = TokenTree(text[:-1])
            logits = [runner.forward([prefill])[0].logits]
            runner.commit([range(text_length)])
            logits += [runner.forward([tree])[0].logits for tree in (TokenTree(text[-1:]), drafted_tree(text[-1:]))]
            outcomes.append(logits)
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", quickly(ARCHITECTURES, REPRESENTATIVES[1::2]))
def test_packed_weights_give_the_same_text(name: str) -> None:
    model = build(name, attention=ARCHITECTURES[name].attention[0])
    expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(lookahead.generate(model, PROMPT, lookahead_config=PACKED, **GREEDY), expected)


def test_changed_weights_are_packed_anew() -> None:
    model = grouped_llama(torch.float32)
    lookahead.generate(model, PROMPT, lookahead_config=PACKED, **GREEDY)
    with torch.no_grad():
        # Like merging an adapter: the parameter's version counter does not change.
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data += torch.randn(weight.shape) @ torch.randn(weight.shape[1], weight.shape[1])
    expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(lookahead.generate(model, PROMPT, lookahead_config=PACKED, **GREEDY), expected)


def test_replaced_modules_and_settings_are_followed() -> None:
    model = grouped_llama()

    def engine() -> PreTrainedModel:
        open_session(model).check()
        return engine_model(model)

    first = engine()
    assert engine() is first
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[1].mlp)
    second = engine()
    assert second is not first
    model.config.hidden_act = "gelu"  # unused by now, but a clone cannot know that
    assert engine() is not second
    model.set_attn_implementation("eager")
    assert engine() is model


def test_a_model_with_a_replaced_forward_gets_no_clone() -> None:
    model = grouped_llama()
    plain = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: plain(*args, **kwargs)
    assert engine_model(model) is model
    with pytest.raises(UnsupportedArgumentError, match="pack_weights=True"):
        engine_model(model, pack_weights=True)


def test_hooks_are_called() -> None:
    model = grouped_llama()
    engine_model(model)
    calls: list[torch.nn.Module] = []
    model.model.layers[0].register_forward_hook(lambda module, *_: calls.append(module))
    lookahead.generate(model, PROMPT, **GREEDY)
    assert calls


def test_the_clone_goes_when_the_model_goes() -> None:
    model = grouped_llama()
    lookahead.attach(model)
    model.generate(PROMPT, lookahead_config=PACKED, **GREEDY)
    gone = weakref.ref(model), weakref.ref(engine_model(model, pack_weights=True))
    del model
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None
