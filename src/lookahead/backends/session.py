"""Sessions: `open_session` opens a model of any kind; nothing else asks which kind it is."""

from __future__ import annotations

from transformers import PreTrainedModel

from lookahead.backends.base import Session
from lookahead.backends.llama_cpp.model import GGUFModel
from lookahead.backends.llama_cpp.session import GGUFSession
from lookahead.backends.mlx.model import MLXModel
from lookahead.backends.transformers.session import TransformersSession


def open_session(model: PreTrainedModel) -> Session:
    """How to run `model`, which may be one of transformers, a GGUF file or a model of MLX."""
    if isinstance(model, MLXModel):
        from lookahead.backends.mlx.session import MLXSession  # late, as mlx is an extra

        return MLXSession(model)
    return GGUFSession(model) if isinstance(model, GGUFModel) else TransformersSession(model)
