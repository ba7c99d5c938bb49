"""Random steps for tests of tree attention, and attention computed by its definition."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from lookahead.core.tree_masks import SCRATCH, MaskedTrees, dense_masks, packed_masks, packed_width


@dataclass(frozen=True)
class Step:
    """A batch of trees as input of one attention layer.

    Attributes:
        parents: Parent of each node, per row; -1 for the first. Rows have different numbers of nodes.
        lengths: Cached tokens, per row.
        gap: Garbage columns between the longest row and the scratch memory.
        window: Window of a sliding layer.
        chunk: Chunk length of a chunked layer.
    """

    parents: list[list[int]]
    lengths: list[int]
    gap: int
    window: int | None
    chunk: int | None

    @property
    def nodes(self) -> int:
        return max(len(row) for row in self.parents)

    @property
    def scratch(self) -> int:
        return max(self.lengths) + self.gap

    def position(self, row: int, node: int) -> int:
        """Return the position id of a real node."""
        return self.lengths[row] + len(self.path(row, node)) - 1

    def path(self, row: int, node: int) -> list[int]:
        """Return a node and its ancestors."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[row][node]
        return path

    def packed(self) -> torch.Tensor:
        """The packed mask of the step."""
        packed = packed_masks(self.trees(), self.window, self.chunk, packed_width(self.nodes))
        packed[:, SCRATCH] = self.scratch
        return torch.from_numpy(packed.reshape(len(self.lengths), 1, self.nodes, -1))

    def dense(self, dropped: int) -> NDArray[np.floating]:
        """Return the dense masks without a gap and the first `dropped` keys, `[batch, nodes, keys]`."""
        scratch = np.full(len(self.lengths), max(self.lengths))
        masks, _ = dense_masks(self.trees(), scratch, (self.window, self.chunk), -1.0, dropped)
        return masks.reshape(len(self.lengths), self.nodes, -1)

    def trees(self) -> MaskedTrees:
        """The padded trees."""
        shape = (len(self.lengths), self.nodes)
        parents, places = np.full(shape, -2), np.zeros(shape, dtype=np.int64)
        for row, nodes in enumerate(self.parents):
            parents[row, : len(nodes)] = nodes
            places[row, : len(nodes)] = [self.position(row, node) for node in range(len(nodes))]
        firsts = np.arange(len(self.lengths) + 1) * self.nodes
        return MaskedTrees(firsts, parents.ravel(), np.array(self.lengths), places.ravel())

    def visible(self, keys: int) -> NDArray[np.bool_]:
        """Return the visible keys of each node, computed pair by pair: `[batch, nodes, keys]`."""
        visible = np.zeros((len(self.lengths), self.nodes, keys), dtype=np.bool_)
        for row, parents in enumerate(self.parents):
            for node in range(self.nodes):
                if node >= len(parents):
                    visible[row, node, self.scratch + node] = True
                    continue
                places = {column: column for column in range(self.lengths[row])}
                places |= {self.scratch + other: self.position(row, other) for other in self.path(row, node)}
                for column, position in places.items():
                    visible[row, node, column] = self._reaches(self.position(row, node), position)
        return visible

    def _reaches(self, query: int, key: int) -> bool:
        if self.window is not None:
            return query - key < self.window
        return self.chunk is None or query // self.chunk == key // self.chunk


@st.composite
def steps(draw: st.DrawFn, max_nodes: int = 40, max_length: int = 70, max_batch: int = 3) -> Step:
    """Draw random steps."""
    batch = draw(st.integers(1, max_batch))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [draw(st.integers(1, max_nodes)) for _ in range(batch)]
    # Deep trees as well as bushy ones: a parent is one of the last few nodes.
    reach = draw(st.sampled_from([1, 2, 5, 50]))
    parents = [
        [int(random.integers(max(node - reach, 0), node)) if node else -1 for node in range(size)] for size in sizes
    ]
    window = draw(st.sampled_from([None, None, 1, 3, 9, 40]))
    chunk = None if window is not None else draw(st.sampled_from([None, None, 4, 32]))
    lengths = [draw(st.integers(0, max_length)) for _ in range(batch)]
    return Step(parents, lengths, draw(st.sampled_from([0, 0, 5])), window, chunk)


def states(
    step: Step, heads: int, kv_heads: int, key_size: int, value_size: int, room: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value in a model's layout, with NaN in garbage columns."""
    random = torch.Generator().manual_seed(seed)
    batch, keys = len(step.lengths), step.scratch + step.nodes + room
    # A model's queries are a transposed view.
    query = torch.randn(batch, step.nodes, heads, key_size, generator=random).to(dtype).transpose(1, 2)
    key = torch.randn(batch, kv_heads, keys, key_size, generator=random).to(dtype)
    value = torch.randn(batch, kv_heads, keys, value_size, generator=random).to(dtype)
    for row, length in enumerate(step.lengths):
        for tensor in (key, value):
            tensor[row, :, length : step.scratch] = float("nan")
            tensor[row, :, step.scratch + step.nodes :] = float("nan")
    return query, key, value


def attention_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: NDArray[np.bool_],
    scaling: float,
    softcap: float | None,
) -> NDArray[np.float64]:
    """Return softmax attention in float64, per query, from visible keys only: `[batch, nodes, heads, value_size]`."""
    q, k, v = (tensor.double().numpy() for tensor in (query, key, value))
    batch, heads, nodes, _ = q.shape
    group = heads // k.shape[1]
    output = np.empty((batch, nodes, heads, v.shape[3]))
    for row in range(batch):
        for node in range(nodes):
            seen = visible[row, node]
            for head in range(heads):
                scores = k[row, head // group, seen] @ q[row, head, node] * scaling
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                output[row, node, head] = weights / weights.sum() @ v[row, head // group, seen]
    return output


def tolerance(dtype: torch.dtype, value: torch.Tensor) -> float:
    """Return the largest allowed error of a result.

    Weights are rounded to the number type before the product with the values, and the result is rounded again: each
    rounding adds at most half a unit in the last place of the largest value. The rest is float32: scores up to 20 and
    soft caps up to 30 have errors of a few 1e-6, and weights have the same relative error.
    """
    largest = 0.0 if dtype == torch.float32 else float(value.double().nan_to_num().abs().max())
    return torch.finfo(dtype).eps * largest + 3e-5
