"""What is asked before a model runs: of the model, of the settings, and of the texts of a call.

| question | how it is tried | what is refused |
| --- | --- | --- |
| Is it of a kind that can work? | from the outside: `ADAPTERS`, `MODELS` | the model |
| Does it decode by transformers' loop? | methods of its own: `own_decoding`; a miniature | the model |
| Does it take trees? | from the outside: `_check_inputs` | trees; chains may do |
| Does it honour masks and positions? | a text along trees, and token by token: `_try_trees` | likewise |
| Does its kind read trees as plain decoding does? | a miniature: `equivalence.QUESTIONS` | likewise |
| Does it go on from running states? | a miniature, and chains on the model itself: `_check_chains` | the model |
| Is a prompt read in parts as at once? | a text, both ways: `engine_model.check_parts` | Engines |
| Do its rows come and go? | an encoder's do not; without drafts a miniature shows it: `runs_rows` | Engines |
| Does a clone compute what it computes? | both read the same: `comparisons.computes_the_same` | the clone |
| Are passes invariant? | `SETTINGS`; all bits along a text: `comparisons.is_invariant` | `invariant=True` |
| Are weights packed? | from the outside: `SETTINGS` | `pack_weights=True` |
| Are rows that share a pass read as each alone? | three texts: `comparisons.reads_rows_alike` | packed rows, Engines |
| Do static passes compute what others do? | the same steps: `static_engine.acquire_steps` | they are not used |
| Are there positions for a text? | `limits.Limits`: `check_length` | longer prompts, and texts read wrongly |
| May rows be at different places? | `Limits`: `_check_places`; a miniature: `check_texts` | rows, `use_cache=False` |
| Do rows of plain decoding depend on each other? | a miniature: `check_texts` | rows |
| Is a text read anew as from a cache? | a miniature, padding tokens in it: `check_texts` | `use_cache=False` |
| Are hidden tokens hidden? | `Limits`, a miniature: `_check_hidden` | `attention_mask`, a cache |
| May a call run on chains? | from the outside: `_check_states` | what the state of a whole text does not have |
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
from lookahead.backends.transformers.comparisons import TEXTS, are_close, goes_on_rightly, reads_trees
from lookahead.backends.transformers.equivalence import Equivalence, equivalence
from lookahead.backends.transformers.masks import INDEXED, MaskBuilder
from lookahead.backends.transformers.model_state import forward_arguments, model_setting, once, state_of
from lookahead.backends.transformers.own_decoding import own_method
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.backends.transformers.shared_clone import FORWARD_IS_REPLACED, can_be_cloned, chain_engine
from lookahead.backends.transformers.snapshots import preserved_state
from lookahead.backends.trials import difference, tolerance
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError, warn_of_plain

Rules = tuple[tuple[Callable[[Any], object], str], ...]
"""What shows from the outside: what something is known by, and why it is refused. `{it}` and `{kind}` are filled in."""

_CPU = "cpu"
_CUDA = "cuda"

ADAPTERS: Rules = (
    (
        lambda adapter: getattr(adapter, "is_prompt_learning", False),
        "has a {kind} adapter, whose virtual tokens come by a way that token trees do not take. Use "
        "model.generate, or an adapter of the weights, such as LoRA",
    ),
    (
        lambda adapter: getattr(adapter, "alora_invocation_tokens", None),
        "has an activated LoRA adapter, which counts places in a forward pass. Use model.generate, or plain LoRA",
    ),
)
"""Adapters of PEFT."""

MODELS: Rules = (
    (
        lambda model: (
            model.device.type == "meta" and not (hasattr(model, "_hf_hook") or hasattr(model, "hf_device_map"))
        ),
        "is on the device 'meta': it has no weights, and no hooks of accelerate that would bring them. Load them first",
    ),
    (
        lambda model: model.device.type == _CPU and "flex_attention" in _attentions(model),
        "has attn_implementation='flex_attention' on a CPU, where a pass with the mask of a tree ends the process. "
        "Load it with attn_implementation='sdpa' or 'eager', or use model.generate",
    ),
)
"""Models that neither trees nor chains run on."""

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_INVARIANCE: Rules = (
    (
        lambda model: model.device.type not in (_CPU, _CUDA),
        "it is on {it.device}, and invariant passes are written for CPUs and CUDA",
    ),
    (lambda model: model.device.type == _CUDA and find_spec("triton") is None, "Triton is not installed"),
    (
        lambda model: model.dtype not in _TYPES,
        f"it is in {{it.dtype}}; invariant passes are of {', '.join(map(str, _TYPES))}",
    ),
    (lambda model: torch.is_autocast_enabled(model.device.type), "autocast chooses number types while it runs"),
    (
        lambda model: not getattr(model, "_supports_attention_backend", False),
        "its attention is not called through transformers' attention interface",
    ),
    (
        lambda model: model.config._attn_implementation not in ("sdpa", "eager"),
        "attn_implementation={it.config._attn_implementation!r} was chosen for it, neither 'sdpa' nor 'eager'",
    ),
    (lambda model: not can_be_cloned(model), FORWARD_IS_REPLACED),
)
_PACKING: Rules = (
    (lambda _: not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), "this build of torch has no oneDNN"),
    (lambda model: model.device.type != _CPU, "it is on {it.device}, and weights are packed on CPUs"),
)
SETTINGS = {"pack_weights": _PACKING, "invariant": _INVARIANCE}
"""Models of which it is known without a pass that a setting is not possible for them."""


def _broken(rules: Rules, it: Any) -> str | None:
    """Why `it` is refused by the first of the rules that applies; `None` if none does."""
    return next((why.format(it=it, kind=type(it).__name__) for applies, why in rules if applies(it)), None)


def _attentions(model: PreTrainedModel) -> set[str | None]:
    """The attention implementations of a model, and of the part of it that reads text."""
    return {config._attn_implementation for config in (model.config, model.config.get_text_config(decoder=True))}


def check_adapters(model: torch.nn.Module) -> None:
    """Refuse PEFT adapters that a tree cannot carry; `model` is the adapted model, or its wrapper.

    Raises:
        UnsupportedModelError: There is one.
    """
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if why := _broken(ADAPTERS, adapter):
            raise UnsupportedModelError(f"model={type(model).__name__} {why}")


def _check_outside(model: PreTrainedModel) -> None:
    """Refuse models that already show that neither trees nor chains work."""
    check_adapters(model)
    if why := _broken(MODELS, model):
        raise UnsupportedModelError(f"model={type(model).__name__} {why}")
    if own := own_method(model):
        raise UnsupportedModelError(
            f"model={type(model).__name__} has a {own} of its own, as adapters with virtual tokens do: it may "
            "decode otherwise than transformers' loop, which lookahead decoding takes the place of. Use model.generate"
        )


def check_model(model: PreTrainedModel) -> None:
    """Make sure that `model` can be run on token trees, and that they give what plain decoding gives.

    A few passes over single tokens once per model object, and the questions about its kind once per configuration.

    Raises:
        UnsupportedModelError: It cannot; the message says why.
    """
    _check_outside(model)
    once(model, ("trees", *model_setting(model)), lambda: _try_trees(model))
    kind = equivalence(model)
    if not kind.holds("trees"):
        found = _found(
            kind,
            "a small copy of it, run past every window and context of its configuration, differs from plain decoding",
        )
        raise UnsupportedModelError(
            f"model={type(model).__name__} with attn_implementation={model.config._attn_implementation!r} is not known "
            f"to give on token trees what it gives token by token: {found}. Use model.generate"
        )


def runs_on_chains(model: PreTrainedModel) -> bool:
    """Whether `model` is run on chains of tokens, and not on token trees.

    That is so if it keeps a running state, which cannot take back a token; and if it does not honour the masks or
    positions of trees, but goes on from its cache over several tokens as plain decoding does.

    Raises:
        UnsupportedModelError: It can be run on neither; the message says why.
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
    """How rows of `model` that come and go are run: whether on chains, and whether with drafts, without which one that
    is refused for them may do if it `falls_back`.

    Raises:
        UnsupportedModelError: They cannot; the message says why.
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
            found = _found(kind, "passes over one token of a small copy of it differ from generate")
            raise UnsupportedModelError(
                f"{refusal}. Nor can it be run without drafts (fallback='plain') here: {found}"
            ) from refusal
        warn_of_plain(refusal, stacklevel=4)
        return True, False


def _check_inputs(model: PreTrainedModel) -> None:
    """Refuse what takes no trees."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"model={name} keeps a running state (Mamba-style or linear attention), which cannot take back a token "
            "that was not accepted: it runs chains of tokens, and no token trees"
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
    """Refuse a model that takes no trees, or reads them otherwise than single tokens."""
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
            raise UnsupportedModelError(f"{name} gives logits that are not finite, in {model.dtype}; {advice}")
        if are_close([drafted], [plain], model.dtype):
            return
        found = difference([drafted], [plain])
        allowed = tolerance([plain], model.dtype)
        if not found <= allowed:
            break
    raise UnsupportedModelError(
        f"{name} does not honour explicit positions or tree masks: the logits along a token tree differ by "
        f"{found:.2g} from those token by token, which is more than rounding; {advice}"
    )


