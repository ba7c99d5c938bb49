"""Checks of a GGUF model and of calls on it.

| question | check | refused |
| --- | --- | --- |
| Can it be loaded? | llama.cpp loads it: `file.LlamaModel` | the file |
| Is its architecture supported? | flags of llama.cpp: `check_model` | the model |
| Do trees and single tokens give equal logits? | random text, trees with wrong branches: `check_model` | the model |
| Do chains, of a model with running states? | the same along chains, some of them rejected in part | the model |
| Do the settings apply to llama.cpp? | `check_settings` | `pack_weights`, `invariant`, `engine` |
| Can the rows of a call be run? | `check_call` | caches, too many rows or nodes, too long prompts |
| Can rows join and leave? | `check_rows` | too many rows; models with running states |
"""

from __future__ import annotations

import numpy as np
from torch.nn.modules import module
from transformers import PreTrainedModel

from lookahead.backends.base import Prompts, check_settings
from lookahead.backends.llama_cpp.context import MOST_SEQUENCES, binding
from lookahead.backends.llama_cpp.file import LlamaModel
from lookahead.backends.llama_cpp.runner import LlamaChainRunner, LlamaRunner
from lookahead.backends.trials import LEAVES, LENGTH, NODES, drafted_difference
from lookahead.backends.wrapped_model import refuse_cache
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from lookahead.values import require

TOLERANCE = 0.25
"""Maximum difference to the logits of plain decoding, in standard deviations of the logits."""


def check_model(model: LlamaModel) -> None:
    """Check that logits after accepted and rejected drafts equal those of plain decoding.

    Raises:
        UnsupportedModelError: The logits differ, or the architecture is not supported.
    """
    name = f"path={str(model.path)!r}: the model"
    library = binding()
    for applies, feature in (
        (library.llama_model_has_encoder, "has an encoder"),
        (library.llama_model_is_diffusion, "is a diffusion model"),
    ):
        if applies(model.handle):
            raise UnsupportedModelError(
                f"{name} {feature}, so it cannot be run on token trees. Use llama.cpp's own decoding"
            )
    worst = largest_difference(model)
    if not worst <= TOLERANCE:
        raise UnsupportedModelError(
            f"{name} gives other logits on {'chains of tokens' if model.has_states else 'token trees'} than token by "
            f"token, with this build of llama.cpp: they differ by {worst:.2g} standard deviations. Use llama.cpp's own "
            "decoding"
        )


def replaced_code(model: PreTrainedModel) -> str | None:
    """Name the code added to the forward pass of a GGUF model, hooks for example; `None` if there is none.

    transformers runs such code in each pass, but our steps call llama.cpp directly.
    """
    if model._forward_hooks or model._forward_pre_hooks:
        return "forward hooks"
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        return "forward hooks of all modules of the process"
    if "forward" in vars(model):
        return "another forward pass"
    return None


def check_code(model: PreTrainedModel) -> None:
    """Refuse a GGUF model with hooks or a replaced forward pass, which our steps would skip."""
    if code := replaced_code(model):
        raise UnsupportedModelError(
            f"model={type(model).__name__} has {code}, which steps of llama.cpp do not run; remove them, or use "
            "model.generate"
        )


def largest_difference(model: LlamaModel) -> float:
    """Largest difference between logits with drafts and in plain decoding, in standard deviations of the logits."""
    vocabulary = model.vocabulary
    usable = np.setdiff1d(np.arange(len(vocabulary)), [*vocabulary.controls, *vocabulary.ends])  # tokens that are text
    context = model.acquire(2 * LENGTH + NODES, 2 if model.has_states else LEAVES)
    kind = LlamaChainRunner if model.has_states else LlamaRunner

    def empty_runner(drafts: bool) -> LlamaRunner:
        context.clear()
        return kind(context, 1)

    worst = drafted_difference(empty_runner, usable.tolist(), model.has_states)
    model.release(context)
    return worst


def check_call(model: LlamaModel, prompts: Prompts, config: LookaheadConfig) -> None:
    """Refuse a call that llama.cpp cannot run: caches, too many rows or nodes, too long prompts."""
    check_settings(config, "a GGUF model")
    refuse_cache(prompts.cache)
    if prompts.rows > MOST_SEQUENCES:
        raise InvalidArgumentError(
            f"input_ids has {prompts.rows} rows, but llama.cpp has {MOST_SEQUENCES} sequences; call generate with fewer"
        )
    if model.has_states and prompts.rows > 1:
        raise UnsupportedArgumentError(
            f"input_ids has {prompts.rows} rows, but this model has layers with a running state, and is run on chains "
            "of tokens, one text at a time; call generate once for each row"
        )
    if model.last_length is not None and prompts.longest >= model.last_length:
        raise InvalidArgumentError(
            f"input_ids is a prompt of {prompts.longest} tokens, but the model's context holds {model.last_length}; "
            "shorten it"
        )
    # Trees of a fixed shape cannot be cut to fit.
    leaves = prompts.rows * (config.max_nodes - 1)
    if leaves > MOST_SEQUENCES and config.preset in ("paper", "jacobi"):
        raise InvalidArgumentError(
            f"preset={config.preset!r} sends up to {config.max_nodes} nodes for each of {prompts.rows} rows, but "
            f"llama.cpp has {MOST_SEQUENCES} sequences; choose smaller sizes, or fewer rows"
        )


def check_rows(model: LlamaModel, config: LookaheadConfig, max_rows: int) -> None:
    """Refuse models and settings that cannot run with rows that join and leave."""
    check_settings(config, "a GGUF model")
    if model.has_states:
        raise UnsupportedModelError(
            f"path={str(model.path)!r}: the model has layers with a running state, and is run on chains of tokens, "
            "one text at a time, which an Engine does not; use lookahead.generate"
        )
    too_many = f"is too many: llama.cpp has {MOST_SEQUENCES} sequences; choose at most that"
    require(max_rows <= MOST_SEQUENCES, "max_rows", max_rows, too_many)
