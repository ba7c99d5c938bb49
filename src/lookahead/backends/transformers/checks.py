"""Checks before a model runs: of the model, of the settings, and of the texts of a call.

| question | check | refused otherwise |
| --- | --- | --- |
| Is the kind of model supported? | inspection: `ADAPTERS`, `MODELS` | the model |
| Does it decode by transformers' loop? | inspection: `own_method`; a miniature | the model |
| Does it accept trees? | inspection: `_check_inputs` | trees |
| Does it honour masks and positions? | trial of the model: `_try_trees` | trees |
| Do trees equal plain decoding for its kind? | a miniature: `equivalence.QUESTIONS` | trees |
| Can it continue from running states? | a miniature, and a trial of the model: `_check_chains` | the model |
| Are chunks of a prompt equal to one pass? | trial of the model: `engine_model.check_parts` | Engines |
| Can rows join and leave? | inspection; without drafts a miniature: `runs_rows` | Engines |
| Does a clone equal the model? | trial of both: `comparisons.computes_the_same` | the clone |
| Are passes invariant? | `SETTINGS`; comparison of all bits: `comparisons.is_invariant` | `invariant=True` |
| Can weights be packed? | inspection: `SETTINGS` | `pack_weights=True` |
| Are rows of a shared pass independent? | trial of three texts: `comparisons.reads_rows_alike` | packed rows, Engines |
| Do static passes equal dynamic ones? | trial of both: `static_engine.call_runner` | static passes |
| Are there positions for a text? | `limits.Limits`: `check_length` | prompts, texts |
| May rows have different lengths? | `Limits`: `_check_positions`; a miniature: `check_texts` | rows, `use_cache=False`
| | Are rows of plain decoding independent? | a miniature: `check_texts` | rows |
| Does decoding without a cache equal decoding with one? | a miniature: `check_texts` | `use_cache=False` |
| Are hidden tokens ignored? | `Limits`, a miniature: `_check_hidden` | `attention_mask`, a cache |
| Can a call run on chains? | inspection: `_check_states` | the call |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lookahead.backends.base import Prompts, Runner
from lookahead.backends.transformers.cache_names import CACHE, cache_name
from lookahead.backends.transformers.chain_cache import has_running_state, is_encoder_decoder, is_forgetful
from lookahead.backends.transformers.comparisons import TEXTS, are_close, continues_correctly, reads_trees
from lookahead.backends.transformers.composition import own_method
from lookahead.backends.transformers.equivalence import Equivalence, equivalence
from lookahead.backends.transformers.limits import limits_of
from lookahead.backends.transformers.masks import INDEXED, MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments, model_setting, once, state_of
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.backends.transformers.shared_clone import FORWARD_IS_REPLACED, can_be_cloned, chain_engine
from lookahead.backends.transformers.snapshots import preserved_state
from lookahead.backends.trials import difference, tolerance
from lookahead.config import LookaheadConfig
from lookahead.errors import (
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedModelError,
    not_of_signal,
    warn_of_plain,
)

Rules = tuple[tuple[Callable[[Any], object], str], ...]
"""Pairs of a condition and the reason to refuse, with the fields `{it}` and `{kind}` (its class)."""

_CPU = "cpu"
_CUDA = "cuda"

ADAPTERS: Rules = (
    (
        lambda adapter: getattr(adapter, "is_prompt_learning", False),
        "has a {kind} adapter, and token trees cannot carry its virtual tokens. Use model.generate, or an adapter of "
        "the weights, such as LoRA",
    ),
    (
        lambda adapter: getattr(adapter, "alora_invocation_tokens", None),
        "has an activated LoRA adapter, which depends on the order of tokens in a pass. Use model.generate, or plain "
        "LoRA",
    ),
)
"""Unsupported adapters of PEFT."""

MODELS: Rules = (
    (
        lambda model: (
            model.device.type == "meta" and not (hasattr(model, "_hf_hook") or hasattr(model, "hf_device_map"))
        ),
        "is on the device 'meta': it has no weights, and no hooks of accelerate that load them. Load them first",
    ),
    (
        lambda model: model.device.type == _CPU and "flex_attention" in _attentions(model),
        "has attn_implementation='flex_attention' on a CPU, where a pass with the mask of a tree ends the process. "
        "Load it with attn_implementation='sdpa' or 'eager', or use model.generate",
    ),
)
"""Models that support neither trees nor chains."""

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_INVARIANCE: Rules = (
    (
        lambda model: model.device.type not in (_CPU, _CUDA),
        "it is on {it.device}, and invariant passes run only on CPUs and CUDA",
    ),
    (lambda model: model.device.type == _CUDA and find_spec("triton") is None, "Triton is not installed"),
    (
        lambda model: model.dtype not in _TYPES,
        f"it is in {{it.dtype}}; invariant passes support {', '.join(map(str, _TYPES))}",
    ),
    (lambda model: torch.is_autocast_enabled(model.device.type), "autocast chooses number types while it runs"),
    (
        lambda model: not getattr(model, "_supports_attention_backend", False),
        "its attention is not called through transformers' attention interface",
    ),
    (
        lambda model: model.config._attn_implementation not in ("sdpa", "eager"),
        "its attn_implementation={it.config._attn_implementation!r} is neither 'sdpa' nor 'eager'",
    ),
    (lambda model: not can_be_cloned(model), FORWARD_IS_REPLACED),
)
_PACKING: Rules = (
    (lambda _: not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), "this build of torch has no oneDNN"),
    (lambda model: model.device.type != _CPU, "it is on {it.device}, and weights are packed on CPUs"),
)
SETTINGS = {"pack_weights": _PACKING, "invariant": _INVARIANCE}
"""Conditions that exclude a setting without a trial."""


def _broken(rules: Rules, it: Any) -> str | None:
    """Return the reason of the first rule that applies; `None` if none does."""
    return next((why.format(it=it, kind=type(it).__name__) for applies, why in rules if applies(it)), None)


def _attentions(model: PreTrainedModel) -> set[str | None]:
    """Return the attention implementations of a model and of its text decoder."""
    return {config._attn_implementation for config in (model.config, model.config.get_text_config(decoder=True))}


def check_adapters(model: torch.nn.Module) -> None:
    """Refuse PEFT adapters that do not support trees; `model` is the adapted model, or its wrapper.

    Raises:
        UnsupportedModelError: There is one.
    """
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if why := _broken(ADAPTERS, adapter):
            raise UnsupportedModelError(f"model={type(model).__name__} {why}")


def _check_outside(model: PreTrainedModel) -> None:
    """Refuse models that inspection shows to be unsupported, once for each composition."""
    once(model, ("outside",), lambda: _inspect(model))


def _inspect(model: PreTrainedModel) -> None:
    check_adapters(model)
    if why := _broken(MODELS, model):
        raise UnsupportedModelError(f"model={type(model).__name__} {why}")
    if own := own_method(model):
        raise UnsupportedModelError(
            f"model={type(model).__name__} has a {own} of its own, as adapters with virtual tokens do: it may decode "
            "differently from transformers' loop, which lookahead decoding replaces. Use model.generate"
        )


def check_model(model: PreTrainedModel) -> None:
    """Check that `model` supports token trees, and that they equal plain decoding.

    It runs a few short passes once per model object, and the trials of its kind once per configuration.

    Raises:
        UnsupportedModelError: The model does not; the message has the reason.
    """
    _check_outside(model)
    once(model, ("trees", *model_setting(model)), lambda: _try_trees(model))
    kind = equivalence(model)
    if not kind.holds("trees"):
        reason = _refusal_of(
            kind,
            "a small copy of it, run past every window and context of its configuration, differs from plain decoding",
        )
        raise UnsupportedModelError(
            f"model={type(model).__name__} with attn_implementation={model.config._attn_implementation!r} may compute "
            f"other logits on token trees than token by token: {reason}. Use model.generate"
        )


def runs_on_chains(model: PreTrainedModel) -> bool:
    """Return whether `model` runs on chains, rather than on token trees.

    A model with a running state does, since it cannot take back a token. So does a model that ignores the masks or
    positions of trees, but processes several tokens after its cache correctly.

    Raises:
        UnsupportedModelError: It supports neither; the message has the reason.
    """
    _check_outside(model)
    made = state_of(model).trials.made
    setting = model_setting(model)
    if ("chains", *setting) in made:
        return True
    if ("trees", *setting) in made:
        if equivalence(model).holds("trees"):
            return False
    elif is_encoder_decoder(model) or has_running_state(type(model), model.config):
        _check_chains(model)
        return True
    try:
        check_model(model)
    except UnsupportedModelError as refusal:
        try:
            _check_chains(model)
        except UnsupportedModelError:
            raise refusal from None
        return True
    return False


def runs_rows(model: PreTrainedModel, falls_back: bool) -> tuple[bool, bool]:
    """Return how an engine runs rows of `model`: whether on chains, and whether with drafts.

    Args:
        model: The model.
        falls_back: Whether a model that is refused with drafts may run without them.

    Raises:
        UnsupportedModelError: Engines do not support the model; the message has the reason.
    """
    if is_encoder_decoder(model):
        raise UnsupportedModelError(
            f"model={type(model).__name__} is an encoder-decoder, which an Engine does not run; use lookahead.generate"
        )
    try:
        return runs_on_chains(model), True
    except UnsupportedModelError as refusal:
        if not falls_back:
            raise
        _check_outside(model)
        kind = equivalence(model)
        if not kind.holds("plain"):
            reason = _refusal_of(kind, "passes over one token of a small copy of it differ from generate")
            raise UnsupportedModelError(
                f"{refusal}. Nor can it be run without drafts (fallback='plain') here: {reason}"
            ) from refusal
        warn_of_plain(refusal, stacklevel=4)
        return True, False


def _check_inputs(model: PreTrainedModel) -> None:
    """Refuse models without the inputs that trees need."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"model={name} keeps a running state (Mamba-style or linear attention), which cannot take back a token "
            "that was not accepted: it supports chains of tokens, but no token trees"
        )
    MaskBuilder(model.config)
    arguments = forward_arguments(model)
    takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    for needed in (cache_name(model), "position_ids", "attention_mask"):
        if needed not in arguments and not takes_all:
            raise UnsupportedModelError(
                f"model={name} takes no {needed!r} in its forward pass, which token trees need. Use model.generate"
            )


