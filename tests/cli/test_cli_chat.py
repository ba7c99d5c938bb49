"""`lookahead chat`: answers equal plain decoding, the KV cache is reused, and interrupted turns lose nothing."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead import InvalidArgumentError, LookaheadConfig
from lookahead.backends.loading import LoadedModel
from lookahead.cli import main
from lookahead.cli.chat import Conversation, Message, Reply, TurnFormat
from lookahead.cli.settings import ChatSettings
from lookahead.demo import demo_model_path
from model_zoo import ROPE_CONTEXT, build
from preloaded import Command
from standard_input import StandardInput
from tiny import families
from tiny.variant import Variant

pytestmark = pytest.mark.usefixtures("compiled_loops")

SEPARATOR = "<|endoftext|>"  # a special token: the texts before and after it are tokenized separately
TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}\n{{ message.content }}"
    + SEPARATOR
    + "{% endfor %}{% if add_generation_prompt %}# assistant\n{% endif %}"
)
FORGETFUL = TEMPLATE.replace("{{ message.content }}", "{{ message.content[:9] | trim }}")
TURNS = ["import os, sys, re", "import json, time, re", "class Stack:"]
NEW_TOKENS = 20
SMALL = LookaheadConfig(window_size=5, ngram_size=4, guess_set_size=5, pool_from_prompt=True)
OnSteps = Callable[[Callable[[lookahead.StepRecord], lookahead.StepRecord | None]], None]
CPU = ["--device", "cpu", "--dtype", "float32", "-W", "5", "-N", "4", "-G", "5"]


@pytest.fixture
def loaded(demo: Any) -> LoadedModel:
    return LoadedModel(demo_model_path(), *demo)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with a chat template and settings for sampling."""
    path = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(demo_model_path(), path)
    change(path / "tokenizer_config.json", chat_template=TEMPLATE)
    change(path / "generation_config.json", do_sample=True, temperature=0.7, top_p=0.95)
    return path


@pytest.fixture(autouse=True)
def _python_handles_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore the signal
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def variant(model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_path, tmp_path / "variant"))


