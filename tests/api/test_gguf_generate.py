"""GGUF models through `lookahead.generate`: the texts of transformers in float32, and of plain llama.cpp."""

import gc
import weakref
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteriaList, TextIteratorStreamer

import lookahead
from gguf_files import REASON, tool, zoo_file
from lookahead import InvalidArgumentError, LookaheadConfig, UnsupportedArgumentError, UnsupportedModelError
from lookahead.demo import DEMO_PROMPT, demo_model_path
from model_zoo import build

PRESETS = [
    LookaheadConfig(),
    LookaheadConfig(step_budget=24),
    LookaheadConfig(preset="paper"),
    LookaheadConfig(preset="paper", window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True),
    LookaheadConfig(preset="jacobi"),
    LookaheadConfig(preset="token_recycling"),
    LookaheadConfig(preset="suffix_decoding"),
    LookaheadConfig(preset="racer"),
    LookaheadConfig(preset="context_matches"),
    LookaheadConfig(preset="autoregressive"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The zoo's Llama in a GGUF file."""
    pytest.importorskip("llama_cpp", reason=REASON)
    loaded = lookahead.load_gguf(zoo_file(tmp_path_factory.mktemp("zoo")))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(loaded.generation_config, token, None)  # as in the zoo
    return loaded


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    tool().convert(demo_model_path(), path)
    return path


@pytest.mark.parametrize("config", PRESETS, ids=lambda config: f"{config.preset}-{config.max_nodes}")
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 1.3, "top_k": 20}], ids=["greedy", "sampled"]
)
def test_texts_equal_transformers(
    model: Any, prompt: torch.Tensor, config: LookaheadConfig, sampling: dict[str, Any]
) -> None:
    options, reference = {"max_new_tokens": 60, "do_sample": False} | sampling, build("llama")
    torch.manual_seed(3)
    expected = reference.generate(prompt, **options)
    torch.manual_seed(3)
    plain = model.generate(prompt, **options)
    torch.manual_seed(3)
    output = lookahead.generate(model, prompt, lookahead_config=config, return_dict_in_generate=True, **options)
    assert plain.tolist() == expected.tolist()
    assert output.sequences.tolist() == expected.tolist()
    assert output.statistics.tokens == 60
    if config.preset == "auto" and config.step_budget and not sampling:
        assert output.statistics.step_compression > 1.2


@pytest.mark.parametrize("rows", [2, 5])
def test_rows_of_different_lengths(model: Any, rows: int) -> None:
    draws = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, 72, (rows, 14), generator=draws)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    options |= {"eos_token_id": 7, "pad_token_id": 0}
    expected = build("llama").generate(ids, **options)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    for config in (
        LookaheadConfig(preset="autoregressive"),
        LookaheadConfig(step_budget=60),
        LookaheadConfig(preset="paper", window_size=5, ngram_size=3),
    ):
        assert lookahead.generate(model, ids, lookahead_config=config, **options).tolist() == expected.tolist()


def test_processors_and_collected_scores(model: Any, prompt: torch.Tensor) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "repetition_penalty": 1.4}
    options |= {"no_repeat_ngram_size": 3, "output_scores": True, "return_dict_in_generate": True}
    expected = build("llama").generate(prompt, **options)
    output = lookahead.generate(model, prompt, lookahead_config=LookaheadConfig(step_budget=16), **options)
    assert output.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.cat(output.scores), torch.cat(expected.scores), atol=1e-3, rtol=1e-3)


