"""Tree attention: packed masks, the interface of transformers, and the kernel, interpreted and compiled."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookahead.backends.transformers.attention import tree_attention_forward
from lookahead.backends.transformers.tree_attention import Pages, unpack
from lookahead.core.tree_masks import MaskedTrees, packed_width, write_masks
from lookahead.errors import InvalidArgumentError, UnsupportedModelError
from tree_attention_cases import Step, steps

SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may use, by compute capability. Code for 8.0 also has to run on 8.6 and 8.9, with less than the
163 KiB of 8.0."""


BRANCHES_IN_SHORTEST_WINDOW = Step([[-1, 0, 0, 1, 2]], [6], 0, 1, None)


@settings(max_examples=60, deadline=None)
@given(step=steps(max_nodes=70, max_length=90))
def test_masks_of_packed_trees_equal_masks_of_single_trees(step: Step) -> None:
    firsts, parents = np.cumsum([0, *map(len, step.parents)]), np.concatenate(step.parents)
    pairs = [(row, node) for row, nodes in enumerate(step.parents) for node in range(len(nodes))]
    places = np.array([step.position(row, node) for row, node in pairs])
    mask = np.full((len(parents) + 3, packed_width(96)), 7, dtype=np.int32)
    trees = MaskedTrees(firsts, parents, np.array(step.lengths), places)
    write_masks(trees, step.window or 0, step.chunk or 0, mask)
    for row, length in enumerate(step.lengths):
        alone = replace(step, parents=[step.parents[row]], lengths=[length], gap=0).packed()[0, 0].numpy()
        rows = mask[firsts[row] : firsts[row + 1]]
        np.testing.assert_array_equal(rows[:, : alone.shape[1]], alone)
        assert not rows[:, alone.shape[1] :].any()
    assert (mask[len(parents) :] == 7).all()


@settings(max_examples=60, deadline=None)
@given(step=steps(max_nodes=70, max_length=90), room=st.integers(0, 40))
@example(step=BRANCHES_IN_SHORTEST_WINDOW, room=0)
def test_packed_mask_has_the_visible_keys_of_each_node(step: Step, room: int) -> None:
    packed, keys = step.packed(), step.scratch + step.nodes + room
    assert packed.dtype == torch.int32
    assert packed.shape == (len(step.lengths), 1, step.nodes, packed_width(step.nodes))
    np.testing.assert_array_equal(unpack(packed, keys)[:, 0].numpy(), step.visible(keys))


@settings(max_examples=60, deadline=None)
@given(step=steps(max_nodes=70, max_length=90), dropped=st.integers(0, 5))
@example(step=BRANCHES_IN_SHORTEST_WINDOW, dropped=0)
def test_dense_masks_say_the_same(step: Step, dropped: int) -> None:
    step = replace(step, gap=0)
    dropped = min(dropped, step.scratch)
    visible = step.dense(dropped) == 0
    np.testing.assert_array_equal(visible, step.visible(step.scratch + step.nodes)[:, :, dropped:])


def test_interface_refuses_in_clear_words() -> None:
    module, query, key = torch.nn.Module(), torch.zeros(1, 2, 3, 16), torch.zeros(1, 1, 9, 16)
    packed = Step([[-1, 0, 1]], [6], 0, None, None).packed()
    with pytest.raises(UnsupportedModelError, match="attention sinks"):
        tree_attention_forward(module, query, key, key, packed, s_aux=torch.zeros(2))
    with pytest.raises(InvalidArgumentError, match=r"dropout=0.1"):
        tree_attention_forward(module, query, key, key, packed, dropout=0.1)
    with pytest.raises(UnsupportedModelError, match="soft-capped"):
        tree_attention_forward(module, query, key, key, packed, softcap=2.0)


# The rest needs Triton, which torch for CPUs does not include.
try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lookahead.backends import likeliest_kernel
    from lookahead.backends.transformers import fused_kernels
    from lookahead.backends.transformers.tree_attention import kernel as kernel_module
    from lookahead.backends.transformers.tree_attention import running_softmax
except ModuleNotFoundError:
    triton = None

needs_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")


