"""Loading of llama-cpp-python, and its contexts: keys and values in cells that belong to sequence ids."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.errors import InvalidArgumentError, LookaheadError, extra_hint

_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_log_lock = Lock()


@cache
def binding() -> Any:
    """Import the module `llama_cpp`.

    Raises:
        InvalidArgumentError: llama-cpp-python is not installed, or does not load.
    """
    try:
        import llama_cpp
    except Exception as error:  # without its library, ctypes raises errors of several types
        raise InvalidArgumentError(
            f"GGUF models are run by llama-cpp-python, which cannot be loaded here ({type(error).__name__}: {error}); "
            + extra_hint("gguf")
        ) from error
    log = logging.getLogger("llama-cpp-python")
    if log.level == logging.NOTSET:  # it would print llama.cpp's log
        log.setLevel(logging.ERROR)
    llama_cpp.llama_backend_init()
    return llama_cpp


@contextmanager
def error_lines() -> Iterator[list[str]]:
    """Collect the error lines of llama.cpp's log instead of printing them."""
    llama_cpp = binding()
    lines: list[str] = []

    def keep(level: int, text: bytes, _: Any) -> None:
        if level == _ERROR:
            lines.append(text.decode(errors="replace").strip())

    callback = llama_cpp.llama_log_callback(keep)
    before = llama_cpp.llama_log_callback()
    data = ctypes.c_void_p()
    with _log_lock:
        llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
        llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
        try:
            yield lines
        finally:
            llama_cpp.llama_log_set(before, data)


MOST_SEQUENCES = 256
"""Largest number of sequence ids in llama.cpp (`LLAMA_MAX_SEQ`)."""

_F32, _F16 = 0, 1  # GGML_TYPE_F32, GGML_TYPE_F16
_FLASH_AUTO = -1
_FLASH_OFF = 0
_CELLS = 256
"""Cells that llama.cpp allocates and reads at a time."""

_TOKENS = 512
"""Most tokens that llama.cpp computes together; longer texts are split."""


class TokenBatch:
    """Tokens of one llama.cpp call, in arrays with a fixed address.

    Args:
        capacity: Largest number of tokens.

    Attributes:
        tokens: Token ids, `[capacity]` int32.
        positions: Positions of the tokens, `[capacity]` int32.
        sequences: Address of the sequence ids (int32) of each token, `[capacity]` uint64.
        counts: Number of sequence ids of each token, `[capacity]` int32.
        reads: Whether logits after each token are needed, `[capacity]` int8.
        struct: The arrays as a `llama_batch`.
    """

    def __init__(self, capacity: int) -> None:
        self.tokens, self.positions, self.counts = np.zeros((3, capacity), dtype=np.int32)
        self.sequences = np.zeros(capacity, dtype=np.uint64)
        self.reads = np.zeros(capacity, dtype=np.int8)
        self.struct = binding().llama_batch()
        self.struct.token = _pointer(self.tokens)
        self.struct.pos = _pointer(self.positions)
        self.struct.n_seq_id = _pointer(self.counts)
        self.struct.logits = _pointer(self.reads, ctypes.c_int8)
        self.struct.seq_id = _pointer(self.sequences, ctypes.POINTER(ctypes.c_int32))