def reports(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def conversation(loaded: LoadedModel, turns: TurnFormat | None = None, **options: Any) -> Conversation:
    turns = TurnFormat(loaded.tokenizer, TEMPLATE) if turns is None else turns
    return Conversation(loaded, turns, ChatSettings(**{"config": SMALL, "max_new_tokens": NEW_TOKENS} | options))


def plain_answer(loaded: LoadedModel, input_ids: torch.Tensor, **options: Any) -> list[int]:
    """Return the new tokens of `model.generate` after a conversation."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    output = loaded.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
    return output[0, input_ids.shape[1] :].tolist()


def check_turn(loaded: LoadedModel, talk: Conversation, text: str, **options: Any) -> tuple[torch.Tensor, Reply]:
    """Check that the answer of a turn equals plain decoding; return its input and the answer."""
    prompt = talk.prompt(text)
    answer = talk.answer(prompt)
    assert answer.recording.tokens == plain_answer(loaded, prompt.input_ids, **options)
    assert answer.text == loaded.tokenizer.decode(answer.recording.tokens, skip_special_tokens=True)
    assert not answer.interrupted
    return prompt.input_ids, answer


# the conversation


@pytest.mark.parametrize("preset", ["paper", "jacobi"])
def test_answers_equal_plain_decoding(loaded: LoadedModel, preset: str) -> None:
    config = SMALL if preset == "paper" else LookaheadConfig(preset=preset)
    talk = conversation(loaded, config=config, system="Write Python.")
    known = 0
    for number, text in enumerate(TURNS, start=1):
        input_ids, answer = check_turn(loaded, talk, text)
        assert answer.prefilled_tokens == input_ids.shape[1] - known
        assert answer.recording.statistics.steps <= NEW_TOKENS
        assert answer.cut == "max_new_tokens"
        known = input_ids.shape[1] + len(answer.recording.tokens) - 1  # the last token is not in the cache
        assert len(talk.cached) == known
        assert len(talk.messages) == 1 + 2 * number
    assert talk.messages[0] == {"role": "system", "content": "Write Python."}
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}


def test_a_kept_pool_saves_steps(loaded: LoadedModel) -> None:
    talk = conversation(loaded)
    _, first = check_turn(loaded, talk, TURNS[0])
    talk.reset()
    _, again = check_turn(loaded, talk, TURNS[0])
    assert again.recording.statistics.steps < first.recording.statistics.steps


def test_reset_forgets_turns_but_not_the_system_message(loaded: LoadedModel) -> None:
    talk = conversation(loaded, system="Write Python.")
    first, _ = check_turn(loaded, talk, TURNS[0])
    check_turn(loaded, talk, TURNS[1])
    talk.reset()
    assert len(talk.cached) == 0
    assert len(talk.messages) == 1
    again, answer = check_turn(loaded, talk, TURNS[0])
    assert torch.equal(first, again)
    assert answer.prefilled_tokens == first.shape[1]


def test_template_that_rewrites_earlier_turns(loaded: LoadedModel) -> None:
    talk = conversation(loaded, TurnFormat(loaded.tokenizer, FORGETFUL))
    first, _ = check_turn(loaded, talk, TURNS[0])
    second, answer = check_turn(loaded, talk, TURNS[1])
    assert 0 < second.shape[1] - answer.prefilled_tokens < first.shape[1] + NEW_TOKENS - 1
    # A template that changes the beginning leaves nothing to reuse.
    counting = "{{ messages | length }}" + TEMPLATE
    talk = conversation(loaded, TurnFormat(loaded.tokenizer, counting))
    check_turn(loaded, talk, TURNS[0])
    second, answer = check_turn(loaded, talk, TURNS[1])
    assert answer.prefilled_tokens == second.shape[1]


def test_template_that_shortens_the_conversation(loaded: LoadedModel) -> None:
    last_only = TEMPLATE.replace("in messages", "in messages[:1]")
    talk = conversation(loaded, TurnFormat(loaded.tokenizer, last_only))
    first, _ = check_turn(loaded, talk, TURNS[0])
    second, answer = check_turn(loaded, talk, TURNS[1])
    assert torch.equal(first, second)
    assert answer.prefilled_tokens == 1  # at least one token has to be read for its logits


def test_turns_without_a_template_are_joined_by_lines(loaded: LoadedModel) -> None:
    talk = conversation(loaded, TurnFormat(loaded.tokenizer, plain=True), system="import math")
    known, text = 0, "import math"
    for turn in TURNS:
        input_ids, answer = check_turn(loaded, talk, turn)
        text += ("" if text.endswith("\n") else "\n") + turn
        assert loaded.tokenizer.decode(input_ids[0]) == text
        assert (
            input_ids.shape[1] - known <= answer.prefilled_tokens <= input_ids.shape[1] - known + 3
        )  # tokens merge at the seam
        known = input_ids.shape[1] + NEW_TOKENS - 1
        text += answer.text


def test_sampled_turns_equal_generate_under_the_same_seed(loaded: LoadedModel) -> None:
    model = LoadedModel(loaded.path, loaded.model, loaded.tokenizer, sampling={"top_p": 0.9, "temperature": 0.3})
    talk = conversation(model, sample=True, temperature=0.8, top_k=20)
    torch.manual_seed(7)
    answers = [talk.answer(talk.prompt(text)).recording.tokens for text in TURNS]
    messages: list[Message] = []
    torch.manual_seed(7)
    for text, tokens in zip(TURNS, answers, strict=True):
        messages.append({"role": "user", "content": text})
        input_ids = TurnFormat(loaded.tokenizer, TEMPLATE).encode(messages)
        assert tokens == plain_answer(loaded, input_ids, do_sample=True, temperature=0.8, top_p=0.9, top_k=20)
        messages.append({"role": "assistant", "content": loaded.tokenizer.decode(tokens, skip_special_tokens=True)})


def test_end_of_sequence(loaded: LoadedModel) -> None:
    loaded = LoadedModel(loaded.path, copy.deepcopy(loaded.model), loaded.tokenizer)
    loaded.model.generation_config.forced_eos_token_id = 0  # the last token of every answer
    talk = conversation(loaded)
    known = 0
    for text in TURNS:
        input_ids, answer = check_turn(loaded, talk, text)
        assert answer.recording.tokens[-1] == loaded.tokenizer.eos_token_id
        assert SEPARATOR not in answer.text
        assert answer.cut is None
        assert answer.prefilled_tokens == input_ids.shape[1] - known
        known = input_ids.shape[1] + NEW_TOKENS - 1


def test_end_of_the_context(loaded: LoadedModel) -> None:
    loaded = LoadedModel(loaded.path, copy.deepcopy(loaded.model), loaded.tokenizer)
    talk = conversation(loaded)
    length = talk.prompt(TURNS[0]).input_ids.shape[1]
    loaded.model.config.max_position_embeddings = length + 7
    _, answer = check_turn(loaded, talk, TURNS[0], max_new_tokens=7)
    assert answer.cut == "context"
    history = [*talk.messages]
    with pytest.raises(InvalidArgumentError, match=rf"context is {length + 7}.*/reset"):
        talk.prompt(TURNS[1])
    assert talk.messages == history
    talk.reset()
    check_turn(loaded, talk, TURNS[0], max_new_tokens=7)


class Numbers:
    """Turn format of a model without a tokenizer: each turn is a list of token ids, written as text."""

    chat_template = None

    def encode(self, messages: Sequence[Message]) -> torch.Tensor:
        return torch.tensor([[int(token) for message in messages for token in message["content"].split()]])

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return " " + " ".join(str(token) for token in token_ids)


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "phi3_long_rope", "qwen2_mixed_sliding"])
def test_models_with_positions_that_change_with_length(name: str) -> None:
    turns: Any = Numbers()
    model = build(name)
    loaded = LoadedModel(Path(name), model, turns)
    talk = conversation(loaded, turns, max_new_tokens=12)
    reused = 0
    for turn in ("3 14 15 9 2 6 5", "3 5 8 9 7 9", "3 2 3 8 4 6", "2 6 4 3 3 8", "3 2 7 9"):
        prompt = talk.prompt(turn)
        expected = plain_answer(loaded, prompt.input_ids, max_new_tokens=12, eos_token_id=None)
        assert talk.answer(prompt).recording.tokens == expected
        reused += prompt.input_ids.shape[1] > ROPE_CONTEXT
    assert reused > 0
    # A shorter conversation must return to the positions of short texts.
    talk.messages = talk.messages[:2]
    prompt = talk.prompt("3 14")
    assert prompt.input_ids.shape[1] < ROPE_CONTEXT
    assert talk.answer(prompt).recording.tokens == plain_answer(loaded, prompt.input_ids, max_new_tokens=12)


@pytest.mark.parametrize(("name", "goes_on"), [("lfm2", True), ("mamba2", False)])
def test_a_state_that_has_no_way_back_is_computed_anew(name: str, goes_on: bool) -> None:
    """A changed history, with models that cannot crop their cache."""
    turns: Any = Numbers()
    loaded = LoadedModel(Path(name), families.build(name, Variant(), "sdpa"), turns)
    talk = conversation(loaded, turns, config=LookaheadConfig(step_budget=8), max_new_tokens=8)
    check_numbers(loaded, talk, "3 14 15 9 2 6 5")
    cached_tokens = len(talk.cached)
    assert (cached_tokens > 0) is goes_on
    assert check_numbers(loaded, talk, "3 5 8 9") == talk.prompt("").input_ids.shape[1] - 8 - cached_tokens
    talk.messages = talk.messages[:2]
    prompt = talk.prompt("2 7")
    assert check_numbers(loaded, talk, "2 7") == prompt.input_ids.shape[1]


def check_numbers(loaded: LoadedModel, talk: Conversation, turn: str) -> int:
    """Check that the answer of a turn equals plain decoding; return the number of prefilled tokens."""
    prompt = talk.prompt(turn)
    answer = talk.answer(prompt)
    assert answer.recording.tokens == plain_answer(loaded, prompt.input_ids, max_new_tokens=8)
    return answer.prefilled_tokens


# Ctrl-C


def test_an_interrupted_answer_stays(loaded: LoadedModel, on_steps: OnSteps) -> None:
    talk = conversation(loaded)
    on_steps(lambda step: signal.raise_signal(signal.SIGINT) if step.step == 4 else None)
    prompt = talk.prompt(TURNS[0])
    answer = talk.answer(prompt)
    on_steps(lambda step: step)
    tokens = answer.recording.tokens
    assert answer.interrupted
    assert len(tokens) < NEW_TOKENS
    assert tokens == plain_answer(loaded, prompt.input_ids, max_new_tokens=len(tokens))
    assert answer.recording.complete  # the running step was completed
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}
    known = prompt.input_ids.shape[1] + len(tokens) - 1
    assert len(talk.cached) == known
    second, answer = check_turn(loaded, talk, TURNS[1])
    assert answer.prefilled_tokens == second.shape[1] - known


def press_twice(*_: object) -> None:
    """Press Ctrl-C twice, without waiting for the end of the step."""
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_an_answer_broken_off_in_the_middle_of_a_step(loaded: LoadedModel) -> None:
    """A second Ctrl-C may leave a step's keys in some layers only; the cache returns to the turn before."""
    talk = conversation(loaded)
    keys: list[Callable[[], None]] = []  # for the next passes, in reverse order
    with loaded.model.model.layers[3].register_forward_pre_hook(lambda *_: keys.pop()() if keys else None):
        check_turn(loaded, talk, TURNS[0])
        known = len(talk.cached)
        prompt = talk.prompt(TURNS[1])
        keys += [press_twice, *[lambda: None] * 4]
        answer = talk.answer(prompt)
    assert answer.interrupted
    assert not answer.recording.complete
    assert answer.recording.statistics.steps == 4
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}
    assert len(talk.cached) == known
    third, answer = check_turn(loaded, talk, TURNS[2])
    assert answer.prefilled_tokens == third.shape[1] - known


