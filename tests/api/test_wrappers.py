"""Compiled, adapted, quantised and offloaded models: texts equal plain decoding."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

import lookahead
from lookahead import Engine, LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from lookahead.backends.transformers import TRANSFORMERS
from lookahead.demo import demo_model_path
from model_zoo import build
from quick import quickly

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
SMALL = LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True)
GREEDY = {"max_new_tokens": 20, "do_sample": False}


def check(model: Any, plain: Any | None = None) -> None:
    """Check that both entry points give the text of plain decoding in fewer steps."""
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


def compiled_part(model: PreTrainedModel) -> Any:
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, dynamic=True, backend="eager")
    return model


COMPILED = [compiled_forward, compiled_in_place, compiled_around, compiled_part]


@pytest.mark.parametrize("compiled", quickly(COMPILED, [compiled_around, compiled_part]))
def test_a_compiled_model_writes_the_same_text(compiled: Any) -> None:
    torch._dynamo.reset()
    check(compiled(copy.deepcopy(build("llama"))), plain=build("llama"))


@pytest.mark.exact
def test_a_compiled_model_is_compiled_in_whole() -> None:
    """The cache is part of the graph, and a few graphs cover steps of any number of nodes."""
    model = copy.deepcopy(build("gpt2"))
    torch._dynamo.reset()
    counters.clear()
    output = lookahead.generate(
        compiled_forward(model), PROMPT, lookahead_config=SMALL, return_dict_in_generate=True, **GREEDY
    )
    assert len(set(output.statistics.nodes_per_step)) > 3
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 5  # a single token has its own graph


def test_detaching_from_a_compiled_wrapper() -> None:
    model = copy.deepcopy(build("llama"))
    wrapper = compiled_around(model)
    lookahead.attach(wrapper)
    assert "generate" in vars(model)
    lookahead.detach(wrapper)
    assert "generate" not in vars(model)


@pytest.mark.exact
def test_layers_compiled_by_inductor_write_the_same_text() -> None:
    """Real compiled kernels, only of the feed-forward layers: a whole model compiles for half a minute."""
    if shutil.which("g++") is None:
        pytest.skip("compiling for the CPU takes a C++ compiler")
    torch._dynamo.reset()
    model = copy.deepcopy(build("llama"))
    for layer in model.model.layers:
        layer.mlp.compile(dynamic=True)
    check(model)


def adapted(name: str, config: Any, spread: float = 0.3, changes_text: bool = True) -> Any:
    """Return a zoo model with a random adapter that is strong enough to change the text."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(build(name)), config(peft)).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in (weights for weights in model.parameters() if weights.requires_grad):
            weights.add_(spread * torch.randn(weights.shape, generator=random))
    text = model.generate(input_ids=PROMPT, **GREEDY)
    differs = not torch.equal(text, build(name).generate(PROMPT, **GREEDY))
    assert differs or not changes_text, "the adapter must change the text"
    return model


