"""A simulated CUDA device: tensors with `device` `cuda:N` in the CPU's memory.

Errors on a GPU are errors here, too:

* operations on tensors of two devices raise;
* waits of the host for the device, and copies that cause one, are logged with their line;
* `torch.cuda.graph` captures kernel launches, not Python code; a replay uses the same memory, and overwrites the
  results of other graphs in its pool; a wait during a capture raises;
* overwriting a pinned buffer during its copy raises at the next wait.

Speed, numerics and memory of a GPU are not simulated. The simulation patches torch, which cannot be fully restored, so
its tests run in a separate process.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, cast
from unittest import mock
from weakref import WeakSet

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

import lookahead
from lookahead.backends import likeliest_kernel
from lookahead.backends.forward_result import pack_likeliest
from lookahead.backends.transformers import fused_kernels
from lookahead.backends.transformers.fused_kernels import LateKey
from lookahead.backends.transformers.tree_attention import Pages, unpack
from lookahead.backends.transformers.tree_attention import kernel as tree_kernel
from lookahead.core.tree_masks import SCRATCH

aten = torch.ops.aten
_OURS = str(Path(lookahead.__file__).parent)

WAIT, PAGEABLE, PINNED, OPERATION, REPLAY, CAPTURE = "wait", "pageable", "pinned", "operation", "replay", "capture"


class Event(NamedTuple):
    """An action of the host on the device.

    Attributes:
        kind: One of the names above. An asynchronous pageable copy is not a wait, but must not be captured; other
            pageable copies are logged as waits only.
        what: The operation.
        place: File and line of this library that caused it.
        in_model: Whether the model's code caused it, directly or indirectly.
    """

    kind: str
    what: str
    place: str
    in_model: bool


@dataclass(eq=False)
class Graph:
    """Replacement for `torch.cuda.CUDAGraph`: the launches of a capture, with their memory."""

    launches: list[Callable[[], None]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    pool: object = None
    spoiled: bool = False

    def replay(self) -> None:
        for other in _device.graphs:
            if other is not self and other.pool == self.pool:
                other.spoil()
        self.spoiled = False
        with without_simulation():  # all tensors are the host's
            for launch in self.launches:
                launch()
        _device.log(REPLAY, f"{len(self.launches)} launches")

    def spoil(self) -> None:
        """Overwrite the graph's results, like another graph of its pool."""
        if self.spoiled:
            return
        self.spoiled = True
        for result in self.results:
            result.fill_(float("nan") if result.is_floating_point() else result.dtype == torch.bool or -77)