@pytest.mark.parametrize("earlier", [[], TURNS[:1]])
def test_a_turn_broken_off_before_its_answer_is_taken_back(loaded: LoadedModel, earlier: list[str]) -> None:
    talk = conversation(loaded)
    for text in earlier:
        check_turn(loaded, talk, text)
    history = [*talk.messages]
    with loaded.model.lm_head.register_forward_pre_hook(press_twice):
        answer = talk.answer(talk.prompt(TURNS[1]))
    assert answer.interrupted
    assert answer.text == ""
    assert talk.messages == history
    check_turn(loaded, talk, TURNS[2])


def test_a_turn_that_fails_is_taken_back(loaded: LoadedModel, on_steps: OnSteps) -> None:
    def fail(step: lookahead.StepRecord) -> None:
        if step.step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")

    talk = conversation(loaded)
    check_turn(loaded, talk, TURNS[0])
    history = [*talk.messages]
    on_steps(fail)
    with pytest.raises(lookahead.LookaheadError, match=r"out of memory on cpu.*2.00 GiB.*-W"):
        talk.answer(talk.prompt(TURNS[1]))
    on_steps(lambda step: step)
    assert talk.messages == history
    check_turn(loaded, talk, TURNS[1])


def test_ctrl_c_that_python_does_not_handle_stays_unhandled(loaded: LoadedModel) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        check_turn(loaded, conversation(loaded), TURNS[0])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# the command


