"""The command line: sources of prompts, output and errors, refusals, exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead.backends.loading import is_out_of_memory
from lookahead.cli import main
from lookahead.cli.compare import parting
from lookahead.cli.loading import OutOfMemoryError, memory_errors_explained
from lookahead.cli.terminal import StepPrinter
from lookahead.demo import DEMO_PROMPT, demo_model_path
from preloaded import Command, run_program
from server_process import ServerProcess
from standard_input import StandardInput

pytestmark = pytest.mark.usefixtures("compiled_loops")

OnSteps = Callable[[Callable[[lookahead.StepRecord], lookahead.StepRecord | None]], None]
FullDisk = Callable[[], AbstractContextManager[None]]
PROMPT = "def add(a, b):"
NEW_TOKENS = 24
CPU = ["--device", "cpu", "--dtype", "float32"]
SHORT = ["--max-new-tokens", str(NEW_TOKENS), *CPU]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def expected(tokenizer: Any) -> list[int]:
    """New tokens of `model.generate` after PROMPT."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True)
    input_ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    output = model.generate(input_ids, do_sample=False, max_new_tokens=NEW_TOKENS)
    return output[0, input_ids.shape[1] :].tolist()


@pytest.fixture
def text(tokenizer: Any, expected: list[int]) -> str:
    return tokenizer.decode(expected, skip_special_tokens=True)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused with one line on stderr, and return that line."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


# generate