def test_merged_and_unmerged_adapters() -> None:
    model = adapted(
        "gpt2",
        lambda peft: peft.LoraConfig(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )
    check(model)
    model.merge_adapter()
    check(model)
    model.unmerge_adapter()
    check(model)


def test_each_adapter_has_its_own_memory() -> None:
    model = adapted("llama", lambda peft: peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    model.add_adapter("second", peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    config = LookaheadConfig(step_budget=16, memory="process")

    def steps() -> int:
        options = {"lookahead_config": config, "return_dict_in_generate": True, **GREEDY}
        return int(lookahead.generate(model.eval(), PROMPT, **options).statistics.steps)

    first, again = steps(), steps()
    assert again < first
    model.set_adapter("second")
    alone = steps()
    assert steps() < alone
    with model.disable_adapter():
        assert steps() > again
    model.set_adapter("default")
    assert steps() < first


def test_the_active_one_of_two_adapters_writes_the_text() -> None:
    model = adapted("llama", lambda peft: peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    first = model.generate(input_ids=PROMPT, **GREEDY)
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    model.add_adapter("second", peft.LoraConfig(target_modules=["up_proj", "down_proj"], init_lora_weights=False))
    model.set_adapter("second")
    assert not torch.equal(model.generate(input_ids=PROMPT, **GREEDY), first)
    check(model.eval())


def test_an_adapter_for_each_row_is_refused() -> None:
    model = adapted("llama", lambda peft: peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    options = {"adapter_names": ["default", "__base__"], **GREEDY}
    rows = PROMPT.repeat(2, 1)
    assert model.generate(input_ids=rows, **options).shape[0] == 2
    with pytest.raises(UnsupportedArgumentError, match="adapter_names=.*set_adapter"):
        lookahead.generate(model, rows, **options)
    check(model)


def test_an_engine_refuses_an_adapter_that_writes_into_weights() -> None:
    model = adapted("llama", lambda peft: peft.LoraConfig(target_parameters=["mlp.up_proj.weight"]))
    check(model)
    with pytest.raises(UnsupportedModelError, match="write into its weights"):
        Engine(model)
    model.merge_adapter()
    expected = model.generate(input_ids=PROMPT, **GREEDY)
    assert torch.equal(Engine(model).submit(PROMPT, **GREEDY).result(), expected)


ADAPTERS = {
    "ia3": lambda peft: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "adaption": lambda peft: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_any_kind_is_followed(name: str) -> None:
    check(adapted("llama", ADAPTERS[name]))


NOT_CARRIED = {
    "prompt": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "prefix": lambda peft: peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "p-tuning": lambda peft: peft.PromptEncoderConfig(
        num_virtual_tokens=5, encoder_hidden_size=16, task_type="CAUSAL_LM"
    ),
    "activated": lambda peft: peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[14, 15], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_adapters_that_a_tree_cannot_carry_are_refused(name: str) -> None:
    """PEFT adds virtual tokens outside of trees; an activated LoRA counts positions in a forward pass."""
    takes_prefix = TRANSFORMERS < (5, 24)  # later versions do not accept PEFT's name of the prefix
    model = adapted("llama", NOT_CARRIED[name], spread=1.0, changes_text=takes_prefix or name != "prefix")
    expected = model.generate(input_ids=PROMPT, **GREEDY)
    with pytest.raises(lookahead.UnsupportedModelError, match="adapter|LoRA"):
        lookahead.generate(model, PROMPT, **GREEDY)
    with pytest.raises(lookahead.UnsupportedModelError, match="adapter|LoRA"):
        model.generate(input_ids=PROMPT, custom_generate=lookahead.generate, **GREEDY)
    assert torch.equal(model.generate(input_ids=PROMPT, **GREEDY), expected), "the model is left as it was"


def test_a_peft_model_writes_its_own_text() -> None:
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


ON_THE_EMBEDDING = {
    "lora": lambda peft: peft.LoraConfig(
        target_modules=["embed_tokens", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
    ),
    "trained tokens": lambda peft: peft.TrainableTokensConfig(
        token_indices=[3, 14, 15], init_weights=False, task_type="CAUSAL_LM"
    ),
    "lora with trained tokens": lambda peft: peft.LoraConfig(
        target_modules=["q_proj"], trainable_token_indices=[3, 14, 15], task_type="CAUSAL_LM"
    ),
}


@pytest.mark.parametrize("name", ON_THE_EMBEDDING)
def test_adapters_on_the_embedding(name: str) -> None:
    """Such adapters replace the embedding, and with it the size of the vocabulary."""
    model = adapted("llama", ON_THE_EMBEDDING[name], spread=1.0)
    check(model)
    output = lookahead.generate(model, PROMPT, prediction=[3, 14, 15], **GREEDY)
    assert torch.equal(output, model.generate(input_ids=PROMPT, **GREEDY))
    with pytest.raises(lookahead.InvalidArgumentError, match="token id 97"):
        lookahead.generate(model, torch.tensor([[97]]), **GREEDY)


def test_an_embedding_inside_of_another_module() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(tokens)

    model = copy.deepcopy(build("llama"))
    model.set_input_embeddings(Scaled(model.get_input_embeddings()))
    check(model)


def test_an_engine_of_a_peft_model() -> None:
    """The engine writes the adapter's text, and the base model's while the adapter is disabled."""
    model = adapted("llama", ON_THE_EMBEDDING["lora"], spread=1.0)
    with lookahead.Engine(model, SMALL) as engine:
        assert torch.equal(engine.submit(PROMPT, **GREEDY).result(), model.generate(input_ids=PROMPT, **GREEDY))
        with model.disable_adapter():
            assert torch.equal(engine.submit(PROMPT, **GREEDY).result(), build("llama").generate(PROMPT, **GREEDY))
    peft = pytest.importorskip("peft")
    for config in (NOT_CARRIED["prompt"](peft), NOT_CARRIED["activated"](peft)):
        with pytest.raises(lookahead.UnsupportedModelError, match="adapter"):
            lookahead.Engine(peft.get_peft_model(copy.deepcopy(build("llama")), config))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantised_products_of_a_processor(dtype: torch.dtype) -> None:
    """torchao's 4-bit kernel for CPUs: plain steps are bit-identical, drafted steps differ by rounding."""
    pytest.importorskip("torchao")
    kernels = pytest.importorskip("torchao.prototype.quantization.int4")
    from torchao.quantization import quantize_

    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=dtype, local_files_only=True).eval()
    quantize_(model, kernels.PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False))
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(PROMPT, **options)
    plain = lookahead.generate(model, PROMPT, lookahead_config=LookaheadConfig(preset="autoregressive"), **options)
    assert all(torch.equal(got, theirs) for got, theirs in zip(plain.logits, expected.logits, strict=True))
    if dtype is torch.float32:
        check(model)
    else:
        drafted = lookahead.generate(model, PROMPT, lookahead_config=SMALL, **options)
        torch.testing.assert_close(drafted.logits[0], expected.logits[0], atol=0.3, rtol=0.0)


def test_a_dispatched_model_writes_its_own_text() -> None:
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32, device_map={"": "cpu"}, local_files_only=True
    )
    check(model)


@pytest.mark.parametrize("everything", [False, True])
def test_embeddings_that_are_not_in_memory(everything: bool, tmp_path: Any) -> None:
    """With these, `model.device` is "meta", and only accelerate knows the device of inputs."""
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(build("llama"))
    if everything:
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        parts = ["model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
        device_map = {"model.embed_tokens": "disk"} | dict.fromkeys(parts, "cpu")
        model = accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert model.device.type == "meta"
    check(model, plain=build("llama"))


def test_weights_that_are_loaded_layer_by_layer(tmp_path: Any) -> None:
    """Weights as with a device map that leaves layers on disk."""
    accelerate = pytest.importorskip("accelerate")
    plain = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True)
    placed = copy.deepcopy(plain)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(6)}
    placed = accelerate.dispatch_model(placed, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    check(placed, plain=plain)
