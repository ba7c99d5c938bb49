"""The demo model's training tool, with a model and sources that train in seconds."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lookahead.bench.summary import MIN_REPEATED

TOOLS = Path(__file__).parents[2] / "tools"
STEPS = 8


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The command's module; pytest has tools/ on the path."""
    return importlib.import_module("train_demo_model")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for number, noun in enumerate(["apple", "bridge", "candle", "door", "engine", "forest"]):
        lines = [
            f"def count_{noun}_{index}(values):\n    return len(values) + {index * number}\n" for index in range(12)
        ]
        (root / f"{noun}.py").write_text("\n".join(lines))
    return root


@pytest.fixture
def train(tool: ModuleType, sources: Path, tmp_path: Path) -> Callable[..., int]:
    def run(output: str = "model", **options: Any) -> int:
        values = {
            "source": sources,
            "output": tmp_path / output,
            "tokens": STEPS * 64,
            "batch_tokens": 64,
            "sequence_length": 16,
            "max_positions": 64,
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "layers": 2,
            "heads": 2,
            "validation_percent": 20,
            "validation_tokens": 64,
            "dtype": "float32",
            "save_dtype": "float32",
            "device": "cpu",
        } | options
        arguments = ["--no-resume"] if values.pop("fresh", False) else []
        for name, value in values.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        return int(tool.main(arguments))

    return run


@contextmanager
def ctrl_c_in_step(number: int) -> Iterator[None]:
    """Press Ctrl-C in a step, counted from 1."""
    steps: list[int] = []

    def count(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, LlamaForCausalLM) and module.training:
            steps.append(1)
            if len(steps) == number:
                signal.raise_signal(signal.SIGINT)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    yield
    hook.remove()


def test_trains_a_model_that_transformers_loads(train: Callable[..., int], tmp_path: Path) -> None:
    assert train(tokens=40 * 64, save_dtype="bfloat16") == 0
    record = json.loads((tmp_path / "model" / "training.json").read_text())
    losses = [entry["eval_loss"] for entry in record["losses"] if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 1
    assert record["tokens_seen"] == 40 * 64
    assert record["data"]["files"] == 6
    assert str(tmp_path) not in json.dumps(record)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == record["parameters"]
    text = "def count_apple(values):\n    return '☃'"
    inputs = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0]) == text
    output = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert output.shape[1] == inputs["input_ids"].shape[1] + 5
    assert not any(path.is_dir() for path in (tmp_path / "model").iterdir())


def test_going_on_from_a_model_keeps_its_vocabulary_and_lowers_its_loss(
    train: Callable[..., int], tmp_path: Path
) -> None:
    assert train("first", tokens=40 * 64) == 0
    gentle = {"muon_lr": 0.002, "adamw_lr": 0.0003, "own_text_weight": 1, "own_text_rows": 2, "own_text_tokens": 20}
    assert train("second", start_from=str(tmp_path / "first"), **gentle) == 0
    first, second = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("first", "second"))
    ends = [max(row["eval_loss"] for row in record["losses"][-2:] if "eval_loss" in row) for record in (first, second)]
    assert ends[1] < ends[0]
    assert second["settings"]["start_from"] == "first"
    assert str(tmp_path) not in json.dumps(second)
    vocabularies = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second")]
    assert vocabularies[0] == vocabularies[1]


def test_the_loss_on_own_text_makes_repetition_less_likely(tool: ModuleType) -> None:
    own_text = importlib.import_module("demo_training.own_text")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape))
    windows = torch.randint(1, 50, (8, 12))
    text, prompt_length = own_text.own_text(model, windows, 40, np.random.default_rng(0))
    assert torch.equal(text[:, :prompt_length], windows)
    part, length = own_text.own_text(model, torch.randint(1, 50, (2, 300)), 1, np.random.default_rng(0))
    assert part.shape[1] == length + 1 <= 97
    assert model.training
    repeats = own_text.in_repeated_cycle(text)

    @torch.no_grad()
    def probabilities() -> list[float]:
        """Return the probability of each repeated token, from a pass over only the text before it."""
        rows, places = (repeats & (torch.arange(text.shape[1]) >= prompt_length)).nonzero(as_tuple=True)
        return [
            float(model(text[row : row + 1, :place]).logits[0, -1].softmax(-1)[text[row, place]])
            for row, place in zip(rows.tolist(), places.tolist(), strict=True)
        ]

    before = probabilities()
    assert len(before) > 40
    loss = own_text.own_text_loss(model, text, prompt_length)
    assert loss.item() == pytest.approx(-sum(math.log(1 - p) for p in before) / (8 * 40), rel=1e-3)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert sum(probabilities()) < sum(before)


