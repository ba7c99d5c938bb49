"""The tree attention kernel in Triton's interpreter, on the CPU, against attention by its definition.

The interpreter must be chosen before Triton is imported, so `test_tree_attention.py` runs this file in a separate
process: `TRITON_INTERPRET=1 python -m pytest tests/backends/apart/interpreted_tree_attention.py`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.machine import PausingClock
from lookahead.backends.transformers import pooled_rows, static_engine
from lookahead.backends.transformers.attention import BY_POSITION as BY_POSITION_NAME
from lookahead.backends.transformers.attention import TREE_ATTENTION
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.comparisons import CHECK_LENGTH, check_invariance, check_logits, reads_rows_alike
from lookahead.backends.transformers.layouts import padded_trees
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.pooled_rows import PooledRunner
from lookahead.backends.transformers.row_pool import layer_shapes
from lookahead.backends.transformers.rows import PaddedCache
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.shared_clone import SharedClone
from lookahead.backends.transformers.tree_attention import Pages, along_paths, kernel
from lookahead.backends.transformers.tree_attention.kernel import attention_by_position, tree_attention
from lookahead.backends.transformers.tree_attention.running_softmax import Tiling, choose_tiling
from lookahead.backends.transformers.tree_cache import Row
from lookahead.core.forest import Forest, lay_out
from lookahead.core.token_tree import TokenTree
from lookahead.core.tree_masks import packed_width
from model_zoo import build, in_type
from quick import quickly
from tree_attention_cases import Step, attention_by_definition, states, steps, tolerance


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Compute products in float64: on some processors the interpreter's rounding depends on a row's index.

    The interpreter stores bfloat16 as raw bits, which its matrix product would read as integers, so they are widened.
    """

    def widened(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
        values = [h.data for h in (a, b)]
        if a.data.dtype == np.uint16:
            values = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in values]
        product = np.matmul(*(value.astype(np.float64) for value in values)).astype(d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    # Scores far beyond the soft cap may overflow before they are capped.
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        patch.setattr(InterpreterBuilder, "create_dot", widened)
        yield


# One program per row and head combines the splits; these programs take most of the interpreter's time.
BY_POSITION = "by position"
CASES: dict[str, Any] = {
    "step": steps(max_batch=2),
    "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    "heads": st.sampled_from(
        [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 1), (2, 2)]
    ),  # key heads, queries per key head
    "sizes": st.sampled_from([(64, 64), (80, 80), (96, 96), (128, 128), (16, 16), (8, 24), (24, 16), (256, 256)]),
    "room": st.sampled_from([0, 0, 7, 200]),
    "softcap": st.sampled_from([None, None, 1.0, 30.0]),
    "tiling": st.sampled_from([None, (16, 16, 1), (16, 16, 2), (32, 16, 4), (64, 32, 2), (16, 64, 8)]),
    "seed": st.integers(0, 2**31),
}


@settings(max_examples=3, deadline=None)
@given(**{**CASES, "step": steps(max_batch=2, max_nodes=16)})
def test_kernel_is_attention_by_its_definition(**case: Any) -> None:
    assert_attention(**case)


@pytest.mark.exact
@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_kernel_is_attention_by_its_definition_in_many_cases(**case: Any) -> None:
    assert_attention(**case)


def assert_attention(
    step: Step,
    dtype: torch.dtype,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    room: int,
    softcap: float | None,
    tiling: tuple[int, int, int] | str | None,
    seed: int,
) -> None:
    kv_heads, group = heads
    query, key, value = states(step, kv_heads * group, kv_heads, *sizes, room, dtype, seed)
    packed, scaling = step.packed(), sizes[0] ** -0.5
    if tiling == BY_POSITION:
        result = attention_by_position(query, key, value, along_paths(packed), scaling, softcap)
    else:
        softcap = None
        cut = None if tiling is None else Tiling(*tiling, warps=4, stages=2)
        result = tree_attention(query, key, value, packed, scaling, cut)
    visible = step.visible(key.shape[2])
    assert result.dtype == dtype
    limit = tolerance(dtype, value)
    expected = attention_by_definition(query, key, value, visible, scaling, softcap)
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=0, atol=limit)


