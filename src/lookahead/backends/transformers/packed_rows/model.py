"""What runs the rows of many requests on a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.check_pass import agree
from lookahead.backends.transformers.engine_model import clone_for, engine_model
from lookahead.backends.transformers.equivalence import equivalence
from lookahead.backends.transformers.invariant.attention import PACKED_ROWS as INVARIANT
from lookahead.backends.transformers.model_check import check_model, checked_setting
from lookahead.backends.transformers.model_runner import ModelRunner
from lookahead.backends.transformers.model_state import state_of
from lookahead.backends.transformers.packed_rows import attention
from lookahead.backends.transformers.packed_rows.cache import Row
from lookahead.backends.transformers.packed_rows.padded_runner import PaddedRowsRunner
from lookahead.backends.transformers.packed_rows.rows_runner import RowsRunner
from lookahead.backends.transformers.packed_rows.runner import PackedRowsRunner
from lookahead.backends.transformers.preserved_state import preserved_state
from lookahead.backends.transformers.shared_clone import SharedClone, can_be_cloned
from lookahead.core.token_tree import TokenTree
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

_TEXTS = ((5, 11, 7, 3, 13, 2), (17, 19, 23), (29, 5, 31, 37))
"""Short texts that share a pass in the equivalence check."""


def rows_runner(model: PreTrainedModel, pack_weights: bool = False, invariant: bool = False) -> RowsRunner:
    """What runs rows of `model` that come and go: packed into one row of tokens, or padded where that cannot be.

    Args:
        model: A causal language model of transformers.
        pack_weights: See `LookaheadConfig.pack_weights`.
        invariant: See `LookaheadConfig.invariant`.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model cannot be run on token trees, or its rows give other logits together.
    """
    clone = packed_clone(model, pack_weights, invariant)
    ends = equivalence(model).positions_end
    if not isinstance(clone, str):
        return PackedRowsRunner(clone, ends)
    if invariant:
        raise _unsupported(model, clone)
    engine = engine_model(model, pack_weights)
    runner = PaddedRowsRunner(engine, ends, equivalence(model).batches)
    state, setting = state_of(model), ("padded rows", *checked_setting(model))
    with state.lock:
        if setting not in state.checked:
            runner.rows = [Row() for _ in _TEXTS]
            with preserved_state(model):
                same = _same(runner, engine, exactly=False)
            if not same:
                raise _unsupported(model, f"{clone}, and padded ones gave other logits together than each alone")
            state.checked.add(setting)
    runner.rows = []
    return runner


def packed_rows_model(model: PreTrainedModel, pack_weights: bool = False, invariant: bool = False) -> PreTrainedModel:
    """A clone of `model` for `PackedRowsRunner`, with the model's own weights. Made and tried once per model object.

    Arguments as for `rows_runner`.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model cannot be run on token trees, or not with packed rows.
    """
    clone = packed_clone(model, pack_weights, invariant)
    if isinstance(clone, str):
        raise _unsupported(model, clone)
    return clone


def packed_clone(model: PreTrainedModel, pack_weights: bool, invariant: bool) -> PreTrainedModel | str:
    """What `packed_rows_model` gives, or why there is none.

    Raises:
        UnsupportedArgumentError: Passes of the model cannot be invariant.
        UnsupportedModelError: The model cannot be run on token trees.
    """
    check_model(model)
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return (
            f"its attention, {implementation!r}, is not called through transformers' AttentionInterface as 'sdpa'; "
            "load it with attn_implementation='sdpa' if it has that"
        )
    if not can_be_cloned(model):
        return "it was compiled, or a hook stands in for the forward pass of one of its modules"
    if not equivalence(model).packed_rows:
        return "a small copy of it gave other logits for rows that share a pass than for each alone"
    if invariant and model.device.type != "cpu":
        raise UnsupportedArgumentError(
            f"invariant=True is not possible for rows that share a pass on {model.device}, but on CPUs only; use "
            "lookahead.generate, or invariant=False"
        )
    if invariant:  # refused where passes of one text cannot be
        engine_model(model, pack_weights, invariant=True)
    clone = clone_for(model, INVARIANT if invariant else attention.NAME, pack_weights, _tried_clone)
    return clone.module if isinstance(clone, SharedClone) else str(clone)


def _tried_clone(model: PreTrainedModel, name: str | None, pack_weights: bool | str) -> SharedClone | str:
    attention.register()
    clone = SharedClone(model, name, pack_weights)
    packed = PackedRowsRunner(clone.module)
    packed.rows = [Row() for _ in _TEXTS]
    invariant = name == INVARIANT
    with preserved_state(model):
        try:
            alone = engine_model(model, bool(pack_weights), invariant=True) if invariant else model
            same = _same(packed, alone, exactly=invariant)
        except UnsupportedModelError as error:
            return str(error)
    if not same or clone.keeps_state(model):
        return "its rows gave other logits together than each alone"
    return clone


@torch.no_grad()
def _same(runner: RowsRunner, alone: PreTrainedModel, exactly: bool) -> bool:
    """Whether the logits of texts together are those of each alone; all their bits, or but for rounding."""
    vocabulary = alone.get_input_embeddings().num_embeddings
    texts = [[token % vocabulary for token in text] for text in _TEXTS]
    found = _logits(runner, texts)
    expected = [_logits(ModelRunner(alone, 1), [text])[0] for text in texts]
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(*pair) if exactly else agree(*pair, alone.dtype) for pair in pairs)


def _logits(runner: RowsRunner | ModelRunner, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits `[reads, vocabulary]` for each text: of two steps with a tree for each, the second behind the first."""
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for pending in (texts, [text[:1] for text in texts]):
        trees = [TokenTree(tokens) for tokens in pending]
        kept = []
        for tree, text in zip(trees, texts, strict=True):
            tree.add_candidates(text[:2])
            kept.append([*range(tree.root + 1), *tree.add_candidates(text[1:3])])
        for tree, result, logits in zip(trees, runner.forward(trees), found, strict=True):
            logits += [result.logits_after(node) for node in range(tree.root, len(tree))]
        runner.commit(kept)
    return [torch.cat(logits) for logits in found]


def _unsupported(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model={type(model).__name__} cannot be run with the rows of many requests in one: {why}. Use "
        "lookahead.generate"
    )
