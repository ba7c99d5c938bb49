"""The static engine: fixed shapes, fixed memory, equal texts."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaModel, PreTrainedModel, StoppingCriteriaList

import lookahead
from compared.case import zoo_case
from compared.report import check
from compared.tables import ZOO, greedy_case
from lookahead import LookaheadConfig, LookaheadOutput, LookaheadWarning, UnsupportedModelError
from lookahead.backends import machine
from lookahead.backends.transformers import fixed_passes, model_state, session, static_engine
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.fixed_passes import FixedPasses, Outputs, Pass, pass_sizes, recorder_for, rounded
from lookahead.backends.transformers.layouts import PassPlan
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.pooled_rows import PooledInputs, PooledRunner
from lookahead.backends.transformers.row_pool import LayerShape, PooledRow, RowPool, layer_shapes
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.tree_attention import first_position
from lookahead.core.forest import Forest, lay_out
from lookahead.core.token_tree import TokenTree
from lookahead.demo import DEMO_PROMPT
from model_zoo import ARCHITECTURES, SLIDING_WINDOW, VOCAB_SIZE, build
from quick import REPRESENTATIVES, quickly
from test_engine_model import grouped_llama
from test_tree_cache import states

NAMES = sorted(ARCHITECTURES)
BY_LENGTH = ["llama_dynamic_rope", "phi3_long_rope"]
"""Models with positions that change for long texts, so no pass fits all lengths."""
CHOSEN = ["llama", "gemma3", "gpt2", "llama4_chunked", "deepseek_v3"]
CPU = torch.device("cpu")
STATIC = LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True, engine="static")
PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])


def storages(value: Any) -> set[int]:
    """Return the start addresses of the tensors' memory."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Tape(TorchDispatchMode):
    """Record operations, and repeat them on the same memory; operations that return values to the host raise."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in operation.tags:
            raise RuntimeError(f"{operation} while a tape is recorded")
        results = operation(*args, **(kwargs or {}))
        if not operation.is_view or storages(results) - storages(args):  # some operations copy if a view is impossible
            self._operations.append((operation, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        for operation, args, kwargs, results in self._operations:
            again = operation(*args, **kwargs)
            if not operation._schema.is_mutable:
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    old.copy_(new)


class TapeRecorder:
    """A CUDA graph on the CPU: record the operations on tensors, and replay them without the model's Python code."""

    replays = 0

    def __init__(self, device: torch.device = CPU) -> None:
        TapeRecorder.replays = 0

    def __call__(self, work: Pass) -> Pass:
        work()  # the warm-up
        tape = Tape()
        with tape:
            outputs = work()

        def replay() -> Outputs:
            TapeRecorder.replays += 1
            tape.replay()
            return outputs

        return replay


def static_runner(
    model: PreTrainedModel, batch: int = 1, capacity: int = 128, nodes: int = 32, passes: FixedPasses | None = None
) -> PooledRunner:
    """Return a runner with fixed passes for `model`, made like the one of a call."""
    shapes = layer_shapes(ModelRunner(model).run_token().cache)
    runner = PooledRunner(model, shapes, machine.PausingClock(model.device))
    runner.begin_call(batch, nodes, capacity, passes=passes)
    return runner


def drafted(runner: ModelRunner, row: int, text: list[int], draft: int) -> TokenTree:
    """Return a tree; `draft` sets its size and shape."""
    tree = runner.begin_tree(row, text)
    random = Random(draft)
    for _ in range(draft % 5):
        tree.add_candidates(random.choices(range(6), k=random.randint(1, 4)))
    if draft % 5:
        tree.add_window_node(11, tree.root, needs_logits=True)
    return tree


