"""A user's processors and criteria, also in batches: texts equal `model.generate`, whatever they read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

import lookahead
from compared.settings import Recorder
from lookahead import Engine, LookaheadConfig, UnsupportedArgumentError
from lookahead.parallel import ParallelGroup
from model_zoo import MAX_POSITIONS, build, greedy
from quick import diagonal
from tiny.families import build as family
from tiny.images import image_prompt
from tiny.variant import Variant

DRAFTS = LookaheadConfig(step_budget=16)
IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6], [1] * 6 + [40, 41, 40, 41, 40, 41], [8] * 12])
MASK = torch.ones_like(IDS)
MASK[1, :6] = 0


class PerRow(LogitsProcessor):
    """A rule for each row, by its index."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row in range(len(input_ids)):
            scores[row, 10 * row : 10 * row + 20] += 8
        return scores


class Counting(LogitsProcessor):
    """A state for each row, by its index, that advances with each call; the number of rows is fixed."""

    def __init__(self) -> None:
        self.states: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.states = self.states or [0] * len(input_ids)
        assert len(self.states) == len(input_ids)
        scores = scores.clone()
        for row in range(len(input_ids)):
            self.states[row] += 1 + row
            scores[row, self.states[row] % 7 * 10 : self.states[row] % 7 * 10 + 12] += 9
        return scores


class Following(LogitsProcessor):
    """A state that advances with the last token, like a grammar's: no token twice within five of a row."""

    def __init__(self) -> None:
        self.recent: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.recent = self.recent or [[] for _ in input_ids]
        for row, recent in enumerate(self.recent):
            recent.append(int(input_ids[row, -1]))
            scores[row, recent[-5:]] = -float("inf")  # in place, like xgrammar
        return scores


class AcrossRows(LogitsProcessor):
    """Subtract half of another row's scores from each row's."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 0.5 * scores.roll(1, dims=0)


class Drawing(LogitsProcessor):
    """Draw from the random state of the sampling."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3 * torch.rand(scores.shape)


class Writing(LogitsProcessor):
    """Write into the text, also into the padding of ended rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        input_ids[:, 4 - input_ids.shape[1] % 7] += 1
        return scores


class Typed(LogitsProcessor):
    """Return scores of another floating type, at some positions or at all."""

    def __init__(self, dtype: torch.dtype, every: int = 1) -> None:
        self._dtype, self._every = dtype, every

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.to(self._dtype) if input_ids.shape[1] % self._every == 0 else scores


class PerRowEnd(StoppingCriteria):
    """End rows by their index."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([self.calls >= 9 - 3 * row for row in range(len(input_ids))])


class CommonEnd(StoppingCriteria):
    """End all rows by a sum over the tokens of all rows."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return int(input_ids[:, 12:].sum()) > 1500


class Alternating:
    """A `prefix_allowed_tokens_fn` that counts its calls, across all rows."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, row: int, text: torch.Tensor) -> list[int]:
        self.calls += 1
        return list(range(self.calls % 5 * 10, self.calls % 5 * 10 + 25))


MEMBERS: dict[str, Callable[[], dict[str, Any]]] = {
    "per row": lambda: {"logits_processor": [PerRow()]},
    "counting": lambda: {"logits_processor": [Counting()], "repetition_penalty": 1.3},
    "following": lambda: {"logits_processor": [Following()]},
    "across rows": lambda: {"logits_processor": [AcrossRows()]},
    "drawing": lambda: {"logits_processor": [Drawing()]},
    "criterion per row": lambda: {"stopping_criteria": [PerRowEnd()]},
    "criterion of all": lambda: {"stopping_criteria": [CommonEnd()]},
    "allowed tokens": lambda: {"prefix_allowed_tokens_fn": Alternating()},
    "writing": lambda: {"logits_processor": [Writing()], "repetition_penalty": 1.3},
    "float64": lambda: {"logits_processor": [Typed(torch.float64)]},
    "float16": lambda: {"logits_processor": [Typed(torch.float16)]},
    "bfloat16": lambda: {"logits_processor": [Typed(torch.bfloat16)]},
    "two types": lambda: {"logits_processor": [Typed(torch.float64, every=3)]},
    "guidance": lambda: {"guidance_scale": 1.4},
}
SAMPLING: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": 0.7}]


