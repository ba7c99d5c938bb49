"""Prices of a GPU and its host: launches, copies and waits; kernels timed by replay; the kernels of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from lookahead.backends.forward_result import pack_likeliest
from lookahead.backends.machine import Staged
from lookahead.bench.rows import Row
from lookahead.bench.tuning import seconds_of
from lookahead.core.tree_masks import MaskedTrees, packed_width, write_masks

HEADS = ((32, 8, 128), (16, 8, 256), (32, 32, 96), (40, 8, 80), (8, 8, 64))
"""Numbers of query heads and key heads, and head size, for the tests of the attention kernel."""

VOCABULARY = 128256
HIDDEN = 4096
GATED = 14336

TIMES = 20
"""Calls of a kernel in a captured graph. The first ones bring its inputs to the caches, as the layers before it do."""

LISTED_KERNELS = 24
"""Number of kernels in the table of a step; the others are one row."""


def microseconds(work: Callable[[], object], device: str) -> float:
    """Return the time of the work on the device, in a captured graph without launches of its own."""
    place = torch.device(device)
    work()
    if place.type == "cpu":
        return 1e6 * min(seconds_of(place, work) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(TIMES):
            work()
    graph.replay()
    return 1e6 * min(seconds_of(place, graph.replay) for _ in range(5)) / TIMES


def host_rows(device: str) -> Iterator[Row]:
    """Yield microseconds of the host for a launch, a replay of 600 kernels, an upload, and a wait."""
    place = torch.device(device)
    number = torch.zeros(1, device=device)
    staged = Staged(place, [(64, 64)])
    works: dict[str, Callable[[], object]] = {
        "launch": lambda: number.add_(1),
        "upload": staged.send,
        "launch, copy to the host and wait": lambda: number.add_(1).item(),
    }
    if place.type != "cpu":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(600):
                number.add_(1)
        works["replay of 600 kernels"] = graph.replay
    for name, work in works.items():
        work()
        seconds = seconds_of(place, lambda work=work: [work() for _ in range(100)])  # type: ignore[misc]
        begin = perf_counter()
        for _ in range(100):
            work()
        host = perf_counter() - begin
        yield {"kind": "host", "work": name, "host_us": 1e4 * host, "us": 1e4 * seconds}


def kernels_of(work: Callable[[], object], device: str) -> tuple[dict[str, int], list[tuple[str, int, float]]]:
    """Return the driver's calls by name, and the name, number and microseconds of all kernels, longest first.

    On a CPU operations of torch count as kernels.
    """
    is_cpu = torch.device(device).type == "cpu"
    activities = [ProfilerActivity.CPU] if is_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as seen:
        seconds_of(torch.device(device), work)
    kind, field = (DeviceType.CPU, "self_cpu_time_total") if is_cpu else (DeviceType.CUDA, "self_device_time_total")
    events = seen.key_averages()
    kernels = [(event.key, event.count, float(getattr(event, field))) for event in events if event.device_type == kind]
    calls = {event.key: event.count for event in events if event.key.startswith("cuda")}
    return calls, sorted(kernels, key=lambda kernel: -kernel[2])


def table_rows(work: Callable[[], object], steps: int, about: Row, device: str) -> Iterator[Row]:
    """Yield the driver's calls, and the kernels of each of some steps with their time."""
    calls, kernels = kernels_of(work, device)
    total = sum(time for _, _, time in kernels) / steps
    of_step = {name: count / steps for name, count in calls.items()}
    yield {
        "kind": "launches",
        **about,
        "kernels": sum(count for _, count, _ in kernels) / steps,
        "us": total,
        **of_step,
    }
    rest = Counter[str]()
    for place, (name, count, time) in enumerate(kernels):
        if place < LISTED_KERNELS:
            yield {
                "kind": "kernel of a step",
                **about,
                "kernel": name[:120],
                "count": count / steps,
                "us": time / steps,
            }
        else:
            rest.update(count=count, us=time)  # type: ignore[call-arg]
    yield {"kind": "kernel of a step", **about, "kernel": "others"} | {
        key: rest[key] / steps for key in ("count", "us")
    }


