"""A GGUF model with the interface of a transformers model, for `generate` and programs built on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizer

from lookahead.backends.llama_cpp.checks import check_model
from lookahead.backends.llama_cpp.file import LlamaModel, Vocabulary
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.backends.wrapped_model import PlainReader, WrappedModel
from lookahead.values import check_path, whole_number, yes_or_no

_SPARE_CELLS = 256
"""Cells of plain decoding beyond twice the length of the texts."""


def load_gguf(
    path: str | os.PathLike[str], *, n_gpu_layers: int = 0, n_threads: int | None = None, fast_kv: bool = False
) -> GGUFModel:
    """Load a GGUF model with its tokenizer, to be run by llama.cpp.

    `lookahead.generate` accepts the model like one of transformers, with all arguments except a cache. So does the
    model's own `generate`, which decodes plainly. Needs llama-cpp-python (`pip install '.[gguf]'` in a checkout).

    Args:
        path: The file; the first file of a split model.
        n_gpu_layers: Layers to keep on a GPU, if llama-cpp-python was built for one; -1 for all.
        n_threads: Threads of a step; by default the number of threads of torch.
        fast_kv: Keep keys and values in float16, and let llama.cpp choose its attention, as it does by default. Faster,
            but it rounds more: where two tokens are nearly as likely, texts may differ from plain decoding.

    Returns:
        The model, with its tokenizer in `tokenizer`.

    Raises:
        InvalidArgumentError: The file cannot be loaded, or llama-cpp-python is not installed.
        UnsupportedModelError: The model can be run neither on token trees nor on chains of tokens.
    """
    check_path("path", path, "must be the path of a GGUF file")
    threads = whole_number("n_threads", torch.get_num_threads() if n_threads is None else n_threads, 1, 2**31 - 1)
    n_gpu_layers = whole_number("n_gpu_layers", n_gpu_layers, -1, 2**31 - 1)
    yes_or_no("fast_kv", fast_kv)
    llama = LlamaModel(Path(path).expanduser(), n_gpu_layers, threads, fast_kv)
    check_model(llama)
    return GGUFModel(llama)


class GGUFConfig(PreTrainedConfig):  # type: ignore[misc]
    """Description of a GGUF file: its special tokens, its context length, and a fingerprint of its content."""

    model_type = "gguf"


class GGUFModel(WrappedModel):
    """A GGUF model, run by llama.cpp.

    Attributes:
        llama: The file, loaded by llama.cpp.
        tokenizer: The file's tokenizer, with its chat template.
        keeps_text: Whether a call of `lookahead.generate` with one row leaves its text in llama.cpp. The next call then
            computes only the part of its prompt that differs.
        reused_tokens: Tokens of the last prompt that llama.cpp held already.
    """

    config_class = GGUFConfig

    def __init__(self, llama: LlamaModel) -> None:
        tokens = llama.vocabulary
        super().__init__(
            GGUFTokenizer(tokens, llama.chat_template),
            llama.parameters,
            {"bos_token_id": tokens.bos, "eos_token_id": tokens.ends or None, "pad_token_id": tokens.pad},
            vocab_size=len(tokens),
            hidden_size=llama.width,
            max_position_embeddings=llama.trained_context,
            description=llama.name,
            fingerprint=llama.fingerprint(),
            fast_kv=llama.fast_kv,
        )
        self.llama = llama
        self.keeps_text = False
        self.reused_tokens = 0

    def plain_reader(self, texts: Sequence[Sequence[int]]) -> PlainReader:
        """Return a reader of as many texts, which has capacity for them."""
        llama = self.llama
        cells = 2 * sum(map(len, texts)) + _SPARE_CELLS
        runner = LlamaRunner(llama.acquire(cells, len(texts)), len(texts), llama.last_length)
        return PlainReader(runner, cells, drops=not llama.has_states)


class GGUFTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Tokenizer of a GGUF file, run by llama.cpp.

    Names of special tokens in a text become these tokens.

    Args:
        vocabulary: The vocabulary of the file.
        chat_template: The file's chat template in Jinja; `None` if it has none.
    """

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None) -> None:
        self._vocabulary = vocabulary
        self._names = [vocabulary.name(token) for token in range(len(vocabulary))]
        self._tokens = {name: token for token, name in enumerate(self._names)}
        specials = {
            f"{kind}_token": self._names[token]
            for kind, token in (("bos", vocabulary.bos), ("eos", vocabulary.eos), ("pad", vocabulary.pad))
            if token is not None
        }
        super().__init__(chat_template=chat_template, padding_side="left", **specials)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        """Token ids by name."""
        return dict(self._tokens)

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Names of the tokens of `text`."""
        return [self._names[token] for token in self._vocabulary.encode(text)]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Add the tokens that the file adds at the beginning and the end of texts."""
        vocabulary = self._vocabulary
        begin = [vocabulary.bos] if vocabulary.adds_bos and vocabulary.bos is not None else []
        end = [vocabulary.eos] if vocabulary.adds_eos and vocabulary.eos is not None else []
        return [*begin, *token_ids_0, *(token_ids_1 or []), *end]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens by name."""
        return self._vocabulary.decode([self._tokens[name] for name in tokens])

    def _decode(self, token_ids: int | list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        tokens = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._vocabulary.decode(tokens, skip_special_tokens)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._tokens.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]