class LlamaContext:
    """Run tokens that belong to one or several sequences, and keep their keys and values in cells.

    A token sees the cells of its first sequence up to its own position. Sequences that begin with the same text share
    the cells of that text.

    Args:
        model: The model.
        cells: Minimum number of cells, one for each token.
        sequences: Number of sequence ids.

    Attributes:
        cells: Number of cells.
        batch: The tokens of the next `run`.
        text: Token ids in the first sequence while the context is unused.

    Raises:
        InvalidArgumentError: llama.cpp cannot allocate the memory.
    """

    def __init__(self, model: Any, cells: int, sequences: int) -> None:
        self._library = library = binding()
        self.cells = -(-cells // _CELLS) * _CELLS
        self.sequences = sequences
        parameters = library.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = self.cells
        parameters.n_ubatch = min(_TOKENS, self.cells)
        parameters.n_seq_max = sequences
        # Sequences can share cells only in one buffer.
        parameters.kv_unified = parameters.swa_full = True
        parameters.n_outputs_max_per_seq = 0
        parameters.n_threads = parameters.n_threads_batch = model.threads
        parameters.type_k = parameters.type_v = _F16 if model.fast_kv else _F32
        parameters.flash_attn_type = _FLASH_AUTO if model.fast_kv else _FLASH_OFF
        with error_lines() as lines:
            self._handle = library.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise InvalidArgumentError(
                f"llama.cpp cannot allocate memory for {self.cells} tokens ({'; '.join(lines)}); choose a smaller "
                "max_new_tokens, or fewer rows"
            )
        weakref.finalize(self, _free, library, self._handle, model.owner)
        self._memory = library.llama_get_memory(self._handle)
        self._vocabulary = len(model.vocabulary)
        self._address = 0
        self._logits: NDArray[np.float32] = np.empty((0, self._vocabulary), dtype=np.float32)
        self.batch = TokenBatch(self.cells)
        self.text: list[int] = []

    def run(self, count: int, reads: int) -> NDArray[np.float32]:
        """Compute the first `count` tokens of `batch`, and keep their keys and values.

        Returns:
            Logits after the `reads` tokens with `batch.reads` set, `[reads, vocabulary]`; a view of a buffer that the
            next call overwrites.
        """
        self.batch.struct.n_tokens = count
        code = self._library.llama_decode(self._handle, self.batch.struct)
        if code != 0:
            raise LookaheadError(
                f"llama.cpp could not run a step of {count} tokens (llama_decode returned {code}; the context has "
                f"{self.cells} cells)"
            )
        if not reads:
            return self._logits[:0]
        first = self._library.llama_get_logits(self._handle)
        address = ctypes.addressof(first.contents)
        if address != self._address:  # llama.cpp has allocated a larger buffer
            self._address = address
            self._logits = np.ctypeslib.as_array(first, shape=(self.cells, self._vocabulary))
        return self._logits[:reads]

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Add the cells of sequence `source` at positions `start` to `end` - 1 (-1 for all) to sequence `target`."""
        self._library.llama_memory_seq_cp(self._memory, source, target, start, end)

    def remove(self, sequence: int, start: int = -1) -> None:
        """Remove the cells at positions from `start` (-1 for all) from a sequence."""
        self._library.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def save(self, sequence: int) -> NDArray[np.uint8]:
        """Keys and values of a sequence, in llama.cpp's serialised form."""
        state = np.empty(self._library.llama_state_seq_get_size(self._handle, sequence), dtype=np.uint8)
        self._library.llama_state_seq_get_data(self._handle, _pointer(state, ctypes.c_uint8), state.size, sequence)
        return state

    def load(self, state: NDArray[np.uint8], sequence: int) -> bool:
        """Replace the content of a sequence by the result of `save`; return whether there were enough cells."""
        with error_lines():  # llama.cpp logs an error if there are too few cells
            data = _pointer(state, ctypes.c_uint8)
            return bool(self._library.llama_state_seq_set_data(self._handle, data, state.size, sequence))

    def keep(self, text: Sequence[int]) -> None:
        """Empty all sequences but the first one, which holds `text`."""
        for sequence in range(1, self.sequences):
            self.remove(sequence)
        self.text = list(text)

    def clear(self) -> None:
        """Empty all sequences."""
        self.text = []
        self._library.llama_memory_clear(self._memory, False)


def _pointer(values: NDArray[Any], kind: Any = ctypes.c_int32) -> Any:
    return ctypes.cast(values.ctypes.data, ctypes.POINTER(kind))


def _free(library: Any, handle: Any, owner: Any) -> None:
    """Free a context. The argument `owner` keeps the model loaded until then."""
    library.llama_free(handle)
