"""A GGUF model with the interface of a transformers model, for `generate` and programs built on it."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizer
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead.backends.llama_cpp.checks import check_model, refuse_cache
from lookahead.backends.llama_cpp.file import LlamaModel, Vocabulary
from lookahead.backends.llama_cpp.runner import PlainReader
from lookahead.values import check_path, whole_number, yes_or_no


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


class GGUFModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A GGUF model. llama.cpp holds its weights; transformers sees none.

    `generate` decodes plainly, one token a step; `lookahead.generate` decodes the same text in fewer steps. Both take
    the arguments of transformers' `generate` except a cache: keys and values stay in llama.cpp.

    Attributes:
        llama: The file, loaded by llama.cpp.
        tokenizer: The file's tokenizer, with its chat template.
        keeps_text: Whether a call of `lookahead.generate` with one row leaves its text in llama.cpp. The next call then
            computes only the part of its prompt that differs.
        reused_tokens: Tokens of the last prompt that llama.cpp held already.
        generation_config: The special tokens of the file. The file's own sampling settings are not read.
    """

    config_class = GGUFConfig
    main_input_name = "input_ids"

    def __init__(self, llama: LlamaModel) -> None:
        tokens = llama.vocabulary
        special_tokens = {"bos_token_id": tokens.bos, "eos_token_id": tokens.ends or None, "pad_token_id": tokens.pad}
        super().__init__(
            GGUFConfig(
                vocab_size=len(tokens),
                hidden_size=llama.width,
                max_position_embeddings=llama.trained_context,
                description=llama.name,
                fingerprint=llama.fingerprint(),
                fast_kv=llama.fast_kv,
                **special_tokens,
            )
        )
        self.llama = llama
        self.tokenizer = GGUFTokenizer(tokens, llama.chat_template)
        self.generation_config = GenerationConfig(**special_tokens)
        # transformers reads the vocabulary size, the device and the dtype from this layer.
        self.embed_tokens = torch.nn.Embedding(len(tokens), 0)
        self.keeps_text = False
        self.reused_tokens = 0
        self._reader: PlainReader | None = None
        self._lock = Lock()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of weights in llama.cpp. The arguments change nothing."""
        return self.llama.parameters

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: object | None = None,
        past_key_values: object | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Pass the whole text at every step; `forward` computes only its new part."""
        cache = past_key_values if cache is None else cache
        return {"input_ids": input_ids, "attention_mask": attention_mask, "cache": cache}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: object | None = None,
        past_key_values: object | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits after the last token of each text.

        Args:
            input_ids: Token ids of the texts, `[batch, tokens]` int64.
            attention_mask: Nonzero for tokens and 0 for padding, `[batch, tokens]`; no padding if not given.
            cache, past_key_values: Not supported.
            use_cache: Ignored: tokens of the same texts are never computed again.
            return_dict: Ignored: the result always has named fields.
            **kwargs: Ignored.

        Returns:
            An output with `logits`, `[batch, 1, vocabulary]` float32.

        Raises:
            UnsupportedArgumentError: A cache is given.
        """
        refuse_cache(past_key_values if cache is None else cache)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        texts = [row[mine.bool()].tolist() for row, mine in zip(input_ids, mask, strict=True)]
        with self._lock:
            if self._reader is None or not self._reader.fits(texts):
                self._reader = PlainReader(self.llama, texts)
            logits = self._reader.read(texts)
        return CausalLMOutputWithPast(logits=logits[:, None].to(input_ids.device))


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
