"""The models of a benchmark, and the objects that each method runs on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lookahead.backends.llama_cpp.model import load_gguf
from lookahead.backends.session import open_session
from lookahead.backends.transformers.identity import model_identity
from lookahead.bench.suite import MethodSpec, ModelSpec
from lookahead.demo import demo_model_path
from lookahead.errors import InvalidArgumentError, LookaheadError


@dataclass(frozen=True)
class BenchModel:
    """A model that was loaded.

    Attributes:
        spec: What the benchmark says of it.
        model: The model, which stays greedy: whatever it shipped for sampling is gone.
        tokenizer: Its tokenizer.
        identity: A name for its weights.
    """

    spec: ModelSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: str

    @property
    def context(self) -> int | None:
        """Most tokens of a text, `None` when the configuration names no limit."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    def settings(self) -> dict[str, Any]:
        """What the measured figures depend on."""
        return {
            **self.spec.settings(),
            "architecture": type(self.model).__name__,
            "parameters": open_session(self.model).parameters,
            "identity": self.identity,
        }


def load(spec: ModelSpec, device: torch.device) -> BenchModel:
    """Load a model, or make the one with random weights.

    Raises:
        InvalidArgumentError: It cannot be loaded; the message names the model.
    """
    if spec.path is not None and Path(spec.path).suffix.lower() == ".gguf":
        return _load_gguf(spec)
    tokenizer_path = spec.tokenizer or spec.path or "demo"
    try:
        tokenizer = AutoTokenizer.from_pretrained(_folder(tokenizer_path), local_files_only=True)
        model = _random(spec, tokenizer) if spec.path is None else _load(spec.path, getattr(torch, spec.dtype))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"models: {spec.name!r} cannot be loaded: {error}") from error
    model = model.to(device).eval()
    return BenchModel(spec, model, tokenizer, model_identity(model))


def load_assistant(method: MethodSpec, model: PreTrainedModel) -> PreTrainedModel | None:
    """The model that drafts for `model` in assisted generation, `None` where there is none.

    Raises:
        InvalidArgumentError: It cannot be loaded; the message names the method.
    """
    if method.assistant is None:
        return None
    try:
        assistant = _load(method.assistant, model.dtype)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidArgumentError(f"methods: the assistant of {method.name!r} cannot be loaded: {error}") from error
    return assistant.to(model.device).eval()


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Another object of the same model, weights shared: nothing that the library keeps for the one is known of it."""
    return open_session(model).sharing_weights()


def _load_gguf(spec: ModelSpec) -> BenchModel:
    assert spec.path is not None
    try:
        model = load_gguf(spec.path)
    except LookaheadError as error:
        raise InvalidArgumentError(f"models: {spec.name!r} cannot be loaded: {error}") from error
    return BenchModel(spec, model, model.tokenizer, model_identity(model))


def _folder(path: Path | str) -> Path:
    return demo_model_path() if path == "demo" else Path(path)


def _load(path: Path | str, dtype: torch.dtype) -> PreTrainedModel:
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model, report = AutoModelForCausalLM.from_pretrained(_folder(path), dtype=dtype, output_loading_info=True, **local)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{path} lacks {len(missing)} weights ({missing[0]}); copy the model again")
    shipped = model.generation_config
    # Only which tokens end a text is taken over; tasks say how tokens are chosen.
    model.generation_config = GenerationConfig(
        bos_token_id=shipped.bos_token_id, eos_token_id=shipped.eos_token_id, pad_token_id=_pad_token(shipped)
    )
    return model


def _pad_token(config: GenerationConfig) -> int | None:
    """Without one every call of `generate` would warn about it."""
    eos = config.eos_token_id
    first: int | None = eos[0] if isinstance(eos, list) else eos
    return first if config.pad_token_id is None else int(config.pad_token_id)


def _random(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model with random weights, a Llama if not said otherwise, and no token that ends a text."""
    sizes = {"vocab_size": len(tokenizer), "model_type": "llama", **spec.random}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(sizes.pop("model_type"), **special | sizes)
    if config.vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} tokens of the tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(getattr(torch, spec.dtype))