PAGED: dict[str, Any] = {
    "step": steps(max_batch=4),
    "dtype": CASES["dtype"],
    "heads": CASES["heads"],
    "sizes": st.sampled_from([(16, 16), (8, 24), (64, 64)]),
    "page": st.sampled_from([1, 7, 16, 64]),
    "padding": st.integers(0, 20),
    "tiling": CASES["tiling"],
    "seed": CASES["seed"],
}


@settings(max_examples=3, deadline=None)
@given(**{**PAGED, "step": steps(max_batch=3, max_nodes=8)})
def test_texts_in_pages_are_attended_to_one_by_one(**case: Any) -> None:
    assert_pages(**case)


@pytest.mark.exact
@settings(max_examples=60, deadline=None)
@given(**PAGED)
def test_texts_in_pages_are_attended_to_one_by_one_in_many_cases(**case: Any) -> None:
    assert_pages(**case)


def test_a_text_with_more_nodes_than_others_takes_its_turns() -> None:
    """The long text has eight blocks of rows; four run at once. The kernel by position takes no turns."""
    step = Step([[*range(-1, 31)], [-1], [-1]], [9, 20, 0], 0, None, None)
    assert_pages(step, torch.float16, (1, 4), (16, 16), 7, 0, None, 0, with_positions=False)


