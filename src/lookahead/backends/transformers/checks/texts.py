"""What is asked of the texts of a call: whether they may come to where the model cannot be exact.

| what the call asks for | what is refused |
| --- | --- |
| a prompt, and tokens after it | more than there are positions for; what plain decoding reads wrongly |
| several rows, `use_cache=False` | texts that may come to where all positions change |
| hidden tokens | a model that counts them, a kind of model that reads them otherwise, a model that runs on chains |
| several rows, a cache | a kind of model that reads them otherwise |
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel

from lookahead.backends.base import Prompts, Runner
from lookahead.backends.transformers.chain_cache import has_running_state, is_forgetful
from lookahead.backends.transformers.checks.kinds import Equivalence, equivalence
from lookahead.backends.transformers.masks import INDEXED
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError


def check_texts(
    model: PreTrainedModel, runner: ModelRunner | ChainRunner, prompts: Prompts, generation_config: GenerationConfig
) -> None:
    """Refuse a call whose texts may come to where the model cannot be exact.

    Args:
        model: The model.
        runner: Runs it.
        prompts: What the rows begin with.
        generation_config: The configuration of the call.

    Raises:
        InvalidArgumentError: A prompt is longer than the model's table of positions.
        UnsupportedArgumentError: Rows, hidden tokens or `use_cache=False` do not go with the model.
    """
    name = type(model).__name__
    if isinstance(runner, ChainRunner):
        _check_chains(model, prompts, generation_config)
    new_tokens = generation_config.max_length - prompts.width
    check_length(runner, name, prompts, new_tokens)
    _check_changing_positions(runner, prompts, new_tokens, generation_config.use_cache)
    if isinstance(runner, ModelRunner):
        _check_hidden(runner, prompts, new_tokens)
        _check_kind(equivalence(model), name, prompts)


def _check_chains(model: PreTrainedModel, prompts: Prompts, generation_config: GenerationConfig) -> None:
    """Refuse what does not go with chains: their states are those of a whole text, a row's apart from the others'."""
    name = type(model).__name__
    if not generation_config.use_cache and has_running_state(type(model), model.config):
        raise UnsupportedArgumentError(
            f"use_cache=False is not supported for {name}, which keeps a running state: plain "
            "decoding would compute it anew from the whole text at each step; pass use_cache=True"
        )
    if generation_config.prefill_chunk_size is not None and is_forgetful(model):
        raise UnsupportedArgumentError(
            f"prefill_chunk_size is not supported for {name}, whose own passes over several tokens forget the state "
            "behind them; leave it unset"
        )
    picks = INDEXED in (getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if prompts.rows > 1 and (prompts.cache is not None or (prompts.inputs and picks)):
        what = "past_key_values" if prompts.cache is not None else "more than tokens"
        raise UnsupportedArgumentError(
            f"input_ids has {prompts.rows} rows with {what}, but {name} is run on chains of tokens, whose states are "
            "kept for each row apart; call generate once for each row"
        )
    # The model itself reads a prompt with images, padding included, and its cache is cut. Picked keys lie in blocks.
    by_model = bool(prompts.inputs) and prompts.cache is None and not picks and not _has_holes(prompts.mask)
    if not prompts.all_count and not by_model:
        raise UnsupportedArgumentError(
            f"attention_mask hides tokens, and lookahead decoding does not send them; {name} is run on chains, "
            "and they may have a part in its state; leave them out of input_ids, or use the model's own generate"
        )


def check_length(runner: Runner, name: str, prompts: Prompts, new_tokens: int) -> None:
    """Refuse a prompt longer than the table of positions, and texts of which plain decoding loses the beginning.

    Args:
        runner: Runs the model.
        name: Name of its class.
        prompts: What the rows begin with.
        new_tokens: Most tokens that are added to each.

    Raises:
        InvalidArgumentError: There is no position for the prompt.
        UnsupportedArgumentError: Plain decoding reads such texts wrongly.
    """
    longest = prompts.longest
    if runner.last_length is not None and longest >= runner.last_length:
        raise InvalidArgumentError(
            f"input_ids is a prompt of {longest} tokens, but the model's context holds {runner.context}; shorten it"
        )
    if runner.broken_after is not None and longest + new_tokens > runner.broken_after:
        raise UnsupportedArgumentError(
            f"input_ids and max_new_tokens may come to {longest + new_tokens} tokens: beyond {runner.broken_after} "
            f"generate of {name} drops its cache and reads the last token alone; choose a smaller max_new_tokens"
        )


def _check_changing_positions(
    runner: ModelRunner | ChainRunner, prompts: Prompts, new_tokens: int, use_cache: bool
) -> None:
    """Refuse texts that may come to where all positions change, if rows are at different places, of which others would
    be read with those of the longest, or if plain decoding would compute earlier keys anew."""
    longest = prompts.longest + new_tokens - 1  # the last token of a text is not read
    if runner.changes_after is None or longest <= runner.changes_after:
        return
    if prompts.rows > 1:
        raise UnsupportedArgumentError(
            f"input_ids has {prompts.rows} rows, and the longest may come to {longest} tokens: beyond "
            f"{runner.changes_after} the positions of this model depend on the longest text of a pass, and rows are at "
            "different places; call generate once for each row, or choose a smaller max_new_tokens"
        )
    if not use_cache:
        raise UnsupportedArgumentError(
            f"use_cache=False is not supported for a text that may come to {longest} tokens: beyond "
            f"{runner.changes_after} this model reads positions otherwise, and keys computed anew would differ from "
            "those that lookahead decoding keeps; leave use_cache unset, or choose a smaller max_new_tokens"
        )


def _check_hidden(runner: ModelRunner, prompts: Prompts, new_tokens: int) -> None:
    """Refuse hidden tokens where the model counts them: only those that count are sent."""
    if prompts.all_count:
        return
    mask = prompts.mask
    has_hole = _has_holes(mask)
    limit = runner.counts_hidden_after(between=has_hole)
    longest = mask.shape[1] + new_tokens - 1
    if limit is not None and longest > limit:
        raise UnsupportedArgumentError(
            f"attention_mask hides tokens {'between others' if has_hole else 'before the prompt'}, and the text may "
            f"come to {longest} tokens: beyond {limit} this model counts hidden tokens as well, which lookahead "
            "decoding does not send; use the model's own generate, or choose a smaller max_new_tokens"
        )


def _check_kind(kind: Equivalence, name: str, prompts: Prompts) -> None:
    """Refuse batches and hidden tokens where this kind of model reads them otherwise than plain decoding does."""
    if prompts.rows > 1 and not kind.holds("batches"):
        what = f"input_ids has {prompts.rows} rows, which"
    elif prompts.all_count:
        return
    elif not kind.holds("padding"):
        what = "attention_mask hides tokens before the prompt, and such rows"
    elif _has_holes(prompts.mask) and not kind.holds("holes"):
        what = "attention_mask hides tokens between others, and such rows"
    elif prompts.cache is not None and not kind.holds("padded_caches"):
        raise UnsupportedArgumentError(
            f"past_key_values of a prompt with hidden tokens is not supported for {name}, whose plain decoding counts "
            "them as positions; give the whole text without a cache"
        )
    else:
        return
    raise UnsupportedArgumentError(
        f"{what} are read otherwise by plain decoding of {name} than each row by itself; call generate once for each "
        "row, without hidden tokens"
    )


def _has_holes(mask: torch.Tensor) -> bool:
    """Whether a token is hidden behind one that is not."""
    return bool((mask[:, 1:] < mask[:, :-1]).any())
