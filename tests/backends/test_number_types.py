"""Low precision: decoding works in every number type, and plain steps are bit-identical to transformers."""

import copy

import pytest
import torch
from transformers import DynamicCache

import lookahead
from lookahead import LookaheadConfig
from model_zoo import build, in_type
from quick import diagonal, quickly

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
SMALL = LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=5, pool_from_prompt=True)
GREEDY = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "name", quickly(["demo", "llama", "mistral_sliding", "gemma2", "mixtral"], ["llama", "gemma2"])
)
def test_plain_steps_are_plain_decoding_in_every_type(name: str, dtype: torch.dtype) -> None:
    model = in_type(name, dtype)
    expected = model.generate(PROMPT, **GREEDY)
    plain = LookaheadConfig(preset="autoregressive")
    output = lookahead.generate(model, PROMPT, lookahead_config=plain, **GREEDY)
    assert torch.equal(output.sequences, expected.sequences)
    if name in ("mistral_sliding", "gemma2"):
        return  # transformers drops tokens outside of the window, and sums the rest in another order
    for got, theirs in zip(output.logits, expected.logits, strict=True):
        assert torch.equal(got, theirs)


@pytest.mark.parametrize(("dtype", "attention"), diagonal([torch.bfloat16, torch.float16], ["sdpa", "eager"]))
def test_plain_steps_under_autocast_are_plain_to_the_bit(attention: str, dtype: torch.dtype) -> None:
    """The model is in float32 and its products in 16 bits, so keys and values have two types."""
    model, plain = build("llama", attention=attention), LookaheadConfig(preset="autoregressive")
    with torch.autocast("cpu", dtype):
        expected = model.generate(PROMPT, **GREEDY).logits
        output = lookahead.generate(model, PROMPT, lookahead_config=plain, **GREEDY)
        drafted = lookahead.generate(model, PROMPT, lookahead_config=SMALL, **GREEDY)
    assert all(torch.equal(got, theirs) for got, theirs in zip(output.logits, expected, strict=True))
    assert drafted.statistics.steps < 24
    layer = drafted.past_key_values.layers[0]
    assert (layer.keys.dtype, layer.values.dtype) == (torch.float32, dtype)


@pytest.mark.filterwarnings("error")
def test_double_precision() -> None:
    model = in_type("llama", torch.float64)
    expected = model.generate(PROMPT, **GREEDY).sequences
    output = lookahead.generate(model, PROMPT, lookahead_config=SMALL, **GREEDY)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.steps < 24


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_that_was_filled_in_another_type(rows: int) -> None:
    """transformers concatenates old and new states, in the type that holds both."""
    model, ids = copy.deepcopy(build("llama")), PROMPT.repeat(rows, 1)
    caches = [DynamicCache(), DynamicCache()]
    for cache in caches:
        first = model.generate(ids, past_key_values=cache, **GREEDY)
    model.to(torch.float64)
    options = {**GREEDY, "max_new_tokens": 40}
    expected = model.generate(first.sequences, past_key_values=caches[0], **options)
    output = lookahead.generate(model, first.sequences, past_key_values=caches[1], lookahead_config=SMALL, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert caches[1].layers[0].keys.dtype == torch.float64


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", quickly(["demo", "llama", "gemma2"], ["llama", "gemma2"]))
def test_drafted_steps_select_likely_tokens_in_every_type(name: str, dtype: torch.dtype) -> None:
    """If the text differs from plain decoding, the two tokens are nearly equally likely."""
    model = in_type(name, dtype)
    plain = model.generate(PROMPT, **GREEDY)
    output = lookahead.generate(model, PROMPT, lookahead_config=SMALL, **GREEDY)
    assert output.statistics.steps <= 24
    different = (output.sequences != plain.sequences)[0].nonzero().flatten().tolist()
    if dtype is torch.float32:
        assert not different
    elif different:
        place = different[0] - PROMPT.shape[1]
        logits = plain.logits[place][0]
        chosen = logits[output.sequences[0, different[0]]]
        # A few units in the last place of a logit of this size.
        assert float(logits.max() - chosen) <= 16 * torch.finfo(dtype).eps * float(logits.abs().max())
