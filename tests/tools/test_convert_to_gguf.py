"""The converter: tokens and logits equal the checkpoint's, in every number type."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lookahead
from gguf_files import REASON, tool
from lookahead.demo import DEMO_PROMPT, demo_model_path

pytest.importorskip("llama_cpp", reason=REASON)

SHARED = Path(__file__).parents[3] / "shared"
TEXTS = [
    DEMO_PROMPT,
    "  two spaces, a tab\t, Ünïcödé 中文 🙂, numbers 1234567 and 3.14, we'll it's I'M  ",
    "<|endoftext|>between<|endoftext|>",
    "\n\n    \n\tdef f(x):\n        return x ** 2  # done\n",
    "x",
]


def rounded(values: torch.Tensor, block: int) -> torch.Tensor:
    """Round to eight bits, with a scale for each block of `block` values, or of 32 if rows are no multiple of it."""
    blocks = values.unflatten(-1, (-1, 32 if values.shape[-1] % block else block))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return ((blocks / scale).round() * scale).flatten(-2)


ROUNDED_INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "f32": lambda values: values,
    "f16": lambda values: values.half().float(),
    "q8_0": partial(rounded, block=32),
    "q4_k_m": partial(rounded, block=256),
}
"""Rounding of a product's inputs in llama.cpp, for each type of weights, on any processor."""


@contextmanager
def inputs_rounded(model: PreTrainedModel, kind: str) -> Iterator[None]:
    """Make all linear layers round their inputs."""
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    change = ROUNDED_INPUTS[kind]
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]),)) for layer in layers]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("kind", "weight_error"), [("f32", 0), ("f16", 5e-4), ("q8_0", 0.01), ("q4_k_m", 0.1)])
def test_logits_of_the_demo_model(
    kind: str, weight_error: float, tmp_path: Path, demo: tuple[PreTrainedModel, Any]
) -> None:
    """Logits match transformers with the file's weights, within the error of rounded inputs.

    The processor decides which inputs are rounded up or down, but hardly changes the size of the error.
    """
    original, tokenizer = demo
    tool().convert(demo_model_path(), tmp_path / "demo.gguf", kind)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="demo.gguf", dtype=torch.float32).eval()
    for (name, weight), stored in zip(original.named_parameters(), reference.parameters(), strict=True):
        assert (stored - weight).norm() <= weight_error * weight.norm(), name
    model = lookahead.load_gguf(tmp_path / "demo.gguf")
    logits, differences, of_rounding = [], [], []
    for text in TEXTS:
        ids = model.tokenizer(text, return_tensors="pt").input_ids
        assert ids.tolist() == tokenizer(text, return_tensors="pt").input_ids.tolist()
        assert model.tokenizer.decode(ids[0]) == tokenizer.decode(ids[0]) == text
        assert model.tokenizer.decode(ids[0], skip_special_tokens=True) == text.replace("<|endoftext|>", "")
        logits.append(reference(ids).logits[:, -1])
        with inputs_rounded(reference, kind):
            of_rounding.append(reference(ids).logits[:, -1] - logits[-1])
        differences.append(model(ids).logits[:, -1] - logits[-1])
    allowed = 2 * torch.cat(of_rounding).norm() + 1e-5 * torch.cat(logits).norm()
    assert torch.cat(differences).norm() <= allowed


def test_the_story_model_and_all_prompts(tmp_path: Path) -> None:
    """A model with byte fallback, a BOS token, and fewer key-value heads than query heads."""
    if not SHARED.exists():
        pytest.skip("the story model is not here")
    folder = SHARED / "models" / "stories260k"
    tool().convert(folder, tmp_path / "stories.gguf")
    model = lookahead.load_gguf(tmp_path / "stories.gguf")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for path in (SHARED / "data").glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            text = json.loads(line).get("prompt")
            if text is not None:
                assert model.tokenizer(text).input_ids == tokenizer(text).input_ids
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    torch.testing.assert_close(model(ids).logits[:, -1], reference(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_a_chat_template(tmp_path: Path) -> None:
    shutil.copytree(demo_model_path(), tmp_path / "chat", ignore=shutil.ignore_patterns("*.py*"))
    template = "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    tool().convert(tmp_path / "chat", tmp_path / "chat.gguf", "q8_0")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat", local_files_only=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello,  you?"}]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True}
    expected = tokenizer.apply_chat_template(messages, **options).input_ids
    model = lookahead.load_gguf(tmp_path / "chat.gguf")
    assert model.tokenizer.apply_chat_template(messages, **options).input_ids == expected


@pytest.mark.parametrize("kind", ["f32", "q4_k_m"])
def test_nothing_is_printed(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [str(demo_model_path()), str(tmp_path / "demo.gguf"), "--type", kind]
    assert tool().main(arguments) == 0
    assert capfd.readouterr() == ("", "")


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(tool().ConversionError, match="gpt2"):
        tool().convert(tmp_path, tmp_path / "out.gguf")
    assert tool().main([str(tmp_path), str(tmp_path / "out.gguf")]) == tool().EXIT_REFUSED


def test_a_file_that_is_no_gguf_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ValueError, match="is no GGUF file, and was left as it is"):
        tool().convert(demo_model_path(), path)
    assert path.read_text() == "mine"
