"""Checks of what a call of `generate` asks for, before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.drafting import NGramPool
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
    """
    if not isinstance(input_ids, torch.Tensor):
        raise InvalidArgumentError(
            f"input_ids={type(input_ids).__name__} must be a tensor of token ids [batch, tokens]; "
            "tokenizer(text, return_tensors='pt').input_ids makes one"
        )
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InvalidArgumentError(
            f"input_ids of shape {tuple(input_ids.shape)} and dtype {input_ids.dtype} must be token ids [batch, tokens]"
        )
    if input_ids.shape[1] == 0:
        raise InvalidArgumentError(
            f"input_ids of shape {tuple(input_ids.shape)} is an empty prompt; give it at least one token, "
            "the model's bos_token_id for example"
        )


def check_mode(config: GenerationConfig) -> None:
    """Refuse the ways of decoding that are neither greedy nor sampling, and outputs that a tree does not give.

    Raises:
        UnsupportedArgumentError: One of them is asked for; the message names the argument.
    """
    beams = config.num_beams or 1
    unsupported = {
        "num_beams": (beams > 1, "beam search keeps several texts; use num_beams=1"),
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
    """Refuse inputs of the model that a token tree could not carry along.

    Raises:
        UnsupportedArgumentError: There is one; the message names it.
    """
    for name, value in model_kwargs.items():
        if name not in _CONSUMED and value is not None and value is not False:
            raise UnsupportedArgumentError(
                f"{name} is not supported by lookahead decoding, which sends the model token ids alone; leave it out, "
                "or use the model's own generate"
            )


def check_pool(pool: NGramPool | None, config: LookaheadConfig) -> None:
    """Refuse a pool that does not go with the configuration.

    Raises:
        InvalidArgumentError: It is no pool, or was made for n-grams of another size.
    """
    if pool is None:
        return
    if not isinstance(pool, NGramPool):
        raise InvalidArgumentError(f"ngram_pool={pool!r} must be a lookahead.NGramPool, or None for a new one")
    if config.preset != "paper":
        raise InvalidArgumentError(f"ngram_pool is of no use to preset={config.preset!r}; use it with preset='paper'")
    if pool.ngram_size != config.ngram_size:
        raise InvalidArgumentError(
            f"ngram_pool holds n-grams of {pool.ngram_size} tokens, but lookahead_config.ngram_size={config.ngram_size}"
        )


def prompt_tokens(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
) -> list[list[int]]:
    """The tokens of each row's prompt that the model reads: those the attention mask does not hide.

    Args:
        model: The model, which says how many tokens there are.
        input_ids: The prompts, `[batch, tokens]`.
        mask: Nonzero for each token that counts, `[batch, tokens]`; all of them do if not given.
        positions: Position ids `[batch or 1, tokens]`, if any.

    Raises:
        InvalidArgumentError: The mask hides all of a row, or a token id is outside the vocabulary.
        UnsupportedArgumentError: `positions` are not the usual ones, that count the tokens.
    """
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    vocabulary = model.get_input_embeddings().num_embeddings
    outside = kept & ((input_ids < 0) | (input_ids >= vocabulary))
    if outside.any():
        raise InvalidArgumentError(
            f"input_ids holds the token id {int(input_ids[outside][0])}, but the model's vocabulary has {vocabulary} "
            "entries; use the tokenizer that belongs to the model"
        )
    if not kept.any(dim=1).all():
        row = int((~kept.any(dim=1)).nonzero()[0])
        raise InvalidArgumentError(f"attention_mask hides every token of row {row} of input_ids; its prompt is empty")
    if positions is not None and positions.shape[-1] == input_ids.shape[1]:
        usual = (kept.long().cumsum(-1) - 1).to(positions.device)
        if not torch.equal(positions.expand_as(usual)[kept.to(positions.device)], usual[kept.to(positions.device)]):
            raise UnsupportedArgumentError(
                "position_ids that do not count the tokens 0, 1, 2, ... are not supported by lookahead decoding; "
                "leave them out"
            )
    return [row[mine].tolist() for row, mine in zip(input_ids, kept, strict=True)]
