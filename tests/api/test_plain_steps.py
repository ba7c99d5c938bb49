"""Steps without a draft run without trees, and give the texts, streams and errors of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import lookahead
from lookahead import LookaheadConfig
from lookahead.serving import request
from model_zoo import build
from quick import diagonal

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 5, 8, 1]])
PLAIN = LookaheadConfig(preset="autoregressive")


class EndsAfter(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 30)


class Collects(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.values.append([])


MODELS = [
    "llama",
    "gpt2",
    "mistral_sliding",
    "llama_dynamic_rope",
    "gemma3",
    "qwen2_mixed_sliding",
    "opt",
    "llama4_chunked",
]
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2},
    "recorded": {"do_sample": True, "output_logits": True, "output_scores": True, "return_dict_in_generate": True},
    "hidden": {"do_sample": False, "attention_mask": torch.tensor([[0] * 4 + [1] * 11])},
    "in parts": {"do_sample": False, "prefill_chunk_size": 4},
    "forced": {"do_sample": False, "min_new_tokens": 20, "eos_token_id": list(range(0, 72, 3)), "pad_token_id": 0},
}


@pytest.fixture
def without_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid steps with trees."""
    monkeypatch.delattr(request, "step")


def both(name: str, **options: Any) -> tuple[Any, Any]:
    """Return the outputs of transformers and of this library for a call with the same seed."""
    model = build(name)
    outputs = []
    for generate in (model.generate, lambda *args, **rest: lookahead.generate(model, *args, **rest)):
        torch.manual_seed(5)
        own = {"lookahead_config": PLAIN} if outputs else {}
        criteria = {"stopping_criteria": StoppingCriteriaList([EndsAfter()])} if options.get("ends") else {}
        rest = {name: value for name, value in options.items() if name != "ends"}
        outputs.append(generate(PROMPT, **{"max_new_tokens": 40, **rest}, **criteria, **own))
    return outputs[0], outputs[1]


@pytest.mark.usefixtures("without_trees")
@pytest.mark.parametrize(("options", "name"), diagonal(CALLS, MODELS))
def test_steps_without_trees_give_the_text_of_transformers(name: str, options: str) -> None:
    expected, output = both(name, **CALLS[options])
    if options != "recorded":
        assert torch.equal(output, expected)
        return
    assert torch.equal(output.sequences, expected.sequences)
    assert output.statistics.steps == len(expected.logits) == 40
    assert output.statistics.nodes_per_step == output.statistics.accepted_lengths == [1] * 40
    for mine, theirs in ((output.logits, expected.logits), (output.scores, expected.scores)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_trees")
def test_criteria_streamers_and_listeners_see_each_token() -> None:
    theirs, ours = Collects(), Collects()
    expected = build("llama").generate(PROMPT, max_new_tokens=9, do_sample=False, streamer=theirs)
    steps: list[list[int]] = []
    output = lookahead.generate(
        build("llama"),
        PROMPT,
        max_new_tokens=9,
        do_sample=False,
        streamer=ours,
        lookahead_config=PLAIN,
        on_step=lambda record: steps.append(record.tokens),
    )
    assert torch.equal(output, expected)
    assert ours.values == theirs.values
    assert steps == [[token] for token in expected[0, PROMPT.shape[1] :].tolist()]
    assert torch.equal(*both("llama", do_sample=False, ends=True))


@pytest.mark.usefixtures("without_trees")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_callers_code_ends_the_call_and_no_later_one(error: type[BaseException]) -> None:
    model = build("llama")

    def fail(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] == 20:
            raise error("of the processor")
        return scores

    expected = model.generate(PROMPT, max_new_tokens=20, do_sample=False)
    with pytest.raises(error, match="of the processor"):
        lookahead.generate(
            model, PROMPT, max_new_tokens=20, do_sample=False, logits_processor=[fail], lookahead_config=PLAIN
        )
    output = lookahead.generate(model, PROMPT, max_new_tokens=20, do_sample=False, lookahead_config=PLAIN)
    assert torch.equal(output, expected)


def test_texts_are_equal_where_plain_and_drafted_steps_take_turns() -> None:
    """A pace that rests, probes and drafts again; the memory of the process is kept between the calls."""
    model = build("llama")
    config = LookaheadConfig(compile_in_background=False)
    with_trees = []
    step = request.step

    def counted(*args: Any) -> Any:
        with_trees.append(args)
        return step(*args)

    for seed in range(8):
        options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": seed % 2 == 1, "return_dict_in_generate": True}
        torch.manual_seed(seed)
        expected = model.generate(PROMPT + seed, **options).sequences
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request, "step", counted)
            torch.manual_seed(seed)
            output = lookahead.generate(model, PROMPT + seed, lookahead_config=config, **options)
        assert torch.equal(output.sequences, expected)
        assert sum(output.statistics.accepted_lengths) == output.statistics.tokens == 60
    assert with_trees, "drafted steps need trees"
