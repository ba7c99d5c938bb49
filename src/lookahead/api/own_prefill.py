"""Prompts that are more than tokens, such as ones with images: what a call with them cannot have."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel

from lookahead.api.arguments import inputs_beside_tokens
from lookahead.backends.prompts import Prompts
from lookahead.backends.session import open_session
from lookahead.config import LookaheadConfig
from lookahead.errors import UnsupportedArgumentError


def check_own_prefill(
    model: PreTrainedModel,
    prompts: Prompts,
    config: LookaheadConfig,
    generation_config: GenerationConfig,
    on_ranks: bool,
) -> None:
    """Refuse what does not go with a prompt that the model's own prefill reads.

    Args:
        model: The model.
        prompts: The prompts, with `inputs`.
        config: How to draft.
        generation_config: The configuration of the call.
        on_ranks: Whether several processes decode.

    Raises:
        UnsupportedArgumentError: Something else is asked for; the message names it.
    """
    names = ", ".join(inputs_beside_tokens(prompts.inputs)) or "positions that follow an image"
    if open_session(model).reads_tokens_alone:
        reason = "a GGUF model reads token ids alone; leave it out"
    elif on_ranks:
        reason = "one process has to read it; leave parallel out"
    elif config.invariant:
        reason = "the model's own prefill reads it, whose bits depend on what is sent together; use invariant=False"
    elif generation_config.prefill_chunk_size is not None:
        reason = "it is read in one pass; leave prefill_chunk_size unset"
    elif prompts.cache is not None and not bool(prompts.mask.all()):
        reason = "it cannot be read behind past_key_values with hidden tokens; give the whole text without a cache"
    else:
        return
    raise UnsupportedArgumentError(f"a prompt with {names} is not supported here: {reason}")