@torch.no_grad()
def logits_of_steps(
    runner: ModelRunner, steps: int = 12, batch: int = 1, before_step: Callable[[], None] = lambda: None
) -> list[torch.Tensor]:
    """Return the logits of all read nodes, over steps with changing trees; accepted paths do not depend on logits."""
    texts = [[5, 9, 1, 4, 7, 5, 9][: 7 - 3 * row] for row in range(batch)]
    collected = []
    for step in range(steps):
        before_step()
        trees = [drafted(runner, row, text, step + row) for row, text in enumerate(texts)]
        results = runner.forward(trees, 3)
        paths = []
        for row, (tree, result) in enumerate(zip(trees, results, strict=True)):
            nodes = [node for node in range(len(tree)) if tree.needs_logits[node]]
            logits = torch.cat([result.logits_after(node) for node in nodes])
            collected.append(logits)
            assert result.predictions[nodes].tolist() == logits.argmax(dim=-1).tolist()
            probabilities, ids = logits.softmax(dim=-1).topk(3)
            assert result.top_ids[nodes].tolist() == ids.tolist()
            np.testing.assert_allclose(result.top_probabilities[nodes], probabilities.cpu().numpy(), rtol=1e-5)
            unread = [node for node in range(len(tree)) if not tree.needs_logits[node]]
            assert (result.predictions[unread] == -1).all()
            children = [node for node in range(tree.root + 1, len(tree) - 1) if tree.parents[node] == tree.root]
            paths.append(children[-1:])  # rarely the child in place
            texts[row] = texts[row] + [tree.tokens[node] for node in paths[-1]] + [(7 * step + row) % VOCAB_SIZE]
        runner.commit([[*range(tree.root + 1), *path] for tree, path in zip(trees, paths, strict=True)])
    return collected


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """Check that logits are equal up to rounding."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def kept_passes(engine: PreTrainedModel) -> FixedPasses:
    """Return the passes that the last call with this engine released."""
    passes: FixedPasses | None = state_of(engine).trials.fixed_passes
    assert passes is not None
    return passes


@contextmanager
def recorded_with(recorder: type) -> Iterator[None]:
    """Let calls of `generate` record their passes with `recorder`, and delete the recorded passes afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_passes, "recorder_for", recorder)
        patch.setattr(model_state, "STATES", weakref.WeakKeyDictionary())
        yield


# --- the same text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quickly(NAMES, REPRESENTATIVES[::3]))
def test_texts_equal_generate(name: str) -> None:
    for turn in range(2):
        case = check(greedy_case(turn * len(ZOO) + ZOO.index(name), engine="static"), "static").case
    model = engine_model(build(name, attention=case.attention))
    with pytest.raises(UnsupportedModelError) if name in BY_LENGTH else nullcontext():
        static_engine.fixed_runner(model, 1)


@pytest.mark.parametrize(
    "name",
    quickly(
        ["llama", "gemma3", "gpt2", "mixtral", "llama4_chunked", *BY_LENGTH], ["gemma3", "gpt2", "llama_dynamic_rope"]
    ),
)
def test_sampled_texts_and_batches_equal_generate(name: str) -> None:
    model = build(name)
    arguments: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "top_k": 8}
    for seed in range(2):
        torch.manual_seed(seed)
        expected = model.generate(PROMPT, **arguments)
        torch.manual_seed(seed)
        assert torch.equal(lookahead.generate(model, PROMPT, lookahead_config=STATIC, **arguments), expected)
    texts = [[3, 14, 15, 9, 2, 6, 3, 14, 15], [7, 8], [20, 21, 22, 20]]
    ids = torch.tensor([[0] * (9 - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (9 - len(text)) + [1] * len(text) for text in texts])
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 5, "pad_token_id": 0}
    batch = lookahead.generate(model, ids, attention_mask=mask, lookahead_config=STATIC, **arguments)
    for row, text in zip(batch, texts, strict=True):
        model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)  # resets dynamic RoPE
        expected = model.generate(torch.tensor([text]), **arguments)[0, len(text) :].tolist()
        assert row[9 : 9 + len(expected)].tolist() == expected