def _try_trees(model: PreTrainedModel) -> None:
    """Refuse a model with other logits on trees than token by token."""
    _check_inputs(model)
    name = f"model={type(model).__name__} with attn_implementation={model.config._attn_implementation!r}"
    advice = (
        "call model.eval() if it is in training mode, load it with attn_implementation='sdpa' or 'eager' if it has "
        "them, and if it still fails, use model.generate: lookahead decoding cannot run it"
    )
    for number in range(TEXTS):
        with _failure_refused(model, f"{name} failed on a token tree", advice):
            drafted, plain = reads_trees(model, number)
        if not bool(torch.isfinite(plain).all()):
            raise UnsupportedModelError(f"{name} computes logits that are not finite, in {model.dtype}; {advice}")
        if are_close([drafted], [plain], model.dtype):
            return
        deviation = difference([drafted], [plain])
        allowed = tolerance([plain], model.dtype)
        if not deviation <= allowed:
            break
    raise UnsupportedModelError(
        f"{name} does not honour explicit positions or tree masks: the logits along a token tree differ by "
        f"{deviation:.2g} from those token by token, which is more than rounding; {advice}"
    )


def _check_chains(model: PreTrainedModel) -> None:
    """Refuse a model with other logits on chains than token by token."""
    kind = equivalence(model)
    name = f"model={type(model).__name__}"
    state = "keeps a running state (Mamba-style or linear attention)"
    what = f"{name} {'is an encoder-decoder' if is_encoder_decoder(model) else state}"
    if not kind.holds("chains"):
        reason = _refusal_of(
            kind, "a small copy of it that goes on from its state over several tokens differs from plain decoding"
        )
        raise UnsupportedModelError(f"{what}, and {reason}. Use model.generate")
    once(model, ("chains", *model_setting(model)), lambda: _try_chains(model, what))


