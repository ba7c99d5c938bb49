"""What is asked of a module that is to run a model: whether it computes what the model computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from lookahead.backends.base import vocabulary_size
from lookahead.backends.transformers.chain_cache import ChainRow, is_encoder_decoder, tried_source
from lookahead.backends.transformers.findings import architecture, recall, remember
from lookahead.backends.transformers.invariant.modules import foreign_product
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.backends.trials import among_decoys, chains, difference, follow, nothing, rounding
from lookahead.errors import UnsupportedModelError

_TEXT = (5, 11, 7, 3, 13, 2, 17, 19, 23, 29, 31, 37, 41, 43)
_ROWS = ((5, 11, 7, 3, 13, 2, 11), (17, 19, 23, 5), (29, 5, 31, 37, 13))
"""Texts that share a pass."""
CHECK_LENGTH = 24
"""Tokens, nodes included, that `check_logits` may put into a cache."""
TEXTS = 3
"""A small difference counts if it shows with each of so many texts: near-ties between experts are rounding's."""
_SMALL = 1e-3
"""Part of the largest logit that is no difference yet; the miniature shows finer ones."""
_CHAIN_PROMPT = 6
_BITS_TEXT = 7
_BITS_PROMPT = 3
"""Tokens of the text that invariant passes are compared along, and of its prompt."""


def _vocabulary(model: PreTrainedModel) -> range:
    """Tokens that `model` reads."""
    return range(vocabulary_size(model))


def _readable(model: PreTrainedModel, tokens: Sequence[int]) -> list[int]:
    """The tokens, as far as `model` has as many."""
    return [token % len(_vocabulary(model)) for token in tokens]


def trial_runner(model: PreTrainedModel, engine: PreTrainedModel | None = None) -> ChainRunner:
    """An empty runner of chains, with what stands for an encoder's output if `model` has one; see `ChainRunner`."""
    source = tried_source(model) if is_encoder_decoder(model) else None
    return ChainRunner(model, [ChainRow(model, source=source)], engine=engine)


def goes_on_rightly(model: PreTrainedModel, engine: PreTrainedModel) -> bool:
    """Whether `engine` reads chains as `model` reads one token at a time."""
    for number in range(TEXTS):
        text = _readable(model, [token + number for token in _TEXT])
        expected = follow(trial_runner(model), [text], _CHAIN_PROMPT, nothing)
        found = follow(trial_runner(engine), [text], _CHAIN_PROMPT, chains(random.Random(number)))
        if are_close(found, expected, model.dtype):
            return True
    return False


def are_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether logits differ by less than wrong states or masks make of them; not if they are no numbers."""
    least = _SMALL * max(float(logits.abs().max()) for logits in expected)
    return difference(found, expected) <= max(least, rounding(expected, dtype))


def check_logits(runner: ModelRunner) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of three steps of at most 8 nodes, of an empty runner of one row.

    The second and the third go by what the steps before them kept, the third without a draft. Static steps of 8 nodes
    record the first one, and replay for the second what they recorded.
    """
    text = _readable(runner.model, _TEXT[:9])
    return follow(runner, [text], 2, among_decoys(3, 1, _vocabulary(runner.model)))[0]


def agree(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits are the same but for rounding in `dtype`."""
    return difference([found], [expected]) <= rounding([expected], dtype)


def reads_trees(model: PreTrainedModel, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[places, vocabulary]` along text `number`: of trees with wrong branches, and of single tokens."""
    text = _readable(model, [token + number for token in _TEXT[:7]])
    drafts = among_decoys(4, 2, _vocabulary(model)), nothing
    drafted, plain = (follow(ModelRunner(model, 1), [text], 4, draft)[0] for draft in drafts)
    return drafted, plain


def reads_parts(model: PreTrainedModel, make: Callable[[], ModelRunner | ChainRunner]) -> bool:
    """Whether a prompt that is read token by token gives the logits of one that is read at once.

    Args:
        model: The model.
        make: Makes an empty runner of one row.
    """
    for number in range(TEXTS):
        text = _readable(model, [token + number for token in _TEXT[:7]])
        whole, parts = (follow(make(), [text], prompt, nothing)[0] for prompt in (4, 1))
        if are_close([parts[3:]], [whole], model.dtype):
            return True
    return False


def computes_the_same(clone: PreTrainedModel, model: PreTrainedModel, reads_plainly: bool = True) -> bool:
    """Whether a clone gives the logits of its model, along trees as well, but for rounding; `reads_plainly` if it is to
    run passes without any mask of ours, too."""
    if reads_plainly:
        tokens = torch.tensor([_readable(model, _TEXT[:4])], device=model.device)
        found, expected = (module(input_ids=tokens, use_cache=False).logits[0] for module in (clone, model))
        if not agree(found, expected, model.dtype):
            return False
    found, expected = (check_logits(ModelRunner(module, 1)) for module in (clone, model))
    return agree(found, expected, model.dtype)


@torch.no_grad()
def reads_rows_alike(runner: ModelRunner, alone: PreTrainedModel, exactly: bool) -> bool:
    """Whether texts in one pass have the logits that each has alone.

    Args:
        runner: Runs the texts together.
        alone: Runs each alone.
        exactly: Whether all bits must be the same; else they may differ by rounding.
    """
    texts = [_readable(alone, text) for text in _ROWS]
    draft = among_decoys(3, 1, _vocabulary(alone))
    with runner.serving([runner.new_row() for _ in texts]):
        found = follow(runner, texts, 2, draft)
    expected = [follow(ModelRunner(alone, 1), [text], 2, draft)[0] for text in texts]
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(*pair) if exactly else agree(*pair, alone.dtype) for pair in pairs)


MakeRunner = Callable[[int], ModelRunner]
"""Makes an empty runner for so many rows."""


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
    """Whether trees, chains, batches and single tokens along a text give the same bits after each of its tokens; see
    `is_invariant`."""
    make = partial(ModelRunner, model) if fixed is None else fixed
    vocabulary = _vocabulary(model)
    draws = torch.Generator().manual_seed(1)
    text, other = torch.randint(len(vocabulary), (2, _BITS_TEXT + 1), generator=draws).tolist()

    def along(texts: Sequence[list[int]], size: int, decoys: int, prompt: int = 1) -> torch.Tensor:
        """Logits after each token of `text`, read so many tokens at a time, among decoys."""
        return follow(make(len(texts)), texts, prompt, among_decoys(size, decoys, vocabulary))[texts.index(text)]

    ways = [
        along([text], 1, 0),
        along([text], _BITS_TEXT, 0),
        along([text], 5, 3),
        along([other, text], 3, 1),
        along([other[:6], text, other], 3, 0),
    ]
    if fixed is not None:
        ways.append(along([text], _BITS_TEXT, 6))  # more nodes than a pass has, and right ones all over it
    prompted = along([text], 2, 1, _BITS_PROMPT)
    return torch.equal(prompted, ways[0][_BITS_PROMPT - 1 :]) and all(torch.equal(*pair) for pair in pairwise(ways))