def _check_chains(model: PreTrainedModel) -> None:
    """Refuse a model that reads chains otherwise than single tokens."""
    kind = equivalence(model)
    name = f"model={type(model).__name__}"
    state = "keeps a running state (Mamba-style or linear attention)"
    what = f"{name} {'is an encoder-decoder' if is_encoder_decoder(model) else state}"
    if not kind.holds("chains"):
        found = _found(
            kind, "a small copy of it that goes on from its state over several tokens differs from plain decoding"
        )
        raise UnsupportedModelError(f"{what}, and {found}. Use model.generate")
    once(model, ("chains", *model_setting(model)), lambda: _try_chains(model, what))


def _found(kind: Equivalence, differs: str) -> str:
    """Why the answer to a question about a kind is no."""
    return differs if kind.has_miniature else f"no small copy of it could be tried ({kind.obstacle})"


def _try_chains(model: PreTrainedModel, what: str) -> None:
    """Refuse the model itself, whose device may have kernels of its own; `what` says of which kind it is."""
    with _failure_refused(model, f"model={type(model).__name__} failed on a chain of tokens", "use model.generate"):
        # A clone that runs chains has been compared.
        same = chain_engine(model) is not model or goes_on_rightly(model, model)
    if not same:
        raise UnsupportedModelError(
            f"{what}, and goes on over several tokens otherwise than one token at a time; call model.eval() if it "
            "is in training mode, and if it still does, use model.generate"
        )