def _refusal_of(kind: Equivalence, differs: str) -> str:
    """Return the reason of a failed trial of a kind."""
    return differs if kind.has_miniature else f"no small copy of it could be tried ({kind.obstacle})"


def _try_chains(model: PreTrainedModel, what: str) -> None:
    """Try chains on the model itself, since its device may have other kernels; `what` names its kind in errors."""
    with _failure_refused(model, f"model={type(model).__name__} failed on a chain of tokens", "use model.generate"):
        # A clone for chains has been compared already.
        same = chain_engine(model) is not model or continues_correctly(model, model)
    if not same:
        raise UnsupportedModelError(
            f"{what}, and processes several tokens otherwise than one token at a time; call model.eval() if it is in "
            "training mode, and if that does not help, use model.generate"
        )


@contextmanager
def _failure_refused(model: PreTrainedModel, what: str, advice: str) -> Iterator[None]:
    """Restore the state of `model` after trial passes, and refuse the model if one fails."""
    try:
        with torch.no_grad(), preserved_state(model) as written:
            yield
    except Exception as error:
        not_of_signal(error)
        raise UnsupportedModelError(f"{what} ({type(error).__name__}: {error}); {advice}") from error
    if (composition := state_of(model).trials.composition) is not None:
        composition.expect_writes(written)


