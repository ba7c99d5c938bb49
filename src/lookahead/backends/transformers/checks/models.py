"""What is asked of a model before it is used, and of the clones that stand for it.

| question | how it is tried | what is refused |
| --- | --- | --- |
| Is it of a kind that can work? | from the outside: `REFUSED` | the model |
| Does it take trees? | from the outside: `_check_inputs` | trees; chains may do |
| Does it honour masks and positions? | a text along trees, and token by token: `clones.reads_trees` | likewise |
| Does its kind read trees as plain decoding does? | a miniature: `kinds.QUESTIONS` | likewise |
| Does it go on from running states? | a miniature, and chains on the model itself: `_check_chains` | the model |
| Do its rows come and go? | an encoder's do not; without drafts a miniature shows it: `runs_rows` | Engines |
| Does a clone compute what it computes? | both read the same: `clones.computes_the_same` | the clone |
| Are passes invariant? | `IN_THE_WAY`; all bits along a text: `clones.is_invariant` | `invariant=True` |
| Are rows that share a pass read as each alone? | three texts: `clones.reads_rows_alike` | packed rows, or Engines |
| Do static passes compute what others do? | the same steps: `static_engine.acquire_steps` | they are not used |
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.chain_cache import has_running_state, is_encoder_decoder
from lookahead.backends.transformers.checks.clones import goes_on_rightly, reads_trees
from lookahead.backends.transformers.checks.kinds import equivalence
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_state import Setting, forward_arguments, state_of
from lookahead.backends.transformers.shared_clone import FORWARD_IS_REPLACED, can_be_cloned, chain_engine
from lookahead.backends.transformers.snapshots import preserved_state
from lookahead.backends.trials import difference, tolerance
from lookahead.core.compiled import IS_COMPILED
from lookahead.errors import UnsupportedModelError, warn_of_plain

ADAPTERS: tuple[tuple[Callable[[Any], object], str], ...] = (
    (
        lambda adapter: getattr(adapter, "is_prompt_learning", False),
        "has a {adapter} adapter, whose virtual tokens come by a way that token trees do not take. Use "
        "model.generate, or an adapter of the weights, such as LoRA",
    ),
    (
        lambda adapter: getattr(adapter, "alora_invocation_tokens", None),
        "has an activated LoRA adapter, which counts places in a forward pass. Use model.generate, or plain LoRA",
    ),
)
"""Adapters of PEFT that are refused: what they are known by, and why."""

REFUSED: tuple[tuple[Callable[[PreTrainedModel], object], str], ...] = (
    (
        lambda model: "prepare_inputs_for_generation" in vars(model),
        "has been given another way to prepare its inputs, as adapters with virtual tokens do, which token trees do "
        "not take. Use model.generate",
    ),
    (
        lambda model: (
            model.device.type == "meta" and not (hasattr(model, "_hf_hook") or hasattr(model, "hf_device_map"))
        ),
        "is on the device 'meta': it has no weights, and no hooks of accelerate that would bring them. Load them first",
    ),
)
"""Models that neither trees nor chains run on: what they are known by, and why."""

_CPU, _CUDA = "cpu", "cuda"
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
IN_THE_WAY: tuple[tuple[Callable[[PreTrainedModel], object], str], ...] = (
    (
        lambda model: model.device.type not in (_CPU, _CUDA),
        "it is on {model.device}, and invariant passes are written for CPUs and CUDA",
    ),
    (lambda model: model.device.type == _CUDA and find_spec("triton") is None, "Triton is not installed"),
    (
        lambda model: model.dtype not in _TYPES,
        f"it is in {{model.dtype}}; invariant passes are of {', '.join(map(str, _TYPES))}",
    ),
    (
        lambda model: torch.is_autocast_enabled(model.device.type),
        "autocast chooses number types while it runs",
    ),
    (lambda model: model.device.type == _CPU and not IS_COMPILED, "numba is not installed"),
    (
        lambda model: not getattr(model, "_supports_attention_backend", False),
        "its attention is not called through transformers' attention interface",
    ),
    (
        lambda model: model.config._attn_implementation not in ("sdpa", "eager"),
        "attn_implementation={model.config._attn_implementation!r} was chosen for it, neither 'sdpa' nor 'eager'",
    ),
    (lambda model: not can_be_cloned(model), FORWARD_IS_REPLACED),
)
"""What is known without a pass to keep passes from being invariant, and how to say it."""


def check_adapters(model: torch.nn.Module) -> None:
    """Refuse PEFT adapters that a tree cannot carry; `model` is the adapted model, or its wrapper.

    Raises:
        UnsupportedModelError: There is one.
    """
    adapters = getattr(model, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        for applies, why in ADAPTERS:
            if applies(adapter):
                why = why.format(adapter=type(adapter).__name__)
                raise UnsupportedModelError(f"model={type(model).__name__} {why}")


def check_kind(model: PreTrainedModel) -> None:
    """Refuse models whose configuration already shows that neither trees nor chains work.

    Raises:
        UnsupportedModelError: It is of such a kind.
    """
    check_adapters(model)
    for applies, why in REFUSED:
        if applies(model):
            raise UnsupportedModelError(f"model={type(model).__name__} {why}")


def check_model(model: PreTrainedModel) -> None:
    """Make sure that `model` can be run on token trees, and that they give what plain decoding gives.

    A few passes over single tokens once per model object, and the questions about its kind once per configuration.

    Raises:
        UnsupportedModelError: It cannot; the message says why.
    """
    check_kind(model)
    state = state_of(model)
    setting = checked_setting(model)
    with state.lock:
        if setting not in state.checked:
            _check_inputs(model)
            _try_trees(model)
            state.checked.add(setting)
    if not equivalence(model).holds("trees"):
        raise UnsupportedModelError(
            f"model={type(model).__name__} with attn_implementation={model.config._attn_implementation!r} does not "
            "give on token trees what it gives token by token: a small copy of it, run past every window and context "
            "of its configuration, differs from plain decoding. Use model.generate"
        )


def runs_on_chains(model: PreTrainedModel) -> bool:
    """Whether `model` is run on chains of tokens, and not on token trees.

    That is so if it keeps a running state, which cannot take back a token; and if it does not honour the masks or
    positions of trees, but goes on from its cache over several tokens as plain decoding does.

    Raises:
        UnsupportedModelError: It can be run on neither; the message says why.
    """
    checked, setting = state_of(model).checked, checked_setting(model)
    if _on_chains(setting) in checked:
        check_kind(model)
        return True
    if setting not in checked and (is_encoder_decoder(model) or has_running_state(type(model), model.config)):
        check_kind(model)
        _check_chains(model)
        return True
    try:
        check_model(model)
    except UnsupportedModelError as refusal:
        check_kind(model)
        try:
            _check_chains(model)
        except UnsupportedModelError:
            raise refusal from None
        return True
    return False


def runs_rows(model: PreTrainedModel, falls_back: bool) -> tuple[bool, bool]:
    """How rows of `model` that come and go are run: whether on chains, and whether with drafts.

    Args:
        model: The model.
        falls_back: Whether one that is refused for drafts may do without.

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
        _check_plain(model, refusal)
        return True, False