def compared(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    make: Callable[[], dict[str, Any]],
    config: LookaheadConfig = DRAFTS,
    **options: Any,
) -> lookahead.LookaheadOutput:
    """Compare a call with transformers': texts, scores, streamed values, and the random state afterwards."""
    options = {"max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True, **options}
    outputs, streams, states = [], [], []
    for generate in (type(model).generate, lookahead.generate):
        torch.manual_seed(3)
        streamer = Recorder()
        own = {"lookahead_config": config} if generate is lookahead.generate else {}
        outputs.append(
            generate(model, **copy.deepcopy(inputs), **make(), streamer=streamer, output_scores=True, **options, **own)
        )
        streams.append(streamer.values)
        states.append(torch.get_rng_state())
    plain, ours = outputs
    assert torch.equal(plain.sequences, ours.sequences)
    assert streams[0] == streams[1]
    assert torch.equal(*states)
    assert len(plain.scores) == len(ours.scores)
    for theirs, own_scores in zip(plain.scores, ours.scores, strict=True):
        goes_on = own_scores.isfinite().any(-1) & (own_scores != 0).any(-1)  # zero after the end of a row
        torch.testing.assert_close(own_scores[goes_on], theirs[goes_on], atol=2e-2, rtol=1e-3)
    return ours


@pytest.mark.parametrize(("name", "sampling"), diagonal(MEMBERS, SAMPLING))
def test_rows_of_a_batch(name: str, sampling: dict[str, Any]) -> None:
    model = build("llama")
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    free = compared(model, inputs, MEMBERS[name], **sampling)
    ends = free.sequences[0, 17].item(), free.sequences[1, 14].item()
    compared(model, inputs, MEMBERS[name], eos_token_id=list(ends), **sampling)
    returned = {"num_return_sequences": 3} if sampling["do_sample"] else {}
    compared(model, {"input_ids": IDS[:1]}, MEMBERS[name], eos_token_id=ends[0], **returned, **sampling)


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
def test_rows_go_on_together_with_drafts(sampling: dict[str, Any]) -> None:
    ids = IDS[:1].repeat(3, 1)
    output = compared(
        build("llama"), {"input_ids": ids}, lambda: {"logits_processor": [Typed(torch.float32)]}, **sampling
    )
    assert output.statistics is not None
    assert output.statistics.steps < 24 or sampling["do_sample"]


@pytest.mark.parametrize("config", [LookaheadConfig(preset="paper"), LookaheadConfig(engine="static", step_budget=8)])
def test_other_ways_to_draft_and_to_run(config: LookaheadConfig) -> None:
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    compared(build("llama"), inputs, MEMBERS["counting"], config, eos_token_id=[5, 7, 9, 30, 44], do_sample=True)


@pytest.mark.slow_by_nature("Mamba scans its text in Python")
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mamba"])
def test_other_models(name: str) -> None:
    model = family(name, Variant(), "sdpa") if name == "mamba" else build(name)
    for make in (MEMBERS["counting"], MEMBERS["across rows"]):
        first = compared(model, {"input_ids": IDS}, make, do_sample=False)
        compared(model, {"input_ids": IDS}, make, do_sample=False, eos_token_id=first.sequences[1, 15].item())


def test_rows_to_the_last_position() -> None:
    model = build("gpt2")
    end = greedy(model, tuple(IDS[0].tolist()), 8)[-1]
    options = {"max_new_tokens": MAX_POSITIONS, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    with pytest.warns(UserWarning, match="no position for another"):
        text = lookahead.generate(model, IDS, logits_processor=[PerRow()], lookahead_config=DRAFTS, **options)
    expected = model.generate(
        IDS, logits_processor=[PerRow()], **{**options, "max_new_tokens": text.shape[1] - IDS.shape[1]}
    )
    assert torch.equal(text, expected)
    assert text.shape[1] == MAX_POSITIONS + 1


def test_prompts_with_images() -> None:
    model = family("gemma3", Variant(window=12), "sdpa")
    inputs = image_prompt(model, [[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4]], 0)
    for sampling in SAMPLING:
        compared(model, inputs, MEMBERS["counting"], **sampling)


def test_encoder_decoders() -> None:
    model = family("bart/encoder", Variant(), "sdpa")
    for sampling in SAMPLING:
        compared(model, {"input_ids": IDS}, MEMBERS["per row"], num_beams=1, **sampling)


@pytest.mark.parametrize("name", MEMBERS)
def test_rows_on_several_ranks_are_refused(name: str) -> None:
    group = ParallelGroup.__new__(ParallelGroup)  # refused before the group is used
    with pytest.raises(UnsupportedArgumentError, match="parallel is not supported for several rows"):
        lookahead.generate(build("llama"), IDS, parallel=group, max_new_tokens=4, **MEMBERS[name]())


def test_attached_models_and_the_hook_of_transformers() -> None:
    model = copy.deepcopy(build("llama"))
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(IDS, **MEMBERS["counting"](), **options)
    hooked = model.generate(IDS, custom_generate=lookahead.generate, **MEMBERS["counting"](), **options)
    assert torch.equal(hooked, expected)
    lookahead.attach(model, DRAFTS)
    assert torch.equal(model.generate(IDS, **MEMBERS["counting"](), **options), expected)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "guidance"])
def test_requests_of_an_engine_that_share_steps(name: str) -> None:
    model = build("llama")
    options: dict[str, Any] = {"max_new_tokens": 20, "pad_token_id": 0, **SAMPLING[1]}
    expected = []
    for seed, ids in enumerate(IDS):
        torch.manual_seed(seed)
        expected.append(model.generate(ids[None].clone(), **MEMBERS[name](), **options))
    engine = Engine(model, LookaheadConfig(step_budget=24, memory="process"))
    plainly = engine.submit(IDS[0], max_new_tokens=20, do_sample=False)
    handles = [engine.submit(ids, seed=seed, **MEMBERS[name](), **options) for seed, ids in enumerate(IDS)]
    if name == "drawing":  # from the shared generator
        return
    engine.run()
    for handle, text in zip(handles, expected, strict=True):
        assert torch.equal(handle.result(), text)
    assert torch.equal(plainly.result(), model.generate(IDS[:1], max_new_tokens=20, do_sample=False))
    assert plainly.statistics.steps < 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_scores_of_any_type_stop_no_draft(dtype: torch.dtype, recwarn: pytest.WarningsRecorder) -> None:
    model, options = build("llama"), {"max_new_tokens": 24, "pad_token_id": 0, **SAMPLING[1], "temperature": 0.4}
    torch.manual_seed(0)
    expected = model.generate(IDS[:1], logits_processor=[Typed(dtype)], **options)
    engine = Engine(model, LookaheadConfig(step_budget=24, memory="process"))
    handles = [engine.submit(IDS[0], seed=0, logits_processor=[Typed(dtype)], **options) for _ in range(2)]
    engine.run()
    assert all(torch.equal(handle.result(), expected) for handle in handles)
    assert not [warning for warning in recwarn if "drafting stopped" in str(warning.message)]
