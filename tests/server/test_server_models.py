"""Other kinds of models behind the server: named LoRA adapters, running states, images."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from lookahead.backends.transformers.miniature import VOCABULARY
from lookahead.cli import main
from lookahead.demo import demo_model_path
from server_process import ServerProcess
from tiny.families import build
from tiny.images import IMAGE_TOKEN, image_prompt
from tiny.variant import Variant

PROMPT = "def add(a, b):\n"


def continued(model: Any, prompt: str = PROMPT, tokens: int = 24, **options: Any) -> str:
    """Return the text of `model.generate` after a prompt."""
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
    """Return the model with an adapter of random weights, and save the adapter."""
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
        for name in expected:  # again, with drafts and a KV cache from the first round
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0)
            assert answer.choices[0].text == expected[name]
        with pytest.raises(NotFoundError, match="the models are 'demo', 'one', 'two'"):
            client.completions.create(model="three", prompt=PROMPT)


@pytest.mark.parametrize(
    ("adapter_argument", "message"),
    [("one", "NAME=PATH"), ("one={folder}", "adapter_config.json"), ("demo={adapter}", "choose another")],
)
def test_adapters_that_cannot_be_are_refused(
    adapter_argument: str, message: str, base: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter(base, tmp_path / "adapter", 1)
    adapter_argument = adapter_argument.format(folder=tmp_path, adapter=tmp_path / "adapter")
    assert main(["serve", "--port", "0", "--lora", adapter_argument]) == 2
    assert message in capsys.readouterr().err


def words(model: Any, path: Path, **more: Any) -> PreTrainedTokenizerFast:
    """Save a tiny model with a tokenizer of the words `w0`, `w1`, ..."""
    known = {f"w{token}": token for token in range(VOCABULARY) if token != IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(known | {"<image>": IMAGE_TOKEN}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["<image>"])
    model.save_pretrained(path)
    made.save_pretrained(path)
    return made


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_running_states_are_served_beside_one_another(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "states", build(family, Variant(window=12), "sdpa")
    tokenizer = words(model, path)
    prompts = [" ".join(f"w{token}" for token in range(first, first + 9)) for first in (5, 20, 35)]

    def alone(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        return str(tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True))

    expected = [alone(prompt) for prompt in prompts]
    with ServerProcess("--model", path) as server:
        client = connected(server)
        answers = [
            client.completions.create(model="states", prompt=prompt, max_tokens=16, temperature=0, stream=True)
            for prompt in prompts
        ]
        texts = ["".join(chunk.choices[0].text for chunk in answer if chunk.choices) for answer in answers]
        assert [text.strip() for text in texts] == expected
    lines = [json.dumps({"id": str(place), "prompt": prompt}) for place, prompt in enumerate(prompts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    command = ["batch", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "answers.jsonl"), "--model", str(path)]
    assert main([*command, "--max-new-tokens", "16"]) == 0, capsys.readouterr().err
    rows = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert {row["id"]: row["text"] for row in rows} == {str(place): text for place, text in enumerate(expected)}


TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for images of any size, with the words `w1`, `w2`, ..."""
    path, model = tmp_path_factory.mktemp("models") / "seeing", build("llava/multimodal", Variant(window=12), "sdpa")
    image_prompt(model, [[1]], 0)  # sets the image token of the configuration
    vision = model.config.vision_config
    size = vision.image_size
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}),
        tokenizer=words(model, path),
        patch_size=vision.patch_size,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(path)
    return path


def picture(seed: int, form: str = "PNG") -> bytes:
    pixels = numpy.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=numpy.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def as_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image_turn(url: str) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return [{"role": "user", "content": [{"type": "text", "text": "w5"}, image, {"type": "text", "text": "w6 w7 w6"}]}]


