"""A GGUF file loaded by llama.cpp: its weights, its vocabulary, and contexts to run it in."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from lookahead.backends.llama_cpp.context import LlamaContext, binding, error_lines
from lookahead.errors import InvalidArgumentError

_NO_TOKEN = -1  # LLAMA_TOKEN_NULL


class Vocabulary:
    """Tokenizer of a GGUF file; `handle` is llama.cpp's vocabulary, valid as long as its model.

    Attributes:
        bos, eos, pad: Token ids of the beginning and the end of a text, and of padding; `None` if the file has none.
        adds_bos, adds_eos: Whether texts begin with `bos`, or end with `eos`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._library = library = binding()
        tokens = (
            int(ask(handle)) for ask in (library.llama_vocab_bos, library.llama_vocab_eos, library.llama_vocab_pad)
        )
        self.bos, self.eos, self.pad = (None if token == _NO_TOKEN else token for token in tokens)
        self.adds_bos = bool(library.llama_vocab_get_add_bos(handle))
        self.adds_eos = bool(library.llama_vocab_get_add_eos(handle))

    def __len__(self) -> int:
        return int(self._library.llama_vocab_n_tokens(self._handle))

    @cached_property
    def ends(self) -> list[int]:
        """Token ids that end generation in llama.cpp: end of text, end of turn, and so on."""
        return [token for token in range(len(self)) if self._library.llama_vocab_is_eog(self._handle, token)]

    @cached_property
    def controls(self) -> list[int]:
        """Ids of control tokens, which are no text: the beginning of a turn, for example."""
        return [token for token in range(len(self)) if self._library.llama_vocab_is_control(self._handle, token)]

    def name(self, token: int) -> str:
        """Token in the notation of the file, `Ġthe` for example."""
        return str(self._library.llama_vocab_get_text(self._handle, token).decode(errors="replace"))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Names of special tokens in it become these tokens; none are added."""
        content = text.encode()
        room = len(content) + 8  # a token has at least a byte, except for added ones
        tokens = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(self._handle, content, len(content), tokens, room, False, True)
        if count < 0:
            raise ValueError(f"text of {len(content)} bytes has {-count} tokens")
        return list(tokens[:count])

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become the replacement character."""
        ids = (ctypes.c_int32 * max(len(tokens), 1))(*tokens)
        room = 8 * len(tokens) + 16
        while True:
            content = ctypes.create_string_buffer(room)
            count = self._library.llama_detokenize(
                self._handle, ids, len(tokens), content, room, False, not skip_special
            )
            if count >= 0:
                return content.raw[:count].decode(errors="replace")
            room = -count


_LONGEST_VALUE = 1 << 20
_NO_ROPE = -1  # LLAMA_ROPE_TYPE_NONE
_SAMPLED = 1 << 16