def attention_rows(device: str, heads: int, groups: int, size: int) -> Iterator[Row]:
    """Yield errors of the attention kernel on chains, and its time beside torch's masked attention."""
    from lookahead.backends.transformers.tree_attention import unpack
    from lookahead.backends.transformers.tree_attention.kernel import tree_attention

    for context in (512, 4096, 32768):
        for nodes in (1, 16, 64):
            torch.manual_seed(context + nodes)
            shapes = ((heads, nodes), (groups, context + nodes), (groups, context + nodes))
            query, key, value = (
                torch.randn(1, count, length, size, device=device, dtype=torch.bfloat16) for count, length in shapes
            )
            chain = np.arange(nodes)
            trees = MaskedTrees(np.array([0, nodes]), chain - 1, np.array([context]), context + chain)
            packed = np.zeros((nodes, packed_width(nodes)), dtype=np.int32)
            write_masks(trees, 0, 0, packed)
            mask = torch.from_numpy(packed)[None, None].to(device)
            seen = unpack(mask, context + nodes)
            ours = partial(tree_attention, query, key, value, mask, size**-0.5)
            exact = scaled_dot_product_attention(query.float(), key.float(), value.float(), seen, enable_gqa=True)
            error = float((ours().float() - exact.transpose(1, 2)).norm() / exact.norm())
            bias = torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
            repeated = [states.repeat_interleave(heads // groups, 1) for states in (key, value)]
            theirs = partial(scaled_dot_product_attention, query, *repeated, bias)
            about = {"heads": heads, "groups": groups, "size": size, "context": context, "nodes": nodes}
            row: Row = {"kind": "attention", **about, "relative_error": error}
            row |= {"kernel_us": microseconds(ours, device), "sdpa_us": microseconds(theirs, device)}
            yield row | ({"error": f"the kernel is wrong by {error:.3f} at {about}"} if not error < 0.01 else {})


def _gate_of_model(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(states) * others


def _fused_pairs(device: str, nodes: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return for each fused kernel its work, and the model's, on random states."""
    from lookahead.backends.transformers import fused_kernels as fused

    torch.manual_seed(nodes)
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    norm = LlamaRMSNorm(HIDDEN)
    norm.weight = torch.nn.Parameter(random(HIDDEN))
    manner = norm.weight, norm.variance_epsilon, True, 0.0
    states, update = random(2, 1, nodes, HIDDEN)
    query, key, value = (random(1, nodes, heads, 128).transpose(1, 2) for heads in (32, 8, 8))
    cos, sin = random(2, 1, nodes, 128)
    wide, other = random(2, nodes, GATED)
    caches = torch.zeros(2, 2, 1, 8, 1024, 128, device=device, dtype=torch.bfloat16)
    columns = torch.arange(512, 512 + nodes, device=device)
    rotated = torch.empty_like(query)

    def norm_of_sum() -> tuple[torch.Tensor, torch.Tensor]:
        total = states + update
        return total, norm(total)

    def written() -> tuple[torch.Tensor, ...]:
        fused.rotate_into(fused.LateKey(query, key, cos, sin, rotated), value, *caches[0], columns)
        return rotated, *caches[0]

    def written_by_model() -> tuple[torch.Tensor, ...]:
        turned, new_key = apply_rotary_pos_emb(query, key, cos, sin)
        for cache, new in zip(caches[1], (new_key, value), strict=True):
            cache.index_copy_(2, columns, new)
        return turned, *caches[1]

    return {
        "norm": (partial(fused.rms_norm, states, *manner), partial(norm, states)),
        "norm of a sum": (partial(fused.add_norm, states, update, *manner), norm_of_sum),
        "rotary embeddings": (
            partial(fused.rotate, query, key, cos, sin),
            partial(apply_rotary_pos_emb, query, key, cos, sin),
        ),
        "rotary embeddings and cache": (written, written_by_model),
        "gate": (partial(fused.gate, wide, other), partial(_gate_of_model, wide, other)),
    }


@torch.no_grad()
def fused_rows(device: str) -> Iterator[Row]:
    """Yield values with other bits than the model's, and times, of the fused kernels for 1 to 256 nodes."""
    for nodes in (1, 16, 64, 256):
        for name, (ours, theirs) in _fused_pairs(device, nodes).items():
            got, expected = (torch.cat([part.flatten() for part in work()]) for work in (ours, theirs))
            row: Row = {"kind": "fused", "kernel": name, "nodes": nodes}
            row |= {"other_bits": int((got != expected).sum()), "values": expected.numel()}
            yield row | {"us": microseconds(ours, device), "model_us": microseconds(theirs, device)}


def likeliest_rows(device: str) -> Iterator[Row]:
    """Yield the time of listing the likeliest tokens after each node, beside torch's, and whether both agree."""

    def by_torch(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids = logits.topk(8, dim=-1).indices
        return logits.argmax(dim=-1, keepdim=True), ids, logits.float().softmax(dim=-1).gather(1, ids)

    for nodes in (1, 16, 64, 256):
        torch.manual_seed(nodes)
        logits = torch.randn(nodes, VOCABULARY, device=device, dtype=torch.bfloat16)
        first, ids, _ = by_torch(logits)
        packed = pack_likeliest(logits, 8).long()
        alike = torch.equal(packed[:, :1], first) and torch.equal(
            logits.gather(1, packed[:, 1:9]), logits.gather(1, ids)
        )
        row: Row = {"kind": "likeliest", "nodes": nodes, "equal": alike}
        row["us"] = microseconds(partial(pack_likeliest, logits, 8), device)
        yield row | {"torch_us": microseconds(partial(by_torch, logits), device)}
