"""Models that are compiled, adapted, quantised or placed: what plain decoding does with them, we do as well."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.demo import demo_model_path
from model_zoo import build

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
SMALL = LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True)
GREEDY = {"max_new_tokens": 20, "do_sample": False}


def check(model: Any, plain: Any | None = None) -> None:
    """Both doors of `model` give what plain decoding gives, in fewer steps."""
    expected = (model if plain is None else plain).generate(input_ids=PROMPT, **GREEDY)
    options = {**GREEDY, "return_dict_in_generate": True}
    output = lookahead.generate(model, PROMPT, lookahead_config=SMALL, **options)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.steps < 20
    lookahead.attach(model, SMALL)
    try:
        output = model.generate(input_ids=PROMPT, **options)
    finally:
        lookahead.detach(model)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.steps < 20


def compiled_forward(model: PreTrainedModel) -> Any:
    model.forward = torch.compile(model.forward, dynamic=True, backend="eager")
    return model


def compiled_in_place(model: PreTrainedModel) -> Any:
    model.compile(dynamic=True, backend="eager")
    return model


def compiled_around(model: PreTrainedModel) -> Any:
    return torch.compile(model, dynamic=True, backend="eager")


@pytest.mark.parametrize("compiled", [compiled_forward, compiled_in_place, compiled_around])
def test_compiled(compiled: Any) -> None:
    torch._dynamo.reset()
    check(compiled(copy.deepcopy(build("llama"))), plain=build("llama"))


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(build("llama")), config).eval()
    plain = build("llama").generate(PROMPT, **GREEDY)
    assert not torch.equal(adapted.generate(input_ids=PROMPT, **GREEDY), plain), "the adapter must change the text"
    check(adapted)
    with adapted.disable_adapter():
        assert torch.equal(lookahead.generate(adapted, PROMPT, lookahead_config=SMALL, **GREEDY), plain)
    check(adapted.merge_and_unload())


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_quantisation(bits: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True).eval()
    config = {
        8: quantization.Int8WeightOnlyConfig(),
        4: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32)),
    }
    quantization.quantize_(model, config[bits])
    check(model)


def test_device_map() -> None:
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32, device_map={"": "cpu"}, local_files_only=True
    )
    check(model)


def test_weights_that_are_brought_in_layer_by_layer(tmp_path: Any) -> None:
    """As with a device map that leaves layers on the disk."""
    accelerate = pytest.importorskip("accelerate")
    plain = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True)
    placed = copy.deepcopy(plain)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(6)}
    placed = accelerate.dispatch_model(placed, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    check(placed, plain=plain)
