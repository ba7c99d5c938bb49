"""A model runs on trees only after a successful trial."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import InvalidArgumentError, UnsupportedModelError
from lookahead.backends.transformers.checks import check_model
from model_zoo import ARCHITECTURES, build

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny_llama(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES, intermediate_size=64, initializer_range=0.3)).eval()


class IgnoresMasks(LlamaForCausalLM):
    """A model that ignores masks: attention is causal in the order of inputs."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class IgnoresPositions(LlamaForCausalLM):
    """A model that ignores position ids, and counts its inputs."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class IgnoresContext(LlamaForCausalLM):
    """A model that only reads the last token."""

    def forward(self, input_ids: Any, past_key_values: Any = None, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        output = super().forward(input_ids, past_key_values=past_key_values, logits_to_keep=logits_to_keep, **kwargs)
        selection = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output.logits = logits[:, selection]
        return output


class Fails(LlamaForCausalLM):
    """A model that raises for a 4-D mask."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 4:
            raise ValueError("too many dimensions")
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


class TakesNoPositions(LlamaForCausalLM):
    def forward(
        self, input_ids: Any, attention_mask: Any = None, cache: Any = None, past_key_values: Any = None
    ) -> Any: ...


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (IgnoresMasks, "tree masks"),
        (IgnoresPositions, "explicit positions"),
        (Fails, "too many dimensions"),
        (TakesNoPositions, "position_ids"),
    ],
)
def test_models_that_do_not_honour_trees_run_none(kind: type[LlamaForCausalLM], reason: str) -> None:
    """Such models continue from their cache like plain decoding, so they draft single paths; without a cache they are
    refused."""
    model, prompt, options = tiny_llama(kind), torch.tensor([[1, 2, 3]]), {"max_new_tokens": 12, "do_sample": False}
    with pytest.raises(UnsupportedModelError, match=reason):
        check_model(model)
    if kind is not TakesNoPositions:
        assert torch.equal(lookahead.generate(model, prompt, **options), model.generate(prompt, **options))
        return
    with pytest.raises(UnsupportedModelError, match=reason):
        lookahead.attach(model)
    assert "generate" not in vars(model)


def test_a_model_that_ignores_earlier_tokens_is_exact() -> None:
    model, prompt = tiny_llama(IgnoresContext), torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(lookahead.generate(model, prompt, **options), model.generate(prompt, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [IgnoresMasks, IgnoresPositions])
def test_low_precision_hides_no_fault(kind: type[LlamaForCausalLM], dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModelError):
        check_model(tiny_llama(kind).to(dtype))
    check_model(tiny_llama(LlamaForCausalLM).to(dtype))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_of_the_zoo_passes(name: str) -> None:
    check_model(build(name, attention=ARCHITECTURES[name].attention[0]))


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_freshly_initialised_models_pass(scale: float) -> None:
    torch.manual_seed(1)
    check_model(LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.02 * scale)))


class Counted(LlamaForCausalLM):
    """Counts its passes."""

    passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Counted.passes += 1
        return super().forward(*args, **kwargs)


def test_a_model_is_tried_once() -> None:
    check_model(tiny_llama(Counted))  # which tries its kind
    model, before = tiny_llama(Counted), Counted.passes
    check_model(model)
    first = Counted.passes - before
    check_model(model)
    assert Counted.passes - before == first > 0
    model.to(torch.bfloat16)
    check_model(model)
    assert Counted.passes - before == 2 * first, "another number type is another model"
    check_model(tiny_llama(Counted))
    assert Counted.passes - before == 3 * first


def test_trying_draws_no_random_numbers() -> None:
    model = tiny_llama(LlamaForCausalLM)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    check_model(model)
    assert torch.equal(torch.rand(1), expected)


def from_config(model_type: str, **overrides: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **overrides}))


@pytest.mark.parametrize(
    ("model", "reason"), [(lambda: from_config("recurrent_gemma", num_hidden_layers=3), "Mamba-style")]
)
def test_other_kinds_of_models_are_refused(model: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        lookahead.generate(model(), torch.tensor([[1, 2, 3]]), max_new_tokens=4)


def test_flex_attention_on_a_processor_is_refused_before_any_pass() -> None:
    """A pass with a tree's mask would crash the process."""
    model = tiny_llama(LlamaForCausalLM)
    model.set_attn_implementation("flex_attention")
    prompt, options = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(UnsupportedModelError, match="flex_attention"):
        lookahead.generate(model, prompt, **options)
    with pytest.raises(UnsupportedModelError, match="flex_attention"):
        lookahead.Engine(model)


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2), "llama"])
def test_objects_that_are_no_model_are_refused(model: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="from_pretrained"):
        lookahead.generate(model, torch.tensor([[1, 2, 3]]))
