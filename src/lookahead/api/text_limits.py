"""How long a text may become for what a call asks of a model, checked before anything runs."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from lookahead.api.prompts import Prompts
from lookahead.backends.transformers import Equivalence, ModelRunner
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError


def check_text(
    runner: ModelRunner, kind: Equivalence, name: str, prompts: Prompts, generation_config: GenerationConfig
) -> None:
    """Refuse a call whose texts may come to where the model cannot be exact.

    Args:
        runner: Runs the model.
        kind: What the equivalence check found about its class.
        name: Name of the class.
        prompts: What the rows begin with.
        generation_config: The configuration of the call.

    Raises:
        InvalidArgumentError: A prompt is longer than the model's table of positions.
        UnsupportedArgumentError: Rows, hidden tokens or `use_cache=False` do not go with the model.
    """
    new_tokens = generation_config.max_length - prompts.width
    _check_context(runner, prompts)
    _check_whole(runner, name, prompts.longest + new_tokens)
    _check_batch(runner, prompts, new_tokens)
    _check_recomputing(runner, prompts, new_tokens, generation_config.use_cache)
    _check_hidden(runner, prompts.mask, new_tokens)
    _check_kind(kind, name, prompts.mask)
    if prompts.cache is not None and not prompts.mask.all() and not kind.padded_caches:
        raise UnsupportedArgumentError(
            f"past_key_values of a prompt with hidden tokens is not supported for {name}, whose plain decoding counts "
            "them as positions; give the whole text without a cache"
        )


def _check_context(runner: ModelRunner, prompts: Prompts) -> None:
    """Refuse a prompt that is longer than the model's table of positions."""
    longest = prompts.longest
    if runner.last_length is not None and longest >= runner.last_length:
        raise InvalidArgumentError(
            f"input_ids is a prompt of {longest} tokens, but the model's context holds {runner.context}; shorten it"
        )


def _check_whole(runner: ModelRunner, name: str, longest: int) -> None:
    """Refuse texts of which plain decoding of the model loses the beginning."""
    if runner.broken_after is not None and longest > runner.broken_after:
        raise UnsupportedArgumentError(
            f"input_ids and max_new_tokens may come to {longest} tokens: beyond {runner.broken_after} generate of "
            f"{name} drops its cache and reads the last token alone; choose a smaller max_new_tokens"
        )


def _check_batch(runner: ModelRunner, prompts: Prompts, new_tokens: int) -> None:
    """Refuse rows of which one may come to where all positions change: others would be read with its frequencies.

    Raises:
        UnsupportedArgumentError: They may come there.
    """
    # The last token of a text is not read.
    longest = prompts.longest + new_tokens - 1
    if prompts.rows > 1 and runner.changes_after is not None and longest > runner.changes_after:
        raise UnsupportedArgumentError(
            f"input_ids has {prompts.rows} rows, and the longest may come to {longest} tokens: beyond "
            f"{runner.changes_after} the positions of this model depend on the longest text of a pass, and rows are at "
            "different places; call generate once for each row, or choose a smaller max_new_tokens"
        )


def _check_kind(kind: Equivalence, name: str, mask: torch.Tensor) -> None:
    """Refuse batches and hidden tokens where this kind of model reads them otherwise than plain decoding does.

    Args:
        kind: What the equivalence check found.
        name: Name of the model's class.
        mask: Which tokens of the whole text count, `[batch, columns]` bool.

    Raises:
        UnsupportedArgumentError: It does.
    """
    if len(mask) > 1 and not kind.batches:
        what = f"input_ids has {len(mask)} rows, which"
    elif not mask.all() and not kind.padding:
        what = "attention_mask hides tokens before the prompt, and such rows"
    elif _has_holes(mask) and not kind.holes:
        what = "attention_mask hides tokens between others, and such rows"
    else:
        return
    raise UnsupportedArgumentError(
        f"{what} are read otherwise by plain decoding of {name} than each row by itself; call generate once for each "
        "row, without hidden tokens"
    )


def _check_recomputing(runner: ModelRunner, prompts: Prompts, new_tokens: int, use_cache: bool) -> None:
    """Refuse to do without a cache where that makes another text.

    Raises:
        UnsupportedArgumentError: Plain decoding would compute earlier keys anew, with other frequencies.
    """
    if use_cache or runner.changes_after is None:
        return
    longest = prompts.longest + new_tokens - 1
    if longest > runner.changes_after:
        raise UnsupportedArgumentError(
            f"use_cache=False is not supported for a text that may come to {longest} tokens: beyond "
            f"{runner.changes_after} this model reads positions otherwise, and keys computed anew would differ from "
            "those that lookahead decoding keeps; leave use_cache unset, or choose a smaller max_new_tokens"
        )


def _check_hidden(runner: ModelRunner, mask: torch.Tensor, new_tokens: int) -> None:
    """Refuse hidden tokens where the model counts them: only those that count are sent.

    Raises:
        UnsupportedArgumentError: It does so within the length that the text may come to.
    """
    if bool(mask.all()):
        return
    has_hole = _has_holes(mask)
    limit = runner.counts_hidden_after(between=has_hole)
    longest = mask.shape[1] + new_tokens - 1
    if limit is not None and longest > limit:
        raise UnsupportedArgumentError(
            f"attention_mask hides tokens {'between others' if has_hole else 'before the prompt'}, and the text may "
            f"come to {longest} tokens: beyond {limit} this model counts hidden tokens as well, which lookahead "
            "decoding does not send; use the model's own generate, or choose a smaller max_new_tokens"
        )


def _has_holes(mask: torch.Tensor) -> bool:
    """Whether a token is hidden behind one that is not."""
    return bool((mask[:, 1:] < mask[:, :-1]).any())