def test_going_on_needs_a_model_of_the_same_shape(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("first") == 0
    capsys.readouterr()
    assert train("second", start_from=str(tmp_path / "first"), layers=3) == 2
    assert "--layers 3 is not that of --start-from" in capsys.readouterr().err
    assert train("third", start_from=str(tmp_path / "no-model")) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("length", [7, 24, 60])
def test_cycles_equal_a_search_by_hand(tool: ModuleType, length: int) -> None:
    own_text = importlib.import_module("demo_training.own_text")
    torch.manual_seed(length)
    text = torch.randint(0, 2, (40, length))
    expected = torch.zeros_like(text, dtype=torch.bool)
    for row, tokens in enumerate(text.tolist()):
        for period in range(1, length // 2 + 1):
            need = max(period, MIN_REPEATED)
            for start in range(period, length - need + 1):
                if all(tokens[place] == tokens[place - period] for place in range(start, start + need)):
                    expected[row, start : start + need] = True
    assert torch.equal(own_text.in_repeated_cycle(text), expected)
    assert expected.any() or length == 7


@pytest.mark.parametrize(("dtype", "optimizer"), [("float32", "muon"), ("bfloat16", "adamw")])
def test_a_stopped_run_continues_exactly(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, optimizer: str
) -> None:
    recipe = {"dtype": dtype, "optimizer": optimizer, "own_text_tokens": 20, "own_text_rows": 2}
    if dtype == "float32":
        recipe |= {"own_text_weight": 0.5, "own_text_steps": 2}
    assert train("straight", **recipe) == 0
    with ctrl_c_in_step(3):
        assert train("stopped", **recipe) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert train("stopped", **recipe) == 0

    straight = load_file(tmp_path / "straight" / "model.safetensors")
    stopped = load_file(tmp_path / "stopped" / "model.safetensors")
    assert straight.keys() == stopped.keys()
    for name, weight in straight.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, stopped[name]), name
    records = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("straight", "stopped")]
    assert records[0]["losses"] == records[1]["losses"]


def test_ctrl_c_handlers_are_given_back(train: Callable[..., int]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert train() == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_other_settings_refuse_to_resume(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ctrl_c_in_step(2):
        assert train() == 130
    assert train(muon_lr=0.01, seed=3) == 2
    message = capsys.readouterr().err
    assert "--muon-lr 0.01 (was 0.02)" in message
    assert "--seed 3 (was 0)" in message
    assert "--no-resume" in message
    assert "layers" not in message

    assert train(muon_lr=0.01, seed=3, fresh=True) == 0
    assert json.loads((tmp_path / "model" / "training.json").read_text())["settings"]["seed"] == 3
    assert train(muon_lr=0.01, seed=3) == 2
    assert "already holds a finished model" in capsys.readouterr().err


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_something_else_is_left_alone(
    train: Callable[..., int], tmp_path: Path, fresh: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    assert train(fresh=fresh) == 2
    assert "holds files that are no model of this tool" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_resuming_outlives_a_change_of_the_sources(train: Callable[..., int], tmp_path: Path) -> None:
    source = tmp_path / "changing"
    source.mkdir()
    for name in ("one", "two"):
        (source / f"{name}.py").write_text("".join(f"{name}_{index} = {index}\n" for index in range(80)))
    with ctrl_c_in_step(2):
        assert train(source=source) == 130
    (source / "three.py").write_text("three = 3\n")
    assert train(source=source) == 0
    assert json.loads((tmp_path / "model" / "training.json").read_text())["data"]["files"] == 2


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"source": "/no/such/folder"}, ["--source /no/such/folder", "is no folder"]),
        ({"batch_tokens": 50}, ["--batch-tokens 50", "multiple of --sequence-length 16"]),
        ({"hidden_size": 34}, ["--hidden-size 34", "--heads 2"]),
        ({"layers": 0}, ["--layers 0", "at least 1"]),
        ({"muon_lr": "nan"}, ["--muon-lr nan", "above 0"]),
        ({"own_text_weight": -1}, ["--own-text-weight -1", "at least 0"]),
        ({"own_text_rows": 0}, ["--own-text-rows 0", "at least 1"]),
        ({"decay_from": 1}, ["--decay-from 1.0", "below 1"]),
        ({"max_positions": 8}, ["--max-positions 8", "--sequence-length 16"]),
        ({"validation_percent": 100}, ["--validation-percent 100", "between 0 and 100"]),
        ({"vocab_size": 4096}, ["--vocab-size 4096", "more than the source files yield"]),
        ({"max_mb_per_package": 0.000001}, ["holds 0 usable Python files", "--max-mb-per-package"]),
    ],
)
def test_errors_name_the_option_and_the_remedy(
    train: Callable[..., int], options: dict[str, Any], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(**options) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    for part in parts:
        assert part in message


def test_the_corpus_leaves_out_tests_copies_and_excess(tool: ModuleType, tmp_path: Path) -> None:
    find_corpus = importlib.import_module("demo_training.tokens").find_corpus
    files = {
        "big/a.py": "a = 1\n" * 100,
        "big/b.py": "b = 1\n" * 100,
        "big/sub/tests/helper.py": "left_out = 1\n",
        "big/test_a.py": "left_out = 2\n",
        "big/empty.py": "\n",
        "copies/one.py": "same = 1\n",
        "copies/two.py": "same = 1\n",
        "single.py": "single = 1\n",
        "data.txt": "no Python\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")

    def names(seed: int) -> list[str]:
        training, validation = find_corpus(tool.TrainingSettings([str(tmp_path)], max_mb_per_package=0.001, seed=seed))
        assert training
        assert validation
        return [file.name for file in validation + training]

    packages = sorted(name.partition(":")[0] for name in names(0))
    assert packages == ["big", "copies", "single"]
    assert names(0) == names(0)
    assert len({tuple(names(seed)) for seed in range(8)}) > 1