@pytest.mark.slow_by_nature("the interpreter runs kernels in Python")
@needs_triton
@pytest.mark.parametrize("marked", ["not exact", pytest.param("exact", marks=pytest.mark.exact)])
def test_kernels_in_the_interpreter(marked: str) -> None:
    apart = Path(__file__).parent / "apart"
    paths = [str(apart / f"interpreted_{what}.py") for what in ("tree_attention", "fused", "likeliest")]
    command = [sys.executable, "-m", "pytest", *paths, "-p", "no:cacheprovider", "-m", marked]
    result = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


class Launches:
    """Replace a kernel, and record the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> "Launches":
        assert all(0 < size < 65536 for size in grid[1:])
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        names = self.kernel.arg_names
        self.options = {name: value for name, value in kwargs.items() if name not in names}
        self.arguments = dict(zip(names, args, strict=False))
        self.arguments |= {name: value for name, value in kwargs.items() if name in names}

    def compile(self, capability: int) -> Any:
        """Return the kernel compiled by Triton for the recorded arguments."""
        types = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
        types[torch.int64] = "*i64"
        signature, constants, attributes = {}, {}, {}
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name], aligned = types[value.dtype], True
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if aligned:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    """All kernels, not launched, by their names."""
    found = {}
    for module in (kernel_module, running_softmax, likeliest_kernel, fused_kernels):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                found[name.lstrip("_")] = Launches(kernel)
                monkeypatch.setattr(module, name, found[name.lstrip("_")])
    return found


def compile_step(
    launches: dict[str, Launches], capability: int, dtype: torch.dtype, size: int, nodes: int, room: tuple[int, int]
) -> int:
    """Compile the kernels of a step with 8 key heads and groups of 4; `room` is the number of keys and, for keys in
    pages, of texts. Return the bytes of shared memory."""
    keys, texts = room
    query = torch.empty(1, nodes, 32, size, dtype=dtype, device="meta").transpose(1, 2)
    key = torch.empty(1, 8, keys, size, dtype=dtype, device="meta")
    mask = torch.empty(1, 1, nodes, packed_width(nodes), dtype=torch.int32, device="meta")
    table, starts = (
        torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((texts, keys // 64), (texts + 1,))
    )
    pages = Pages(table, starts, 64) if texts else None
    result = kernel_module.tree_attention(query, key, key, mask, size**-0.5, pages=pages)
    assert result.shape == (1, nodes, 32, size)
    used = 0
    for launch in (launches["attention_kernel"], launches["combine_kernel"]):
        compiled = launch.compile(capability)
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert len(compiled.asm["cubin"]) > 0
        assert compiled.metadata.shared <= SHARED_MEMORY[capability]
        used = max(used, compiled.metadata.shared)
    return used


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of spilled registers of each thread."""
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        (Path(folder) / "kernel.cubin").write_bytes(cubin)
        command = [str(reader), "--dump-resource-usage", "kernel.cubin"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    sizes = re.findall(r"STACK:(\d+)", result.stdout)
    assert sizes, result.stdout
    return sum(map(int, sizes))


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "count"),
    [(80, torch.bfloat16, 8), (90, torch.bfloat16, 8), pytest.param(80, torch.float32, 16, marks=pytest.mark.exact)],
)
def test_kernels_of_likeliest_tokens_compile_without_spills(
    launches: dict[str, Launches], capability: int, dtype: torch.dtype, count: int
) -> None:
    likeliest_kernel.list_largest(torch.empty(64, 128256, dtype=dtype, device="meta"), count)
    for launch in (launches["part_kernel"], launches["merge_kernel"]):
        assert stack_bytes(launch.compile(capability).asm["cubin"]) == 0


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_fused_kernels_compile_without_spills(launches: dict[str, Launches], capability: int) -> None:
    """For shapes of Llama 3.1 8B."""
    new = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    states = new(64, 14336)
    fused_kernels.gate(states, states)
    hidden = new(1, 64, 4096)
    fused_kernels.add_norm(hidden, hidden, new(4096), 1e-5, True, 0.0)
    query, key = (new(1, 64, heads, 128).transpose(1, 2) for heads in (32, 8))
    cos = new(1, 64, 128)
    fused_kernels.rotate(query, key, cos, cos)
    buffer = new(1, 8, 4096, 128)
    columns = torch.empty(64, dtype=torch.int64, device="meta")
    fused_kernels.rotate_into(fused_kernels.LateKey(query, key, cos, cos, query), key, buffer, buffer, columns)
    for name in ("gate_kernel", "norm_kernel", "rotate_kernel", "rotate_into_kernel"):
        assert stack_bytes(launches[name].compile(capability).asm["cubin"]) == 0


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "size", "nodes", "room"),
    [
        pytest.param(80, torch.float16, 128, 61, (4096, 0), marks=pytest.mark.exact),
        (90, torch.bfloat16, 128, 64, (4096, 17)),
        pytest.param(80, torch.float16, 128, 16, (4096, 17), marks=pytest.mark.exact),
        pytest.param(80, torch.bfloat16, 256, 128, (8192, 17), marks=pytest.mark.exact),
        pytest.param(90, torch.float32, 64, 1, (2048, 2), marks=pytest.mark.exact),
        pytest.param(80, torch.bfloat16, 256, 4, (8192, 0), marks=pytest.mark.exact),
        pytest.param(90, torch.bfloat16, 128, 61, (4096, 0), marks=pytest.mark.exact),
        pytest.param(90, torch.bfloat16, 80, 1024, (2048, 0), marks=pytest.mark.exact),
        (90, torch.float32, 64, 30, (500, 0)),
    ],
)
def test_kernel_compiles(
    launches: dict[str, Launches], capability: int, dtype: torch.dtype, size: int, nodes: int, room: tuple[int, int]
) -> None:
    compile_step(launches, capability, dtype, size, nodes, room)
    assert stack_bytes(launches["attention_kernel"].compile(capability).asm["cubin"]) == 0