@pytest.mark.parametrize(
    "name", quickly(["llama", "qwen2_mixed_sliding", "qwen3_moe", "llama4_chunked"], ["qwen2_mixed_sliding"])
)
def test_recorded_passes_write_the_same_text(name: str) -> None:
    """The parts of the first step in a captured graph must be right for all steps."""
    with recorded_with(TapeRecorder):
        model = build(name, 0, "sdpa")
        drafting = {"preset": "paper", "pool_from_prompt": True, "engine": "static"}
        drafting |= {"window_size": 6, "ngram_size": 4, "guess_set_size": 6}
        outcome = check(zoo_case(name, tuple(range(5)) * 3, attention="sdpa", max_new_tokens=30, drafting=drafting))
        passes = kept_passes(engine_model(model))
        assert TapeRecorder.replays == len(outcome.accepted)
        assert passes.recorded.count <= len(pass_sizes(64))


def test_long_prompts_go_the_dynamic_way(llama: PreTrainedModel) -> None:
    prompt = torch.randint(VOCAB_SIZE, (1, 150), generator=torch.Generator().manual_seed(3))
    for chunk in (None, 40):
        arguments: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "prefill_chunk_size": chunk}
        got = lookahead.generate(llama, prompt, lookahead_config=STATIC, **arguments)
        assert torch.equal(got, llama.generate(prompt, max_new_tokens=24, do_sample=False))


def test_scores_and_logits_are_not_overwritten_by_later_steps(llama: PreTrainedModel) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    arguments |= {"output_logits": True, "output_scores": True}
    with recorded_with(TapeRecorder):
        got = lookahead.generate(llama, PROMPT, lookahead_config=STATIC, **arguments)
    expected = llama.generate(PROMPT, **arguments)
    for name in ("logits", "scores"):
        assert_same(list(getattr(got, name)), list(getattr(expected, name)))


def test_hooks_go_the_dynamic_way() -> None:
    model = grouped_llama(torch.float32)
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    calls: list[torch.nn.Module] = []
    model.model.layers[0].register_forward_hook(lambda module, *_: calls.append(module))
    assert torch.equal(lookahead.generate(model, PROMPT, lookahead_config=STATIC, max_new_tokens=8), expected)
    assert calls
    assert state_of(engine_model(model)).trials.fixed_passes is None


# --- fixed memory -------------------------------------------------------------------------------------------


def inputs_of(passes: FixedPasses) -> list[PooledInputs]:
    """The inputs of passes of each size."""
    found: dict[int, PooledInputs] = passes.inputs
    return [found[size] for size in sorted(found)]


def tokens_of(inputs: Any) -> torch.Tensor:
    """Return the tokens of a pass at their fixed address, `[1, nodes]`."""
    tokens: torch.Tensor = inputs._staged.there[0]
    return tokens


def addresses(passes: FixedPasses) -> list[int]:
    """Return the addresses of all memory that outlives a step."""
    inputs = inputs_of(passes)
    return [
        *(buffer.data_ptr() for buffer in passes.cache.buffers),
        *(states.data_ptr() for layer in passes.cache.layers for states in (layer.keys, layer.values)),
        *(tokens_of(one).data_ptr() for one in inputs),
        *(mask.data_ptr() for one in inputs for mask in one.packed),
    ]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_nothing_moves_and_nothing_is_recorded_twice(name: str) -> None:
    model = build(name)
    with recorded_with(TapeRecorder):
        runner = static_runner(model, batch=2)
        first = logits_of_steps(runner, batch=2)
    passes = runner.end_call()
    seen, recordings = addresses(passes), passes.recorded.count
    assert recordings == len(inputs_of(passes))
    assert TapeRecorder.replays == 12
    runner = static_runner(model, batch=2, passes=passes)  # the next text
    second = logits_of_steps(runner, batch=2, before_step=lambda: addresses(passes) == seen or pytest.fail("moved"))
    assert addresses(passes) == seen
    assert passes.recorded.count == recordings
    expected = logits_of_steps(ModelRunner(model, 2), batch=2)
    assert_same(first, expected)
    assert_same(second, expected)