@contextmanager
def _failure_refused(model: PreTrainedModel, what: str, advice: str) -> Iterator[None]:
    """Passes that leave no trace in `model`; where one fails, the model is refused."""
    try:
        with torch.no_grad(), preserved_state(model) as written:
            yield
    except Exception as error:
        raise UnsupportedModelError(f"{what} ({type(error).__name__}: {error}); {advice}") from error
    if (composition := state_of(model).trials.composition) is not None:
        composition.expect_writes(written)


def check_setting(model: PreTrainedModel, name: str) -> None:
    """Refuse one of `SETTINGS` where it is known without a pass that it is not possible.

    Raises:
        UnsupportedArgumentError: It is not.
    """
    if why := _broken(SETTINGS[name], model):
        raise not_possible(model, name, why)


def not_possible(model: PreTrainedModel, name: str, why: str) -> UnsupportedArgumentError:
    """The error of one of `SETTINGS` that `model` cannot be run with."""
    return UnsupportedArgumentError(
        f"{name}=True is not possible for this {type(model).__name__}: {why}; use {name}=False"
    )


def check_chain_settings(model: PreTrainedModel, config: LookaheadConfig) -> None:
    """Refuse settings that are about trees.

    Raises:
        UnsupportedArgumentError: There is one.
    """
    for name in SETTINGS:
        if getattr(config, name):
            raise not_possible(model, name, "it keeps a running state")