def test_turns_through_a_pipe(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, loaded: LoadedModel, model_path: Path
) -> None:
    stdin.lines(TURNS[0], "", "  ", TURNS[1], "/reset", TURNS[0] + "\r", "/help", "/exit", TURNS[2])
    assert main(["chat", "--model", str(model_path), *CPU, "-n", str(NEW_TOKENS), "--json", "--system", "Python"]) == 0
    out, err = capsys.readouterr()
    first, second, again = reports(out)
    assert "the conversation is forgotten" in err
    assert "/reset  forget" in err
    talk = conversation(loaded, system="Python")
    for text, report in zip((TURNS[0], TURNS[1]), (first, second), strict=True):
        input_ids, answer = check_turn(loaded, talk, text)
        assert report["text"] == answer.text
        assert report["tokens"] == answer.recording.tokens
        assert report["prompt"] == text
        assert report["prompt_tokens"] == input_ids.shape[1]
        assert report["prefilled_tokens"] == answer.prefilled_tokens
        assert report["steps"] == answer.recording.statistics.steps
        assert report["step_compression"] == NEW_TOKENS / report["steps"] > 1
        assert report["interrupted"] is False
        assert report["cut"] == "max_new_tokens"
    assert again["text"] == first["text"]
    assert again["prefilled_tokens"] == first["prefilled_tokens"]
    assert again["steps"] < first["steps"]  # the n-gram pool stays


