"""The tokens of a GGUF file: text into token ids, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lookahead.backends.llama_cpp.binding import binding

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