def check_texts(
    model: PreTrainedModel, runner: ModelRunner | ChainRunner, prompts: Prompts, generation_config: GenerationConfig
) -> None:
    """Refuse a call whose texts may come to where the model cannot be exact.

    Raises:
        InvalidArgumentError: A prompt is longer than the model's table of positions.
        UnsupportedArgumentError: Rows, hidden tokens or `use_cache=False` do not go with the model.
    """
    name = type(model).__name__
    if isinstance(runner, ChainRunner):
        _check_states(model, prompts, generation_config)
    new_tokens = generation_config.max_length - prompts.width
    check_length(runner, name, prompts, new_tokens)
    _check_places(runner, prompts, new_tokens, generation_config.use_cache)
    kind = equivalence(model)
    questions = ["plain_rows"] if isinstance(runner, ChainRunner) else ["plain_rows", "batches"]
    if prompts.rows > 1 and not all(map(kind.holds, questions)):
        raise _read_otherwise(name, f"input_ids has {prompts.rows} rows, which")
    if not generation_config.use_cache and not kind.holds("anew"):
        raise UnsupportedArgumentError(
            f"use_cache=False is not supported for {name}, which reads a whole text otherwise than from a cache, which "
            "lookahead decoding keeps: it may count positions without padding tokens; leave use_cache unset"
        )
    if isinstance(runner, ModelRunner) and not prompts.all_count:
        _check_hidden(runner, kind, name, prompts, new_tokens)


def _check_states(model: PreTrainedModel, prompts: Prompts, generation_config: GenerationConfig) -> None:
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
    seen = prompts.source.get("attention_mask")
    if generation_config.prefill_chunk_size is not None and seen is not None and not seen.all():
        raise UnsupportedArgumentError(
            "prefill_chunk_size is not supported for an encoder whose attention_mask hides tokens: generate of "
            "transformers cuts that mask to the length of the decoder's chunks; leave it unset"
        )
    picks = INDEXED in (getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if prompts.rows > 1 and (prompts.cache is not None or (prompts.inputs and picks)):
        what = CACHE if prompts.cache is not None else "more than tokens"
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
        runner, name: What runs the model, and the name of its class.
        prompts, new_tokens: What the rows begin with, and how many tokens are added to each at most.

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


def _check_places(runner: Runner, prompts: Prompts, new_tokens: int, use_cache: bool) -> None:
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


def _check_hidden(runner: ModelRunner, kind: Equivalence, name: str, prompts: Prompts, new_tokens: int) -> None:
    """Refuse hidden tokens where the model counts them: only those that count are sent."""
    has_hole = _has_holes(prompts.mask)
    what = f"attention_mask hides tokens {'between others' if has_hole else 'before the prompt'}"
    limit = runner.counts_hidden_after(between=has_hole)
    longest = prompts.mask.shape[1] + new_tokens - 1
    if limit is not None and longest > limit:
        raise UnsupportedArgumentError(
            f"{what}, and the text may come to {longest} tokens: beyond {limit} this model counts hidden tokens as "
            "well, which lookahead decoding does not send; use the model's own generate, or choose a smaller "
            "max_new_tokens"
        )
    if not kind.holds("padding") or (has_hole and not kind.holds("holes")):
        raise _read_otherwise(name, f"{what}, and such rows")
    if prompts.cache is not None and not kind.holds("padded_caches"):
        raise UnsupportedArgumentError(
            f"{CACHE} of a prompt with hidden tokens is not supported for {name}, whose plain decoding counts "
            "them as positions; give the whole text without a cache"
        )


def _read_otherwise(name: str, what: str) -> UnsupportedArgumentError:
    return UnsupportedArgumentError(
        f"{what} are read otherwise by plain decoding of {name} than each row by itself; call generate once for each "
        "row, without hidden tokens"
    )


def _has_holes(mask: torch.Tensor) -> bool:
    """Whether a token is hidden behind one that is not."""
    return bool((mask[:, 1:] < mask[:, :-1]).any())
