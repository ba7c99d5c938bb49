"""`lookahead batch`: answers equal `generate`, files grow line by line, and interrupted runs continue."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead.cli import main
from word_model import WORDS, save_word_model

NEW_TOKENS = 12
PROMPTS = {f"p{number}": " ".join(WORDS[number : 3 * number + 2]) for number in range(1, 9)}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    save_word_model(tmp_path / "model", max_position_embeddings=64)
    lines = [json.dumps({"id": name, "prompt": text}) for name, text in PROMPTS.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "answers.jsonl")]
    return ["batch", *files, "--model", str(tmp_path / "model"), "--device", "cpu", "-n", str(NEW_TOKENS)]


def answers(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "answers.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row.get("text") for row in rows}


def expected(tmp_path: Path, **sampling: Any) -> dict[str, str]:
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    texts = {}
    for name, prompt in PROMPTS.items():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        torch.manual_seed(5)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **{"do_sample": False} | sampling)
        texts[name] = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return texts


@contextmanager
def passes(ctrl_c: Callable[[], bool] = lambda: False) -> Iterator[list[int]]:
    """Yield a list that gets an entry for each pass of a model; press Ctrl-C in a pass if `ctrl_c` returns `True`."""
    counted: list[int] = []

    def count(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            counted.append(1)
            if ctrl_c():
                raise KeyboardInterrupt

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    yield counted
    hook.remove()


def test_answers_equal_generate(arguments: list[str], tmp_path: Path) -> None:
    assert main(arguments) == 0
    assert answers(tmp_path) == expected(tmp_path)
    before = (tmp_path / "answers.jsonl").read_bytes()
    assert main(arguments) == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert main([*arguments, "--restart", "--sample", "--sampling-seed", "5", "--temperature", "0.8"]) == 0
    assert answers(tmp_path) == expected(tmp_path, do_sample=True, temperature=0.8)


def test_an_interrupted_run_goes_on(arguments: list[str], tmp_path: Path) -> None:
    few = [*arguments, "--max-rows", "2", "--preset", "autoregressive"]
    assert main(few) == 0
    with passes() as whole:
        assert main([*few, "--restart"]) == 0
    (tmp_path / "answers.jsonl").unlink()
    with passes(lambda: len(answers(tmp_path)) >= 2):
        assert main(few) == 130
    assert len(answers(tmp_path)) == 2
    with passes() as rest:
        assert main(few) == 0
    assert answers(tmp_path) == expected(tmp_path)
    assert len(rest) < len(whole)


def test_other_settings_do_not_mix(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert main([*arguments, "-n", "13"]) == 2
    assert "--restart" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_has_a_line(arguments: list[str], tmp_path: Path) -> None:
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"id": "long", "prompt": "w1 " * 80}))
    assert main(arguments) == 1
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert "context is 64" in next(row["error"] for row in rows if row["id"] == "long")
    assert answers(tmp_path) == expected(tmp_path) | {"long": None}


def test_a_report_counts_the_answers(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    counts = {name: sum(row[name] for row in rows) for name in ("prompt_tokens", "tokens", "steps")}
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "output": str(tmp_path / "answers.jsonl"),
        "prompts": len(PROMPTS),
        "answered": len(PROMPTS),
        "failed": 0,
        **counts,
        "interrupted": False,
    }


def test_options_of_another_kind_of_model_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in ((["--gpu-layers", "4"], "--gpu-layers 4"), (["--fast-kv"], "--fast-kv applies")):
        assert main([*arguments, *options]) == 2
        assert message in capsys.readouterr().err


def test_the_summary_is_printed_without_a_terminal(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    tokens, steps = (sum(row[name] for row in rows) for name in ("tokens", "steps"))
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        f"{tmp_path / 'answers.jsonl'}: 8 of 8 prompts answered, 8 of them now\n{tokens} tokens in {steps} steps" in err
    )
    assert main(arguments) == 0
    assert "8 of 8 prompts answered, 0 of them now\n0 tokens in 0 steps" in capsys.readouterr().err


def test_bad_lines_become_errors_and_the_others_are_answered(arguments: list[str], tmp_path: Path) -> None:
    bad = {"half": r'"w1 \ud83d"', "empty": '""', "none": "null", "a list": "[]", r"\udc00": '""'}
    prompts = tmp_path / "prompts.jsonl"
    good = prompts.read_text()
    prompts.write_text("\n".join([*(f'{{"id": "{name}", "prompt": {text}}}' for name, text in bad.items()), good]))
    assert main(arguments) == 1
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    errors = {row["id"]: row["error"] for row in rows if "error" in row}
    assert errors.keys() == {json.loads(f'"{name}"') for name in bad}
    assert "line 1 has half of a surrogate pair" in errors["half"]
    assert all("needs a text in `prompt`" in errors[name] for name in ("empty", "none", "a list"))
    assert answers(tmp_path) == expected(tmp_path) | dict.fromkeys(errors)

    before = answers(tmp_path)
    prompts.write_text(prompts.read_text().replace(bad["half"], '"w1"'))  # now only this line is left to answer
    assert main(arguments) == 1
    after = answers(tmp_path)
    assert after.pop("half")
    assert after == {name: text for name, text in before.items() if name != "half"}


def test_lines_that_are_no_prompts_become_errors_until_they_are_mended(arguments: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    good = prompts.read_text()
    prompts.write_text('{"id": "cut off", "pro\n[1]\n{"prompt": "w1"}\n' + good)
    assert main(arguments) == 1
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    errors = {row["id"]: row["error"] for row in rows if "error" in row}
    assert errors.keys() == {f"prompts.jsonl, line {number}" for number in (1, 2, 3)}
    assert "is not JSON" in errors["prompts.jsonl, line 1"]
    assert all("needs an `id`" in errors[f"prompts.jsonl, line {number}"] for number in (2, 3))
    assert answers(tmp_path) == expected(tmp_path) | dict.fromkeys(errors)

    prompts.write_text(good)
    assert main(arguments) == 0
    assert answers(tmp_path) == expected(tmp_path)


def test_an_error_of_the_tokenizer_costs_one_line(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["unk_token"] = "none"
    path.write_text(json.dumps(tokenizer))
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"id": "unknown", "prompt": "w1 unknown"}))
    assert main(arguments) == 1
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert "Missing [UNK] token" in next(row for row in rows if "error" in row)["error"]
    assert answers(tmp_path) == expected(tmp_path) | {"unknown": None}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs devices of a Unix")
@pytest.mark.parametrize("command", ["batch", "bench run"])
def test_a_device_as_output_is_refused_before_it_is_read(
    arguments: list[str], tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    if command == "batch":
        command_line = [*arguments, "-o", str(link)]
    else:
        (tmp_path / "suite.toml").write_text(
            '[[models]]\nname = "demo"\npath = "demo"\n[[tasks]]\nname = "prompts"\ndata = "prompts.jsonl"\n'
            'max_new_tokens = 4\n[[methods]]\nname = "plain"\ntransformers = {}\n'
        )
        command_line = ["bench", "run", str(tmp_path / "suite.toml"), "-o", str(link)]
    assert main(command_line) == 2
    assert f"error: {link} is not a regular file" in capsys.readouterr().err
    assert os.readlink(link) == "/dev/full"


SUITE = (
    '[[models]]\nname = "demo"\npath = "demo"\n[[tasks]]\nname = "prompts"\ndata = "prompts.jsonl"\n'
    'max_new_tokens = 4\n[[methods]]\nname = "plain"\ntransformers = {}\n'
)


@pytest.mark.parametrize("restart", [[], ["--restart"]])
@pytest.mark.parametrize("command", ["batch", "bench run"])
def test_a_file_of_something_else_is_left_alone(
    arguments: list[str], tmp_path: Path, command: str, restart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "suite.toml").write_text(SUITE)
    command_line = arguments if command == "batch" else ["bench", "run", str(tmp_path / "suite.toml")]
    path = tmp_path / "settings.json"
    for content in ('{"theme": "dark"}', '{"id": "p1", "prompt": "w1", "request": 1}\n', '{"unit": "header"}\n'):
        path.write_text(content)
        assert main([*command_line, "-o", str(path), *restart]) == 2
        assert f"error: {path} does not begin with a row of this command" in capsys.readouterr().err
        assert path.read_text() == content
    assert main([*command_line, "-o", "-", *restart]) == 2
    assert "'-' is not a file" in capsys.readouterr().err
    assert not Path("-").exists()


def test_answers_are_never_written_over_the_prompts(arguments: list[str], tmp_path: Path) -> None:
    assert main(arguments) == 0
    answers_before = (tmp_path / "answers.jsonl").read_bytes()
    link = tmp_path / "link"
    link.symlink_to("answers.jsonl")
    assert main([*arguments[:1], str(link), *arguments[2:], "--restart"]) == 2
    assert (tmp_path / "answers.jsonl").read_bytes() == answers_before


def test_an_empty_file_is_filled(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").touch()
    assert main(arguments) == 0
    assert answers(tmp_path) == expected(tmp_path)


def test_a_file_that_appears_while_the_model_loads_is_left_alone(arguments: list[str], tmp_path: Path) -> None:
    loading: list[str] = []

    def write(module: torch.nn.Module, name: str, parameter: Any) -> None:
        loading.append(name)
        (tmp_path / "answers.jsonl").write_text("mine")

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(write)
    try:
        assert main(arguments) == 2
    finally:
        hook.remove()
    assert loading
    assert (tmp_path / "answers.jsonl").read_text() == "mine"
