"""Models of other kinds behind the server: LoRA adapters under names of their own, running states, images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import NotFoundError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead.cli import main
from lookahead.demo import demo_model_path
from server_process import ServerProcess

PROMPT = "def add(a, b):\n"


def continued(model: Any, prompt: str = PROMPT, tokens: int = 24, **options: Any) -> str:
    """What `model.generate` continues a prompt with."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        text = model.generate(**ids, max_new_tokens=tokens, do_sample=False, **options)[0, ids.input_ids.shape[1] :]
    return str(tokenizer.decode(text, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def connected(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)


@pytest.fixture(scope="module")
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)


def adapter(base: Any, path: Path, seed: int) -> Any:
    """The model with an adapter of random weights, which is saved."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(base), config)
    adapted.save_pretrained(path)
    return adapted


def test_adapters_are_models_beside_the_one_that_they_change(base: Any, tmp_path: Path) -> None:
    one, two = adapter(base, tmp_path / "one", 1), adapter(base, tmp_path / "two", 2)
    expected = {"demo": continued(base), "one": continued(one), "two": continued(two)}
    assert len(set(expected.values())) == 3, "adapters change the text"
    names = [f"--lora={name}={tmp_path / name}" for name in ("one", "two")]
    with ServerProcess("--dtype", "float32", *names) as server:
        client = connected(server)
        assert [model.id for model in client.models.list().data] == ["demo", "one", "two"]
        streams = {
            name: client.completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
            for name in expected
        }
        for name, stream in streams.items():
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected[name]
        for name in expected:  # again, so that drafts and kept keys and values come from what there was
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0)
            assert answer.choices[0].text == expected[name]
        with pytest.raises(NotFoundError, match="the models are 'demo', 'one', 'two'"):
            client.completions.create(model="three", prompt=PROMPT)


@pytest.mark.parametrize(
    ("given", "said"),
    [("one", "NAME=PATH"), ("one={folder}", "adapter_config.json"), ("demo={adapter}", "choose another")],
)
def test_adapters_that_cannot_be_are_refused(
    given: str, said: str, base: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter(base, tmp_path / "adapter", 1)
    given = given.format(folder=tmp_path, adapter=tmp_path / "adapter")
    assert main(["serve", "--port", "0", "--lora", given]) == 2
    assert said in capsys.readouterr().err
