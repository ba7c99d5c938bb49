"""Encoder-decoders: texts equal `model.generate`, and drafts come from the encoder's input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import lookahead
from lookahead import Engine, LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from quick import diagonal, quickly
from tiny.encoder_decoders import read_by
from tiny.families import build
from tiny.variant import Variant

TEXT = ["t5/encoder", "bart/encoder", "marian/encoder", "t5gemma/encoder", "led/encoder", "switch_transformers/encoder"]
SPEECH = ["whisper/encoder", "moonshine/encoder"]
FAMILIES = quickly([*TEXT, *SPEECH], ["t5/encoder", "bart/encoder", "t5gemma/encoder", "whisper/encoder"])


def tiny(family: str = "t5/encoder") -> PreTrainedModel:
    return build(family, Variant(), "sdpa")


def source(model: PreTrainedModel, rows: int = 1) -> dict[str, Any]:
    """Return encoder inputs: repetitive rows of different lengths."""
    ids = torch.randint(3, 90, (rows, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return read_by(model, ids, mask)


@pytest.mark.parametrize(("family", "sampled"), diagonal(FAMILIES, [False, True]))
def test_texts_equal_generate(family: str, sampled: bool) -> None:
    model = tiny(family)
    options: dict[str, Any] = {**source(model), "max_new_tokens": 30, "do_sample": sampled, "output_scores": True}
    torch.manual_seed(3)
    expected = model.generate(**options, return_dict_in_generate=True)
    torch.manual_seed(3)
    output = lookahead.generate(model, **options, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences)
    for mine, theirs in zip(output.scores, expected.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths(family: str) -> None:
    model = tiny(family)
    options = {**source(model, rows=3), "max_new_tokens": 20, "do_sample": False, "eos_token_id": [5, 17, 40]}
    options["pad_token_id"] = 0
    assert torch.equal(lookahead.generate(model, **options), model.generate(**options))


def test_several_texts_of_one_source() -> None:
    model = tiny()
    options = {**source(model, rows=2), "max_new_tokens": 15, "num_return_sequences": 2, "do_sample": True, "top_k": 1}
    assert torch.equal(lookahead.generate(model, **options), model.generate(**options))


def test_chunks_need_a_source_without_hidden_tokens() -> None:
    """`generate` crops the source's mask to the decoder's chunks: the text is unaffected only if nothing is hidden."""
    model, chunks = tiny("bart/encoder"), {"max_new_tokens": 12, "do_sample": False, "prefill_chunk_size": 8}
    seen, hiding = source(model), source(model, rows=2)
    assert torch.equal(lookahead.generate(model, **seen, **chunks), model.generate(**seen, **chunks))
    assert not torch.equal(model.generate(**hiding, **chunks), model.generate(**hiding, max_new_tokens=12))
    with pytest.raises(UnsupportedArgumentError, match="prefill_chunk_size.*hides"):
        lookahead.generate(model, **hiding, **chunks)


def test_given_decoder_ids_are_continued() -> None:
    model = tiny("bart/encoder")
    options = {**source(model), "decoder_input_ids": torch.tensor([[2, 7, 9, 7]]), "max_new_tokens": 15}
    assert torch.equal(lookahead.generate(model, **options), model.generate(**options))
    mask = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(UnsupportedArgumentError, match="hides tokens"):
        lookahead.generate(model, **options, decoder_attention_mask=mask)


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Force the model to write `text`."""

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._text[input_ids.shape[1] - 1]] = 0.0
        return forced  # type: ignore[return-value]


def test_positions_that_leave_padding_out() -> None:
    """M2M-100 skips padding tokens when it counts positions within a pass; plain decoding sends single tokens."""
    model = tiny("m2m_100/encoder")
    padding = model.config.pad_token_id
    text = [7, 8, 9, padding, 10, 11, 7, 8, 9, padding, 10, 11, padding, 7, 8, 9, padding, 10, 11]
    options = {**source(model), "max_new_tokens": len(text), "output_logits": True, "return_dict_in_generate": True}
    options["logits_processor"] = LogitsProcessorList([Forced(text)])
    expected = model.generate(**options)
    output = lookahead.generate(model, **options, lookahead_config=LookaheadConfig(step_budget=8))
    assert output.statistics.steps < len(text)
    for mine, theirs in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("preset", ["auto", "context_matches"])
def test_drafts_come_from_the_encoder_input(preset: str) -> None:
    """A text that copies most of its source, like an edit or an extract."""
    model = tiny()
    ids = torch.randperm(90, generator=torch.Generator().manual_seed(1))[None, :60] + 3
    text = [*ids[0, 5:30].tolist(), 4, *ids[0, 33:55].tolist()]
    steps = {}
    for name, read in (("source", ids), ("another", ids.flip(1))):
        output = lookahead.generate(
            model,
            read,
            lookahead_config=LookaheadConfig(preset=preset, step_budget=16, memory="request"),
            logits_processor=LogitsProcessorList([Forced(text)]),
            max_new_tokens=len(text),
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert output.sequences[0, 1:].tolist() == text
        steps[name] = output.statistics.steps
    assert steps["source"] < steps["another"] / 3


def test_attached_models_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("whisper/encoder")
    options = {**source(model), "max_new_tokens": 12, "do_sample": False, "suppress_tokens": [3, 4, 5, 6, 7, 8]}
    expected = model.generate(**options)
    lookahead.attach(model)
    assert torch.equal(model.generate(**options), expected)
    lookahead.detach(model)


def test_unsupported_arguments_are_refused() -> None:
    model = tiny()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(UnsupportedArgumentError, match="(cache|past_key_values).*encoder-decoder"):
        lookahead.generate(model, **source(model), past_key_values=cache, max_new_tokens=4)
    held = model.generate(**source(model), max_new_tokens=4, return_dict_in_generate=True).past_key_values
    with pytest.raises(UnsupportedArgumentError, match="(cache|past_key_values).*encoder-decoder"):
        lookahead.generate(model, **source(model), past_key_values=held, max_new_tokens=4)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder.*lookahead.generate"):
        Engine(model)
    with pytest.raises(UnsupportedArgumentError, match="inputs_embeds"):
        lookahead.generate(model, inputs_embeds=torch.zeros(1, 3, 64), max_new_tokens=4)


def test_a_class_with_its_own_generation_loop_is_refused() -> None:
    """FSMT's output for several tokens at once differs from one token at a time."""
    model = tiny("fsmt/encoder")
    with pytest.raises(UnsupportedModelError, match="encoder-decoder.*differs from plain decoding"):
        lookahead.generate(model, **source(model), max_new_tokens=4)
