"""Models whose weights another engine holds, with the interface of a model of transformers."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead.backends.base import Runner
from lookahead.core.sequence import common_start
from lookahead.errors import UnsupportedArgumentError


class PlainReader:
    """Read rows of text in plain decoding, and compute only new tokens.

    Args:
        runner: Runner of empty rows.
        capacity: Maximum number of tokens over all rows.
        drops: Whether rows can drop tokens. Running states cannot.
    """

    def __init__(self, runner: Runner, capacity: int = sys.maxsize, drops: bool = True) -> None:
        self._runner: Any = runner
        self._capacity = capacity
        self._drops = drops
        self._texts: list[list[int]] = [[] for _ in runner.rows]

    def fits(self, texts: Sequence[Sequence[int]]) -> bool:
        """Return whether `texts` have the same number of rows and fit into the capacity."""
        return len(texts) == len(self._texts) and sum(map(len, texts)) <= self._capacity

    def read(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits after the last token of each text, `[rows, vocabulary]` float32."""
        runner = self._runner
        for number, text in enumerate(texts):
            common = common_start(self._texts[number], text[:-1])
            if common < runner.rows[number].length and self._drops:
                runner.rows[number].crop(common)
            elif common < runner.rows[number].length:
                runner.rows[number] = runner.new_row()
            self._texts[number] = list(text)
        runner.prefill(texts, None)
        trees = [runner.begin_tree(row, text) for row, text in enumerate(texts)]
        results = runner.forward(trees)
        runner.commit([range(len(tree)) for tree in trees])
        return torch.cat([result.logits_after(tree.root) for result, tree in zip(results, trees, strict=True)])


class WrappedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A model of another engine. transformers sees no weights.

    `generate` decodes plainly, one token a step; `lookahead.generate` decodes in fewer steps. Both take the arguments
    of transformers' `generate` except a cache: the engine holds keys and values.

    Args:
        tokenizer: Tokenizer of transformers.
        parameters: Number of weights.
        special_tokens: `bos_token_id`, `eos_token_id` and `pad_token_id`.
        **description: Further fields of the configuration.

    Attributes:
        tokenizer: The argument.
        generation_config: The special tokens. The model's own sampling settings are not read.
    """

    main_input_name = "input_ids"

    def __init__(self, tokenizer: Any, parameters: int, special_tokens: dict[str, Any], **description: Any) -> None:
        super().__init__(self.config_class(**description, **special_tokens))
        self.tokenizer = tokenizer
        self.generation_config = GenerationConfig(**special_tokens)
        # transformers reads the vocabulary size, the device and the dtype from this layer.
        self.embed_tokens = torch.nn.Embedding(description["vocab_size"], 0)
        self._parameter_count = parameters
        self._reader: PlainReader | None = None
        self._lock = Lock()

    @abstractmethod
    def plain_reader(self, texts: Sequence[Sequence[int]]) -> PlainReader:
        """Return a reader of as many texts, which has capacity for them."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of weights. The arguments change nothing."""
        return self._parameter_count

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
                self._reader = None  # frees its memory before the next one is allocated
                self._reader = self.plain_reader(texts)
            logits = self._reader.read(texts)
        return CausalLMOutputWithPast(logits=logits[:, None].to(input_ids.device))


def refuse_cache(cache: object) -> None:
    """Refuse a cache of transformers.

    Raises:
        UnsupportedArgumentError: `cache` is not `None`.
    """
    if cache is not None:
        raise UnsupportedArgumentError(
            "cache (past_key_values) is not supported for a GGUF model or a model of MLX, whose engine holds keys and "
            "values; give the whole text without it"
        )
