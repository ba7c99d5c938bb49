"""The command line with a GGUF file as the model."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from gguf_files import REASON, tool
from lookahead.cli import main
from lookahead.demo import demo_model_path
from server_process import ServerProcess
from standard_input import StandardInput

pytest.importorskip("llama_cpp", reason=REASON)
pytestmark = pytest.mark.usefixtures("compiled_loops")

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    tool().convert(demo_model_path(), path)
    return str(path)


@pytest.fixture(scope="module")
def expected(demo: tuple[PreTrainedModel, Any]) -> str:
    model, tokenizer = demo
    inputs = tokenizer(PROMPT, return_tensors="pt")
    texts = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(texts[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_writes_the_text_of_the_model(
    capsys: pytest.CaptureFixture[str], demo_file: str, expected: str
) -> None:
    result = report(capsys, "generate", PROMPT, "-n", "24", "--model", demo_file)
    assert result["text"] == expected
    assert (result["model"], result["dtype"], result["device"]) == (demo_file, "float32", "cpu")


def test_sampled_texts_equal_the_folders(capsys: pytest.CaptureFixture[str], demo_file: str) -> None:
    options = ["generate", PROMPT, "-n", "24", "--sample", "--temperature", "0.9", "--sampling-seed", "5"]
    folder = report(capsys, *options, "--device", "cpu", "--dtype", "float32")
    assert report(capsys, *options, "--model", demo_file)["tokens"] == folder["tokens"]


def test_compare_finds_the_same_text_in_fewer_steps(
    capsys: pytest.CaptureFixture[str], demo_file: str, expected: str
) -> None:
    result = report(
        capsys, "compare", PROMPT, "-n", "24", "--repeats", "1", "--model", demo_file, "--step-budget", "16"
    )
    assert result["identical"]
    assert result["plain"]["text"] == result["lookahead"]["text"] == expected
    assert result["plain"]["steps"] > result["lookahead"]["steps"]


def test_chat_equals_the_transformers_model(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, demo_file: str
) -> None:
    """The demo model has no template: turns are plain text, or follow a template from the command line."""
    stdin.lines("def f(x):", "    y = 1")
    assert main(["chat", "--raw", "-n", "12", "--model", demo_file, "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    gguf = [turn["text"] for turn in turns]
    assert turns[1]["prefilled_tokens"] < turns[1]["prompt_tokens"] - turns[0]["prompt_tokens"]
    stdin.lines("def f(x):", "    y = 1")
    assert main(["chat", "-n", "12", "--device", "cpu", "--dtype", "float32", "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == gguf
    assert len(gguf) == 2


def test_batch_answers_every_prompt(
    capsys: pytest.CaptureFixture[str], demo_file: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"id": f"{n}", "prompt": PROMPT}) + "\n" for n in "ab"))
    arguments = ["batch", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers.jsonl"), "-n", "24"]
    assert report(capsys, *arguments, "--model", demo_file)["answered"] == 2
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in answers] == [expected] * 2


def test_trace_writes_a_page(capsys: pytest.CaptureFixture[str], demo_file: str, tmp_path: Path) -> None:
    arguments = ["trace", PROMPT, "-n", "24", "--step-budget", "16", "--output", str(tmp_path / "page.html")]
    assert main([*arguments, "--model", demo_file]) == 0
    assert "<html" in (tmp_path / "page.html").read_text()[:200]


def test_bench_finds_no_difference_between_methods(
    capsys: pytest.CaptureFixture[str], demo_file: str, tmp_path: Path
) -> None:
    """Each method has its own object; the file's weights are loaded once."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "1", "prompt": PROMPT}) + "\n")
    (tmp_path / "suite.toml").write_text(
        f'[[models]]\nname = "file"\npath = "{demo_file}"\n'
        '[[tasks]]\nname = "one"\ndata = "prompts.jsonl"\nmax_new_tokens = 16\n'
        '[[methods]]\nname = "plain"\ntransformers = {}\n'
        '[[methods]]\nname = "drafts"\nlookahead = { step_budget = 16 }\n'
    )
    results = tmp_path / "results.jsonl"
    assert main(["bench", "run", str(tmp_path / "suite.toml"), "--output", str(results)]) == 0
    runs = [row for row in map(json.loads, results.read_text().splitlines()) if "steps" in row]
    assert len(runs) == 2
    assert runs[1]["steps"] < runs[0]["steps"]


def test_the_server_answers_requests_side_by_side(demo_file: str, expected: str) -> None:
    """Several concurrent requests, one with a grammar, through OpenAI's client."""
    openai = pytest.importorskip("openai")
    with ServerProcess("--model", demo_file, "--name", "file", "--max-rows", "4", "--step-budget", "24") as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=600)

        def complete(_: int) -> str:
            return client.completions.create(model="file", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(complete, range(6))) == [expected] * 6
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        answer = client.chat.completions.create(
            model="file",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=60,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        )
        assert isinstance(json.loads(answer.choices[0].message.content)["a"], int)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", PROMPT, "--dtype", "bfloat16"], "--dtype bfloat16 .* GGUF"),
        (["generate", PROMPT, "--parallel", "2"], "--parallel 2 .* GGUF"),
        (["generate", PROMPT, "--pack-weights"], "--pack-weights .* GGUF"),
        (["generate", PROMPT, "--invariant"], "--invariant .* GGUF"),
        (["tune", "--no-store"], "tune measures transformers models only"),
        (["chat"], "no chat template"),
        (["serve", "--dtype", "bfloat16", "--port", "0"], "--dtype bfloat16 .* GGUF"),
        (["serve", "--pack-weights", "--port", "0"], "--pack-weights .* GGUF"),
    ],
)
def test_options_for_transformers_models_are_refused(
    capsys: pytest.CaptureFixture[str], demo_file: str, arguments: list[str], message: str
) -> None:
    assert main([*arguments, "--model", demo_file]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_a_broken_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(b"noise")
    assert main(["generate", PROMPT, "--model", str(tmp_path / "noise.gguf")]) == 2
    assert "cannot be loaded by llama.cpp" in capsys.readouterr().err
