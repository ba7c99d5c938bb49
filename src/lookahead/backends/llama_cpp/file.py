"""A GGUF file, loaded by llama.cpp: its weights, its tokens, and contexts to run it in."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from lookahead.backends.llama_cpp.context import LlamaContext, binding, error_lines
from lookahead.errors import InvalidArgumentError, UnsupportedModelError

_NONE = -1  # LLAMA_TOKEN_NULL


class Vocabulary:
    """The tokenizer that a GGUF file brings.

    Args:
        handle: llama.cpp's vocabulary; valid as long as its model.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._library = binding()

    def __len__(self) -> int:
        return int(self._library.llama_vocab_n_tokens(self._handle))

    @property
    def bos(self) -> int | None:
        """The token that begins a text."""
        return self._special(self._library.llama_vocab_bos)

    @property
    def eos(self) -> int | None:
        """The token that ends a text."""
        return self._special(self._library.llama_vocab_eos)

    @property
    def pad(self) -> int | None:
        """The token that fills up rows."""
        return self._special(self._library.llama_vocab_pad)

    @cached_property
    def ends(self) -> list[int]:
        """All tokens after which llama.cpp generates no more: the end of a text, of a turn, and so on."""
        return [token for token in range(len(self)) if self._library.llama_vocab_is_eog(self._handle, token)]

    @cached_property
    def controls(self) -> list[int]:
        """Tokens that are no text, such as the beginning of a turn."""
        return [token for token in range(len(self)) if self._library.llama_vocab_is_control(self._handle, token)]

    @property
    def adds_bos(self) -> bool:
        """Whether texts begin with `bos`."""
        return bool(self._library.llama_vocab_get_add_bos(self._handle))

    @property
    def adds_eos(self) -> bool:
        """Whether texts end with `eos`."""
        return bool(self._library.llama_vocab_get_add_eos(self._handle))

    def name(self, token: int) -> str:
        """The token as the file has it, such as `Ġthe`."""
        return str(self._library.llama_vocab_get_text(self._handle, token).decode(errors="replace"))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: Any text.
            add_special: Add what the file says that texts begin and end with.
            parse_special: Read the names of special tokens in the text as these tokens.
        """
        content = text.encode()
        room = len(content) + 8  # a token has at least a byte, or is one that was added
        tokens = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(
            self._handle, content, len(content), tokens, room, add_special, parse_special
        )
        if count < 0:
            raise ValueError(f"text of {len(content)} bytes has {-count} tokens")
        return list(tokens[:count])

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become the replacement character."""
        given = (ctypes.c_int32 * max(len(tokens), 1))(*tokens)
        room = 8 * len(tokens) + 16
        while True:
            content = ctypes.create_string_buffer(room)
            count = self._library.llama_detokenize(
                self._handle, given, len(tokens), content, room, False, not skip_special
            )
            if count >= 0:
                return content.raw[:count].decode(errors="replace")
            room = -count

    def _special(self, ask: Any) -> int | None:
        token = int(ask(self._handle))
        return None if token == _NONE else token


_LONGEST_VALUE = 1 << 20
_NO_ROPE = -1  # LLAMA_ROPE_TYPE_NONE
_SAMPLED = 1 << 16