def test_generated_text_is_that_of_transformers(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["generate", PROMPT, *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == text if text.endswith("\n") else text + "\n"
    assert f"{NEW_TOKENS} tokens in " in err
    assert "step compression" in err
    assert err.count("\n") == 1


def test_json_has_the_text_and_the_counts(capsys: pytest.CaptureFixture[str], text: str, expected: list[int]) -> None:
    assert main(["generate", PROMPT, *SHORT, "--json", "-W", "6", "-N", "4", "-G", "5", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert result["text"] == text
    assert result["tokens"] == expected
    assert result["prompt"] == PROMPT
    assert result["model"] == str(demo_model_path())
    assert result["preset"] == "paper"
    assert result["config"] | {"window_size": 6, "ngram_size": 4, "guess_set_size": 5, "seed": 3} == result["config"]
    assert sum(result["accepted_lengths"]) == len(expected)
    assert len(result["accepted_lengths"]) == len(result["nodes_per_step"]) == result["steps"]
    assert result["step_compression"] == pytest.approx(len(expected) / result["steps"])
    seconds = result["seconds"]
    assert seconds["wall"] > seconds["forward"] > 0
    assert sum(seconds[part] for part in seconds.keys() - {"wall", "cpu"}) == pytest.approx(seconds["wall"])
    assert result["versions"]["torch"] == version("torch")
    assert result["dtype"] == "float32"
    assert result["interrupted"] is False


@pytest.mark.parametrize("preset", ["jacobi", "autoregressive"])
def test_each_preset_writes_the_text_of_generate(
    capsys: pytest.CaptureFixture[str], expected: list[int], preset: str
) -> None:
    assert main(["generate", PROMPT, *SHORT, "--json", "--preset", preset]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == expected
    assert result["preset"] == preset


TEXT_OPTIONS = [
    (
        ["--sample", "--temperature", "0.7", "--top-p", "0.9", "--sampling-seed", "5"],
        {"temperature": 0.7, "top_p": 0.9},
    ),
    (["--sample", "--top-k", "9", "--min-p", "0.02", "--sampling-seed", "5"], {"top_k": 9, "min_p": 0.02}),
    (["--repetition-penalty", "1.3"], {"repetition_penalty": 1.3}),
    (["--stop", "list", "--stop", "of a"], {"stop_strings": ["list", "of a"]}),
]


@pytest.mark.parametrize(("options", "arguments"), TEXT_OPTIONS)
def test_text_options_give_the_text_of_generate(
    capsys: pytest.CaptureFixture[str],
    tokenizer: Any,
    expected: list[int],
    options: list[str],
    arguments: dict[str, Any],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(5)
    output = model.generate(
        **inputs, **arguments, do_sample="--sample" in options, max_new_tokens=NEW_TOKENS, tokenizer=tokenizer
    )
    tokens = output[0, inputs.input_ids.shape[1] :].tolist()
    assert tokens != expected
    assert main(["generate", PROMPT, *SHORT, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == tokens
    assert main(["compare", PROMPT, *SHORT, *options, "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plain"]["tokens"] == result["lookahead"]["tokens"] == tokens


def test_sampled_texts_are_compared_under_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", PROMPT, *SHORT, "--sample", "--repeats", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


@pytest.mark.parametrize("source", ["file", "file-dash", "dash", "pipe"])
def test_a_prompt_comes_from_a_file_or_a_pipe_as_it_is(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, tmp_path: Path, source: str
) -> None:
    prompt = "# naïve\r\nx = '€'\n"
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbf" + prompt.encode())  # the byte order mark must be dropped
    if source != "file":
        stdin.pipe(path.read_bytes())
    arguments = {"file": ["--file", str(path)], "file-dash": ["--file", "-"], "dash": ["-"], "pipe": []}[source]
    assert main(["generate", *arguments, "--json", "--max-new-tokens", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == prompt


def test_max_new_tokens_is_clipped_to_the_context(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, expected: list[int]
) -> None:
    model = tmp_path / "short-context"
    shutil.copytree(demo_model_path(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    assert main(["generate", PROMPT, "--json", *CPU, "--model", str(model)]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["prompt_tokens"] + len(result["tokens"]) == 16
    assert result["tokens"] == expected[: len(result["tokens"])]
    assert "--max-new-tokens 128 clipped to" in err
    assert "context is 16" in refused(capsys, "generate", PROMPT * 9, "--model", str(model))


def test_json_has_the_steps_before_an_interrupt(
    capsys: pytest.CaptureFixture[str], on_steps: OnSteps, expected: list[int]
) -> None:
    def interrupt(step: lookahead.StepRecord) -> lookahead.StepRecord:
        if step.step == 4:
            raise KeyboardInterrupt
        return step

    on_steps(interrupt)
    assert main(["generate", PROMPT, *SHORT, "--json"]) == 130
    result = json.loads(capsys.readouterr().out)
    assert result["interrupted"] is True
    assert result["steps"] == 3
    assert 3 <= len(result["tokens"]) < NEW_TOKENS
    assert result["tokens"] == expected[: len(result["tokens"])]


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_interrupt_prints_the_text_so_far() -> None:
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    process = Command(["generate", PROMPT, "--max-new-tokens", "2000"], {1: to_out, 2: to_err})
    os.close(to_out)
    os.close(to_err)
    with open(out, "rb") as output, open(err, "rb") as errors:
        first = output.read(40)  # generation is under way
        process.send_signal(signal.SIGINT)
        rest, messages = output.read(), errors.read().decode()
    assert process.wait(600) == 130
    assert len(first) == 40
    assert (first + rest).decode().endswith("\n")
    assert messages.startswith("interrupted: ")
    assert "step compression" in messages
    assert messages.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGPIPE semantics")
def test_broken_pipe_is_quiet() -> None:
    (gone, to_out), (err, to_err) = os.pipe(), os.pipe()
    os.close(gone)
    process = Command(["generate", PROMPT, *SHORT], {1: to_out, 2: to_err})
    os.close(to_out)
    os.close(to_err)
    with open(err) as errors:
        assert errors.read() == ""
    assert process.wait(600) == 141


# refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "nope"], ["--preset nope", "paper"]),
        (["-W", "0"], ["--window-size 0", "at least 1"]),
        (["--ngram-size", "1"], ["--ngram-size 1 is", "at least 2"]),
        (["-G", "many"], ["--guess-set-size", "'many'"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens", "0", "at least 1"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "bfloat16"]),
        (["--device", "nonsense"], ["--device nonsense", "cpu"]),
        (["--device", "cpu:3"], ["--device cpu:3", "cpu"]),
        (["--device", "meta"], ["--device meta", "cpu"]),
        (["--device", "cuda:99"], ["--device cuda:99", "cpu"]),
        (["--nonsense"], ["--nonsense"]),
        (["--temperature", "0.5"], ["--temperature 0.5", "--sample"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty", "above 0"]),
        (["--min-p", "2", "--sample"], ["--min-p", "at most 1"]),
        (["--stop", ""], ["--stop", "empty"]),
        (["--sample", "--parallel", "2"], ["--sampling-seed"]),
        (["--sample", "--sampling-seed", "1" + 30 * "0"], ["--sampling-seed", "2**64 - 1"]),
        (["--sample", "--sampling-seed", "-1"], ["--sampling-seed", "from 0"]),
        (["--device", ""], ["--device", "empty"]),
        (["--model", "none.gguf"], ["--model none.gguf: no such file"]),
        (["more"], ["more"]),
        (["--invariant", "--fallback", "plain"], ["--fallback plain cannot be combined with --invariant"]),
        (["--no-pool-from-output", "--preset", "jacobi"], ["--no-pool-from-output applies to preset"]),
        (["-W", "500", "-N", "50"], ["--window-size 500, --ngram-size 50, --guess-set-size 15"]),
        (["--memory", "pack_weights"], ["--memory pack_weights is", "./pack_weights"]),
    ],
)
def test_an_option_that_cannot_work_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    message = refused(capsys, "generate", PROMPT, *arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["batch"], "lookahead batch --help"),
        (["nope"], "lookahead --help"),
        (["bench", "nope"], "lookahead bench --help"),
        (["generate", "--nope"], "lookahead generate --help"),
        (["generate", PROMPT, "more"], "lookahead generate --help"),
        (["generate", "--model"], "--help"),
        (["generate", "--file", "{here}/none"], "give the path of a readable file"),
        (["chat", "--template", "{here}/none"], "give the path of a readable file"),
        (["serve", "--api-key-file", "{here}/none"], "give the path of a readable file"),
        (["batch", "{here}/none", "-o", "{here}/out.jsonl"], "give the path of a readable file"),
        (["batch", "{here}/latin-1", "-o", "{here}/out.jsonl"], "convert it to UTF-8"),
        (["batch", "{here}/prompts", "-o", "{here}/prompts/out.jsonl"], "choose another --output"),
        (["bench", "run", "{here}/none", "-o", "{here}/out.jsonl"], "give the path of a readable file"),
        (["bench", "law", "{here}/none"], "give the path of a readable file"),
    ],
)
def test_errors_in_the_command_line_name_the_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], remedy: str
) -> None:
    (tmp_path / "prompts").write_text('{"id": "1", "prompt": "x"}')
    (tmp_path / "latin-1").write_bytes(b'{"id": "1", "prompt": "\xe9"}')
    assert remedy in refused(capsys, *(argument.replace("{here}", str(tmp_path)) for argument in arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_cuda_is_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device cuda is not available here; choose cpu" in refused(capsys, "generate", PROMPT, "--device", "cuda")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="is about machines without MPS")
@pytest.mark.parametrize("device", ["mps", "xla", "vulkan", "mkldnn", "npu"])
def test_devices_that_torch_has_no_part_for_are_refused_briefly(
    capsys: pytest.CaptureFixture[str], device: str
) -> None:
    message = refused(capsys, "generate", PROMPT, "--device", device)
    assert f"--device {device} is not available here; choose " in message
    assert len(message) < 150


@pytest.mark.parametrize("size", ["x", "", "0", "-1", "1.5"])
def test_a_number_of_ranks_that_is_none_is_named(size: str) -> None:
    for command in ("generate", "trace"):
        ran = run_program("-m", "lookahead", command, PROMPT, RANK="0", WORLD_SIZE=size)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
        assert ran.stderr.startswith("error: environment variable WORLD_SIZE=")
        assert "start the processes with torchrun" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "auto", "-W", "3"], ["--window-size 3", "'paper'", "'auto'"]),
        (["--preset", "paper", "--step-budget", "9"], ["--step-budget 9", "'paper'"]),
        (["--memory", "proces"], ["--memory proces is", "./proces"]),
        (["-N", "1000000000"], ["--ngram-size 1000000000", "at most 4096"]),
    ],
)
@pytest.mark.parametrize("command", ["generate", "compare", "chat"])
def test_a_setting_that_a_command_cannot_use_is_named(
    capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], words: list[str]
) -> None:
    message = refused(capsys, command, *([] if command == "chat" else [PROMPT]), *arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("command", ["generate", "chat", "tune"])
def test_an_empty_model_is_named_as_it_was_given(capsys: pytest.CaptureFixture[str], command: str) -> None:
    message = refused(capsys, command, *([PROMPT] if command == "generate" else []), "--model", "")
    assert "--model" in message
    assert "'' is empty" in message


def test_an_error_that_nobody_expected_is_one_line(capsys: pytest.CaptureFixture[str], on_steps: OnSteps) -> None:
    def fail(_: lookahead.StepRecord) -> None:
        raise ZeroDivisionError("of two\nlines")

    on_steps(fail)
    assert refused(capsys, "generate", PROMPT, *SHORT) == "error: ZeroDivisionError: of two lines\n"
    assert main(["generate", PROMPT, *SHORT, "--debug"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback")
    assert "in fail" in err
    assert err.endswith("error: ZeroDivisionError: of two lines\n")


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path / "copy"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("value", ["x", [0, "x"], {"a": 1}, 1.5])
def test_invalid_special_token_ids_are_named(capsys: pytest.CaptureFixture[str], model_copy: Path, value: Any) -> None:
    change(model_copy / "generation_config.json", eos_token_id=value)
    message = refused(capsys, "generate", PROMPT, "--model", str(model_copy))
    assert all(part in message for part in (f"{model_copy}: generation_config.json", f"eos_token_id={value!r}"))


def test_sizes_that_do_not_fit_the_weights(capsys: pytest.CaptureFixture[str], model_copy: Path) -> None:
    change(model_copy / "config.json", intermediate_size=700)
    message = refused(capsys, "generate", PROMPT, "--model", str(model_copy))
    assert "config.json does not fit the weights: model.layers.0.mlp.down_proj.weight" in message
    assert "has the shape (256, 704) in the weights, but (256, 700)" in message
    assert "17 more tensors" in message


def test_a_model_that_lacks_weights_is_refused(capsys: pytest.CaptureFixture[str], model_copy: Path) -> None:
    path = model_copy / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.0.mlp.down_proj.weight"], weights["model.layers.3.self_attn.k_proj.weight"]
    save_file(weights, path, {"format": "pt"})
    message = refused(capsys, "generate", PROMPT, "--model", str(model_copy))
    assert "lacks 2 weights (model.layers.0.mlp.down_proj.weight, …)" in message


@pytest.mark.parametrize(("options", "reuses"), [([], True), (["--no-prefix-cache"], False)])
def test_a_server_keeps_finished_texts_by_default(options: list[str], reuses: bool) -> None:
    request = {"model": "demo", "prompt": DEMO_PROMPT, "max_tokens": 2, "temperature": 0}
    with ServerProcess(*CPU, *options) as server, httpx.Client(base_url=server.url, timeout=600) as client:
        answers = [client.post("/v1/completions", json=request).json() for _ in range(2)]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert (answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is reuses


def test_a_prompt_that_is_empty_or_not_utf8_is_named(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, tmp_path: Path
) -> None:
    empty, latin1, missing = tmp_path / "empty", tmp_path / "latin1", tmp_path / "missing"
    empty.write_bytes(b"")
    latin1.write_bytes(b"caf\xe9")
    assert "the argument is empty" in refused(capsys, "generate", "")
    assert f"--file {empty} is empty" in refused(capsys, "generate", "--file", str(empty))
    assert "standard input is empty" in refused(capsys, "generate")
    assert "standard input is empty" in refused(capsys, "generate", "-")
    assert "standard input is empty" in refused(capsys, "compare", "-")
    assert f"--file {latin1} is not valid UTF-8 (byte 3)" in refused(capsys, "generate", "--file", str(latin1))
    assert "not valid UTF-8" in refused(capsys, "generate", "caf\udce9")
    assert f"--file {missing}: No such file" in refused(capsys, "generate", "--file", str(missing))
    assert "only one" in refused(capsys, "generate", PROMPT, "--file", str(empty))
    stdin.pipe(b"\xff")
    assert "standard input is not valid UTF-8" in refused(capsys, "generate")
    stdin.type_in()
    assert "give it as an argument" in refused(capsys, "generate")


def test_a_folder_that_is_no_model_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def message(path: Path) -> str:
        line = refused(capsys, "generate", PROMPT, "--model", str(path))
        assert f"--model {path}: " in line
        return line

    model = tmp_path / "model"
    assert "no such folder" in message(model)
    model.mkdir()
    assert "no config.json" in message(model)
    assert "not a folder" in message(demo_model_path() / "config.json")
    (model / "config.json").write_text("{")
    assert "its config.json is not valid JSON" in message(model)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, model)
    assert "no file named model.safetensors" in message(model)
    (model / "model.safetensors").write_bytes(b"broken")
    assert "cannot be loaded" in message(model)


# compare


def test_compare_exits_with_0_where_texts_are_equal(capsys: pytest.CaptureFixture[str], expected: list[int]) -> None:
    assert (
        main(["compare", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--device", "cpu", "--repeats", "2", "--json"])
        == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    assert result["identical"] is True
    assert result["first_difference"] is None
    assert result["dtype"] == "float32"
    plain, other = result["plain"], result["lookahead"]
    assert plain["tokens"] == other["tokens"] == expected
    assert plain["steps"] == NEW_TOKENS
    assert plain["step_compression"] == 1
    assert other["steps"] < NEW_TOKENS
    for side in (plain, other):
        assert len(side["cpu_seconds"]) == len(side["wall_seconds"]) == 2
        assert side["cpu_seconds_per_token"] > 0
        assert 0 <= side["repeated_cycle_share"] <= 1


def test_compare_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *CPU, "--max-new-tokens", "8", "--repeats", "1"]) == 0
    out, err = capsys.readouterr()
    assert "no prompt was given" in err
    for row in ("tokens", "steps", "step compression", "CPU time per token", "wall time per token"):
        assert row in out
    assert "inside a repeated cycle" in out
    assert "outputs identical" in out
    assert "\x1b" not in out + err
    assert DEMO_PROMPT.rstrip() not in out
    assert f"prompt:\n{DEMO_PROMPT}\n" in err


def test_compare_shows_the_first_difference(
    capsys: pytest.CaptureFixture[str], on_steps: OnSteps, expected: list[int]
) -> None:
    position = 0

    def change(step: lookahead.StepRecord) -> lookahead.StepRecord:
        nonlocal position
        start = 0 if step.step == 1 else position
        position = start + len(step.tokens)
        step.tokens = [5 if number == 5 else token for number, token in enumerate(step.tokens, start)]
        return step

    on_steps(change)
    assert main(["compare", PROMPT, *CPU, "--max-new-tokens", "9", "--repeats", "1"]) == 1
    out = capsys.readouterr().out
    assert f"first difference at new token 5 (from 0): plain {expected[5]} " in out
    assert "lookahead 5 '%'" in out


def test_an_interrupted_compare_reports_its_results(capsys: pytest.CaptureFixture[str], on_steps: OnSteps) -> None:
    calls = 0

    def interrupt_the_third(step: lookahead.StepRecord) -> lookahead.StepRecord:
        nonlocal calls
        calls += step.step == 1
        if calls == 3:
            raise KeyboardInterrupt
        return step

    on_steps(interrupt_the_third)
    assert main(["compare", PROMPT, *CPU, "--max-new-tokens", "4", "--repeats", "2", "--json"]) == 130
    result = json.loads(capsys.readouterr().out)
    assert result["interrupted"] is True
    assert result["identical"] is True
    assert len(result["plain"]["cpu_seconds"]) == 1


def test_the_first_difference_is_the_place_and_both_tokens() -> None:
    assert parting([1, 2], [1, 2]) is None
    assert parting([1, 2, 3], [1, 4, 3]) == {"position": 1, "plain": 2, "lookahead": 4}
    assert parting([1, 2], [1, 2, 3]) == {"position": 2, "plain": None, "lookahead": 3}


# both


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_out_of_memory_errors_name_the_remedy(
    capsys: pytest.CaptureFixture[str], on_steps: OnSteps, command: str
) -> None:
    def out_of_memory(_: lookahead.StepRecord) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity ...")

    on_steps(out_of_memory)
    message = refused(capsys, command, PROMPT, *SHORT)
    assert "out of memory on cpu while decoding (tried to allocate 2.50 GiB)" in message
    assert all(word in message for word in ("-W", "shorter text", "--dtype bfloat16")), message
    assert "--dtype" not in refused(capsys, command, PROMPT, *SHORT, "--dtype", "bfloat16")


def test_a_model_larger_than_the_memory_is_refused(capsys: pytest.CaptureFixture[str], model_copy: Path) -> None:
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps(config | {"vocab_size": 2**40}))
    message = refused(capsys, "generate", PROMPT, *SHORT, "--model", str(model_copy))
    assert "out of memory on cpu while loading the model" in message


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_memory_that_was_not_saved_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], full_disk: FullDisk, tmp_path: Path, text: str, options: list[str]
) -> None:
    file = tmp_path / "kept.npz"
    with full_disk():
        assert main(["generate", PROMPT, "--memory", str(file), *SHORT, *options]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["text"] if options else out.rstrip("\n")) == text.rstrip("\n")
    (warning,) = (line for line in err.splitlines() if line.startswith("warning: "))
    assert f"--memory {file} could not be written ([Errno 27] File too large)" in warning
    assert ".py:" not in err


def test_errors_that_mean_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    message = r"on cpu \(tried to allocate 1125899906842624 bytes\): try less"
    with pytest.raises(OutOfMemoryError, match=message), memory_errors_explained("on cpu", "less"):
        torch.empty(2**50, dtype=torch.uint8)


def test_models_that_ship_stop_strings(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "stopping"
    shutil.copytree(demo_model_path(), path)
    config = json.loads((path / "generation_config.json").read_text())
    stop = text[len(text) // 2 :][:3]
    (path / "generation_config.json").write_text(json.dumps(config | {"stop_strings": [stop]}))
    arguments = [PROMPT, *SHORT, "--json", "--model", str(path)]
    assert main(["generate", *arguments]) == 0
    stopped = json.loads(capsys.readouterr().out)["text"]
    assert stop in stopped
    assert text.startswith(stopped)
    assert len(stopped) < len(text)
    assert main(["compare", *arguments, "--repeats", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["plain"]["text"] == stopped


# text


def printed(tokenizer: Any, *steps: list[int]) -> list[str]:
    """Return the text on the screen after each step, and at the end."""
    out = io.StringIO()
    printer, screens = StepPrinter(Console(file=out), tokenizer), []
    for tokens in steps:
        printer.step(tokens)
        screens.append(out.getvalue())
    printer.finish()
    return [*screens, out.getvalue()]


def test_characters_are_printed_whole(tokenizer: Any) -> None:
    text = "naïve 日本語 🦙 end"
    tokens = tokenizer(text).input_ids
    assert len(tokens) > len(text.split())
    *screens, whole = printed(tokenizer, *([token] for token in tokens))
    assert all(text.startswith(begin) for begin in screens)
    assert len(set(screens)) < len(screens), "some tokens are parts of a character"
    assert whole == text + "\n"


def test_an_unfinished_character_is_printed_at_the_end(tokenizer: Any) -> None:
    *_, last, whole = printed(tokenizer, *([token] for token in tokenizer("a🦙").input_ids[:-1]))
    assert last == "a"
    assert whole == "a\ufffd\n"


def test_leading_space_rules_match_the_whole_text() -> None:
    class Words:
        """Drop the space before the first token, like SentencePiece tokenizers."""

        def decode(self, token_ids: list[int], **options: Any) -> str:
            return "".join([" once", " upon", " a", " time"][token] for token in token_ids).removeprefix(" ")

    assert printed(Words(), [0], [1, 2], [3])[:3] == ["once", "once upon a", "once upon a time"]


def test_piped_text_is_unchanged() -> None:
    class Lines:
        def decode(self, token_ids: list[int], **options: Any) -> str:
            return "".join(["if x:\n\treturn", "\r\x1b[0m"][token] for token in token_ids)

    assert printed(Lines(), [0], [], [1])[-1] == "if x:\n\treturn\r\x1b[0m\n"


def test_steps_take_turns_with_two_colours(tokenizer: Any) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=10)
    printer = StepPrinter(console, tokenizer)
    for piece in ("a long line, not wrapped", "\tx", "\x1b[2J"):
        printer.step(tokenizer(piece).input_ids)
    printer.finish()
    screens = screen.getvalue()
    assert screens.startswith("\x1b[36ma long line, not wrapped\x1b[0m\x1b[35m\tx\x1b[0m\x1b[36m")
    assert "\x1b[2J" not in screens  # generated text cannot command the terminal
    assert "␛[2J" in screens


# the rest


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str], option: str) -> None:
    try:
        installed = version("lookahead-decoding")
    except PackageNotFoundError:
        installed = "unknown"
    assert main([option]) == 0
    assert installed in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    without_arguments = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "generate" in without_arguments
    out = capsys.readouterr().out
    assert "compare" in out
    assert "chat" in out
    assert main(["help"]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("names", [["generate"], ["serve"], ["bench"], ["bench", "run"], ["help"]])
def test_help_about_a_command(capsys: pytest.CaptureFixture[str], names: list[str]) -> None:
    assert main([*names, "--help"]) == 0
    out = capsys.readouterr().out
    assert main(["help", *names]) == 0
    assert capsys.readouterr().out == out
    assert "--help" in out
    assert "bool" not in out


def test_help_about_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'nope'" in refused(capsys, "help", "nope")
