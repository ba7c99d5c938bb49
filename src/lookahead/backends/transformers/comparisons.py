"""Comparisons of an engine's module with the model: trees, chains, rows, and invariance of bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from lookahead.backends.base import vocabulary_size
from lookahead.backends.transformers.chain_cache import ChainRow, is_encoder_decoder, trial_source
from lookahead.backends.transformers.findings import architecture, recall, remember
from lookahead.backends.transformers.invariant import foreign_product
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.backends.trials import among_decoys, chains, difference, follow, nothing, rounding
from lookahead.errors import UnsupportedModelError

_TEXT = (5, 11, 7, 3, 13, 2, 17, 19, 23, 29, 31, 37, 41, 43)
_ROWS = ((5, 11, 7, 3, 13, 2, 11), (17, 19, 23, 5), (29, 5, 31, 37, 13))
"""Texts of a shared pass."""
CHECK_LENGTH = 24
"""Largest number of tokens that `check_logits` adds to a cache, nodes included."""
TEXTS = 3
"""Number of texts that must all show a difference, because rounding decides near-ties between experts."""
_SMALL = 1e-3
"""Tolerance as a share of the largest logit; miniatures detect smaller differences."""
_CHAIN_PROMPT = 6
_BITS_TEXT = 7
"""Tokens of the text for comparisons of bits."""
_BITS_PROMPT = 3
"""Tokens of its prompt."""


def _vocabulary(model: PreTrainedModel) -> range:
    """Return the token ids of `model`."""
    return range(vocabulary_size(model))


def _in_vocabulary(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """Map tokens into the vocabulary of `model`."""
    return [token % len(_vocabulary(model)) for token in tokens]


def trial_runner(model: PreTrainedModel, engine: PreTrainedModel | None = None) -> ChainRunner:
    """Return an empty runner of chains, with a stand-in for the encoder's output if `model` has an encoder."""
    source = trial_source(model) if is_encoder_decoder(model) else None
    return ChainRunner(model, [ChainRow(model, source=source)], engine=engine)


def continues_correctly(model: PreTrainedModel, engine: PreTrainedModel) -> bool:
    """Return whether chains on `engine` have the logits of single tokens on `model`."""
    for number in range(TEXTS):
        text = _in_vocabulary(model, [token + number for token in _TEXT])
        expected = follow(trial_runner(model), [text], _CHAIN_PROMPT, nothing)
        actual = follow(trial_runner(engine), [text], _CHAIN_PROMPT, chains(random.Random(number)))
        if are_close(actual, expected, model.dtype):
            return True
    return False


def are_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether logits are equal within the tolerance; NaN never is."""
    tolerance = _SMALL * max(float(logits.abs().max()) for logits in expected)
    return difference(actual, expected) <= max(tolerance, rounding(expected, dtype))


def check_logits(runner: ModelRunner) -> torch.Tensor:
    """Return logits `[tokens, vocabulary]` of three steps of at most 8 nodes, on an empty runner of one row.

    The second and the third step depend on accepted nodes, the third has no draft. Static steps record the first one
    and replay it for the second.
    """
    text = _in_vocabulary(runner.model, _TEXT[:9])
    return follow(runner, [text], 2, among_decoys(3, 1, _vocabulary(runner.model)))[0]


def agree(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits are equal except for rounding in `dtype`."""
    return difference([actual], [expected]) <= rounding([expected], dtype)