class ModelOwner:
    """Frees llama.cpp's model when nothing refers to it any more.

    Args:
        handle: The model.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        weakref.finalize(self, binding().llama_model_free, handle)


class LlamaModel:
    """The weights and the vocabulary of a GGUF file, and contexts to run them in.

    Args:
        path: The file; the first one of a model that is split into several.
        n_gpu_layers: Layers to keep on a GPU, if this build of llama.cpp knows one; -1 for all.
        threads: Threads of a step.
        fast_kv: Keep keys and values in float16 and let llama.cpp choose its attention, as it does by default. It is
            faster, and rounds more.

    Attributes:
        path: The file.
        threads, fast_kv: As given.
        gpu_layers: Layers on a GPU; -1 for all.
        vocabulary: Its tokens.

    Raises:
        InvalidArgumentError: The file is not there, or llama.cpp cannot load it.
        UnsupportedModelError: It is a model that cannot be run on token trees.
    """

    def __init__(self, path: Path, n_gpu_layers: int, threads: int, fast_kv: bool = False) -> None:
        self.path, self.threads, self.fast_kv, self.gpu_layers = path, threads, fast_kv, n_gpu_layers
        self._library = binding()
        self._free: list[LlamaContext] = []
        self._lock = Lock()
        self.owner = ModelOwner(self._load(n_gpu_layers))
        self.handle = self.owner.handle
        self._check_kind()
        self.vocabulary = Vocabulary(self._library.llama_model_get_vocab(self.handle))

    def _load(self, n_gpu_layers: int) -> Any:
        if not self.path.is_file():
            raise InvalidArgumentError(f"path={str(self.path)!r} is no file; give the path of a GGUF file")
        parameters = self._library.llama_model_default_params()
        parameters.n_gpu_layers = n_gpu_layers
        # Quantised weights that are packed for AMX crash in the builds that are about.
        parameters.use_extra_bufts = b"AMX_INT8 = 1" not in self._library.llama_print_system_info()
        with error_lines() as lines:
            handle = self._library.llama_model_load_from_file(str(self.path).encode(), parameters)
        if not handle:
            reason = lines[0] if lines else "it gives no reason"
            raise InvalidArgumentError(f"path={str(self.path)!r} cannot be loaded by llama.cpp: {reason}")
        return handle

    def _check_kind(self) -> None:
        library = self._library
        kinds: dict[str, Callable[[Any], bool]] = {
            "has an encoder": library.llama_model_has_encoder,
            "is a diffusion model": library.llama_model_is_diffusion,
        }
        for what, applies in kinds.items():
            if applies(self.handle):
                raise UnsupportedModelError(
                    f"path={str(self.path)!r}: the model {what}, so it cannot be run on token trees. Use llama.cpp's "
                    "own decoding"
                )

    @cached_property
    def has_states(self) -> bool:
        """Whether layers keep a running state, which cannot take back a token: the model is run on chains."""
        library = self._library
        return bool(library.llama_model_is_recurrent(self.handle) or library.llama_model_is_hybrid(self.handle))

    @property
    def name(self) -> str:
        """What the file says that it is, such as `llama 7B Q4_K - Medium`."""
        content = ctypes.create_string_buffer(256)
        self._library.llama_model_desc(self.handle, content, len(content))
        return content.value.decode(errors="replace")

    @property
    def number_type(self) -> str:
        """The types of its weights, such as `float32` or `Q4_K - Medium`."""
        kind = self.name.split(maxsplit=2)[-1]
        return {"all F32": "float32", "F16": "float16"}.get(kind, kind)

    @property
    def trained_context(self) -> int:
        """Tokens of the longest text it was made for."""
        return int(self._library.llama_model_n_ctx_train(self.handle))

    @property
    def last_length(self) -> int | None:
        """Text length at which the model can read no further token, if there is one: the end of a position table."""
        return self.trained_context if self._library.llama_model_rope_type(self.handle) == _NO_ROPE else None

    @property
    def parameters(self) -> int:
        """How many weights it has."""
        return int(self._library.llama_model_n_params(self.handle))

    @property
    def width(self) -> int:
        """Size of the hidden state."""
        return int(self._library.llama_model_n_embd(self.handle))

    def metadata(self, key: str) -> str | None:
        """What the file says under `key`; `None` if it says nothing."""
        content = ctypes.create_string_buffer(_LONGEST_VALUE)
        length = self._library.llama_model_meta_val_str(self.handle, key.encode(), content, len(content))
        return content.value.decode(errors="replace") if length >= 0 else None

    @property
    def chat_template(self) -> str | None:
        """Its chat template, in Jinja."""
        return self.metadata("tokenizer.chat_template")

    @cached_property
    def token_bytes(self) -> int:
        """Bytes that keys and values of a token take, as llama.cpp counts them when it writes them down."""
        context, ids, sizes = self.acquire(2, 1), np.zeros(1, dtype=np.int32), []
        batch = context.batch
        batch.tokens[0], batch.sequences[0], batch.counts[0], batch.reads[0] = 0, ids.ctypes.data, 1, 0
        for batch.positions[0] in range(2):
            context.run(1)
            sizes.append(context.bytes_of(0))
        self.release(context)
        return max(sizes[1] - sizes[0], 1)

    def fingerprint(self) -> str:
        """A short name of the file's content, made of its size and samples of its bytes."""
        size = self.path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self.path.open("rb") as file:
            for place in range(0, size, max(_SAMPLED, size // 16)):
                file.seek(place)
                digest.update(file.read(_SAMPLED))
        return digest.hexdigest()[:24]

    def acquire(self, cells: int, sequences: int, resumes: bool = False) -> LlamaContext:
        """A context for the caller alone until `release`.

        Args:
            cells: Tokens that it has to hold, those of all texts and of a step together.
            sequences: Sequence ids that it has to have.
            resumes: Leave the text in it that it was released with. Otherwise there is nothing in it.
        """
        with self._lock:
            for context in self._free:
                if context.cells >= cells and context.sequences >= sequences:
                    self._free.remove(context)
                    if context.text and not resumes:
                        context.clear()
                    return context
            self._free.clear()
        # With room to spare, so that a call with a somewhat longer text can use it again.
        return LlamaContext(self, cells + min(cells // 2, 1024), sequences)

    def release(self, context: LlamaContext, text: Sequence[int] = ()) -> None:
        """Return a context to the pool; `text` is what its first sequence holds, if that is to be kept."""
        if text:
            context.keep(text)
        else:
            context.clear()
        with self._lock:
            self._free = [context]