def test_calls_in_threads(model: Any) -> None:
    prompts = [torch.randint(1, 72, (1, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [build("llama").generate(ids, max_new_tokens=40, do_sample=False).tolist() for ids in prompts]
    outputs: dict[int, Any] = {}

    def run(number: int) -> None:
        outputs[number] = lookahead.generate(model, prompts[number], max_new_tokens=40, do_sample=False).tolist()

    threads = [Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outputs[number] for number in range(4)] == expected


def test_memory_of_a_process_and_of_a_file(model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    for memory in ("process", tmp_path / "memory.npz"):
        config = LookaheadConfig(memory=memory, step_budget=16)
        runs = [
            lookahead.generate(
                model, prompt, lookahead_config=config, max_new_tokens=40, do_sample=False, return_dict_in_generate=True
            )
            for _ in range(2)
        ]
        assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
        assert runs[1].statistics.steps < runs[0].statistics.steps
    assert (tmp_path / "memory.npz").exists()


def test_text_in_and_text_out(demo_file: Path, demo: tuple[PreTrainedModel, Any]) -> None:
    """The file's tokenizer, stop strings, a streamer, and an attached model."""
    reference, tokenizer = demo
    model = lookahead.load_gguf(demo_file)
    inputs = model.tokenizer(DEMO_PROMPT, return_tensors="pt")
    assert inputs.input_ids.tolist() == tokenizer(DEMO_PROMPT, return_tensors="pt").input_ids.tolist()
    options: dict[str, Any] = {"max_new_tokens": 80, "do_sample": False, "stop_strings": ["def"]}
    expected = reference.generate(**inputs, tokenizer=tokenizer, **options)
    assert lookahead.generate(model, **inputs, tokenizer=model.tokenizer, **options).tolist() == expected.tolist()
    lookahead.attach(model)
    streamer = TextIteratorStreamer(model.tokenizer, skip_prompt=True)
    model.generate(**inputs, streamer=streamer, tokenizer=model.tokenizer, **options)
    new = expected[0, inputs.input_ids.shape[1] :]
    assert "".join(streamer) == tokenizer.decode(new) == model.tokenizer.decode(new)


def test_plain_text_is_that_of_the_binding(demo_file: Path) -> None:
    import llama_cpp

    model = lookahead.load_gguf(demo_file)
    ids = model.tokenizer(DEMO_PROMPT, return_tensors="pt").input_ids
    plain = llama_cpp.Llama(str(demo_file), n_ctx=512, n_threads=1, verbose=False)
    stream = plain.generate(ids[0].tolist(), temp=0.0, top_k=1, repeat_penalty=1.0)
    expected = [next(stream) for _ in range(60)]
    text = lookahead.generate(model, ids, max_new_tokens=60, do_sample=False, eos_token_id=-1)
    assert text[0, ids.shape[1] :].tolist() == expected


def test_a_fast_cache_gives_a_text(demo_file: Path) -> None:
    model = lookahead.load_gguf(demo_file, fast_kv=True)
    ids = model.tokenizer(DEMO_PROMPT, return_tensors="pt").input_ids
    assert lookahead.generate(model, ids, max_new_tokens=30, do_sample=False).shape[1] > ids.shape[1]


def test_nothing_is_left_of_a_model_that_is_gone(demo_file: Path) -> None:
    model = lookahead.load_gguf(demo_file)
    ids = model.tokenizer("def f(", return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=3, do_sample=False)
    lookahead.generate(model, ids, max_new_tokens=3, do_sample=False)
    gone = weakref.ref(model.llama.owner)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lookahead_config": LookaheadConfig(engine="static")}, InvalidArgumentError, "engine='static'"),
        ({"lookahead_config": LookaheadConfig(pack_weights=True)}, InvalidArgumentError, "pack_weights"),
        ({"num_beams": 2}, UnsupportedArgumentError, "num_beams"),
    ],
)
def test_unsupported_arguments_are_refused(
    model: Any, prompt: torch.Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lookahead.generate(model, prompt, max_new_tokens=8, **options)


def test_a_cache_is_refused(model: Any, prompt: torch.Tensor) -> None:
    cache = build("llama")(prompt[:, :4], use_cache=True).past_key_values
    with pytest.raises(UnsupportedArgumentError, match="cache|past_key_values"):
        lookahead.generate(model, prompt, past_key_values=cache, max_new_tokens=4)


def test_a_failed_call_leaves_nothing_behind(model: Any, prompt: torch.Tensor) -> None:
    class Failing:
        def __call__(self, *_: Any) -> Any:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        lookahead.generate(model, prompt, stopping_criteria=StoppingCriteriaList([Failing()]), max_new_tokens=9)
    expected = build("llama").generate(prompt, max_new_tokens=9, do_sample=False)
    assert lookahead.generate(model, prompt, max_new_tokens=9, do_sample=False).tolist() == expected.tolist()


def test_files_that_are_no_models(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason=REASON)
    with pytest.raises(InvalidArgumentError, match="is no file"):
        lookahead.load_gguf(tmp_path / "nothing.gguf")
    (tmp_path / "noise.gguf").write_bytes(b"noise" * 100)
    with pytest.raises(InvalidArgumentError, match=r"noise\.gguf.*cannot be loaded by llama\.cpp: .*"):
        lookahead.load_gguf(tmp_path / "noise.gguf")
    with pytest.raises(InvalidArgumentError, match="n_threads=0"):
        lookahead.load_gguf(tmp_path / "noise.gguf", n_threads=0)


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="is about machines without llama-cpp-python")
def test_a_missing_binding_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"pip install '\.\[gguf\]'"):
        lookahead.load_gguf(tmp_path / "any.gguf")


@pytest.mark.parametrize("where", ["model", "process", "forward"])
def test_code_around_the_forward_pass_is_refused(model: Any, prompt: torch.Tensor, where: str) -> None:
    """transformers runs such code in each pass; llama.cpp does not."""

    def double(module: Any, inputs: Any, output: Any) -> Any:
        output.logits = -output.logits
        return output

    options = {"max_new_tokens": 8, "do_sample": False}
    engine = lookahead.Engine(model)
    text = lookahead.generate(model, prompt, **options)
    if where == "forward":
        plain = model.forward
        model.forward = lambda *args, **kwargs: double(None, None, plain(*args, **kwargs))
        undo = partial(delattr, model, "forward")
    else:
        register = torch.nn.modules.module.register_module_forward_hook
        undo = (model.register_forward_hook(double) if where == "model" else register(double)).remove
    try:
        assert not torch.equal(model.generate(prompt, **options), text)
        with pytest.raises(UnsupportedModelError, match="forward"):
            lookahead.generate(model, prompt, **options)
        handle = engine.submit(prompt, **options)
        with pytest.raises(UnsupportedModelError, match="forward"):
            engine.run()
        with pytest.raises(UnsupportedModelError, match="forward"):
            handle.result()
    finally:
        undo()
    assert torch.equal(lookahead.generate(model, prompt, **options), text)
    assert torch.equal(engine.submit(prompt, **options).result(), text)
