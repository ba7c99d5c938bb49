"""Checks that a model honours tree masks and explicit positions before it is used."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.equivalence import equivalence
from lookahead.backends.transformers.forward_arguments import forward_arguments
from lookahead.backends.transformers.masks import MaskBuilder
from lookahead.backends.transformers.model_runner import ModelRunner
from lookahead.backends.transformers.model_state import Setting, state_of
from lookahead.backends.transformers.preserved_state import preserved_state
from lookahead.core.token_tree import TokenTree
from lookahead.errors import UnsupportedModelError

_ADVICE = (
    "call model.eval() if it is in training mode, load it with attn_implementation='sdpa' or 'eager' if it has "
    "them, and if it still fails, use model.generate: lookahead decoding cannot run it"
)


def check_model(model: PreTrainedModel) -> None:
    """Make sure that `model` can be run on token trees, and that they give what plain decoding gives.

    Two tiny forward passes once per model object, and the equivalence check once per configuration.

    Raises:
        UnsupportedModelError: It cannot; the message says why.
    """
    check_trees(model)
    check_equivalence(model)


def check_equivalence(model: PreTrainedModel) -> None:
    """The part of `check_model` that goes by the kind of the model.

    Raises:
        UnsupportedModelError: Trees of that kind do not give what plain decoding gives.
    """
    if not equivalence(model).trees:
        raise UnsupportedModelError(
            f"model={type(model).__name__} with attn_implementation={model.config._attn_implementation!r} does not "
            "give on token trees what it gives token by token: a small copy of it, run past every window and context "
            "of its configuration, differs from plain decoding. Use model.generate"
        )


def check_trees(model: PreTrainedModel) -> None:
    """Make sure that `model` honours tree masks and positions; two tiny forward passes, once per model object.

    Raises:
        UnsupportedModelError: It does not; the message says why.
    """
    check_kind(model)
    state = state_of(model)
    setting = checked_setting(model)
    with state.lock:
        if setting not in state.checked:
            _check_inputs(model)
            _try_trees(model)
            state.checked.add(setting)


def checked_setting(model: PreTrainedModel) -> Setting:
    """How the model is set when a check passes. Another attention implementation is another way to read a mask."""
    return (model.config._attn_implementation, model.dtype, model.device)


def check_adapters(model: torch.nn.Module) -> None:
    """Refuse PEFT adapters that a tree cannot carry; `model` is the adapted model, or its wrapper.

    Raises:
        UnsupportedModelError: There is one.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"model={type(model).__name__} has a {type(config).__name__} adapter, whose virtual tokens come by a "
                "way that token trees do not take. Use model.generate, or an adapter of the weights, such as LoRA"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"model={type(model).__name__} has an activated LoRA adapter, which counts places in a forward pass. "
                "Use model.generate, or plain LoRA"
            )


def check_kind(model: PreTrainedModel) -> None:
    """Refuse what is known from the outside not to work, neither on trees nor on chains.

    Raises:
        UnsupportedModelError: It is of such a kind.
    """
    name = type(model).__name__
    check_adapters(model)
    if "prepare_inputs_for_generation" in vars(model):
        raise UnsupportedModelError(
            f"model={name} has been given another way to prepare its inputs, as adapters with virtual tokens do, which "
            "token trees do not take. Use model.generate"
        )
    if model.device.type == "meta" and not (hasattr(model, "_hf_hook") or hasattr(model, "hf_device_map")):
        raise UnsupportedModelError(
            f"model={name} is on the device 'meta': it has no weights, and no hooks of accelerate that would bring "
            "them. Load them first"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"model={name} is an encoder-decoder; lookahead decoding runs decoder-only models")


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
    """Run two trees whose outcome is known in advance.

    Both hang the branch a-b from the end of a short text, next to a branch that must not be seen. In the first
    the other branch is a-b as well: if positions and masks count, the two are the same. In the second
    it begins with other tokens: a-b must give the same logits as before, and the other branch must not.
    """
    name = f"model={type(model).__name__} with attn_implementation={model.config._attn_implementation!r}"
    with torch.no_grad(), preserved_state(model):
        try:
            before, repeated = _branches(model, same=True)
            after, other = _branches(model, same=False)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{name} failed on a token tree ({type(error).__name__}: {error}); {_ADVICE}"
            ) from error
    # Rounding differs between places in a batch; a broken mask or position changes the outcome by about as much
    # as other tokens do, far more than this.
    tolerance = 0.1 * _distance(after, other) + 8 * torch.finfo(model.dtype).eps * float(before.abs().max())
    alone = model.get_input_embeddings().num_embeddings == 1  # there are no other tokens
    if not bool(torch.isfinite(before).all()):
        problem = f"gives logits that are not finite, in {model.dtype}"
    elif _distance(before, repeated) > tolerance:
        problem = "does not honour explicit positions or tree masks: the same branch twice reads differently"
    elif _distance(before, after) > tolerance:
        problem = "does not honour tree masks: a branch changed when tokens changed that it must not see"
    elif _distance(after, other) == 0 and not alone:
        problem = "does not read the ancestors of a node: other tokens before it changed nothing"
    else:
        return
    raise UnsupportedModelError(f"{name} {problem}; {_ADVICE}")


def _branches(model: PreTrainedModel, same: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[vocabulary]` after the branch a-b, and after the other one, both read from a cached text."""
    vocabulary = model.get_input_embeddings().num_embeddings
    text = [token % vocabulary for token in (5, 11, 7, 3, 13, 2, 17)]
    a, b = 19 % vocabulary, 23 % vocabulary
    others = [_another(token % vocabulary, a, vocabulary) for token in (29, 31, 37, 41)]
    runner = ModelRunner(model, batch_size=1)
    prefill = TokenTree(text[:-1])
    runner.forward([prefill])
    runner.commit([range(len(prefill))])
    tree = TokenTree(text[-1:])
    first = tree.add_window_node(a, tree.root, needs_logits=False)
    last = tree.add_window_node(b, first, needs_logits=True)
    # Several tokens between, so that seeing them, or counting them as positions, would leave its mark.
    for token in others:
        tree.add_window_node(a if same else token, tree.root, needs_logits=False)
    parent = tree.add_window_node(a if same else others[0], tree.root, needs_logits=False)
    other = tree.add_window_node(b, parent, needs_logits=True)
    result = runner.forward([tree])[0]
    return result.logits_after(last)[0], result.logits_after(other)[0]


def _another(token: int, than: int, vocabulary: int) -> int:
    """`token`, or its neighbour if it is `than`: in a small vocabulary different numbers may be the same token."""
    return token if token != than else (token + 1) % vocabulary


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max())