def check_setting(model: PreTrainedModel, name: str) -> None:
    """Refuse one of `SETTINGS` that inspection shows to be impossible.

    Raises:
        UnsupportedArgumentError: It is impossible.
    """
    if why := _broken(SETTINGS[name], model):
        raise not_possible(model, name, why)


def not_possible(model: PreTrainedModel, name: str, why: str) -> UnsupportedArgumentError:
    """Return the error for one of `SETTINGS`."""
    return UnsupportedArgumentError(
        f"{name}=True is not possible for this {type(model).__name__}: {why}; use {name}=False"
    )


def check_chain_settings(model: PreTrainedModel, config: LookaheadConfig) -> None:
    """Refuse settings for trees.

    Raises:
        UnsupportedArgumentError: There is one.
    """
    for name in SETTINGS:
        if getattr(config, name):
            raise not_possible(model, name, "it keeps a running state")


def check_texts(
    model: PreTrainedModel, runner: ModelRunner | ChainRunner, prompts: Prompts, generation_config: GenerationConfig
) -> None:
    """Refuse a call with texts that the model may not decode exactly.

    Raises:
        InvalidArgumentError: A prompt is longer than the model's table of positions.
        UnsupportedArgumentError: The model does not support several rows, hidden tokens or `use_cache=False`.
    """
    name = type(model).__name__
    if isinstance(runner, ChainRunner):
        _check_states(model, prompts, generation_config)
    new_tokens = generation_config.max_length - prompts.width
    check_length(runner, name, prompts, new_tokens)
    _check_positions(runner, prompts, new_tokens, generation_config.use_cache)
    kind = equivalence(model)
    questions = ["plain_rows"] if isinstance(runner, ChainRunner) else ["plain_rows", "batches"]
    if prompts.rows > 1 and not all(map(kind.holds, questions)):
        raise _read_otherwise(name, f"input_ids has {prompts.rows} rows, which")
    if not generation_config.use_cache and not kind.holds("without_cache"):
        raise UnsupportedArgumentError(
            f"use_cache=False is not supported for {name}: without a cache it computes other logits than with the "
            "cache of lookahead decoding, for example because it skips padding tokens; leave use_cache unset"
        )
    if isinstance(runner, ModelRunner):
        _check_chunks(runner, name, prompts, generation_config.prefill_chunk_size)
        if not prompts.all_count:
            _check_hidden(runner, kind, name, prompts, new_tokens)


