"""A model of mlx-lm with the interface of a transformers model, for `generate` and programs built on it."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError
from lookahead.values import check_path


def load_mlx(path: str | os.PathLike[str]) -> MLXModel:
    """Load a model of mlx-lm with its tokenizer.

    `lookahead.generate` accepts the model like one of transformers, with all arguments except a cache.
    `lookahead.integrations.mlx.stream_generate` has the arguments of mlx-lm. Needs mlx-lm (`pip install '.[mlx]'` in a
    checkout), and torch, which holds token ids and logits between the parts of this library.

    Args:
        path: Folder of the model, or its name on the Hub, which mlx-lm downloads.

    Returns:
        The model, with its tokenizer in `tokenizer`.

    Raises:
        InvalidArgumentError: The model cannot be loaded, or mlx-lm is not installed.
        UnsupportedModelError: The model can be run neither on token trees nor on chains of tokens.
    """
    check_path("path", path, "must be the folder of a model, or its name on the Hub")
    if find_spec("mlx_lm") is None:
        raise InvalidArgumentError(
            f"path={str(path)!r}: a model of MLX needs mlx-lm, which is not installed: pip install mlx-lm, on Linux "
            "also 'mlx[cpu]'"
        )
    import mlx_lm

    try:
        module, tokenizer, config = mlx_lm.load(str(Path(path).expanduser()), return_config=True)
    except Exception as error:  # whatever a broken folder makes mlx-lm raise
        lines = str(error).strip().splitlines() or [""]
        raise InvalidArgumentError(
            f"path={str(path)!r} cannot be loaded by mlx-lm ({type(error).__name__}: {lines[0]}); copy all of its "
            "files, or convert it with mlx_lm.convert"
        ) from error
    return MLXModel(module, tokenizer, config)


class MLXConfig(PreTrainedConfig):  # type: ignore[misc]
    """Description of a model of mlx-lm: its special tokens, its context length, and its configuration."""

    model_type = "mlx"


class MLXModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A model of mlx-lm. MLX holds its weights; transformers sees none.

    `generate` decodes plainly, one token a step; `lookahead.generate` decodes the same text in fewer steps. Both take
    the arguments of transformers' `generate` except a cache.

    Args:
        module: The model, as `mlx_lm.load` returns it.
        tokenizer: Its tokenizer, as `mlx_lm.load` returns it.
        config: Its configuration, as `mlx_lm.load(..., return_config=True)` returns it.

    Attributes:
        mlx: The model of mlx-lm.
        tokenizer: The tokenizer of transformers.
        mlx_tokenizer: The tokenizer of mlx-lm.
        generation_config: The special tokens. The model's own sampling settings are not read.

    Raises:
        UnsupportedModelError: The model can be run neither on token trees nor on chains of tokens.
    """

    config_class = MLXConfig
    main_input_name = "input_ids"

    def __init__(self, module: Any, tokenizer: Any, config: dict[str, Any] | None = None) -> None:
        from lookahead.backends.mlx.checks import check_model

        ends = sorted(tokenizer.eos_token_ids)
        inner = tokenizer._tokenizer
        pad = inner.pad_token_id if inner.pad_token_id is not None else next(iter(ends), None)
        special_tokens = {"bos_token_id": inner.bos_token_id, "eos_token_id": ends or None, "pad_token_id": pad}
        config = config or {}
        findings = check_model(module)
        super().__init__(
            MLXConfig(
                vocab_size=findings.vocabulary,
                hidden_size=config.get("hidden_size"),
                num_hidden_layers=len(module.layers),
                max_position_embeddings=config.get("max_position_embeddings"),
                description=json.dumps(config, sort_keys=True, default=str),
                weights=findings.fingerprint,
                **special_tokens,
            )
        )
        self.mlx = module
        self.description = config
        self.findings = findings
        self.tokenizer = inner
        self.mlx_tokenizer = tokenizer
        self.generation_config = GenerationConfig(**special_tokens)
        # transformers reads the vocabulary size, the device and the dtype from this layer.
        self.embed_tokens = torch.nn.Embedding(findings.vocabulary, 0)
        self._reader: Any = None
        self._lock = Lock()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of weights. The arguments change nothing."""
        return self.findings.parameters

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Pass the whole text at every step; `forward` computes only its new part."""
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        return {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": cache}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits after the last token of each text.

        Args:
            input_ids: Token ids of the texts, `[batch, tokens]` int64.
            attention_mask: Nonzero for tokens and 0 for padding, `[batch, tokens]`; no padding if not given.
            past_key_values: Not supported.
            **kwargs: Ignored.

        Returns:
            An output with `logits`, `[batch, 1, vocabulary]` float32.

        Raises:
            UnsupportedArgumentError: A cache is given.
        """
        from lookahead.backends.mlx.runner import MLXPlainReader

        refuse_cache(past_key_values)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        texts = [row[mine.bool()].tolist() for row, mine in zip(input_ids, mask, strict=True)]
        with self._lock:
            if self._reader is None or len(self._reader.texts) != len(texts):
                self._reader = MLXPlainReader(self.mlx, len(texts))
            logits = self._reader.read(texts)
        return CausalLMOutputWithPast(logits=logits[:, None].to(input_ids.device))


def refuse_cache(cache: object) -> None:
    """Refuse a cache of transformers.

    Raises:
        UnsupportedArgumentError: `cache` is not `None`.
    """
    if cache is not None:
        raise UnsupportedArgumentError(
            "cache (past_key_values) is not supported for a model of MLX; give the whole text without it, or pass "
            "mlx-lm's prompt_cache to lookahead.integrations.mlx.stream_generate"
        )
