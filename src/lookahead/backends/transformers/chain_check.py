"""Which models are run on chains, and whether these give what plain decoding gives."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.chain_cache import has_running_state
from lookahead.backends.transformers.chain_engine import chain_engine
from lookahead.backends.transformers.chain_logits import goes_on_rightly
from lookahead.backends.transformers.equivalence import equivalence
from lookahead.backends.transformers.model_check import check_equivalence, check_kind, check_model, checked_setting
from lookahead.backends.transformers.model_state import Setting, state_of
from lookahead.backends.transformers.preserved_state import preserved_state
from lookahead.errors import UnsupportedModelError


def runs_on_chains(model: PreTrainedModel) -> bool:
    """Whether `model` is run on chains of tokens, and not on token trees.

    That is so if it keeps a running state, which cannot take back a token; and if it does not honour the masks or
    positions of trees, but goes on from its cache over several tokens as plain decoding does.

    Raises:
        UnsupportedModelError: It can be run on neither; the message says why.
    """
    checked = state_of(model).checked
    setting = checked_setting(model)
    if _on_chains(setting) in checked:
        check_kind(model)
        return True
    on_trees = setting in checked
    if not on_trees and has_running_state(type(model), model.config):
        check_kind(model)
        _check_chains(model)
        return True
    try:
        if on_trees:  # this every call asks
            check_kind(model)
            check_equivalence(model)
        else:
            check_model(model)
    except UnsupportedModelError as refusal:
        check_kind(model)
        try:
            _check_chains(model)
        except UnsupportedModelError:
            raise refusal from None
        return True
    return False


def _on_chains(setting: Setting) -> Setting:
    """A setting, with a mark before what `check_trees` notes."""
    return ("chains", *setting)


def _check_chains(model: PreTrainedModel) -> None:
    kind = equivalence(model)
    if not kind.chains:
        found = (
            "a small copy of it that goes on from its state over several tokens differs from plain decoding"
            if kind.has_miniature
            else "no small copy of it can be run to see whether it goes on from its state as plain decoding does"
        )
        raise UnsupportedModelError(
            f"model={type(model).__name__} keeps a running state (Mamba-style or linear attention), and {found}. Use "
            "model.generate"
        )
    state = state_of(model)
    with state.lock:
        _try_chains(model)
        state.checked.add(_on_chains(checked_setting(model)))


def _try_chains(model: PreTrainedModel) -> None:
    """Compare chains with single tokens on the model itself, whose device may have kernels of its own."""
    try:
        if chain_engine(model) is not model:  # which runs the chains, and has been compared
            return
        with torch.no_grad(), preserved_state(model):
            same = goes_on_rightly(model, model)
    except Exception as error:
        raise UnsupportedModelError(
            f"model={type(model).__name__} failed on a chain of tokens ({type(error).__name__}: {error}). "
            "Use model.generate"
        ) from error
    if not same:
        raise UnsupportedModelError(
            f"model={type(model).__name__} keeps a running state, and goes on from it over several tokens otherwise "
            "than one token at a time; call model.eval() if it is in training mode, and if it still does, use "
            "model.generate"
        )
