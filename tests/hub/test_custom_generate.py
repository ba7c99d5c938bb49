"""The folder `hub/` as a repository for transformers: texts equal `model.generate`; streamers, stop strings."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TextIteratorStreamer, dynamic_module_utils

from lookahead import LookaheadConfig
from lookahead.demo import demo_model_path

HUB = Path(__file__).resolve().parents[2] / "hub"
PROMPT = "def add(a, b):"


@pytest.fixture
def setting(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Model, tokenizer, prompt and arguments; transformers copies modules to a temporary folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    model, tokenizer = demo
    arguments = {**tokenizer(PROMPT, return_tensors="pt"), "max_new_tokens": 24, "pad_token_id": 0}
    return model, tokenizer, arguments, {"custom_generate": str(HUB), "trust_remote_code": True}


@pytest.mark.parametrize("sampled", [False, True])
def test_texts_equal_generate(setting: Any, sampled: bool) -> None:
    model, _, arguments, custom = setting
    steps: list[Any] = []
    torch.manual_seed(1)
    expected = model.generate(**arguments, do_sample=sampled)
    for config in (None, {"step_budget": 8}, LookaheadConfig(preset="paper")):
        torch.manual_seed(1)
        output = model.generate(**arguments, do_sample=sampled, **custom, lookahead_config=config, on_step=steps.append)
        assert torch.equal(output, expected)
    assert steps, "transformers decoded by itself"


def test_streamers_and_stop_strings_reach_it(setting: Any) -> None:
    model, tokenizer, arguments, custom = setting
    plain = model.generate(**arguments, do_sample=False)
    stop = {"stop_strings": [tokenizer.decode(plain[0, -8:-5])], "tokenizer": tokenizer}
    expected = model.generate(**arguments, do_sample=False, **stop)
    streamer = TextIteratorStreamer(tokenizer, timeout=60, skip_prompt=True)
    options = {"do_sample": False, "streamer": streamer, **stop}
    outputs: list[Any] = []
    thread = Thread(target=lambda: outputs.append(model.generate(**arguments, **options, **custom)))
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert torch.equal(outputs[0], expected)
    assert expected.shape[1] < plain.shape[1]
    assert text == tokenizer.decode(expected[0, arguments["input_ids"].shape[1] :])


def test_a_models_own_repository_may_hold_it(setting: Any, tmp_path: Path) -> None:
    model, _, arguments, _ = setting
    path = tmp_path / "model"
    shutil.copytree(demo_model_path(), path)
    shutil.copytree(HUB / "custom_generate", path / "custom_generate")
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=model.dtype, trust_remote_code=True)
    steps: list[Any] = []
    rest = {name: value for name, value in arguments.items() if name != "input_ids"}
    output = loaded.generate(arguments["input_ids"], **rest, do_sample=False, on_step=steps.append)
    assert steps
    assert torch.equal(output, model.generate(**arguments, do_sample=False))