class ModelOwner:
    """Owner of llama.cpp's model, which is freed when the last reference to this object ends."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        weakref.finalize(self, binding().llama_model_free, handle)


class LlamaModel:
    """Weights and vocabulary of a GGUF file, and contexts to run them in.

    Args:
        path: The file; the first file of a split model.
        n_gpu_layers: Layers to keep on a GPU, if this build of llama.cpp supports one; -1 for all.
        threads: Threads of a step.
        fast_kv: Keep keys and values in float16 and let llama.cpp choose its attention, as it does by default. It is
            faster, and rounds more.

    Attributes:
        gpu_layers: Layers on a GPU; -1 for all.
        vocabulary: The tokenizer.
        chat_template: Chat template in Jinja; `None` if the file has none.
        name: Description by llama.cpp, `llama 7B Q4_K - Medium` for example.
        parameters: Number of weights.
        width: Size of the hidden state.
        trained_context: Context length that the model was trained with, in tokens.
        last_length: Length of the position table, the longest text that the model can read; `None` without a limit.
        has_states: Whether layers keep a running state. It cannot drop a token, so the model is run on chains.

    Raises:
        InvalidArgumentError: The file does not exist, or llama.cpp cannot load it.
    """

    def __init__(self, path: Path, n_gpu_layers: int, threads: int, fast_kv: bool = False) -> None:
        self.path = path
        self.threads = threads
        self.fast_kv = fast_kv
        self.gpu_layers = n_gpu_layers
        self._free: LlamaContext | None = None
        self._lock = Lock()
        library = binding()
        self.owner = ModelOwner(_load(path, n_gpu_layers))
        self.handle = handle = self.owner.handle
        self.vocabulary = Vocabulary(library.llama_model_get_vocab(handle))
        content = ctypes.create_string_buffer(_LONGEST_VALUE)
        size = library.llama_model_meta_val_str(handle, b"tokenizer.chat_template", content, len(content))
        self.chat_template = content.value.decode(errors="replace") if size >= 0 else None
        library.llama_model_desc(handle, content, len(content))
        self.name = content.value.decode(errors="replace")
        self.parameters = int(library.llama_model_n_params(handle))
        self.width = int(library.llama_model_n_embd(handle))
        self.trained_context = int(library.llama_model_n_ctx_train(handle))
        ends = library.llama_model_rope_type(handle) == _NO_ROPE
        self.last_length = self.trained_context if ends else None
        self.has_states = bool(library.llama_model_is_recurrent(handle) or library.llama_model_is_hybrid(handle))

    @property
    def number_type(self) -> str:
        """Number type of the weights, `float32` or `Q4_K - Medium` for example."""
        kind = self.name.split(maxsplit=2)[-1]
        return {"all F32": "float32", "F16": "float16"}.get(kind, kind)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token, in llama.cpp's serialised form."""
        context = self.acquire(2, 1)
        ids = np.zeros(1, dtype=np.int32)
        sizes = []
        batch = context.batch
        batch.tokens[0], batch.sequences[0], batch.counts[0], batch.reads[0] = 0, ids.ctypes.data, 1, 0
        for batch.positions[0] in range(2):
            context.run(1, reads=0)
            sizes.append(context.save(0).size)
        self.release(context)
        return max(sizes[1] - sizes[0], 1)

    def fingerprint(self) -> str:
        """Hash of the file's size and samples of its bytes, 24 hexadecimal digits."""
        size = self.path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self.path.open("rb") as file:
            for place in range(0, size, max(_SAMPLED, size // 16)):
                file.seek(place)
                digest.update(file.read(_SAMPLED))
        return digest.hexdigest()[:24]

    def acquire(self, cells: int, sequences: int, resumes: bool = False) -> LlamaContext:
        """Return a context that no other caller uses until `release`.

        Args:
            cells: Minimum number of cells, for the tokens of all texts and of a step.
            sequences: Minimum number of sequence ids.
            resumes: Keep the text that the context was released with. Otherwise the context is empty.
        """
        with self._lock:
            context = self._free
            self._free = None
        if context is not None and context.cells >= cells and context.sequences >= sequences:
            if context.text and not resumes:
                context.clear()
            return context
        del context  # frees its memory before the next one is allocated
        # With spare cells, so that a call with a slightly longer text can use the context again.
        return LlamaContext(self, cells + min(cells // 2, 1024), sequences)

    def release(self, context: LlamaContext, text: Sequence[int] = ()) -> None:
        """Return a context for another caller. It keeps `text`, which its first sequence holds, if given."""
        if text:
            context.keep(text)
        else:
            context.clear()
        with self._lock:
            self._free = context


def _load(path: Path, n_gpu_layers: int) -> Any:
    if not path.is_file():  # the message has the whole path, however long it is
        raise InvalidArgumentError(f"path={str(path)!r} is no file; give the path of a GGUF file")
    library = binding()
    parameters = library.llama_model_default_params()
    parameters.n_gpu_layers = n_gpu_layers
    # Quantised weights packed for AMX crash in today's builds.
    parameters.use_extra_bufts = b"AMX_INT8 = 1" not in library.llama_print_system_info()
    with error_lines() as lines:
        handle = library.llama_model_load_from_file(str(path).encode(), parameters)
    if not handle:
        reason = lines[0] if lines else "it gives no reason"
        raise InvalidArgumentError(f"path={str(path)!r} cannot be loaded by llama.cpp: {reason}")
    return handle
