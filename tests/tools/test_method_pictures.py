"""The pictures of the method show real steps."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from word_model import save_word_model

pictures = importlib.import_module("method_pictures")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of forty words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_word_model(folder, max_position_embeddings=256)
    return folder


def test_pictures_show_steps_as_they_were(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompt = [1, 2, 3, 4, 1, 2]
    steps = pictures.watch(model, prompt, 100)
    plain = model.generate(torch.tensor([prompt]), max_new_tokens=100, do_sample=False)[0, len(prompt) :].tolist()
    assert [token for step in steps for token in step.result.tokens] == plain

    step = pictures.choose_step(steps)
    assert tuple(step.tree.tokens[node] for node in step.path) in {guess[: len(step.path)] for guess in step.guesses}
    places = pictures.tree_places(step)
    assert len(places) == len(step.tree) - step.tree.root
    assert len(set(places.values())) == len(places), "no two nodes in one place"

    life = pictures.choose_life(steps)
    n = pictures.NGRAM_SIZE
    for index, token in enumerate(life.tokens):
        assert steps[life.found - n + 1 + index].new_row[life.column] == token, "one token a step, in one column"
    assert life.tokens in steps[life.found].ngrams
    assert life.tokens[0] == steps[life.accepted].root
    assert life.tokens[1:] in steps[life.accepted].guesses
    assert life.found < life.accepted < life.found - n + 1 + pictures.SHOWN_STEPS

    assert pictures.main([str(tmp_path / "images"), "--model", str(model_folder), "--prompt", "w1 w2 w3 w4 w1 w2"]) == 0
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert names == ["method-mask.png", "method-tree.png", "method-window.png"]


def test_text_without_accepted_candidates_is_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "--model", str(model_folder), "--prompt", "w1", "--tokens", "2"]
    assert pictures.main(arguments) == 1
    assert "choose another --prompt" in " ".join(capsys.readouterr().err.split())
