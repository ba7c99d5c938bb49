"""Running states: saved, restored, tried on miniatures, and distinguished from states that cannot be restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import lookahead
from lookahead import Engine, InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from lookahead.backends.transformers.chain_cache import SavedState, has_running_state
from lookahead.backends.transformers.checks import runs_on_chains
from lookahead.backends.transformers.equivalence import equivalence
from lookahead.backends.transformers.runner import ChainRunner
from lookahead.backends.transformers.shared_clone import chain_engine
from lookahead.backends.trials import follow, nothing
from lookahead.core.token_tree import TokenTree
from quick import quickly
from tiny.families import build
from tiny.variant import Variant

EXACT = ["qwen3_next", "granitemoehybrid", "mamba2", "lfm2", "minimax", "deepseek_v4", "kimi_linear", "rwkv", "xlstm"]
FORGETFUL = ["mamba", "falcon_mamba", "jamba", "zamba"]
TEXT = [5, 11, 7, 3, 13, 2, 17, 19, 23, 29, 31, 37, 41, 43]


def tiny(family: str) -> PreTrainedModel:
    return build(family, Variant(), "sdpa")


def plain(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits along the text, read a token at a time."""
    return follow(ChainRunner(model), [[*TEXT, 0]], 4, nothing)[0]


def tensors(cache: Any) -> list[torch.Tensor]:
    """Return copies of all tensors in a cache."""
    copies: list[torch.Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            copies.append(value.clone())
        elif isinstance(value, dict):
            list(map(visit, value.values()))
        elif isinstance(value, list | tuple):
            list(map(visit, value))
        elif type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
            visit({name: each for name, each in vars(value).items() if name != "config"})

    visit(cache)
    return copies


@pytest.mark.parametrize("family", EXACT)
@torch.no_grad()
def test_saved_states_come_back(family: str) -> None:
    runner = ChainRunner(tiny(family))
    runner.forward([TokenTree(TEXT[:8])])
    runner.commit([range(8)])
    before = tensors(runner.rows[0].content)
    tree = TokenTree([TEXT[8]])
    tree.add_candidates(TEXT[9:12])
    runner.forward([tree])
    changed = tensors(runner.rows[0].content)
    assert len(before) != len(changed) or not all(map(torch.equal, before, changed))
    runner.commit([[0, 1]])
    after = tensors(runner.rows[0].content)
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    assert runner.rows[0].length == 8


def test_running_states_are_copied() -> None:
    layer = DynamicCache(config=tiny("qwen3_next").config).layers[0]
    layer.update_conv_state(torch.randn(1, 4, 3))
    layer.update_recurrent_state(torch.randn(1, 2, 4, 4))
    assert SavedState(layer).copied_bytes == 4 * (4 * 3 + 2 * 4 * 4)


def test_keys_that_are_written_in_place_are_noticed() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    saved = SavedState(cache)
    cache.layers[0].keys.zero_()
    with pytest.raises(UnsupportedModelError, match="only replaces"):
        saved.restore()


def test_a_tree_with_branches_is_refused() -> None:
    tree = TokenTree([1])
    tree.add_candidates([2])
    tree.add_candidates([3])
    with pytest.raises(InvalidArgumentError, match="branches"):
        ChainRunner(tiny("lfm2")).forward([tree])


@torch.no_grad()
def test_nothing_is_drafted_behind_a_prompt_or_many_pending_tokens() -> None:
    runner = ChainRunner(tiny("lfm2"))
    tree = runner.begin_tree(0, TEXT[:4])
    assert tree.room == 0
    runner.forward([tree])
    runner.commit([range(4)])
    assert runner.begin_tree(0, TEXT[:6]).room > 0
    many = runner.begin_tree(0, [*TEXT[:4], *range(1, 18)])
    assert many.root == 16
    assert many.room == 0


@pytest.mark.parametrize("family", quickly([*EXACT, "openai-gpt"], EXACT[::3]))
def test_families_that_go_on_from_their_states(family: str) -> None:
    assert runs_on_chains(tiny(family))


def test_a_family_that_goes_on_wrongly_is_found() -> None:
    model = tiny("recurrent_gemma")
    assert has_running_state(type(model), model.config)
    assert not equivalence(model).holds("chains")
    with pytest.raises(UnsupportedModelError, match="goes on from its state over several tokens differs"):
        runs_on_chains(model)


@pytest.mark.parametrize("family", quickly(FORGETFUL, ["jamba", "falcon_mamba"]))
@torch.no_grad()
def test_layers_that_forget_their_states_take_drafts_one_by_one(family: str) -> None:
    model = tiny(family)
    expected = plain(model)
    with_drafts = follow(ChainRunner(model), [[*TEXT, 0]], 4, lambda tree, following: tree.add_candidates(following))
    assert not torch.allclose(with_drafts[0], expected, atol=1e-2)  # the model itself is wrong over several tokens
    runner = ChainRunner(model, engine=chain_engine(model))
    logits = follow(runner, [[*TEXT, 0]], 4, lambda tree, following: tree.add_candidates(following))
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    # A prompt longer than a draft, after a text, is read in the same way.
    runner.rows = [runner.new_row()]
    torch.testing.assert_close(follow(runner, [[*TEXT, 0]], 4, nothing)[0], expected, atol=1e-4, rtol=1e-4)
    text = torch.randint(3, 90, (1, 90), generator=torch.Generator().manual_seed(0))
    prompt = {"max_new_tokens": 4, "do_sample": False}
    with Engine(model, prompt_tokens=70) as rows:
        assert torch.equal(rows.submit(text, **prompt).result(), model.generate(text, **prompt))
    arguments = {"prefill_chunk_size": 4, "past_key_values": DynamicCache(config=model.config)}
    if "mamba" in family:  # its cache argument has another name
        del arguments["past_key_values"]
    for name, value in arguments.items():
        with pytest.raises(UnsupportedArgumentError, match="forget the state"):
            lookahead.generate(model, text, **{name: value}, **prompt)


def test_the_model_itself_is_tried_as_well() -> None:
    model = tiny("mamba2")
    assert equivalence(model).holds("chains")
    mixer = model.backbone.layers[0].mixer  # wrong after a first pass, like a faulty kernel
    mixer.register_forward_hook(lambda module, inputs, output: output if output.shape[1] in (1, 6) else -output)
    with pytest.raises(UnsupportedModelError, match="otherwise than one token at a time"):
        runs_on_chains(model)


@torch.no_grad()
def test_trying_leaves_the_states_of_modules() -> None:
    model = tiny("qwen3_next")
    expected = plain(model)
    runs_on_chains(model)
    assert torch.equal(plain(model), expected)


@torch.no_grad()
def test_drafts_are_read_in_short_chunks() -> None:
    model = tiny("mamba2")
    assert chain_engine(model) is model  # its chunks are short
    for layer in model.backbone.layers:
        layer.mixer.chunk_size = 256
    expected = plain(model)
    engine = chain_engine(model)
    assert engine is not model
    assert chain_engine(model) is engine
    assert {layer.mixer.chunk_size for layer in model.backbone.layers} == {256}
    assert {layer.mixer.chunk_size for layer in engine.backbone.layers} == {16}
    runner = ChainRunner(model, engine=engine)
    runner.forward([TokenTree(TEXT[:4])])
    runner.commit([range(4)])
    tree = TokenTree(TEXT[4:5])
    tree.add_candidates(TEXT[5:])
    (result,) = runner.forward([tree])
    logits = torch.cat([result.logits_after(node) for node in range(len(tree))])
    torch.testing.assert_close(logits, expected[1:], rtol=0, atol=1e-3)


def test_models_with_only_keys_and_values_run_on_trees() -> None:
    assert not runs_on_chains(tiny("llama"))
    blt = tiny("blt")  # transformers cannot make a cache from its configuration
    assert not has_running_state(type(blt), blt.config)


@pytest.mark.parametrize("family", ["bart", "mpt", "bloom", "trocr"])
def test_models_that_do_not_honour_trees_run_on_chains(family: str) -> None:
    model = tiny(family)
    assert not has_running_state(type(model), model.config)
    assert runs_on_chains(model)
    torch.manual_seed(0)
    ids = torch.randint(3, 90, (1, 10)).repeat(1, 2)
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(lookahead.generate(model, ids, max_new_tokens=30, do_sample=False), expected)