def _check_plain(model: PreTrainedModel, refusal: UnsupportedModelError) -> None:
    check_kind(model)
    if not equivalence(model).holds("plain"):
        raise UnsupportedModelError(
            f"{refusal}. Nor can it be run without drafts (fallback='plain') here: passes over one token of a small "
            "copy of it differ from generate"
        ) from refusal
    warn_of_plain(refusal, stacklevel=5)


def checked_setting(model: PreTrainedModel) -> Setting:
    """How the model is set when a check passes. Another attention implementation is another way to read a mask."""
    return (model.config._attn_implementation, model.dtype, model.device)


def _on_chains(setting: Setting) -> Setting:
    """A setting, with a mark before what `check_model` notes."""
    return ("chains", *setting)


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
    for needed in ("past_key_values", "position_ids", "attention_mask"):
        if needed not in arguments and not takes_all:
            raise UnsupportedModelError(
                f"model={name} takes no {needed!r} in its forward pass, which token trees need. Use model.generate"
            )


def _try_trees(model: PreTrainedModel) -> None:
    """Refuse a model that reads trees otherwise than single tokens."""
    name = f"model={type(model).__name__} with attn_implementation={model.config._attn_implementation!r}"
    advice = (
        "call model.eval() if it is in training mode, load it with attn_implementation='sdpa' or 'eager' if it has "
        "them, and if it still fails, use model.generate: lookahead decoding cannot run it"
    )
    try:
        with torch.no_grad(), preserved_state(model):
            drafted, plain = reads_trees(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} failed on a token tree ({type(error).__name__}: {error}); {advice}"
        ) from error
    if not bool(torch.isfinite(plain).all()):
        raise UnsupportedModelError(f"{name} gives logits that are not finite, in {model.dtype}; {advice}")
    found, allowed = difference([drafted], [plain]), tolerance([plain], model.dtype)
    if not found <= allowed:
        raise UnsupportedModelError(
            f"{name} does not honour explicit positions or tree masks: the logits along a token tree differ by "
            f"{found:.2g} from those token by token, where rounding may make {allowed:.2g}; {advice}"
        )


def _check_chains(model: PreTrainedModel) -> None:
    kind, name = equivalence(model), type(model).__name__
    what = (
        "is an encoder-decoder"
        if is_encoder_decoder(model)
        else "keeps a running state (Mamba-style or linear attention)"
    )
    if not kind.holds("chains"):
        found = (
            "a small copy of it that goes on from its state over several tokens differs from plain decoding"
            if kind.has_miniature
            else "no small copy of it can be run to see whether it goes on from its state as plain decoding does"
        )
        raise UnsupportedModelError(f"model={name} {what}, and {found}. Use model.generate")
    state = state_of(model)
    with state.lock:
        try:
            # The model itself, whose device may have kernels of its own; a clone that runs chains has been compared.
            with torch.no_grad(), preserved_state(model):
                same = chain_engine(model) is not model or goes_on_rightly(model, model)
        except Exception as error:
            raise UnsupportedModelError(
                f"model={name} failed on a chain of tokens ({type(error).__name__}: {error}). Use model.generate"
            ) from error
        if not same:
            raise UnsupportedModelError(
                f"model={name} {what}, and goes on over several tokens otherwise than one token at a time; call "
                "model.eval() if it is in training mode, and if it still does, use model.generate"
            )
        state.checked.add(_on_chains(checked_setting(model)))


def what_is_in_the_way(model: PreTrainedModel) -> str | None:
    """Why passes of `model` cannot be made invariant, as far as that is known without a pass; `None` for nothing."""
    return next((why.format(model=model) for applies, why in IN_THE_WAY if applies(model)), None)
