"""Loading a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lookahead.backends.gguf.model import GGUFModel
from lookahead.backends.llama_cpp.checks import check_model
from lookahead.backends.llama_cpp.model import LlamaModel
from lookahead.errors import InvalidArgumentError


def load_gguf(
    path: str | os.PathLike[str], *, n_gpu_layers: int = 0, n_threads: int | None = None, fast_kv: bool = False
) -> GGUFModel:
    """Load a GGUF model with its tokenizer, to be run by llama.cpp.

    `lookahead.generate` takes the model as it takes one of transformers, and all of its arguments but those that are
    about a cache; so does the model's own `generate`, which decodes plainly. Needs llama-cpp-python
    (`pip install 'lookahead-decoding[gguf]'`).

    Args:
        path: The file; the first one of a model that is split into several.
        n_gpu_layers: Layers to keep on a GPU, where llama-cpp-python was built for one; -1 for all.
        n_threads: Threads of a step; as many as torch uses if not given.
        fast_kv: Keep keys and values in float16, and let llama.cpp choose its attention, as it does by default. Faster,
            but it rounds more: where two tokens are nearly as likely, texts may differ from plain decoding.

    Returns:
        The model, with its tokenizer in `tokenizer`.

    Raises:
        InvalidArgumentError: The file cannot be loaded, or llama-cpp-python is not installed.
        UnsupportedModelError: The model can be run neither on token trees nor on chains of tokens.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgumentError(f"path={path!r} must be the path of a GGUF file")
    threads = torch.get_num_threads() if n_threads is None else n_threads
    for name, value, least in (("n_threads", threads, 1), ("n_gpu_layers", n_gpu_layers, -1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgumentError(f"{name}={value!r} must be a whole number of at least {least}")
    llama = LlamaModel(Path(path).expanduser(), n_gpu_layers, threads, fast_kv)
    check_model(llama)
    return GGUFModel(llama)
