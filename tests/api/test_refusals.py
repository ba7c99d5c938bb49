"""Impossible calls are refused before anything runs, by an error that names the reason."""

import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

import lookahead
from lookahead import InvalidArgumentError, LookaheadConfig, LookaheadError, UnsupportedModelError
from lookahead.config import PRESETS
from model_zoo import MAX_POSITIONS, build


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window_size": 0}, "window_size=0 .* at least 1"),
        ({"window_size": -3}, "window_size=-3"),
        ({"window_size": 2.5}, r"window_size=2\.5 must be a whole number"),
        ({"window_size": True}, "window_size=True"),
        ({"ngram_size": 1}, "ngram_size=1 .* at least 2"),
        ({"guess_set_size": 0}, "guess_set_size=0"),
        ({"guess_set_size": "15"}, "guess_set_size='15'"),
        ({"step_budget": 0}, "step_budget=0 .* at least 1"),
        ({"step_budget": 10_000}, "step_budget=10000.*smaller"),
        ({"memory": ""}, "memory='' must be"),
        ({"memory": None}, "memory=None must be"),
        ({"engine": "fast"}, "engine='fast'"),
        ({"pack_weights": 1}, "pack_weights=1"),
        ({"invariant": "yes"}, "invariant='yes'"),
        ({"window_size": 1000, "ngram_size": 10}, "window_size=1000.*smaller"),
        ({"preset": "fastest"}, "preset='fastest'.*paper"),
        ({"preset": "jacobi", "block_size": 0}, "block_size=0"),
        ({"preset": "jacobi", "block_size": 10_000}, "block_size=10000"),
        ({"max_iterations": 0}, "max_iterations=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"preset": "paper", "seed": None}, "seed=None must be a whole number"),
        ({"engine": None}, "engine=None"),
        ({"pool_from_prompt": 1}, "pool_from_prompt=1"),
        ({"pool_from_output": "no"}, "pool_from_output='no'"),
        *(
            ({name: 10**9}, f"{name}=1000000000 .* at most 409[56].*smaller")
            for name in ("step_budget", "window_size", "ngram_size", "guess_set_size", "block_size")
        ),
        ({"seed": np.float64(3)}, "seed=.*3.0.* whole number"),
        ({"window_size": np.bool_(True)}, "window_size=.*True.* whole number"),
        ({"memory": "proces"}, "memory='proces' is neither \"request\" nor \"process\".*'./proces'"),
        ({"memory": "Request"}, "memory='Request'"),
        ({"preset": "auto", "window_size": 3}, "window_size=3 .*'paper'.* 'auto'"),
        ({"preset": "paper", "step_budget": 9}, "step_budget=9 .*'auto' or .* 'paper'"),
        ({"preset": "jacobi", "pool_from_prompt": True}, "pool_from_prompt=True .*'paper'.* 'jacobi'"),
        ({"preset": "autoregressive", "block_size": 4}, "block_size=4 .*'jacobi'.* 'autoregressive'"),
        ({"preset": "auto", "max_iterations": 4}, "max_iterations=4 .*'jacobi'.* 'auto'"),
        ({"preset": "auto", "pool_from_output": False}, "pool_from_output=False .*'paper'.* 'auto'"),
        ({"preset": "token_recycling", "memory": "./file"}, "memory='./file' .*'auto'.* 'token_recycling'"),
        ({"seed": 3}, "seed=3 .*'paper' or 'jacobi'.* 'auto'"),
        ({"window_size": 3, "block_size": 4}, "block_size=4 .*'jacobi'.* 'paper'"),
    ],
)
def test_a_bad_configuration_is_refused_with_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LookaheadConfig(**values)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_numbers_are_accepted(kind: type) -> None:
    config = LookaheadConfig(window_size=kind(3), ngram_size=kind(4), guess_set_size=kind(5), seed=kind(6))
    assert config == LookaheadConfig(window_size=3, ngram_size=4, guess_set_size=5, seed=6)
    assert {type(getattr(config, name)) for name in ("window_size", "ngram_size", "guess_set_size", "seed")} == {int}
    assert type(LookaheadConfig(step_budget=kind(16)).step_budget) is int


@pytest.mark.parametrize("memory", ["./proces", "memory.npz", "~/memory", Path("proces"), "process", "request"])
def test_memory_may_be_a_scope_or_a_path(memory: str | Path) -> None:
    assert LookaheadConfig(memory=memory).memory == memory


@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_can_be_written_down_and_changed(preset: str) -> None:
    config = LookaheadConfig(preset=preset)
    assert LookaheadConfig.from_dict(asdict(config)) == config
    assert replace(config, pack_weights=True).preset == preset


