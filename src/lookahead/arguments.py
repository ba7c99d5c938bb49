"""Checks of what a call of `generate` asks for, before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError

_CONSUMED = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
)
"""Model inputs that `generate` prepares and the engine makes for itself."""


def check_config(config: object) -> LookaheadConfig:
    """The configuration of a call; the default one for `None`.

    Raises:
        InvalidArgumentError: It is no `LookaheadConfig`.
    """
    if config is None:
        return LookaheadConfig()
    if not isinstance(config, LookaheadConfig):
        raise InvalidArgumentError(
            f"lookahead_config={config!r} must be a lookahead.LookaheadConfig, or None for the default one"
        )
    return config


def check_prompt_ids(input_ids: object) -> None:
    """Refuse prompts that are no token ids, or have none.

    Raises:
        InvalidArgumentError: `input_ids` is no integer tensor `[batch, tokens]`, or has no tokens.
        UnsupportedArgumentError: It has more than one row.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise InvalidArgumentError(
            f"input_ids={type(input_ids).__name__} must be a tensor of token ids [1, tokens]; "
            "tokenizer(text, return_tensors='pt').input_ids makes one"
        )
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InvalidArgumentError(
            f"input_ids of shape {tuple(input_ids.shape)} and dtype {input_ids.dtype} must be token ids [1, tokens]"
        )
    if input_ids.shape[1] == 0:
        raise InvalidArgumentError(
            f"input_ids of shape {tuple(input_ids.shape)} is an empty prompt; give it at least one token, "
            "the model's bos_token_id for example"
        )
    if input_ids.shape[0] != 1:
        raise UnsupportedArgumentError(
            f"input_ids has a batch of {input_ids.shape[0]} rows; lookahead decoding runs one sequence a call for now: "
            "call it once for each row"
        )


def check_mode(config: GenerationConfig) -> None:
    """Refuse the ways of decoding that are neither greedy nor sampling, and outputs that a tree does not give.

    Raises:
        UnsupportedArgumentError: One of them is asked for; the message names the argument.
    """
    beams = config.num_beams or 1
    unsupported = {
        "num_beams": (beams > 1, "beam search keeps several texts; use num_beams=1"),
        "num_return_sequences": (
            (config.num_return_sequences or 1) > 1,
            "several sequences are a batch; call generate once for each",
        ),
        "penalty_alpha": (
            bool(config.penalty_alpha) and not config.do_sample,
            "contrastive search is another way of decoding; leave it unset",
        ),
        "constraints": (getattr(config, "constraints", None) is not None, "constrained search needs beams"),
        "force_words_ids": (getattr(config, "force_words_ids", None) is not None, "forced words need beams"),
        "dola_layers": (config.dola_layers is not None, "DoLa changes the model's logits; leave it unset"),
        "prompt_lookup_num_tokens": (
            config.prompt_lookup_num_tokens is not None,
            "prompt lookup is another way to draft; leave it unset",
        ),
        "assistant_early_exit": (
            config.assistant_early_exit is not None,
            "early exit is another way to draft; leave it unset",
        ),
        "use_mtp": (bool(getattr(config, "use_mtp", None)), "multi-token prediction is another way to draft"),
        "output_attentions": (
            bool(config.output_attentions),
            "a step reads many tokens at once; leave it unset",
        ),
        "output_hidden_states": (
            bool(config.output_hidden_states),
            "a step reads many tokens at once; leave it unset",
        ),
        "cache_implementation": (
            config.cache_implementation not in (None, "dynamic"),
            "a token tree needs the cache of lookahead decoding; leave it unset",
        ),
    }
    for name, (asked, advice) in unsupported.items():
        if asked:
            raise UnsupportedArgumentError(
                f"{name}={getattr(config, name)!r} is not supported by lookahead decoding: {advice}, or use the "
                "model's own generate"
            )


def check_model_inputs(model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs of the model that a token tree could not carry along, and caches that hold text already.

    Raises:
        UnsupportedArgumentError: There is one; the message names it.
    """
    for name, value in model_kwargs.items():
        if name not in _CONSUMED and value is not None and value is not False:
            raise UnsupportedArgumentError(
                f"{name} is not supported by lookahead decoding, which sends the model token ids alone; leave it out, "
                "or use the model's own generate"
            )
    cache = model_kwargs.get("past_key_values")
    if getattr(cache, "_is_user_defined", False):
        raise UnsupportedArgumentError(
            f"past_key_values={type(cache).__name__} is not supported yet: lookahead decoding keeps its own cache; "
            "leave it out and give the whole text as input_ids"
        )


def prompt_tokens(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """The tokens of the prompt that the model reads: those the attention mask does not hide.

    Raises:
        InvalidArgumentError: The mask hides all of them, or a token id is outside the vocabulary.
        UnsupportedArgumentError: `position_ids` are not the usual ones, that count the tokens.
    """
    mask = model_kwargs.get("attention_mask")
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    tokens: list[int] = input_ids[kept].tolist()
    if not tokens:
        raise InvalidArgumentError("attention_mask hides every token of input_ids; the prompt would be empty")
    vocabulary = model.get_input_embeddings().num_embeddings
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InvalidArgumentError(
                f"input_ids holds the token id {token}, but the model's vocabulary has {vocabulary} entries; "
                "use the tokenizer that belongs to the model"
            )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        usual = torch.arange(len(tokens), device=positions.device)
        if positions.shape[-1] != input_ids.shape[1] or not torch.equal(positions[kept.to(positions.device)], usual):
            raise UnsupportedArgumentError(
                "position_ids that do not count the tokens 0, 1, 2, ... are not supported by lookahead decoding; "
                "leave them out"
            )
    return tokens
