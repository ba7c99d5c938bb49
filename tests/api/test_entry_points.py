"""The three entry points: each returns transformers' output, and keeps the promises of its documentation."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from threading import Thread
from time import perf_counter
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import lookahead
from compared.settings import Recorder
from lookahead import Engine, LookaheadConfig
from model_zoo import build
from quick import diagonal

PROMPT = [3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 5, 8, 1]
SMALL = LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True)


def through_function(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Any:
    return lookahead.generate(model, ids, lookahead_config=SMALL, **kwargs)


def through_attach(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Any:
    lookahead.attach(model, SMALL)
    try:
        return model.generate(input_ids=ids, **kwargs)
    finally:
        lookahead.detach(model)


def through_custom_generate(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Any:
    return model.generate(input_ids=ids, custom_generate=lookahead.generate, lookahead_config=SMALL, **kwargs)


OPEN_ENTRIES = [through_function, through_attach]
ALL_ENTRIES = [*OPEN_ENTRIES, through_custom_generate]
EntryPoint = Callable[..., Any]


@pytest.mark.parametrize("entry", ALL_ENTRIES)
def test_every_entry_point_gives_the_tokens_of_generate(
    entry: EntryPoint, llama: PreTrainedModel, prompt: torch.Tensor
) -> None:
    expected = llama.generate(prompt, max_new_tokens=40, do_sample=False)
    assert torch.equal(entry(llama, prompt, max_new_tokens=40, do_sample=False), expected)
    assert torch.equal(entry(llama, prompt, max_length=30, do_sample=False), expected[:, :30])


@pytest.mark.parametrize("entry", ALL_ENTRIES)
def test_sampling_draws_the_same_tokens(entry: EntryPoint, llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    for seed in range(5):
        torch.manual_seed(seed)
        expected, after = llama.generate(prompt, **options), torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(entry(llama, prompt, **options), expected)
        assert torch.equal(torch.rand(1), after), "the random state is left as plain decoding leaves it"


@pytest.mark.parametrize("entry", ALL_ENTRIES)
@pytest.mark.parametrize("several", [False, True])
def test_end_of_sequence(entry: EntryPoint, several: bool, llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    text = llama.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :].tolist()
    eos: int | list[int] = [text[11], text[17]] if several else text[11]
    expected = llama.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(
        entry(llama, prompt, max_new_tokens=40, do_sample=False, eos_token_id=eos, pad_token_id=0), expected
    )


@pytest.mark.parametrize("entry", OPEN_ENTRIES)
def test_streamer_gets_the_prompt_and_every_token_in_order(
    entry: EntryPoint, llama: PreTrainedModel, prompt: torch.Tensor
) -> None:
    plain, ours = Recorder(), Recorder()
    llama.generate(prompt, max_new_tokens=25, do_sample=False, streamer=plain)
    entry(llama, prompt, max_new_tokens=25, do_sample=False, streamer=ours)
    assert ours.values == plain.values
    assert ours.values.count("end") == 1


def test_text_iterator_streamer(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = demo
    ids = tokenizer("def main():", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600)
    options = {"max_new_tokens": 24, "do_sample": False, "streamer": streamer}
    thread = Thread(target=lookahead.generate, args=(model, ids), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(expected)


@pytest.mark.parametrize(("entry", "place"), diagonal(OPEN_ENTRIES, ["argument", "config", "model"]))
def test_stop_strings(
    entry: EntryPoint,
    place: str,
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tokenizer = demo
    ids = tokenizer("class Stack:\n    def push(self, item):\n", return_tensors="pt").input_ids
    config = model.generation_config
    options: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "tokenizer": tokenizer}
    plain = model.generate(ids, **options)
    if place == "argument":
        options["stop_strings"] = ["def "]
    elif place == "config":
        options = {"generation_config": type(config)(max_new_tokens=48, do_sample=False, stop_strings="def ")}
        options["tokenizer"] = tokenizer
    try:
        config.stop_strings = "def " if place == "model" else None
        expected = model.generate(ids, **options)
        assert torch.equal(entry(model, ids, streamer=TextStreamer(tokenizer), **options), expected)
        assert config.stop_strings == ("def " if place == "model" else None)
    finally:
        config.stop_strings = None
    assert expected.shape[1] < plain.shape[1], "the stop string must occur for the test to mean anything"
    assert "def " in tokenizer.decode(expected[0, ids.shape[1] :])
    assert "def " in capsys.readouterr().out


@pytest.mark.parametrize("entry", ALL_ENTRIES)
def test_own_stopping_criterion_sees_every_token_once(
    entry: EntryPoint, llama: PreTrainedModel, prompt: torch.Tensor
) -> None:
    class StopAt(StoppingCriteria):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            self.seen.append(input_ids[0].tolist())
            return torch.tensor([input_ids.shape[1] >= prompt.shape[1] + 13])

    plain, ours = StopAt(), StopAt()
    expected = llama.generate(prompt, max_new_tokens=40, do_sample=False, stopping_criteria=[plain])
    assert torch.equal(entry(llama, prompt, max_new_tokens=40, do_sample=False, stopping_criteria=[ours]), expected)
    assert ours.seen == plain.seen


@pytest.mark.parametrize("entry", ALL_ENTRIES)
def test_output_object(entry: EntryPoint, llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    plain = llama.generate(prompt, output_scores=True, output_logits=True, **options)
    ours = entry(llama, prompt, output_scores=True, output_logits=True, **options)
    assert isinstance(ours, lookahead.LookaheadOutput)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name]) == 30
        for got, theirs in zip(ours[name], plain[name], strict=True):
            torch.testing.assert_close(got, theirs, atol=2e-4, rtol=1e-4)
    statistics = ours.statistics
    assert statistics.tokens == 30
    assert statistics.steps == len(statistics.nodes_per_step) == len(statistics.accepted_lengths) < 30
    assert sum(statistics.accepted_lengths) == 30
    assert statistics.step_compression == 30 / statistics.steps
    assert statistics.seconds.forward > 0
    # As in plain decoding, the cache holds the text without its last token.
    assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


@pytest.mark.parametrize("entry", ALL_ENTRIES)
def test_the_time_includes_the_preparation_before_the_first_step(
    entry: EntryPoint, llama: PreTrainedModel, prompt: torch.Tensor
) -> None:
    model = copy.deepcopy(llama)  # a new object is checked first
    start = perf_counter()
    output = entry(model, prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    seconds = output.statistics.seconds
    assert 0 < seconds.prepare <= seconds.total <= perf_counter() - start
    assert seconds.total == pytest.approx(sum(asdict(seconds).values()))


def test_plain_call_returns_a_tensor_and_no_more(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    output = lookahead.generate(llama, prompt, max_new_tokens=3, do_sample=False)
    assert isinstance(output, torch.Tensor)
    assert output.shape == (1, prompt.shape[1] + 3)


def test_on_step_sees_each_step(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    records: list[lookahead.StepRecord] = []
    output = lookahead.generate(
        llama,
        prompt,
        lookahead_config=SMALL,
        max_new_tokens=30,
        do_sample=False,
        on_step=records.append,
        return_dict_in_generate=True,
    )
    assert [token for record in records for token in record.tokens] == output.sequences[0, prompt.shape[1] :].tolist()
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert [record.nodes for record in records] == output.statistics.nodes_per_step
    assert {record.index for record in records} == {0}
    assert max(record.nodes for record in records) <= SMALL.max_nodes


def test_autoregressive_preset_takes_one_token_a_step(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    output = lookahead.generate(
        llama,
        prompt,
        lookahead_config=LookaheadConfig(preset="autoregressive"),
        max_new_tokens=9,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.statistics.accepted_lengths == [1] * 9
    assert output.statistics.nodes_per_step == [1] * 9


def test_attach_stays_until_detach(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    lookahead.attach(llama, SMALL)
    lookahead.attach(llama, SMALL)  # a second call replaces the first
    try:
        assert llama.generate(prompt, **options).statistics.steps < 20
        other = LookaheadConfig(preset="autoregressive")
        assert llama.generate(inputs=prompt, lookahead_config=other, **options).statistics.steps == 20
        passed_on = llama.generate(prompt, custom_generate=type(llama)._sample, **options)
        assert not hasattr(passed_on, "statistics")
    finally:
        lookahead.detach(llama)
    assert not hasattr(llama.generate(prompt, **options), "statistics")
    lookahead.detach(llama)
    assert "generate" not in vars(llama)


def test_pipelines_work_on_an_attached_model(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = demo
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = generator("import os\n", **options)
    steps: list[lookahead.StepRecord] = []
    lookahead.attach(model)
    try:
        assert generator("import os\n", on_step=steps.append, **options) == expected
    finally:
        lookahead.detach(model)
    assert steps


def test_padded_prompt_reads_only_its_tokens(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(through_function(llama, padded, **options), llama.generate(padded, **options))


def test_default_length_is_transformers_own(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="max_length"):
        expected = llama.generate(prompt, do_sample=False)
    with pytest.warns(UserWarning, match="max_length"):
        assert torch.equal(through_function(llama, prompt, do_sample=False), expected)


def test_model_is_left_as_it_was(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    attributes, settings = set(vars(llama)), pickle.dumps(llama.generation_config.to_dict())
    threads = torch.get_num_threads()
    through_attach(llama, prompt, max_new_tokens=5, do_sample=False)
    through_custom_generate(llama, prompt, max_new_tokens=5, do_sample=False)
    assert set(vars(llama)) == attributes
    assert pickle.dumps(llama.generation_config.to_dict()) == settings
    assert torch.get_num_threads() == threads


def test_an_error_in_mid_generation_leaves_the_model_usable(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    class Fails(BaseStreamer):
        def __init__(self) -> None:
            self.count = 0

        def put(self, value: torch.Tensor) -> None:
            self.count += 1
            if self.count > 4:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    expected = llama.generate(prompt, max_new_tokens=20, do_sample=False)
    with pytest.raises(KeyboardInterrupt):
        through_function(llama, prompt, max_new_tokens=20, do_sample=False, streamer=Fails())
    assert torch.equal(through_function(llama, prompt, max_new_tokens=20, do_sample=False), expected)
    assert torch.equal(llama.generate(prompt, max_new_tokens=20, do_sample=False), expected)


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Change torch's default number type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow_by_nature("all trials of a model run in torch's mode for default devices")
@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64, torch.bfloat16], ids=str)
def test_defaults_of_torch_change_nothing(default: torch.device | torch.dtype) -> None:
    """A program may have a GPU as default device; `meta` stands for it, and holds no values."""
    model = copy.deepcopy(build("llama"))
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "eos_token_id": 5}
    rows = torch.tensor([PROMPT, PROMPT[::-1]])
    torch.manual_seed(1)
    alone = model.generate(rows[:1], **options)[0].tolist()
    torch.manual_seed(1)
    together = model.generate(rows, pad_token_id=0, **options)
    greedy = model.generate(rows[:1], max_new_tokens=16, do_sample=False)
    config = LookaheadConfig(step_budget=12)
    with default if isinstance(default, torch.device) else default_type(default):
        assert Engine(model, config).submit(PROMPT, seed=1, logprobs=1, **options).result()[0].tolist() == alone
        torch.manual_seed(1)
        output = lookahead.generate(
            model, rows, lookahead_config=config, return_dict_in_generate=True, pad_token_id=0, **options
        )
        config = LookaheadConfig(invariant=True)
        text = lookahead.generate(model, rows[:1], lookahead_config=config, max_new_tokens=16, do_sample=False)
    assert torch.equal(output.sequences, together)
    assert torch.equal(text, greedy)