def _check_states(model: PreTrainedModel, prompts: Prompts, generation_config: GenerationConfig) -> None:
    """Refuse calls that chains do not support: their states belong to a whole text, and to one row."""
    name = type(model).__name__
    if not generation_config.use_cache and has_running_state(type(model), model.config):
        raise UnsupportedArgumentError(
            f"use_cache=False is not supported for {name}, which keeps a running state: plain "
            "decoding would compute it anew from the whole text at each step; pass use_cache=True"
        )
    if generation_config.prefill_chunk_size is not None and is_forgetful(model):
        raise UnsupportedArgumentError(
            f"prefill_chunk_size is not supported for {name}: its own passes over several tokens forget the state "
            "before them; leave it unset"
        )
    source_mask = prompts.source.get("attention_mask")
    if generation_config.prefill_chunk_size is not None and source_mask is not None and not source_mask.all():
        raise UnsupportedArgumentError(
            "prefill_chunk_size is not supported for an encoder whose attention_mask hides tokens: generate of "
            "transformers cuts that mask to the length of the decoder's chunks; leave it unset"
        )
    picks = INDEXED in (getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if prompts.rows > 1 and (prompts.cache is not None or (prompts.inputs and picks)):
        what = CACHE if prompts.cache is not None else "more than tokens"
        raise UnsupportedArgumentError(
            f"input_ids has {prompts.rows} rows with {what}, but {name} runs on chains of tokens with a separate state "
            "for each row; call generate once for each row"
        )
    # The model's own prefill reads images and padding, and its cache is cropped. Indexed keys lie in blocks.
    by_model = bool(prompts.inputs) and prompts.cache is None and not picks and not _has_holes(prompts.mask)
    if not prompts.all_count and not by_model:
        raise UnsupportedArgumentError(
            f"attention_mask hides tokens, and lookahead decoding does not send them; {name} runs on chains, and they "
            "may change its state; leave them out of input_ids, or use the model's own generate"
        )


def check_length(runner: Runner, name: str, prompts: Prompts, new_tokens: int) -> None:
    """Refuse a prompt longer than the table of positions, and texts that plain decoding truncates.

    Args:
        runner: Runner of the model.
        name: Class name of the model.
        prompts: Prompts of the rows.
        new_tokens: Largest number of tokens to add to each.

    Raises:
        InvalidArgumentError: There is no position for the prompt.
        UnsupportedArgumentError: Plain decoding drops the cache of texts of this length.
    """
    longest = prompts.longest
    if runner.last_length is not None and longest >= runner.last_length:
        raise InvalidArgumentError(
            f"input_ids is a prompt of {longest} tokens, but the model's context has {runner.context}; shorten it"
        )
    if runner.broken_after is not None and longest + new_tokens > runner.broken_after:
        raise UnsupportedArgumentError(
            f"input_ids and max_new_tokens may reach {longest + new_tokens} tokens: beyond {runner.broken_after} "
            f"generate of {name} drops its cache and reads only the last token; choose a smaller max_new_tokens"
        )


def _check_positions(runner: Runner, prompts: Prompts, new_tokens: int, use_cache: bool) -> None:
    """Refuse texts beyond a change of all positions for several rows, and without a cache.

    The longest row would change the positions of the others. Without a cache plain decoding recomputes earlier keys.
    """
    longest = prompts.longest + new_tokens - 1  # the last token of a text is not sent
    if runner.changes_after is None or longest <= runner.changes_after:
        return
    if prompts.rows > 1:
        raise UnsupportedArgumentError(
            f"input_ids has {prompts.rows} rows, and the longest may reach {longest} tokens: beyond "
            f"{runner.changes_after} the positions of this model depend on the longest text of a pass; call generate "
            "once for each row, or choose a smaller max_new_tokens"
        )
    if not use_cache:
        raise UnsupportedArgumentError(
            f"use_cache=False is not supported for a text that may reach {longest} tokens: beyond "
            f"{runner.changes_after} this model changes all positions, and recomputed keys would differ from cached "
            "ones; leave use_cache unset, or choose a smaller max_new_tokens"
        )


def _check_chunks(runner: ModelRunner, name: str, prompts: Prompts, size: int | None) -> None:
    """Refuse chunks of a prompt whose positions depend on the tokens of a chunk, unless these are known."""
    changes_after = runner.changes_after
    if size is None or changes_after is None or prompts.longest <= changes_after:
        return
    if not prompts.all_count or limits_of(runner.model).recompute_at is not None:
        raise UnsupportedArgumentError(
            f"prefill_chunk_size={size} is not supported for a prompt of {prompts.longest} tokens here: beyond "
            f"{changes_after} {name} changes all positions of a pass, or drops its cache, and hidden tokens belong to "
            "chunks of transformers, but are not sent; leave prefill_chunk_size unset"
        )


def _check_hidden(runner: ModelRunner, kind: Equivalence, name: str, prompts: Prompts, new_tokens: int) -> None:
    """Refuse hidden tokens if the model counts them, since only visible ones are sent."""
    has_hole = _has_holes(prompts.mask)
    what = f"attention_mask hides tokens {'between others' if has_hole else 'before the prompt'}"
    limit = runner.counts_hidden_after(between=has_hole)
    longest = prompts.mask.shape[1] + new_tokens - 1
    if limit is not None and longest > limit:
        raise UnsupportedArgumentError(
            f"{what}, and the text may reach {longest} tokens: beyond {limit} this model counts hidden tokens, which "
            "lookahead decoding does not send; use the model's own generate, or choose a smaller max_new_tokens"
        )
    if not kind.holds("padding") or (has_hole and not kind.holds("holes")):
        raise _read_otherwise(name, f"{what}, and such rows")
    if prompts.cache is not None and not kind.holds("padded_caches"):
        raise UnsupportedArgumentError(
            f"{CACHE} of a prompt with hidden tokens is not supported for {name}, because its plain decoding counts "
            "them as positions; give the whole text without a cache"
        )


def _read_otherwise(name: str, what: str) -> UnsupportedArgumentError:
    return UnsupportedArgumentError(
        f"{what} may have other logits in plain decoding of {name} than each row by itself; call generate once for "
        "each row, without hidden tokens"
    )


def _has_holes(mask: torch.Tensor) -> bool:
    """Return whether a token after a visible one is hidden."""
    return bool((mask[:, 1:] < mask[:, :-1]).any())