def test_the_next_call_reuses_the_last_ones_memory() -> None:
    model = grouped_llama(torch.float32)
    expected = model.generate(PROMPT, max_new_tokens=24, do_sample=False)

    def decode(new_tokens: int = 24) -> FixedPasses:
        got = lookahead.generate(model, PROMPT, lookahead_config=STATIC, max_new_tokens=new_tokens)
        assert torch.equal(got[:, :36], expected)
        return kept_passes(engine_model(model))

    passes = decode()
    seen, recordings = addresses(passes), passes.recorded.count
    with torch.inference_mode():
        assert decode() is passes
    assert (addresses(passes), passes.recorded.count) == (seen, recordings)
    assert decode(200) is not passes, "too short for this text"
    passes = decode(200)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.clone()
    assert decode(200) is not passes, "a graph would read the weights where they were"


def test_nothing_is_kept_of_a_call_that_failed(llama: PreTrainedModel) -> None:
    lookahead.generate(llama, PROMPT, lookahead_config=STATIC, max_new_tokens=8)
    engine = engine_model(llama)
    assert state_of(engine).trials.fixed_passes is not None

    def fail(_: object) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        lookahead.generate(llama, PROMPT, lookahead_config=STATIC, max_new_tokens=8, on_step=fail)
    assert state_of(engine).trials.fixed_passes is None


def test_memory_goes_when_the_model_goes() -> None:
    model = grouped_llama()
    lookahead.generate(model, PROMPT, lookahead_config=STATIC, max_new_tokens=8)
    engine = engine_model(model)
    gone = [weakref.ref(thing) for thing in (model, engine, kept_passes(engine))]
    del model, engine
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_buffers_grow_with_the_text() -> None:
    model = build("qwen2_mixed_sliding")
    with recorded_with(TapeRecorder):
        runner = static_runner(model, capacity=16, nodes=8)
        assert_same(logits_of_steps(runner, steps=30), logits_of_steps(ModelRunner(model, 1), steps=30))
    assert runner.passes.cache.capacity > 128
    assert runner.recorded.count > 2, "what was recorded for the smaller pool is of no use"


# --- padding and garbage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quickly(CHOSEN, CHOSEN[::2]))
def test_no_node_sees_padding(name: str) -> None:
    model = build(name)
    for batch in (1, 2):
        clean = logits_of_steps(static_runner(model, batch), batch=batch)
        larger = static_runner(model, batch)
        larger.pass_sizes = (128,)
        assert_same(clean, logits_of_steps(larger, batch=batch))


