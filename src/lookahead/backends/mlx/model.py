"""A model of mlx-lm with the interface of a transformers model, for `generate` and programs built on it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from lookahead.backends.wrapped_model import PlainReader, WrappedModel
from lookahead.errors import InvalidArgumentError, not_of_signal
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
        ) from not_of_signal(error)
    return MLXModel(module, tokenizer, config)


class MLXConfig(PreTrainedConfig):  # type: ignore[misc]
    """Description of a model of mlx-lm: its special tokens, its context length, and its configuration."""

    model_type = "mlx"


class MLXModel(WrappedModel):
    """A model of mlx-lm, run by MLX.

    Args:
        module: The model, as `mlx_lm.load` returns it.
        tokenizer: Its tokenizer, as `mlx_lm.load` returns it.
        config: Its configuration, as `mlx_lm.load(..., return_config=True)` returns it.

    Attributes:
        mlx: The model of mlx-lm.
        mlx_tokenizer: The tokenizer of mlx-lm.
        description: The argument `config`.
        way: Kind of passes that it runs, after trials.
        difference: Largest difference of its logits to those of plain decoding, in standard deviations of the logits.
        vocabulary: Number of token ids.
        number_type: Names of the number types of its weights.

    Raises:
        UnsupportedModelError: The model can be run neither on token trees nor on chains of tokens.
    """

    config_class = MLXConfig

    def __init__(self, module: Any, tokenizer: Any, config: dict[str, Any] | None = None) -> None:
        from lookahead.backends.mlx.checks import check_model, describe_weights

        ends = sorted(tokenizer.eos_token_ids)
        inner = tokenizer._tokenizer
        pad = inner.pad_token_id if inner.pad_token_id is not None else next(iter(ends), None)
        config = config or {}
        vocabulary, number_type, parameters, fingerprint = describe_weights(module)
        way, difference = check_model(module, vocabulary, number_type)
        super().__init__(
            inner,
            parameters,
            {"bos_token_id": inner.bos_token_id, "eos_token_id": ends or None, "pad_token_id": pad},
            vocab_size=vocabulary,
            hidden_size=config.get("hidden_size"),
            num_hidden_layers=len(module.layers),
            max_position_embeddings=config.get("max_position_embeddings"),
            description=json.dumps(config, sort_keys=True, default=str),
            weights=fingerprint,
        )
        self.mlx = module
        self.mlx_tokenizer = tokenizer
        self.description = config
        self.way, self.difference = way, difference
        self.vocabulary, self.number_type = vocabulary, number_type

    def plain_reader(self, texts: Sequence[Sequence[int]]) -> PlainReader:
        """Return a reader of as many texts."""
        from mlx_lm.models.cache import make_prompt_cache  # late, as mlx is an extra

        from lookahead.backends.mlx.runner import MLXRunner

        runner = MLXRunner(self.mlx, [make_prompt_cache(self.mlx) for _ in texts], self, self.way)
        return PlainReader(runner, drops=not runner.chains)