def test_text_through_a_pipe(capsys: pytest.CaptureFixture[str], stdin: StandardInput, loaded: LoadedModel) -> None:
    stdin.lines(*TURNS[:2])
    assert main(["chat", *CPU, "-n", "8"]) == 0
    out, err = capsys.readouterr()
    talk = conversation(loaded, TurnFormat(loaded.tokenizer, plain=True), max_new_tokens=8)
    answers = [check_turn(loaded, talk, text, max_new_tokens=8)[1].text for text in TURNS[:2]]
    assert out == "".join(answer if answer.endswith("\n") else answer + "\n" for answer in answers)
    note, *statistics = err.splitlines()
    assert "continues code, it does not answer questions" in note
    assert len(statistics) == 2
    for line in statistics:
        assert line.startswith("8 tokens in ")
        assert "step compression" in line
        assert "tokens/s" in line
        assert "tokens prefilled; cut at --max-new-tokens 8" in line


def test_typed_turns(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, model_path: Path, loaded: LoadedModel
) -> None:
    command = ["chat", "--model", str(model_path), *CPU, "-n", "6"]
    terminal = stdin.type_in(TURNS[0], "/nonsense", "caf\udce9", EOFError())
    assert main(command) == 0
    out, err = capsys.readouterr()
    _, answer = check_turn(loaded, conversation(loaded, max_new_tokens=6), TURNS[0], max_new_tokens=6)
    assert out == answer.text + "\n"
    assert terminal.read == err.count("> ") == 4  # markers are not in the output, which is no terminal
    assert "error: /nonsense is not a command" in err
    assert "not valid UTF-8" in err
    stdin.type_in(KeyboardInterrupt())
    assert main(command) == 130
    stdin.type_in("/exit")
    assert main(command) == 0


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--repetition-penalty", "1.3"], {"repetition_penalty": 1.3}),
        (["--stop", "self", "--stop", "return"], {"stop_strings": ["self", "return"]}),
        (["--sample", "--min-p", "0.05", "--sampling-seed", "4"], {"do_sample": True, "min_p": 0.05}),
    ],
)
def test_options_about_the_text(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, options: list[str], arguments: dict[str, Any]
) -> None:
    stdin.lines("def area(self):")
    assert main(["chat", *CPU, "-n", "24", *options, "--json"]) == 0
    (report,) = reports(capsys.readouterr().out)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True)
    inputs = tokenizer("def area(self):", return_tensors="pt")
    torch.manual_seed(4)
    plainly = {"do_sample": False} | arguments
    output = model.generate(**inputs, **plainly, max_new_tokens=24, tokenizer=tokenizer)
    assert report["tokens"] == output[0, inputs.input_ids.shape[1] :].tolist()