@pytest.mark.parametrize("name", quickly(CHOSEN, CHOSEN[1::2]))
def test_nodes_only_see_text(name: str) -> None:
    model = build(name)
    for batch in (1, 2):
        runner = static_runner(model, batch)
        pool = runner.passes.cache

        def fill(runner: PooledRunner = runner, pool: RowPool = pool) -> None:
            # The largest values with finite scores, as dense masks only add to scores.
            hidden = np.ones(pool.capacity, dtype=bool)
            for row in runner.rows:
                hidden[pool.columns_of(row.number, np.arange(row.length))] = False
            for buffer in pool.buffers:
                buffer[:, :, :, torch.from_numpy(hidden)] = 1e30

        expected = logits_of_steps(ModelRunner(model, batch), batch=batch)
        assert_same(logits_of_steps(runner, batch=batch, before_step=fill), expected)


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "qwen2_mixed_sliding", "llama4_chunked"])
@pytest.mark.parametrize("rows", [1, 2])
def test_staged_masks_equal_the_dynamic_engines(name: str, rows: int) -> None:
    masks = MaskBuilder(build(name).config)
    runner = ModelRunner(build(name), 2)
    random = Random(0)
    pool = RowPool([LayerShape(1, 1, 1, torch.float32)], rows * 128, 16, CPU, is_slice=rows == 1)
    texts = [PooledRow(pool) for _ in range(rows)]
    staged = {nodes: PooledInputs(masks, pool, (rows, 8, 0), nodes) for nodes in (8, 32, 64)}
    keys = pool.capacity - pool.first_visible
    for step in range(40):
        lengths = [random.randint(0, 3 * SLIDING_WINDOW), random.randint(0, 2)][:rows]
        trees = [drafted(runner, 0, [1] * random.randint(1, 3), step), drafted(runner, 1, [2], step // 2)][:rows]
        layouts = [lay_out(tree) for tree in trees]
        count = sum(map(len, trees))
        numbers = np.array([text.number for text in texts])
        pool.reserve(numbers, np.array(lengths) + 64)
        inputs = staged[next(nodes for nodes in staged if nodes >= count)]
        inputs.stage(pool, numbers, PassPlan(Forest(trees), np.array(lengths), np.array(lengths)))
        model = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(_attn_implementation="sdpa"))
        dense = inputs.arguments(model, pool)["attention_mask"]  # type: ignore[arg-type]
        dense = dense if isinstance(dense, dict) else {masks.kinds[0]: dense}
        assert tokens_of(inputs)[0].tolist() == [
            *(token for layout in layouts for token in layout.tokens),
            *[0] * (inputs.nodes - count),
        ]
        for kind in masks.kinds:
            visible = dense[kind][0, 0] == 0
            assert visible.shape == (inputs.nodes, keys)
            assert visible.any(dim=-1).all(), "no row of a softmax is empty"
            begin = 0
            for text, length, layout in zip(texts, lengths, layouts, strict=True):
                own = len(layout.order)
                positions = length + np.array(layout.depths)[None]
                seen = visible_keys(masks, kind, [length], positions, layout.ancestor_mask()[None])[0]
                expected = np.zeros((own, keys), dtype=bool)
                columns = pool.columns_of(text.number, np.arange(length + own)) - pool.first_visible
                expected[:, columns] = seen
                assert torch.equal(visible[begin : begin + own], torch.from_numpy(expected))
                assert inputs.columns[begin : begin + own].tolist() == (columns[length:] + pool.first_visible).tolist()
                begin += own
        for text in texts:
            text.crop(random.randint(0, 2))


def visible_keys(masks: MaskBuilder, kind: str, lengths: list[int], positions: Any, ancestors: Any) -> Any:
    """Return the visible keys of the nodes of padded trees, `[rows, nodes, keys]`; padding sees itself."""
    first = first_position(positions, *masks.reach(kind))[:, :, None]
    is_real = ancestors.any(axis=2)[:, :, None]
    column = np.arange(max(lengths))
    cached = is_real & (column >= first) & (column < np.array(lengths)[:, None, None])
    nodes = (ancestors & (positions[:, None, :] >= first)) | np.eye(ancestors.shape[1], dtype=bool)
    return np.concatenate([cached, nodes], axis=2)


# --- the cache ----------------------------------------------------------------------------------------------


def test_the_pool_keeps_committed_tokens() -> None:
    """Rows of a pool keep their texts, whatever other rows do, also after growth and in copies."""
    shape = LayerShape(2, 3, 3, torch.float32)
    pool = RowPool([shape, None, replace(shape, value_size=5)], 20, 4, CPU)
    assert len(pool.buffers) == 2, "one for each size"
    rows = [PooledRow(pool) for _ in range(2)]
    expected: list[list[int]] = [[], []]
    random, count = Random(1), 0
    for turn in range(6):
        if turn == 4:
            pool.add_pages(10)
        for row, tokens in zip(rows, expected, strict=True):
            fresh = list(range(count, count + random.randint(1, 5)))
            count += 10
            pool.reserve(np.array([row.number]), np.array([row.length + len(fresh)]))
            columns = pool.columns_of(row.number, row.length + np.arange(len(fresh)))
            with pool.written_at(torch.from_numpy(columns)):
                for layer in (0, 2):
                    values = -states([fresh])[..., :1].expand(-1, -1, -1, pool.layers[layer].values.shape[3])
                    keys, _ = pool.update(states([fresh]), values, layer)
                    assert keys.data_ptr() == pool.layers[layer].keys.data_ptr()
                    assert keys.shape == (1, 2, pool.capacity, 3)
                    assert pool.get_seq_length() == 0, "the same for every step"
            slots = sorted(random.sample(range(len(fresh)), random.randint(0, len(fresh))))
            pool.move(columns[slots], columns[: len(slots)])
            row.length += len(slots)
            tokens += [fresh[slot] for slot in slots]
        copied = PooledRow(pool)
        copied.adopt(rows[0].copied())
        for row, tokens in zip([*rows, copied], [*expected, expected[0]], strict=True):
            assert row.length == len(tokens)
            columns = pool.columns_of(row.number, np.arange(row.length))
            for layer in (0, 2):
                assert pool.layers[layer].keys[0, 1, columns, 2].tolist() == tokens
                assert pool.layers[layer].values[0, 0, columns, -1].tolist() == [-token for token in tokens]


def test_caches_can_be_returned_and_continued(llama: PreTrainedModel) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    expected = llama.generate(PROMPT, **{**arguments, "max_new_tokens": 30})
    for first, second, third in (("static", "static", "dynamic"), ("dynamic", "static", "static")):
        turn = lookahead.generate(llama, PROMPT, lookahead_config=replace(STATIC, engine=first), **arguments)
        for engine in (second, third):
            before, length = turn.past_key_values, turn.past_key_values.get_seq_length()
            assert type(before) is DynamicCache
            assert length == turn.sequences.shape[1] - 1
            config = replace(STATIC, engine=engine)
            arguments["past_key_values"] = before
            turn = lookahead.generate(llama, turn.sequences, lookahead_config=config, **arguments)
            assert turn.past_key_values is before
        del arguments["past_key_values"]
        assert torch.equal(turn.sequences, expected.sequences)
        for own, layer in zip(before.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(own.keys[:, :, :41], layer.keys, atol=1e-4, rtol=1e-4)
    filled = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(PROMPT[:, :-1], past_key_values=filled)
    turn = lookahead.generate(llama, PROMPT, past_key_values=filled, lookahead_config=STATIC, **arguments)
    assert turn.past_key_values is filled
    assert torch.equal(turn.sequences, expected.sequences[:, :22])
    torch.testing.assert_close(
        filled.layers[1].values, expected.past_key_values.layers[1].values[:, :, :21], atol=1e-4, rtol=1e-4
    )


# --- recording and compiling --------------------------------------------------------------------------------


class FakeCuda:
    """The part of `torch.cuda` for graphs; records calls and their state."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state = "default stream"

    def graph_pool_handle(self) -> str:
        return "pool"

    @contextmanager
    def _within(self, state: str) -> Iterator[None]:
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before

    def device(self, device: object) -> Any:
        return self._within(self.state)

    def stream(self, stream: object) -> Any:
        return self._within("side stream")

    def graph(self, graph: object, pool: str, capture_error_mode: str) -> Any:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        return self._within("capture")

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.calls.append("side waits"))

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.calls.append("default waits"))

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.calls.append("replay"))

    def synchronize(self, device: object) -> None:
        self.calls.append("host waits")


def test_graphs_are_captured_once_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(fixed_passes, "torch", SimpleNamespace(cuda=cuda))
    outputs = torch.zeros(1), torch.zeros(1)

    def work() -> Outputs:
        watched = "" if _get_current_dispatch_mode() is None else ", watched"
        cuda.calls.append(f"work, {cuda.state}{watched}")
        return outputs

    record = recorder_for(torch.device("cuda"))
    assert record is not None
    replay = record(work)
    assert cuda.calls == [
        "side waits",
        "work, side stream",
        "work, side stream, watched",
        "default waits",
        "work, capture",
        "host waits",
    ]
    cuda.calls.clear()
    assert replay() is outputs
    assert replay() is outputs
    assert cuda.calls == ["replay", "replay"]


def decoded(demo: Any, recording: float) -> tuple[list[list[int]], int]:
    """Return the nodes of the steps of four calls, and the number of recorded passes, with a clock of passes only."""
    now, recordings = 0.0, 0

    class Recorded(TapeRecorder):
        def __call__(self, work: Pass) -> Pass:
            nonlocal now, recordings
            now, recordings = now + recording, recordings + 1

            def replay() -> Outputs:
                nonlocal now
                logits, packed = work()
                now += 4.6e-3 + 1e-5 * logits.shape[1]  # like eight billion parameters on a large GPU
                return logits, packed

            return replay

    model, tokenizer = demo
    ids = tokenizer(DEMO_PROMPT, return_tensors="pt").input_ids
    calls: list[list[int]] = []
    with recorded_with(Recorded), pytest.MonkeyPatch.context() as patch:
        for module in (machine, session):
            patch.setattr(module, "step_clock", lambda device: lambda: now)
        for new_tokens in (32, 150, 500):  # each needs larger buffers than the one before
            calls.append([])
            config = LookaheadConfig(engine="static")
            on_step = partial(lambda nodes, record: nodes.append(record.nodes), calls[-1])
            arguments = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            arguments["stopping_criteria"] = StoppingCriteriaList([lambda ids, _: len(calls[-1]) >= 40])
            lookahead.generate(model, ids, lookahead_config=config, on_step=on_step, **arguments)
    return calls, recordings


@pytest.mark.slow_by_nature("decodes six texts with the demo model")
def test_recording_is_not_booked_as_decoding(demo: Any) -> None:
    """A capture takes the time of twenty steps, but does not change the sizes of drafts."""
    free, _ = decoded(demo, 0.0)
    calls, recordings = decoded(demo, 0.11)
    assert recordings >= 9
    assert calls == free
    assert sum(nodes > 1 for nodes in calls[-1]) > len(calls[-1]) / 2


def test_models_that_cannot_be_recorded_run_dynamically() -> None:
    class Failing(TapeRecorder):
        def __call__(self, work: Pass) -> Pass:
            raise RuntimeError("operation not permitted when stream is capturing")

    model = grouped_llama(torch.float32)
    with recorded_with(Failing):
        got = lookahead.generate(model, PROMPT, lookahead_config=STATIC, max_new_tokens=8)
        assert state_of(engine_model(model)).trials.fixed_passes is None
    assert torch.equal(got, model.generate(PROMPT, max_new_tokens=8, do_sample=False))


def test_python_that_depends_on_the_text_is_detected() -> None:
    """Python code that depends on the cache's length would be wrong in a captured graph."""

    class Scaled(LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            cached = kwargs[CACHE].get_seq_length() if kwargs.get(CACHE) is not None else 0
            output = super().forward(*args, **kwargs)
            output.last_hidden_state = output.last_hidden_state * (1 + cached)
            return output

    model = grouped_llama(torch.float32)
    engine_model(model).model.__class__ = Scaled
    with pytest.raises(UnsupportedModelError, match="passes of fixed shapes give other logits"):
        static_engine.fixed_runner(engine_model(model), 1)


# --- small things -------------------------------------------------------------------------------------------


def test_passes_and_buffers_have_few_sizes() -> None:
    assert pass_sizes(1) == (1,)
    assert pass_sizes(2) == pass_sizes(8) == (1, 8)
    assert pass_sizes(120) == pass_sizes(128) == (1, 8, 16, 32, 64, 128)
    assert [rounded(tokens) for tokens in (1, 192, 193, 256, 257, 384, 385, 5000)] == [
        *[192, 192, 256, 256, 384, 384, 512],
        6144,
    ]


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(lookahead.InvalidArgumentError, match="engine='quick'"):
        LookaheadConfig(engine="quick")


def test_autocast_takes_dynamic_steps() -> None:
    """Autocast chooses another number type than the static memory's; steps before and after it are static."""
    model = copy.deepcopy(build("llama"))
    ids, options = torch.tensor([[5, 9, 1, 4, 7, 5, 9]]), {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)

    def run(config: LookaheadConfig = STATIC) -> LookaheadOutput:
        return lookahead.generate(model, ids, lookahead_config=config, return_dict_in_generate=True, **options)

    assert run().statistics.engine == "static"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(LookaheadWarning, match="autocast"):
        inside = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(inside.sequences, run(replace(STATIC, engine="dynamic")).sequences)
    assert inside.statistics.engine == "dynamic"
    assert torch.equal(run().sequences, expected)