def test_a_long_text_among_short_ones_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of 4,000 tokens among seven of 20 to 200: no program reads more than 1,024 keys, where one read all."""
    lengths = [20, 40, 200, 4000, 100, 33, 64, 190]
    products = Counter[tuple[int, ...]]()
    dot = InterpreterBuilder.create_dot

    def counted(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        products[tuple(self.grid_idx)] += 1
        return dot(self, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    step = Step([[-1, 0]] * 8, lengths, 0, None, None)
    assert_pages(step, torch.float16, (1, 4), (16, 16), 64, 0, (16, 32, 1), 0, with_positions=False)
    blocks = {program: count // 2 for program, count in products.items()}  # scores, and the average of values
    assert max(blocks.values()) == 32
    assert sum(blocks.values()) == sum(-(-length // 32) + 1 for length in lengths)
    assert len(blocks) == 7 + 4


def assert_pages(
    step: Step,
    dtype: torch.dtype,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    page: int,
    padding: int,
    tiling: tuple[int, int, int] | None,
    seed: int,
    with_positions: bool = True,
) -> None:
    """Check texts in one packed row, with keys in scattered pages, followed by padding nodes.

    Args:
        with_positions: Whether to check the kernel by position as well.
    """
    kv_heads, group = heads
    texts = [
        Step([parents], [length], 0, step.window, step.chunk)
        for parents, length in zip([*step.parents, [-1] * padding], [*step.lengths, 0], strict=True)
        if parents
    ]
    scaling, random = sizes[0] ** -0.5, np.random.default_rng(seed)
    parts = [states(text, kv_heads * group, kv_heads, *sizes, 0, dtype, seed) for text in texts]
    counts = [-(-key.shape[2] // page) for _, key, _ in parts]
    order = random.permutation(sum(counts))
    table = np.zeros((len(texts) + 1, max(counts) + 2), dtype=np.int32)  # the last text has no nodes
    key, value = (torch.full((1, kv_heads, page * sum(counts), size), float("nan")).to(dtype) for size in sizes)
    shape = 1, 1, sum(text.nodes for text in texts), packed_width(step.nodes + padding)
    packed, first = torch.zeros(shape, dtype=torch.int32), 0
    for row, (text, (_, own_key, own_value), count) in enumerate(zip(texts, parts, counts, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        columns = (table[row, :count, None] * page + np.arange(page)).reshape(-1)[: own_key.shape[2]]
        key[:, :, columns], value[:, :, columns] = own_key, own_value
        mask = text.packed()
        packed[:, :, first : first + text.nodes, : mask.shape[3]] = mask
        first += text.nodes
    starts = np.cumsum([0, *(text.nodes for text in texts), 0]).astype(np.int32)
    pages = Pages(torch.from_numpy(table), torch.from_numpy(starts), page)
    query = torch.cat([query for query, _, _ in parts], dim=2)
    cut = None if tiling is None else Tiling(*tiling, warps=4, stages=2)
    result = tree_attention(query, key, value, packed, scaling, cut, pages)
    paths = along_paths(packed, has_pages=True)
    by_position = attention_by_position(query, key, value, paths, scaling, None, pages) if with_positions else None
    for row, (text, (own_query, own_key, own_value)) in enumerate(zip(texts, parts, strict=True)):
        expected = attention_by_definition(own_query, own_key, own_value, text.visible(own_key.shape[2]), scaling, None)
        output = result[:, starts[row] : starts[row + 1]]
        np.testing.assert_allclose(output.double().numpy(), expected, rtol=0, atol=tolerance(dtype, own_value))
        if by_position is not None:
            alone = attention_by_position(own_query, own_key, own_value, along_paths(text.packed()), scaling)
            assert torch.equal(by_position[:, starts[row] : starts[row + 1]], alone)


def test_static_buffers_serve_every_step() -> None:
    """Tensors and tiling of one call, as in a captured graph, with the contents of later steps."""
    chain = [-1, 0, 1, 1, 0, 4, 4]
    tiling = choose_tiling(rows=14, heads=2, keys=64, head_dim=16, dtype=torch.float32)
    assert tiling.splits > 1
    packed, key, value = (
        torch.empty(2, 1, 7, 4, dtype=torch.int32),
        torch.empty(2, 1, 64, 16),
        torch.empty(2, 1, 64, 16),
    )
    query = torch.empty(2, 2, 7, 16)
    for lengths in ([0, 0], [3, 1], [34, 11], [57, 57]):
        step = Step([chain, chain[:4]], lengths, 0, None, None)
        for buffer, contents in zip((query, key, value), states(step, 2, 1, 16, 16, 0, torch.float32, 0), strict=True):
            buffer.fill_(float("nan"))[:, :, : contents.shape[2]] = contents
        packed.copy_(step.packed())
        result = tree_attention(query, key, value, packed, 0.25)
        expected = attention_by_definition(query, key, value, step.visible(64), 0.25, None)
        np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=tolerance(torch.float32, value))


def test_same_input_same_bits_whoever_else_is_in_the_batch() -> None:
    rows = [[-1, 0, 0, 1, 2], [-1, 0, 1]]
    step = Step(rows, [50, 33], 0, None, None)
    tensors = states(step, 2, 1, 16, 16, 0, torch.float16, 1)
    tiling = Tiling(16, 16, 4, warps=4, stages=2)
    both = tree_attention(*tensors, step.packed(), 0.25, tiling=tiling)
    again = tree_attention(*tensors, step.packed(), 0.25, tiling=tiling)
    alone = tree_attention(*(tensor[1:] for tensor in tensors), step.packed()[1:], 0.25, tiling=tiling)
    assert torch.equal(both, again)
    assert torch.equal(both[1:], alone)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make splits so short that texts have several."""
    monkeypatch.setattr(kernel, "SPAN", 64)


@pytest.mark.usefixtures("short_splits")
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**{**CASES, "step": steps(max_batch=2, max_nodes=8, max_length=210), "tiling": st.just(BY_POSITION)})
def test_attention_by_position_is_attention_by_its_definition(**case: Any) -> None:
    assert_attention(**case)


@pytest.mark.exact
@pytest.mark.usefixtures("short_splits")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**{**CASES, "step": steps(max_batch=2, max_nodes=40, max_length=210), "tiling": st.just(BY_POSITION)})
def test_attention_by_position_is_attention_by_its_definition_in_many_cases(**case: Any) -> None:
    assert_attention(**case)


