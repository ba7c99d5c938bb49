"""The command line with a folder of mlx-lm as the model."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lookahead.cli import main
from lookahead.demo import demo_model_path
from server_process import ServerProcess
from standard_input import StandardInput

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed; `make test-mlx` installs it")

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_sampler

pytestmark = pytest.mark.usefixtures("compiled_loops")

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model in float32, converted by mlx-lm."""
    path = tmp_path_factory.mktemp("demo") / "demo"
    mlx_lm.convert(str(demo_model_path()), str(path), dtype="float32")
    return str(path)


@pytest.fixture(scope="module")
def expected(folder: str) -> str:
    model, tokenizer = mlx_lm.load(folder)
    return mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=24)


def sampled(folder: str, seed: int, **settings: float) -> str:
    """The text of mlx-lm at temperature 0.8. Its detokenizer drops a space at the beginning."""
    model, tokenizer = mlx_lm.load(folder)
    mx.random.seed(seed)
    options: dict[str, Any] = {"max_tokens": 24, "sampler": make_sampler(0.8, **settings)}
    return tokenizer.decode([answer.token for answer in mlx_lm.stream_generate(model, tokenizer, PROMPT, **options)])


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_and_compare_give_the_text_of_mlx_lm(
    capsys: pytest.CaptureFixture[str], folder: str, expected: str
) -> None:
    result = report(capsys, "generate", PROMPT, "-n", "24", "--model", folder)
    assert (result["text"], result["model"], result["dtype"]) == (expected, folder, "float32")
    options = ["-n", "24", "--repeats", "1", "--model", folder, "--step-budget", "16"]
    result = report(capsys, "compare", PROMPT, *options)
    assert result["identical"]
    assert result["plain"]["text"] == expected
    assert result["plain"]["steps"] > result["lookahead"]["steps"]


def test_samples_of_commands_are_those_of_mlx_lm(
    capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path
) -> None:
    expected = sampled(folder, 7, top_p=0.9)
    options = ["-n", "24", "--model", folder, "--step-budget", "8", "--sample", "--temperature", "0.8"]
    options += ["--top-p", "0.9", "--top-k", "0", "--sampling-seed", "7"]
    assert report(capsys, "generate", PROMPT, *options)["text"] == expected
    result = report(capsys, "compare", PROMPT, "--repeats", "2", *options)
    assert result["identical"]
    assert result["plain"]["text"] == expected
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"id": f"{n}", "prompt": PROMPT}) + "\n" for n in "ab"))
    assert main(["batch", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers.jsonl"), *options]) == 0
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in answers] == [expected] * 2


def test_chat_batch_and_trace(
    capsys: pytest.CaptureFixture[str], stdin: StandardInput, folder: str, expected: str, tmp_path: Path
) -> None:
    stdin.lines(PROMPT, "    y = 1")
    assert main(["chat", "--raw", "-n", "24", "--model", folder, "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert turns[0]["text"] == expected
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"id": f"{n}", "prompt": PROMPT}) + "\n" for n in "ab"))
    arguments = ["batch", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "answers.jsonl"), "-n", "24"]
    assert report(capsys, *arguments, "--model", folder)["answered"] == 2
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in answers] == [expected] * 2
    arguments = ["trace", PROMPT, "-n", "12", "--step-budget", "8", "--output", str(tmp_path / "page.html")]
    assert main([*arguments, "--model", folder]) == 0
    assert "<html" in (tmp_path / "page.html").read_text()[:200]


def test_the_server_answers_requests_side_by_side(folder: str, expected: str) -> None:
    openai = pytest.importorskip("openai")
    with ServerProcess("--model", folder, "--name", "mlx", "--max-rows", "4", "--step-budget", "8") as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=600)

        def complete(_: int) -> str:
            return client.completions.create(model="mlx", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(complete, range(4))) == [expected] * 4

        def sample(seed: int) -> str:
            settings = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": seed}
            return client.completions.create(model="mlx", prompt=PROMPT, **settings).choices[0].text

        seeds = [5, 6, 5, 6]
        texts = {seed: sampled(folder, seed, top_p=0.9) for seed in (5, 6)}
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(sample, seeds)) == [texts[seed] for seed in seeds]
        with pytest.raises(openai.BadRequestError, match="echo"):
            client.completions.create(model="mlx", prompt=PROMPT, max_tokens=1, echo=True, logprobs=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", PROMPT, "--dtype", "bfloat16"], "--dtype bfloat16 .* MLX"),
        (["generate", PROMPT, "--device", "cpu"], "--device cpu .* MLX"),
        (["generate", PROMPT, "--gpu-layers", "1"], "--gpu-layers 1 .* GGUF"),
        (["generate", PROMPT, "--parallel", "2"], "--parallel 2 .* MLX"),
        (["generate", PROMPT, "--pack-weights"], "--pack-weights .* MLX"),
        (["tune", "--no-store"], "tune measures transformers models only"),
    ],
)
def test_options_for_transformers_models_are_refused(
    capsys: pytest.CaptureFixture[str], folder: str, arguments: list[str], message: str
) -> None:
    assert main([*arguments, "--model", folder]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