def test_configuration_from_a_dictionary() -> None:
    assert LookaheadConfig.from_dict({"window_size": 3}) == LookaheadConfig(window_size=3)
    with pytest.raises(InvalidArgumentError, match="'window'.*window_size"):
        LookaheadConfig.from_dict({"window": 3})


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_max_nodes_is_never_passed(columns: int, size: int, llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    config = LookaheadConfig(window_size=columns, ngram_size=size, guess_set_size=2, pool_from_prompt=True)
    output = lookahead.generate(
        llama, prompt, lookahead_config=config, max_new_tokens=30, do_sample=False, return_dict_in_generate=True
    )
    assert max(output.statistics.nodes_per_step) <= config.max_nodes


@pytest.fixture
def watched(llama: PreTrainedModel) -> tuple[PreTrainedModel, list[object]]:
    """A model after its trial, and a list that grows with each further pass."""
    passes: list[object] = []
    model = copy.deepcopy(llama)
    model.register_forward_hook(lambda module, inputs, output: passes.append(module))
    lookahead.generate(model, torch.tensor([[1]]), max_new_tokens=1)
    assert passes
    passes.clear()
    return model, passes


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), InvalidArgumentError, "empty prompt"),
        (torch.tensor([[]]), InvalidArgumentError, "empty prompt"),
        (torch.zeros(0, 0, dtype=torch.long), InvalidArgumentError, "empty prompt"),
        (torch.zeros(0, 3, dtype=torch.long), InvalidArgumentError, r"shape \(0, 3\) has no rows"),
        (torch.tensor([[1, 2]], device="meta"), InvalidArgumentError, "input_ids.*'meta'.*no values"),
        (torch.tensor([1, 2]), InvalidArgumentError, r"shape \(2,\)"),
        (torch.tensor([[1.0, 2.0]]), InvalidArgumentError, "float32"),
        ([[1, 2]], InvalidArgumentError, "input_ids=list"),
        (torch.tensor([[1, 1000]]), InvalidArgumentError, "token id 1000"),
        (torch.tensor([[1, -1]]), InvalidArgumentError, "token id -1"),
    ],
)
def test_a_bad_prompt_is_refused_before_the_model_runs(
    ids: Any, error: type[Exception], message: str, watched: tuple[PreTrainedModel, list[object]]
) -> None:
    model, passes = watched
    with pytest.raises(error, match=message):
        lookahead.generate(model, ids, max_new_tokens=4)
    assert not passes


@pytest.mark.parametrize("ids", [torch.zeros(0, 3, dtype=torch.long), torch.tensor([[1, 2]], device="meta")])
def test_an_engine_refuses_prompts_without_rows_or_values(ids: torch.Tensor, llama: PreTrainedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="input_ids"):
        lookahead.Engine(llama).submit(ids, max_new_tokens=4)


def test_a_model_without_weights_is_refused(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama).to("meta")
    for call in (lookahead.attach, lookahead.Engine, partial(lookahead.generate, input_ids=torch.tensor([[1]]))):
        with pytest.raises(UnsupportedModelError, match="'meta'.*Load them first"):
            call(model)


@pytest.mark.parametrize("model", [None, 3, torch.nn.Linear(2, 2)])
def test_detach_refuses_other_objects_than_models(model: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"model={type(model).__name__} is no"):
        lookahead.detach(model)


@pytest.mark.parametrize("path", [None, 3, b"model.gguf"])
def test_load_gguf_refuses_other_objects_than_paths(path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"path={path!r} must be the path of a GGUF file"):
        lookahead.load_gguf(path)