def reads_trees(model: PreTrainedModel, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[tokens, vocabulary]` along text `number`: from trees with wrong branches, and token by token.

    One tree is in the pass of the prompt, which plain decoding sends without a mask, and one follows cached tokens.
    """
    text = _in_vocabulary(model, [token + number for token in _TEXT[:7]])
    drafts = among_decoys(4, 2, _vocabulary(model)), nothing
    drafted, plain = (follow(ModelRunner(model, 1), [text], 2, draft)[0] for draft in drafts)
    return drafted, plain


def reads_parts(model: PreTrainedModel, make: Callable[[], ModelRunner | ChainRunner]) -> bool:
    """Return whether a prompt has equal logits token by token and in one pass.

    Args:
        model: The model.
        make: Makes an empty runner of one row.
    """
    for number in range(TEXTS):
        text = _in_vocabulary(model, [token + number for token in _TEXT[:7]])
        whole, parts = (follow(make(), [text], prompt, nothing)[0] for prompt in (4, 1))
        if are_close([parts[3:]], [whole], model.dtype):
            return True
    return False


def computes_the_same(clone: PreTrainedModel, model: PreTrainedModel, reads_plainly: bool = True) -> bool:
    """Return whether a clone has the logits of its model except for rounding.

    Args:
        clone: The clone.
        model: The model.
        reads_plainly: Whether to compare passes without our masks too, beside trees.
    """
    if reads_plainly:
        tokens = torch.tensor([_in_vocabulary(model, _TEXT[:4])], device=model.device)
        actual, expected = (module(input_ids=tokens, use_cache=False).logits[0] for module in (clone, model))
        if not agree(actual, expected, model.dtype):
            return False
    actual, expected = (check_logits(ModelRunner(module, 1)) for module in (clone, model))
    return agree(actual, expected, model.dtype)


@torch.no_grad()
def reads_rows_alike(runner: ModelRunner, alone: PreTrainedModel, exactly: bool) -> bool:
    """Return whether texts in a shared pass have the logits of single texts.

    Args:
        runner: Runner of the shared pass.
        alone: Module for single texts.
        exactly: Whether to compare all bits; otherwise rounding is permitted.
    """
    texts = [_in_vocabulary(alone, text) for text in _ROWS]
    draft = among_decoys(3, 1, _vocabulary(alone))
    with runner.serving([runner.new_row() for _ in texts]):
        together = follow(runner, texts, 2, draft)
    expected = [follow(ModelRunner(alone, 1), [text], 2, draft)[0] for text in texts]
    pairs = zip(together, expected, strict=True)
    return all(torch.equal(*pair) if exactly else agree(*pair, alone.dtype) for pair in pairs)


MakeRunner = Callable[[int], ModelRunner]
"""Function that makes an empty runner for a number of rows."""


def is_invariant(model: PreTrainedModel, fixed: MakeRunner | None = None) -> bool:
    """Return whether passes of `model` are invariant: from an earlier finding for the architecture, else by trial.

    The order of a sum does not depend on weights, but a trial may miss differences, so unknown modules are refused.

    Args:
        model: The invariant clone.
        fixed: Makes runners with static passes of one size, if the model uses them. Every process tries these.

    Raises:
        UnsupportedModelError: A module has products with an unknown order of sums.
    """
    if fixed is not None:
        return check_invariance(model, fixed)
    foreign = foreign_product(model)
    if foreign is not None:
        raise UnsupportedModelError(f"{foreign} has its own kind of product, so that the order of its sums is unknown")
    about = architecture(model)
    if about is not None and recall(about) is True:
        return True
    invariant = check_invariance(model)
    if invariant and about is not None:
        remember(about, True)
    return invariant


@torch.no_grad()
def check_invariance(model: PreTrainedModel, fixed: MakeRunner | None = None) -> bool:
    """Return whether trees, chains, batches and single tokens have the same bits along a text; see `is_invariant`."""
    make = partial(ModelRunner, model) if fixed is None else fixed
    vocabulary = _vocabulary(model)
    draws = torch.Generator().manual_seed(1)
    text, other = torch.randint(len(vocabulary), (2, _BITS_TEXT + 1), generator=draws, device="cpu").tolist()

    def logits_along(texts: Sequence[list[int]], size: int, decoys: int, prompt: int = 1) -> torch.Tensor:
        """Return the logits along `text` in passes of `size` tokens, with decoys."""
        return follow(make(len(texts)), texts, prompt, among_decoys(size, decoys, vocabulary))[texts.index(text)]

    ways = [
        logits_along([text], 1, 0),
        logits_along([text], _BITS_TEXT, 0),
        logits_along([text], 5, 3),
        logits_along([other, text], 3, 1),
        logits_along([other[:6], text, other], 3, 0),
    ]
    if fixed is not None:
        ways.append(logits_along([text], _BITS_TEXT, 6))  # several passes for a tree, with accepted nodes in each
    prompted = logits_along([text], 2, 1, _BITS_PROMPT)
    return torch.equal(prompted, ways[0][_BITS_PROMPT - 1 :]) and all(torch.equal(*pair) for pair in pairwise(ways))