def seen(path: Path, data: bytes) -> str:
    """Return the text of `model.generate` for an image."""
    processor, model = AutoProcessor.from_pretrained(path), AutoModelForImageTextToText.from_pretrained(path)
    inputs = processor(text=["w5 <image> w6 w7 w6 "], images=[Image.open(BytesIO(data))], return_tensors="pt")
    text = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    decoded = processor.tokenizer.decode(text, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return f" {decoded}"  # the answer continues the prompt


class Pictures(BaseHTTPRequestHandler):
    """A host of images."""

    def do_GET(self) -> None:
        self.send_response({"/moved": 302, "/none": 404}.get(self.path, 200))
        self.send_header("Location", "/picture")
        self.end_headers()
        self.wfile.write(picture(1) if self.path == "/picture" else b"x" * 2**20)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def test_images_are_seen_as_transformers_sees_them(seeing: Path, host: str) -> None:
    expected = [seen(seeing, picture(seed)) for seed in (1, 2)]
    assert expected[0] != expected[1], "the model sees a difference"
    with ServerProcess("--model", seeing, "--image-host", host, "--max-image-bytes", "100000") as server:
        client = connected(server)

        def text_for(messages: Any, **options: Any) -> str:
            answer = client.chat.completions.create(
                model="seeing", messages=messages, max_tokens=16, temperature=0, **options
            )
            return str(answer.choices[0].message.content)

        for _ in range(2):
            assert [text_for(image_turn(as_url(picture(seed)))) for seed in (1, 2)] == expected
        assert text_for(image_turn(f"http://{host}/picture")) == expected[0]
        stream = client.chat.completions.create(
            model="seeing", messages=image_turn(as_url(picture(2))), max_tokens=16, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == expected[1]
        parts = [
            {"type": "input_text", "text": "w5"},
            {"type": "input_image", "image_url": as_url(picture(1)), "detail": "auto"},
            {"type": "input_text", "text": "w6 w7 w6"},
        ]
        items: Any = [{"role": "user", "content": parts}]
        response = client.responses.create(model="seeing", input=items, max_output_tokens=16, temperature=0)
        assert response.output_text == expected[0]
        assert text_for([{"role": "user", "content": "w5 w6"}]), "text alone is a prompt as well"
        for url, message in {
            "http://127.0.0.1:1/picture": "does not allow",
            f"http://{host}/moved": "status 302",
            f"http://{host}/none": "status 404",
            f"http://{host}/large": "more than 100000 bytes",
            f"file:///{host}/picture": "does not allow",
            "http://[": "cannot be read",
            "data:image/png;base64,%%%": "base64",
            as_url(b"no image"): "no image",
            as_url(picture(1, "TIFF")): "no image in PNG",
        }.items():
            with pytest.raises(BadRequestError, match=message):
                text_for(image_turn(url))
        with pytest.raises(BadRequestError, match="send at most 16"):
            text_for(image_turn(as_url(picture(1))) * 17)


def test_images_are_bounded_and_only_from_allowed_hosts(seeing: Path, host: str) -> None:
    allowed, port = host.split(":")
    large = BytesIO()
    Image.new("1", (2**13, 2**12)).save(large, "PNG")
    with ServerProcess("--model", seeing, "--image-host", allowed, "--max-rows", "1", "--queue", "1") as server:
        client = connected(server)
        padded = f"http://{allowed}".rjust(2048) + f":{port}/picture"
        picture_url = as_url(picture(1))
        for urls, message in (
            ([padded], "characters; send at most"),
            ([padded.strip()], "does not allow"),
            ([f"http://{allowed}@{host}/picture"], "does not allow"),
            ([f"HTTP://{host}/picture"], "does not allow"),
            ([as_url(large.getvalue())] * 3, "pixels in all"),
            ([f"data:image/png,{'%41' * 10}"], "no image"),
        ):
            pictures = [part for url in urls for part in image_turn(url)[0]["content"]]
            with pytest.raises(BadRequestError, match=message):
                client.chat.completions.create(model="seeing", messages=[{"role": "user", "content": pictures}])
        with pytest.raises(BadRequestError, match="3 answers are more than the 2"):
            client.chat.completions.create(model="seeing", messages=image_turn("http://host.of.nobody/"), n=3)  # type: ignore[arg-type]
        assert client.chat.completions.create(model="seeing", messages=image_turn(picture_url), max_tokens=1).choices  # type: ignore[arg-type]


def test_a_model_that_reads_text_alone_refuses_images(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="reads only text"):
        client.chat.completions.create(model="chatty", messages=image_turn(as_url(picture(1))))  # type: ignore[arg-type]