@needs_triton
@pytest.mark.exact
@pytest.mark.parametrize("capability", [80, 90])
def test_kernel_compiles_for_every_size(launches: dict[str, Launches], capability: int) -> None:
    for dtype, size in itertools.product([torch.float16, torch.bfloat16, torch.float32], [64, 80, 96, 128, 256]):
        for nodes, keys in ((1, 8192), (8, 300), (16, 300), (128, 8192)):
            used = compile_step(launches, capability, dtype, size, nodes, (keys, 0))
            print(f"sm_{capability} {dtype} head size {size}, {nodes} nodes: {used} bytes of shared memory")


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "size", "softcap"),
    [
        (90, torch.bfloat16, 128, None),
        pytest.param(90, torch.float16, 256, 50.0, marks=pytest.mark.exact),
        pytest.param(80, torch.bfloat16, 80, None, marks=pytest.mark.exact),
        pytest.param(80, torch.float16, 64, 30.0, marks=pytest.mark.exact),
        pytest.param(90, torch.float32, 64, None, marks=pytest.mark.exact),
    ],
)
def test_kernel_by_position_compiles(
    launches: dict[str, Launches], capability: int, dtype: torch.dtype, size: int, softcap: float | None
) -> None:
    """One kernel serves all steps of a model: it has no constants for the number of nodes or the capacity."""
    own = launches["by_position_kernel"]
    fixed = []
    for nodes, keys in ((64, 4096), (8, 700)):
        query = torch.empty(1, nodes, 32, size, dtype=dtype, device="meta").transpose(1, 2)
        key = torch.empty(1, 8, keys, size, dtype=dtype, device="meta")
        mask = torch.empty(1, 1, nodes, packed_width(nodes) + 200, dtype=torch.int32, device="meta")
        result = kernel_module.attention_by_position(query, key, key, mask, size**-0.5, softcap)
        assert result.shape == (1, nodes, 32, size)
        constants = {name: own.arguments[name] for name in own.arguments if name.isupper()}
        assert kernel_module.SPAN % constants["BLOCK_N"] == 0
        fixed.append((constants, own.options))
    assert fixed[0] == fixed[1]
    for pages in (None, Pages(*(torch.empty(size, dtype=torch.int32, device="meta") for size in ((3, 64), (4,))), 64)):
        kernel_module.attention_by_position(query, key, key, mask, size**-0.5, softcap, pages)
        for launch in (own, launches["combine_kernel"]):
            compiled = launch.compile(capability)
            assert f".target sm_{capability}" in compiled.asm["ptx"]
            assert len(compiled.asm["cubin"]) > 0
            assert compiled.metadata.shared <= SHARED_MEMORY[capability]
