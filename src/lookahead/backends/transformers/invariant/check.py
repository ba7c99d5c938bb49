"""Whether the passes of a model are invariant: known from the outside, and tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.findings import architecture, recall, remember
from lookahead.backends.transformers.invariant.modules import foreign_product
from lookahead.backends.transformers.model_runner import ModelRunner
from lookahead.backends.transformers.shared_clone import can_be_cloned
from lookahead.core.compiled import IS_COMPILED
from lookahead.core.token_tree import TokenTree
from lookahead.errors import UnsupportedModelError

_TEXT, _PROMPT = 7, 3
"""Tokens of the text that passes are compared along, and of its prompt."""

MakeRunner = Callable[[int], ModelRunner]
"""Makes an empty runner for so many rows."""

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def what_is_in_the_way(model: PreTrainedModel) -> str | None:
    """Why passes of `model` cannot be made invariant, as far as that is known without a pass; `None` for nothing."""
    device = model.device.type
    if device not in ("cpu", "cuda"):
        return f"it is on {model.device}, and invariant passes are written for CPUs and CUDA"
    if device == "cuda" and find_spec("triton") is None:
        return "Triton is not installed"
    if model.dtype not in _TYPES:
        return f"it is in {model.dtype}; invariant passes are of {', '.join(map(str, _TYPES))}"
    if torch.is_autocast_enabled(device):
        return "autocast chooses number types while it runs"
    if device == "cpu" and not IS_COMPILED:
        return "numba is not installed"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention is not called through transformers' attention interface"
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"attn_implementation={attention!r} was chosen for it, neither 'sdpa' nor 'eager'"
    if not can_be_cloned(model):
        return "it was compiled, or a hook stands in for the forward pass of one of its modules"
    return None


def is_invariant(model: PreTrainedModel, fixed: MakeRunner | None = None) -> bool:
    """Whether passes of `model` are: as an earlier process found for this architecture on this machine, else tried.

    Weights are no part of it: which order a sum is made in does not depend on the numbers. Whether it shows does, so
    that a model with parts of which nothing is known is refused.

    Args:
        model: The clone that is to be invariant.
        fixed: Makes runners with static passes of one size, if it is run so. These are tried by each process.

    Raises:
        UnsupportedModelError: It has products whose order is not in our hands.
    """
    if fixed is not None:
        return check_invariance(model, fixed)
    foreign = foreign_product(model)
    if foreign is not None:
        raise UnsupportedModelError(
            f"{foreign} multiplies in a way of its own, so that the order of its sums is not known"
        )
    about = architecture(model)
    if about is not None and recall(about) is True:
        return True
    proved = check_invariance(model)
    if proved and about is not None:
        remember(about, True)
    return proved


@torch.no_grad()
def check_invariance(model: PreTrainedModel, fixed: MakeRunner | None = None) -> bool:
    """Whether trees, chains, batches and single tokens along a text give the same bits after each of its tokens.

    Args:
        model: The clone that is to be invariant.
        fixed: As for `is_invariant`.
    """
    runner = partial(ModelRunner, model) if fixed is None else fixed
    draws = torch.Generator().manual_seed(1)
    vocabulary = model.get_input_embeddings().num_embeddings
    text, other = torch.randint(vocabulary, (2, _TEXT), generator=draws).tolist()
    single = _along([text], runner, 1, 0)
    prompted = _along([text], runner, 2, 1, _PROMPT)
    several = [
        _along([text], runner, _TEXT, 0),
        _along([text], runner, 5, 3),
        _along([other, text], runner, 3, 1),
        _along([other[:5], text, other], runner, 3, 0),
    ]
    if fixed is not None:
        several.append(_along([text], runner, _TEXT, 6))  # more nodes than a pass has, and right ones all over it
    return torch.equal(prompted, single[_PROMPT - 1 :]) and all(torch.equal(logits, single) for logits in several)


def _along(texts: Sequence[list[int]], make_runner: MakeRunner, size: int, wrong: int, prompt: int = 1) -> torch.Tensor:
    """Logits after each token of one of the texts, the second if there are several, read `size` tokens at a time.

    Args:
        texts: The rows; one that is shorter goes on with an idle tree.
        make_runner: Makes what runs the model.
        size: Tokens of the text in a pass, if it is not the first.
        wrong: Branches of wrong tokens beside each right one, which the right ones are sent behind.
        prompt: Tokens that the first pass sends as decided; nothing is asked about those before the last of them.
    """
    runner = make_runner(len(texts))
    vocabulary = runner.model.get_input_embeddings().num_embeddings
    which = min(1, len(texts) - 1)
    logits = []
    place = 0
    while place < _TEXT:
        decided = 1 if place else prompt
        count = max(size, decided)
        trees, paths = [], []
        for text in texts:
            tree = TokenTree(text[place : place + decided]) if place < len(text) else runner.idle_tree()
            path = list(range(tree.root + 1))
            for token in text[place + decided : place + count]:
                for step in range(wrong):
                    tree.add_candidates([(token + step + 1) % vocabulary, token], parent=path[-1])
                path += tree.add_candidates([token], parent=path[-1])
            trees.append(tree)
            paths.append(path if place < len(text) else [])
        results = runner.forward(trees)
        logits += [results[which].logits_after(node) for node in paths[which][decided - 1 :]]
        runner.commit(paths)
        place += count
    return torch.cat(logits)