class Louder(DynamicCache):
    """A cache with an `update` of its own."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys, 2 * values, *args, **kwargs)


def changed(name: str, value: object, layer: bool = False) -> DynamicCache:
    """A cache, or its first layer, with an attribute of its own."""
    cache = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    setattr(cache.layers[0] if layer else cache, name, value)
    return cache


def test_empty_prompt_through_custom_generate(llama: PreTrainedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="empty prompt"):
        llama.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=4, custom_generate=lookahead.generate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_cache": None}, "use_cache=None.*give True or False"),  # transformers' text has wrong tokens
        (
            {"past_key_values": StaticCache(LlamaConfig(num_hidden_layers=2), max_cache_len=9)},
            "(cache|past_key_values)=StaticCache",
        ),
        ({"past_key_values": Louder()}, "(cache|past_key_values)='Louder'"),
        ({"past_key_values": changed("update", Louder().update)}, "(cache|past_key_values)='DynamicCache'"),
        ({"past_key_values": changed("update", Louder().update, True)}, "(cache|past_key_values)='DynamicCache'"),
        (
            {"past_key_values": changed("layer_class_to_replicate", type("Layer", (DynamicLayer,), {}))},
            "(cache|past_key_values)='Dyn",
        ),
        ({"inputs_embeds": torch.zeros(1, 3, 48)}, "inputs_embeds|input_ids"),
        ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids"),
        ({"position_ids": torch.arange(3)}, r"position_ids of shape \(3,\).*leave them out"),
        ({"position_ids": torch.arange(3)[None].repeat(2, 1)}, r"position_ids of shape \(2, 3\)"),
        ({"position_ids": torch.arange(3)[None, None]}, r"position_ids of shape \(1, 1, 3\)"),  # as another text
        ({"assistant_model": "anything"}, "assistant_model"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"attention_mask": torch.zeros(1, 3, dtype=torch.long)}, "attention_mask"),
        ({"attention_mask": torch.tensor([[0, 1, 1]] * 2)}, r"attention_mask of shape \(2, 3\)"),
        ({"attention_mask": torch.tensor([[1, 2, 1]])}, "attention_mask has values beside 0 and 1"),
        ({"lookahead_config": {"window_size": 3}}, "lookahead_config"),
        ({"custom_generate": lookahead.generate}, "custom_generate"),
        ({"attention_mask": torch.ones(1, 3, device="meta")}, "attention_mask.*'meta'"),
        ({"prediction": torch.ones(3, dtype=torch.long, device="meta")}, "prediction.*'meta'"),
    ],
)
def test_a_bad_argument_is_refused_before_the_model_runs(
    options: dict[str, Any], message: str, watched: tuple[PreTrainedModel, list[object]]
) -> None:
    model, passes = watched
    with pytest.raises(LookaheadError, match=message):
        lookahead.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=4, **options)
    assert not passes


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_a_cache_with_layers_of_several_lengths_is_refused(places: tuple[int, ...], llama: PreTrainedModel) -> None:
    """As after compression of a cache; a text as long as its first layer has a token for each column."""
    cache = llama.generate(torch.tensor([[1, 2, 3, 4]]), max_new_tokens=9, return_dict_in_generate=True).past_key_values
    for layer in (cache.layers[place] for place in places):
        layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]
    ids = torch.arange(1, cache.get_seq_length() + 2)[None]
    if len(places) == len(cache.layers):
        expected = llama.generate(ids, past_key_values=copy.deepcopy(cache), max_new_tokens=9)
        assert torch.equal(lookahead.generate(llama, ids, past_key_values=cache, max_new_tokens=9), expected)
        return
    with pytest.raises(LookaheadError, match="(cache|past_key_values) lacks"):
        lookahead.generate(llama, ids, past_key_values=cache, max_new_tokens=9)


def test_sizes_below_zero_and_misspelt_arguments_are_transformers_errors(llama: PreTrainedModel) -> None:
    ids = torch.tensor([[1, 2, 3]])
    for options, name in (
        ({"max_new_tokens": 0}, "max_new"),
        ({"max_new_token": 5}, "max_new_token"),
        ({"max_length": 2}, "max_length"),
    ):
        with pytest.raises(ValueError, match=name):
            lookahead.generate(llama, ids, **options)


def test_prompt_longer_than_the_table_of_positions() -> None:
    model = build("gpt2")
    context = model.config.max_position_embeddings
    ids = torch.ones(1, context + 1, dtype=torch.long)
    with pytest.raises(InvalidArgumentError, match=f"{context + 1} tokens.*{context}"):
        lookahead.generate(model, ids, max_new_tokens=4)


def test_default_length_stops_at_the_context_as_in_transformers() -> None:
    model = build("gpt2")
    ids = torch.randint(0, 60, (1, MAX_POSITIONS - 6), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, do_sample=False)
    assert expected.shape[1] == MAX_POSITIONS
    assert torch.equal(lookahead.generate(model, ids, do_sample=False), expected)


def test_a_table_of_positions_ends_the_text_instead_of_losing_it() -> None:
    """transformers fails with an IndexError at the end of the table; up to there both texts are equal."""
    model = build("gpt2")
    ids = torch.randint(0, 60, (1, MAX_POSITIONS - 20), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=21, do_sample=False)
    assert torch.equal(lookahead.generate(model, ids, max_new_tokens=21, do_sample=False), expected)
    with pytest.raises(IndexError):
        model.generate(ids, max_new_tokens=40, do_sample=False)
    with pytest.warns(UserWarning, match="no position for another"):
        assert torch.equal(lookahead.generate(model, ids, max_new_tokens=40, do_sample=False), expected)


@pytest.mark.parametrize("shape", [(2,), (1, 3)])
def test_criterion_that_returns_the_wrong_shape(shape: tuple[int, ...], llama: PreTrainedModel) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(InvalidArgumentError, match="stopping_criteria"):
        lookahead.generate(
            llama,
            ids,
            max_new_tokens=4,
            stopping_criteria=[lambda ids, scores, **_: torch.zeros(shape, dtype=torch.bool)],
        )
    assert lookahead.generate(llama, ids, max_new_tokens=4).shape == (1, 7)


def test_generation_config_object_is_not_changed(llama: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    before = config.to_dict()
    lookahead.generate(llama, torch.tensor([[1, 2, 3]]), generation_config=config)
    assert config.to_dict() == before


def test_chunks_after_a_cache_are_refused_where_transformers_reads_them_wrongly(
    llama: PreTrainedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 4}
    first = lookahead.generate(
        llama, prompt, return_dict_in_generate=True, **options
    )  # without a cache it reads them well
    text = torch.cat([first.sequences, prompt], dim=1)
    lookahead.generate(llama, text, past_key_values=copy.deepcopy(first.past_key_values), **options)
    monkeypatch.setattr("lookahead.serving.arguments.TRANSFORMERS", (5, 22))
    refused = r"prefill_chunk_size=4 is not supported with a non-empty (cache|past_key_values)"
    with pytest.raises(LookaheadError, match=refused):
        lookahead.generate(llama, text, past_key_values=first.past_key_values, **options)