def test_sampling_options(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, loaded: LoadedModel, model_path: Path
) -> None:
    def texts(*options: str) -> list[str]:
        stdin.lines(*TURNS[:2])
        assert main(["chat", "--model", str(model_path), *CPU, "-n", "8", "--json", *options]) == 0
        return [report["text"] for report in reports(capsys.readouterr().out)]

    sampled = texts("--sample", "--top-k", "30", "--sampling-seed", "5")
    talk = conversation(
        LoadedModel(loaded.path, loaded.model, loaded.tokenizer, {"temperature": 0.7, "top_p": 0.95}),
        sample=True,
        top_k=30,
        max_new_tokens=8,
    )
    torch.manual_seed(5)
    assert sampled == [talk.answer(talk.prompt(text)).text for text in TURNS[:2]]
    assert texts("--sample") != texts("--sample", "--temperature", "3.5")
    assert texts("--greedy") == texts()


def test_interrupted_in_a_pipe(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, on_steps: OnSteps, model_path: Path
) -> None:
    on_steps(lambda step: signal.raise_signal(signal.SIGINT) if step.step == 3 else None)
    stdin.lines(*TURNS)
    assert main(["chat", "--model", str(model_path), *CPU, "--json"]) == 130
    (report,) = reports(capsys.readouterr().out)
    assert report["interrupted"] is True
    assert report["text"]


def test_the_context_ends(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, model_path: Path, tmp_path: Path
) -> None:
    path = variant(model_path, tmp_path)
    change(path / "config.json", max_position_embeddings=40)
    stdin.lines(*TURNS[:2], "/reset", TURNS[0])
    assert main(["chat", "--model", str(path), *CPU]) == 2
    out, err = capsys.readouterr()
    answer = out[: len(out) // 2]
    assert out == 2 * answer
    assert err.count("cut at the end of the model's context of 40 tokens") == 2
    assert err.count("error: with this turn the conversation has ") == 1
    stdin.lines(*TURNS[:2])
    assert main(["chat", "--model", str(path), *CPU, "--json"]) == 2
    assert "/reset" in reports(capsys.readouterr().out)[1]["error"]


def test_models_that_ship_stop_strings(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, loaded: LoadedModel, model_path: Path, tmp_path: Path
) -> None:
    path = variant(model_path, tmp_path)
    change(path / "generation_config.json", stop_strings=["e"])  # the answer will contain it
    stdin.lines(*TURNS)
    assert main(["chat", "--model", str(path), *CPU, "-n", str(NEW_TOKENS), "--json"]) == 0
    answers = reports(capsys.readouterr().out)
    assert any("e" in answer["text"] and len(answer["tokens"]) < NEW_TOKENS for answer in answers)
    messages: list[Message] = []
    for text, answer in zip(TURNS, answers, strict=True):
        messages.append({"role": "user", "content": text})
        input_ids = TurnFormat(loaded.tokenizer, TEMPLATE).encode(messages)
        assert answer["tokens"] == plain_answer(loaded, input_ids, stop_strings=["e"], tokenizer=loaded.tokenizer)
        messages.append({"role": "assistant", "content": answer["text"]})


def refused(capsys: pytest.CaptureFixture[str], stdin: StandardInput, *arguments: str) -> str:
    stdin.lines(TURNS[0])
    assert main(["chat", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "0.5"], ["--temperature 0.5", "--sample"]),
        (["--greedy", "--sampling-seed", "1"], ["--sampling-seed 1", "--sample"]),
        (["--sample", "--temperature", "0"], ["--temperature", "0", "above 0"]),
        (["--sample", "--temperature", "inf"], ["--temperature", "inf"]),
        (["--sample", "--top-p", "1.5"], ["--top-p", "1.5", "at most 1"]),
        (["--sample", "--top-p", "x"], ["--top-p", "'x'", "not a number"]),
        (["--sample", "--top-k", "-1"], ["--top-k", "-1", "at least 0"]),
        (["a turn"], ["a turn"]),
        (["--raw", "--template", "nowhere.jinja"], ["--raw", "--template nowhere.jinja"]),
        (["--template", "nowhere.jinja"], ["--template nowhere.jinja", "No such file"]),
    ],
)
def test_options_that_chat_cannot_use_are_refused(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, arguments: list[str], words: list[str]
) -> None:
    message = refused(capsys, stdin, *arguments)
    assert all(word in message for word in words), message