class Simulation:
    """State of the simulated device.

    Attributes:
        events: Log, which tests may clear.
        graphs: Captured graphs that are in use.
        captures_fail: Whether a capture raises.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.graphs = WeakSet[Graph]()
        self.captures_fail = False
        self._largest = 10**10
        self._capture: Graph | None = None
        self._capturing_thread = 0
        self._pinned: dict[int, torch.Tensor] = {}  # by address; references keep addresses from being reused
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, str]] = []

    @contextmanager
    def without_memory(self, beyond: int = 1 << 16) -> Iterator[None]:
        """Refuse to allocate more bytes at once."""
        before, self._largest = self._largest, beyond
        try:
            yield
        finally:
            self._largest = before

    def allocate(self, size: int) -> None:
        """Raise if there is no memory for a tensor of `size` bytes."""
        if size > self._largest:
            raise torch.cuda.OutOfMemoryError(f"no memory for {size} bytes")

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def log(self, kind: str, what: str) -> None:
        self.events.append(Event(kind, what, *_origin()))

    def wait(self, what: str) -> None:
        """Record that the host waits for all work of the device."""
        if self._is_capturing:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what}), {_origin()[0]}")
        for source, then, place in self._under_way:
            if not torch.equal(source, then):
                raise RuntimeError(f"the host overwrote a pinned buffer while it was copied, {place}")
        self._under_way.clear()
        self.log(WAIT, what)

    def copy_in(self, source: torch.Tensor, asynchronous: bool) -> None:
        """Record a copy from the host's memory to the device."""
        what = f"to the device {tuple(source.shape)}"
        if asynchronous and source.untyped_storage().data_ptr() in self._pinned:
            self._under_way.append((source, source.clone(), _origin()[0]))
            self.log(PINNED, what)
        elif asynchronous and not self._is_capturing:
            self.log(PAGEABLE, what)
        else:
            self.wait(what)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    @property
    def _is_capturing(self) -> bool:
        """Whether this thread is capturing, as with `capture_error_mode="thread_local"`."""
        return self._capture is not None and self._capturing_thread == get_ident()

    def launch(self, name: str, work: Callable[[], Any], changes: bool = False) -> Any:
        """Run one kernel; in a capture, also record it for replays.

        Args:
            name: Name of the kernel.
            work: Function that computes host tensors from host tensors.
            changes: Whether the kernel writes to its arguments and returns them.
        """
        self.log(OPERATION, name)
        result = work()
        if self._is_capturing:
            graph = cast(Graph, self._capture)
            held = [tensor for tensor in _leaves(result) if isinstance(tensor, torch.Tensor)]

            def again() -> None:
                for old, new in zip(held, _leaves(work()), strict=False):
                    if not changes:
                        old.copy_(new)

            graph.launches.append(again)
            graph.results += [] if changes else held
        return result

    @contextmanager
    def capture(
        self, graph: Graph, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """Replacement for `torch.cuda.graph`."""
        assert self._capture is None, "a capture within a capture"
        if self.captures_fail:
            raise torch.cuda.OutOfMemoryError("no memory")
        assert capture_error_mode == "thread_local", "waits of other threads would break the capture"
        self._capture, self._capturing_thread, graph.pool = graph, get_ident(), pool
        try:
            yield
        finally:
            self._capture = None
        self.graphs.add(graph)
        graph.spoil()  # a capture computes nothing
        self.log(CAPTURE, f"{len(graph.launches)} launches")


_device = Simulation()


@cache
def _file_of(code: CodeType) -> tuple[str | None, bool]:
    """Return the file of code of this library, below its folder, and whether it is code of models."""
    name = code.co_filename
    return name[len(_OURS) + 1 :] if name.startswith(_OURS) else None, "/transformers/models/" in name


def _origin() -> tuple[str, bool]:
    """Return the current line of this library, and whether it is inside a model's call or calls the model."""
    frame, place, in_model = sys._getframe(2), "elsewhere", False
    while frame is not None and not (in_model and place != "elsewhere"):
        ours, is_model = _file_of(frame.f_code)
        if ours and place == "elsewhere":
            place = f"{ours}:{frame.f_lineno}"
        in_model = in_model or is_model
        frame = cast(Any, frame.f_back)
    return place, in_model


class CudaTensor(torch.Tensor):
    """A tensor that claims to be on `device`, and holds a host tensor."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=device,
        )
        made.host = host
        return cast(CudaTensor, made)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: object) -> CudaTensor:
        return CudaTensor(self.host.clone(), self.device)

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return _kernel("attention", function, args, kwargs or {})
        if function is torch.Tensor.tolist:
            _device.wait("tolist")
            return args[0].host.tolist()
        if function is torch.Tensor.new_tensor:
            return torch.tensor(*args[1:], device=args[0].device, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def _kernel(name: str, work: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], launches: int = 1) -> Any:
    """Run several CPU operations as one launch; as several of which only the first one does something."""
    tensors = [part for part in _leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
    device = _only_device(name, tensors)
    host_args, host_kwargs = _mapped(_to_host, (tuple(args), kwargs))

    def on_host() -> Any:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
            return work(*host_args, **host_kwargs)

    result = _device.launch(name, on_host)
    for _ in range(1, launches):
        _device.launch(name, lambda: None)
    return _mapped(lambda part: CudaTensor(part, device) if isinstance(part, torch.Tensor) else part, result)


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of tuples, lists and dicts; torch's pytrees would take a third of a simulated pass."""
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [leaf for part in value.values() for leaf in _leaves(part)] if isinstance(value, dict) else [value]


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the same tuples, lists and dicts with `change` applied to each leaf."""
    if not isinstance(value, (tuple, list, dict)):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(change, part) for part in value)
    if isinstance(value, list):
        return [_mapped(change, part) for part in value]
    return {name: _mapped(change, part) for name, part in value.items()}


def _to_host(value: Any) -> Any:
    return value.host if isinstance(value, CudaTensor) else value


def _only_device(name: str, tensors: Sequence[torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: expected all tensors on one device, found {devices}, {_origin()[0]}")
    return devices.pop()


def _indexed(device: object) -> torch.device | None:
    """Return the device, with an index if it is a CUDA device."""
    if device is None:
        return None
    named = torch.device(cast(Any, device))
    return torch.device("cuda", 0) if named == torch.device("cuda") else named


_UNLAUNCHED = {
    aten._local_scalar_dense.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.empty.memory_format,
    aten.new_empty.default,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}
"""Operations other than views that launch no kernel."""
_BY_INDEX = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation of torch, on tensors of any device."""
    flat = _leaves((args, kwargs))
    ours = [part for part in flat if isinstance(part, CudaTensor)]
    target = _indexed(kwargs.get("device"))
    if operation is aten.is_pinned.default:
        return not ours and _device.is_pinned(args[0])
    if not ours and (target is None or target.type != "cuda"):
        pinned = kwargs.pop("pin_memory", False)
        result = operation(*args, **kwargs)
        return _device.pin(result) if pinned else result
    if operation is aten._to_copy.default:
        return _to_copy(args[0], target, kwargs)
    if operation is aten.copy_.default:
        return _copy(*args, **kwargs)
    _check_devices(operation, args, flat, ours, target)
    _note_waits(operation, args)
    args, kwargs = _mapped(_to_host, (args, kwargs))
    if operation is aten.zeros.default:
        _device.allocate(prod(args[0]) * torch.empty((), dtype=kwargs.get("dtype")).element_size())
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if operation is aten.histc.default and not args[0].is_floating_point():  # CUDA supports integers here
        work: Callable[[], Any] = lambda: operation(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)  # noqa: E731
    else:
        work = lambda: operation(*args, **kwargs)  # noqa: E731
    if operation.is_view or operation in _UNLAUNCHED:
        result = work()
    else:
        result = _device.launch(str(operation), work, operation._schema.is_mutable)
    device = target or ours[0].device
    if device.type != "cuda":
        return result
    changed = {id(tensor.host): tensor for tensor in ours}

    def wrap(part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        return changed[id(part)] if id(part) in changed else CudaTensor(part, device)

    return _mapped(wrap, result)


def _to_copy(source: torch.Tensor, target: torch.device | None, kwargs: dict[str, Any]) -> torch.Tensor:
    """Copy a tensor as `to` does."""
    device, asynchronous = target or source.device, kwargs.get("non_blocking", False)
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
    host = _to_host(source)
    if device.type == "cpu":
        assert not asynchronous, "whoever reads it has to wait, which is not simulated"
        _device.wait(f"to the host {tuple(source.shape)}")
        return cast(torch.Tensor, aten._to_copy.default(host, **rest))
    if not isinstance(source, CudaTensor):
        _device.copy_in(host, asynchronous)
        return CudaTensor(aten._to_copy.default(host, **rest), device)
    return CudaTensor(_device.launch("to", lambda: aten._to_copy.default(host, **rest)), device)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Run `copy_` from any device to any device."""
    if not isinstance(target, CudaTensor):
        assert not non_blocking, "whoever reads it has to wait, which is not simulated"
        _device.wait(f"to the host {tuple(source.shape)}")
        target.copy_(_to_host(source))
        return target
    if not isinstance(source, CudaTensor):
        _device.copy_in(source, non_blocking)
        target.host.copy_(source)
        return target
    into, out_of = target.host, source.host
    _device.launch("copy_", lambda: into.copy_(out_of), changes=True)
    return target


def _check_devices(
    operation: Any, args: Any, flat: list[Any], ours: list[CudaTensor], target: torch.device | None
) -> None:
    """Raise for tensors of two devices, except scalars, and indices, which are copied."""
    for tensor in flat:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, CudaTensor) or tensor.dim() == 0:
            continue
        if operation in _BY_INDEX and any(tensor is index for index in args[1]):
            _device.copy_in(tensor, False)
        elif target is None:
            _only_device(str(operation), [tensor, *ours])
    if ours:
        _only_device(str(operation), [tensor for tensor in ours if tensor.dim()] or ours[:1])


def _note_waits(operation: Any, args: Any) -> None:
    """Record a wait if the host needs values or sizes of the result."""
    if operation in _BY_INDEX:
        waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    else:
        waits = _values_decide(operation)
    if waits:
        _device.wait(str(operation))


@cache
def _values_decide(operation: Any) -> bool:
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operation.tags))


class _Dispatch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the wrapper costs as much as an operation

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not types and not kwargs and operation is not aten.is_pinned.default:  # only host tensors
            return operation(*args)
        return _run(operation, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Pin results of `torch.tensor`, which is no operation, and read `cuda` as `cuda:0`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tensor:
            args = _mapped(lambda part: part.tolist() if isinstance(part, CudaTensor) else part, tuple(args))
            kwargs = dict(kwargs or {})
            if kwargs.pop("pin_memory", False):
                return _device.pin(function(*args, **kwargs))
        if function is torch.Tensor.to:
            args = tuple(_indexed(part) if isinstance(part, str) and part == "cuda" else part for part in args)
        if not kwargs:
            return function(*args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _indexed(kwargs["device"])}
        return function(*args, **kwargs)


@contextmanager
def _guard() -> Iterator[None]:
    """Use the CPU's device guard, which does nothing, for CUDA; torch without CUDA has no guard for it."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")  # by type of device
    before, guards[1] = guards[1], guards[0]
    try:
        yield
    finally:
        guards[1] = before


class _Generator(torch.Generator):
    """A CPU generator for any device."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls)


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


_last_masks: tuple[int, list[torch.Tensor], Any] = 0, [], None
"""Size of pages and copies of the tensors of the last call, and its masks: layers of a pass share them."""


def _masks_of_texts(packed_mask: Any, table: Any, starts: Any, size: int) -> list[tuple[int, int, Any, Any]]:
    """Return for each text of a pass its first node and its end, and the places of its keys and which it sees."""
    global _last_masks
    given = packed_mask, table, starts
    last_size, last, masks = _last_masks
    if size == last_size and all(torch.equal(one, before) for one, before in zip(given, last, strict=True)):
        return cast("list[tuple[int, int, Any, Any]]", masks)
    masks = []
    for text, (start, end) in enumerate(pairwise(starts.tolist())):
        if end > start:
            mask = packed_mask[:, :, start:end]
            column = torch.arange(int(mask[0, 0, 0, SCRATCH]) + end - start)
            place = table[text, column // size].long() * size + column % size
            masks.append((start, end, place, unpack(mask, len(place))))
    _last_masks = size, [tensor.clone() for tensor in given], masks
    return masks


def _tree_attention(
    query: Any, key: Any, value: Any, packed_mask: Any, scaling: float | None = None, pages: Pages | None = None
) -> Any:
    """Replacement for the two Triton kernels of tree attention."""

    def attend(query: Any, key: Any, value: Any, visible: torch.Tensor) -> torch.Tensor:
        value = value.masked_fill(~visible.any(dim=2)[..., None], 0.0)  # garbage, and 0 * NaN is NaN
        states = [states.float() for states in (query, key, value)]
        output = scaled_dot_product_attention(*states, visible, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous().to(query.dtype)

    def by_definition(query: Any, key: Any, value: Any, packed_mask: Any) -> torch.Tensor:
        return attend(query, key, value, unpack(packed_mask, key.shape[2]))

    def by_text(query: Any, key: Any, value: Any, packed_mask: Any, table: Any, starts: Any) -> torch.Tensor:
        assert pages is not None
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        for start, end, place, visible in _masks_of_texts(packed_mask, table, starts, pages.size):
            part = query[:, :, start:end], key[:, :, place], value[:, :, place], visible
            output[:, start:end] = attend(*part)
        return output

    if pages is None:
        return _kernel("tree attention", by_definition, (query, key, value, packed_mask), {}, launches=2)
    tensors = query, key, value, packed_mask, pages.table, pages.starts
    return _kernel("tree attention", by_text, tensors, {}, launches=2)


def _normed(hidden: Any, weight: Any, epsilon: float, rounds_first: bool, offset: float) -> torch.Tensor:
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if rounds_first:
        return cast(torch.Tensor, weight * wide.to(hidden.dtype))
    return (wide * (weight.float() + offset)).to(hidden.dtype)


def _rms_norm(hidden: Any, weight: Any, *how: Any) -> Any:
    """Replacement for the Triton kernel of norms."""
    return _kernel("norm", _normed, (hidden, weight, *how), {})


def _add_norm(hidden: Any, update: Any, weight: Any, *how: Any) -> Any:
    """Replacement for the Triton kernel of norms with sums."""

    def by_definition(hidden: Any, update: Any, *norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden + update, _normed(hidden + update, *norm)

    return _kernel("norm with a sum", by_definition, (hidden, update, weight, *how), {})


def _turned(states: Any, cos: Any, sin: Any) -> torch.Tensor:
    part = cos.shape[-1]
    turned, left = states[..., :part], states[..., part:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return torch.cat([turned, left], dim=-1)


def _rotate(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    """Replacement for the Triton kernel of rotary embeddings."""

    def by_definition(query: Any, key: Any, *angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _turned(query, *angles), _turned(key, *angles)

    return _kernel("rotary", by_definition, (query, key, cos, sin), {})


def _rotate_into(late: LateKey, value: Any, keys: Any, values: Any, columns: Any) -> None:
    """Replacement for the Triton kernel that writes to a cache."""

    def by_definition(rotated: Any, query: Any, key: Any, value: Any, keys: Any, values: Any, *rest: Any) -> None:
        columns, *angles = rest
        rotated.copy_(_turned(query, *angles))
        keys.index_copy_(2, columns, _turned(key, *angles))
        values.index_copy_(2, columns, value)

    tensors = late.rotated, late.query, late.key, value, keys, values, columns, late.cos, late.sin
    _kernel("rotary with a cache", by_definition, tensors, {})


def _gate(states: Any, others: Any) -> Any:
    """Replacement for the Triton kernel of gates."""
    return _kernel("gate", lambda states, others: torch.nn.functional.silu(states) * others, (states, others), {})


def _list_largest(logits: Any, count: int) -> Any:
    """Replacement for the two Triton kernels of likeliest tokens."""
    return _kernel("likeliest", lambda logits: pack_likeliest(logits, count), (logits,), {}, launches=2)


@contextmanager
def simulated_cuda() -> Iterator[Simulation]:
    """Give torch two simulated CUDA devices in this thread."""
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "default_generators": (torch.default_generator, torch.default_generator),
        "graph_pool_handle": object,
        "CUDAGraph": Graph,
        "graph": _device.capture,
        "Stream": _Stream,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "device_of": lambda _: nullcontext(),
        "synchronize": lambda *_: _device.wait("synchronize"),
        "mem_get_info": lambda *_: (10**8, 10**8),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "simulated",
    }
    before = torch._C._only_lift_cpu_tensors()  # type: ignore[attr-defined]
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    try:
        with ExitStack() as stack:
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(_guard())
            stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
            stack.enter_context(mock.patch.object(tree_kernel, "tree_attention", _tree_attention))
            for kernel in (_rms_norm, _add_norm, _rotate, _rotate_into, _gate):
                stack.enter_context(mock.patch.object(fused_kernels, kernel.__name__.lstrip("_"), kernel))
            stack.enter_context(mock.patch.object(likeliest_kernel, "list_largest", _list_largest))
            stack.enter_context(mock.patch.object(likeliest_kernel, "lists_alike", return_value=True))
            stack.enter_context(_Functions())
            stack.enter_context(_Dispatch())
            yield _device
    finally:
        torch._C._set_only_lift_cpu_tensors(before)  # type: ignore[attr-defined]


@contextmanager
def without_simulation() -> Iterator[None]:
    """Use torch's own operations, which are much faster, for code with only host tensors."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def on_cuda(model: PreTrainedModel, device_of: Callable[[str], str] = lambda _: "cuda:0") -> PreTrainedModel:
    """Move the parameters and buffers of `model`; shared ones stay shared.

    Args:
        model: A model on the CPU, changed in place.
        device_of: Function that returns the device of a parameter or buffer by its full name.
    """
    moved: dict[int, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, CudaTensor):
                place = torch.device(device_of(f"{name}.{key}"))
                copy = moved.setdefault(
                    id(parameter), torch.nn.Parameter(CudaTensor(parameter.detach(), place), requires_grad=False)
                )
                module._parameters[key] = copy
        for tensors in (module._buffers, vars(module)):
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, CudaTensor):
                    tensors[key] = CudaTensor(tensor.detach(), torch.device(device_of(f"{name}.{key}")))
    return model


@cache
def shared_on_cuda(model: PreTrainedModel) -> PreTrainedModel:
    """Return the copy of a model on the device that tests share, so that it is tried once; none may change it."""
    return on_cuda(copy.deepcopy(model))
