"""Sessions: `open_session` opens a model of any kind; nothing else asks which kind it is."""

from __future__ import annotations

from transformers import PreTrainedModel

from lookahead.backends.base import Session
from lookahead.backends.llama_cpp.model import GGUFModel
from lookahead.backends.llama_cpp.session import GGUFSession
from lookahead.backends.transformers.session import TransformersSession


def open_session(model: PreTrainedModel) -> Session:
    """How to run `model`, which may be one of transformers or a GGUF file."""
    return GGUFSession(model) if isinstance(model, GGUFModel) else TransformersSession(model)