def test_a_template_that_is_missing_or_fails_is_named(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, model_path: Path, tmp_path: Path
) -> None:
    message = refused(capsys, stdin, "--model", str(demo_model_path()))
    assert all(word in message for word in ("no chat template", "--template FILE", "--raw")), message
    template = tmp_path / "template.jinja"
    arguments = ["--template", str(template), "--system", "Python", "-n", "1"]
    template.write_text("{% for message in messages %}")
    assert "the chat template fails: TemplateSyntaxError" in refused(capsys, stdin, *arguments)
    template.write_text("{{ raise_exception('no system messages') }}")
    assert "the chat template fails: TemplateError: no system messages" in refused(capsys, stdin, *arguments)
    template.write_bytes(b"caf\xe9")
    assert "is not valid UTF-8" in refused(capsys, stdin, *arguments)
    template.write_text("{{ messages[-1].content }}")
    stdin.lines(TURNS[0])
    assert main(["chat", "--model", str(model_path), *arguments]) == 0
    assert "ignores the message of --system" in capsys.readouterr().err


@pytest.mark.parametrize("json_lines", [False, True])
def test_invalid_utf8_lines_are_named(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, json_lines: bool
) -> None:
    stdin.pipe("\ufeffx = 1\n".encode() + b"caf\xe9\n/reset\ny = 2\n")
    assert main(["chat", *CPU, "-n", "1", *(["--json"] if json_lines else [])]) == 2
    out, err = capsys.readouterr()
    assert "line 2 of standard input is not valid UTF-8 (byte 3)" in err
    if json_lines:
        assert [report["prompt"] for report in reports(out)] == ["x = 1", None, "y = 2"]
        assert "line 2" in reports(out)[1]["error"]
    else:
        assert err.count("1 tokens in 1 steps") == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal and SIGINT")
def test_on_a_terminal() -> None:
    import pty
    import select

    keyboard, terminal = pty.openpty()
    process = Command(["chat", "--no-color", "-n", "2000"], dict.fromkeys(range(3), terminal))
    os.close(terminal)
    seen = ""

    def wait_for(*words: str) -> str:
        """Wait for `words` in this order; return the screen up to the last one."""
        nonlocal seen
        output = ""
        for word in words:
            while word not in seen:
                assert select.select([keyboard], [], [], 600)[0], output + seen
                seen += os.read(keyboard, 1000).decode(errors="replace")
            before, seen = seen.split(word, 1)
            output += before + word
        return output

    try:
        wait_for("continues code", "/help lists the commands", "\n> ")
        os.write(keyboard, b"def add(a, b):\n")
        wait_for("def add(a, b):", '"""', "\n")
        process.send_signal(signal.SIGINT)
        wait_for("interrupted: ", "tokens prefilled", "> ")
        os.write(keyboard, b"/hlp\x1b[D\x1b[De\n" if find_spec("readline") else b"/help\n")  # two to the left
        wait_for("/reset  forget", "> ")
        os.write(keyboard, b"\x04")  # Ctrl-D
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)


def test_the_tokenizer_of_a_template(model_path: Path) -> None:
    """The template of the model folder is `TEMPLATE`."""
    assert AutoTokenizer.from_pretrained(model_path, local_files_only=True).chat_template == TEMPLATE