TEXT = 141
SMALL, LARGE = (torch.float16, (2, 1, 24, 16)), (torch.bfloat16, (8, 1, 128, 128))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    ("others", "cached", "room", "window", "kind"),
    [
        (0, 140, 40, None, SMALL),
        pytest.param(7, 139, 0, None, SMALL, marks=pytest.mark.exact),
        (16, 136, 40, None, SMALL),
        pytest.param(33, 127, 0, None, LARGE, marks=pytest.mark.exact),
        pytest.param(64, 120, 300, None, (torch.float16, (4, 2, 24, 16)), marks=pytest.mark.exact),
        pytest.param(64, 121, 70, 50, LARGE, marks=pytest.mark.exact),
        pytest.param(7, 130, 0, 9, SMALL, marks=pytest.mark.exact),
        pytest.param(16, 135, 7, 100, (torch.float32, (4, 2, 64, 64)), marks=pytest.mark.exact),
        pytest.param(64, 64, 200, None, (torch.float32, (4, 2, 64, 64)), marks=pytest.mark.exact),
    ],
)
def test_bits_of_a_query_do_not_depend_on_its_company(
    others: int, cached: int, room: int, window: int | None, kind: tuple[torch.dtype, tuple[int, int, int, int]]
) -> None:
    """The last tokens of a text as a path in a larger tree and batch: each has the bits of a single query."""
    dtype, (heads, shared, size, value_size) = kind
    draws = torch.Generator().manual_seed(others + cached)
    query, key, value = (
        torch.randn(1, count, TEXT, width, generator=draws).to(dtype)
        for count, width in ((heads, size), (shared, size), (shared, value_size))
    )
    depth = TEXT - cached
    parents, path = [], []
    for level in range(depth):  # add siblings before each token of the path
        wrong = others // depth + (level < others % depth)
        parents += [path[-1] if path else -1] * (wrong if path else 0)
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
    parents += [path[-1]] * (depth + others - len(parents))
    step = Step([parents, [-1]], [cached, 30], 3, window, None)
    tree = list(states(step, heads, shared, size, value_size, room, dtype, 1))
    for buffer, source in zip(tree[1:], (key, value), strict=True):
        buffer[0, :, :cached] = source[0, :, :cached]
        buffer[0, :, step.scratch + torch.tensor(path)] = source[0, :, cached:]
    tree[0][0, :, path] = query[0, :, cached:]
    packed = along_paths(step.packed())
    inside = attention_by_position(*tree, packed, size**-0.5)[0, path]
    for level in range(0, depth, max(1, depth // 4)):
        seen = cached + level + 1
        single = along_paths(Step([[-1]], [seen - 1], 0, window, None).packed())
        alone = attention_by_position(
            query[:, :, seen - 1 : seen], key[:, :, :seen], value[:, :, :seen], single, size**-0.5
        )
        assert torch.equal(alone[0, 0], inside[level]), level


# The interpreter takes seconds per model, so all models run with `make test-exact`.
NAMES = ["llama", "mistral_sliding", "qwen2_mixed_sliding", "deepseek_v3", "llama4_chunked"]

TEXTS = [[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6, 5], [7, 7, 9, 1, 3, 3]]


def trees(runner: ModelRunner) -> list[TokenTree]:
    """Return a tree for each text, with branches, one of them with several pending tokens."""
    first, second = (runner.begin_tree(row, text) for row, text in enumerate(TEXTS))
    for candidate in ([5, 6, 7], [5, 8], [9]):
        first.add_candidates(candidate)
    second.add_candidates([4, 4])
    return [first, second]


@pytest.mark.parametrize("name", quickly(NAMES, ["qwen2_mixed_sliding"]))
@torch.inference_mode()
def test_models_give_the_logits_of_eager_attention_with_dense_masks(name: str) -> None:
    eager, tree_model = build(name, attention="eager"), build(name, attention=TREE_ATTENTION)
    runner = ModelRunner(eager, 2)
    prefixes = [TokenTree(text[:cached]) for text, cached in zip(TEXTS, (12, 3), strict=True)]
    runner.forward(prefixes)
    runner.commit([range(12), range(3)])
    step = trees(runner)
    rows = [Row(), Row()]
    for row, text in zip(rows, runner.rows, strict=True):
        row.adopt(text)
    expected = runner.forward(step)
    logits = packed_forward(tree_model, rows, step)
    for row, tree in enumerate(step):
        slots = lay_out(tree).slots
        for node in np.flatnonzero(tree.needs_logits):
            torch.testing.assert_close(
                logits[row, slots[node]], expected[row].logits_after(node)[0], rtol=1e-4, atol=1e-4
            )


def packed_forward(model: PreTrainedModel, rows: list[Row], step: list[TokenTree]) -> torch.Tensor:
    """Return the logits of every slot, from a pass with packed masks."""
    layouts, lengths = [lay_out(tree) for tree in step], [row.length for row in rows]
    nodes = max(len(layout.order) for layout in layouts)
    tokens, positions = np.zeros((2, nodes), dtype=np.int64), np.zeros((2, nodes), dtype=np.int64)
    for row, layout in enumerate(layouts):
        count = len(layout.order)
        tokens[row, :count], positions[row, :count] = layout.tokens, lengths[row] + layout.depths
    made = MaskBuilder(model.config)
    packed = made.packed(padded_trees(Forest(step), np.array(lengths), positions))
    masks = {kind: torch.from_numpy(mask) for kind, mask in zip(made.kinds, packed, strict=True)}
    kinds = getattr(model.config, "layer_types", None)
    single = "sliding_attention" if getattr(model.config, "sliding_window", None) else "full_attention"
    return model(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(positions),
        attention_mask={kind: masks[kind] for kind in set(kinds)} if kinds else masks[single],
        **{CACHE: PaddedCache(rows, list(map(len, step)))},
    ).logits


@pytest.mark.parametrize("name", quickly(NAMES, []))
@torch.no_grad()
def test_both_engines_with_the_kernel(name: str) -> None:
    """Columns that an earlier text filled with NaN have no effect."""
    expected = check_logits(ModelRunner(build(name, attention="eager"), 1))
    model = build(name, attention=TREE_ATTENTION)
    torch.testing.assert_close(check_logits(ModelRunner(model, 1)), expected, rtol=1e-4, atol=1e-4)
    shapes = layer_shapes(ModelRunner(model).run_token().cache)
    for rows in (1, 3):
        runner = PooledRunner(model, shapes, PausingClock(model.device), is_trial=True)
        runner.begin_call(rows, 8, CHECK_LENGTH)
        for buffer in runner.passes.cache.buffers:
            buffer.fill_(float("nan"))
        runner.begin_call(rows, 8, CHECK_LENGTH, passes=runner.end_call())
        if rows == 1:
            torch.testing.assert_close(check_logits(runner), expected, rtol=1e-4, atol=1e-4)
        else:
            assert reads_rows_alike(runner, model, exactly=False)


@pytest.mark.parametrize("name", quickly(["llama", "qwen2_mixed_sliding", "gemma2"], []))
@torch.no_grad()
def test_static_passes_of_one_size_are_invariant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole computation of CUDA, without its products and graphs."""
    monkeypatch.setattr(pooled_rows, "FIXED_ROWS", 8)
    clone = SharedClone(in_type(name, torch.float16), BY_POSITION_NAME).module
    assert check_invariance(clone, partial(static_engine.fixed_runner, clone))


@pytest.mark.exact
def test_static_engine_with_the_kernel_writes_the_same_text(prompt: torch.Tensor) -> None:
    config = LookaheadConfig(window_size=3, ngram_size=3, guess_set_size=3, pool_from_prompt=True, engine="static")
    expected = build("qwen2_mixed_sliding", attention="sdpa").generate(prompt, max_new_tokens=6, do_sample=False)
    model = build("qwen2_mixed_sliding", attention=TREE_ATTENTION)
    got = lookahead.generate(model, prompt, lookahead_config=config, max_new_tokens=6, do_sample=False)
    assert got.equal(expected)


@torch.inference_mode()
def test_passes_without_a_packed_mask_run_as_sdpa(prompt: torch.Tensor) -> None:
    for name in ("llama", "mistral_sliding"):
        expected = build(name, attention="sdpa").generate(prompt, max_new_tokens=12, do_sample=False)
        assert (
            build(name, attention=TREE_ATTENTION).generate(prompt, max_new_tokens=12, do_sample=False).equal(expected)
        )
