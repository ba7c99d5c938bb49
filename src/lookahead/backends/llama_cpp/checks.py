"""What is checked of each model before it is used, on this build of llama.cpp."""

from __future__ import annotations

import random

import numpy as np

from lookahead.backends.llama_cpp.chain_runner import LlamaChainRunner
from lookahead.backends.llama_cpp.model import LlamaModel
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.backends.trials import among_decoys, chains, difference, follow, nothing
from lookahead.errors import UnsupportedModelError

TOLERANCE = 0.25
"""How far logits may be from plain decoding's, in standard deviations of the logits. Rounding moves those of weights
with four bits by less than a tenth of this; a token that is seen or missed wrongly moves them by about one."""

_PROMPT, _LENGTH, _DEPTH, _DECOYS = 6, 19, 3, 1
_LEAVES = _DEPTH * _DECOYS + 1


def check_model(model: LlamaModel) -> None:
    """Make sure that drafts are read as plain decoding reads them, and that what is kept of them is right.

    | question | how it is tried | what is refused |
    | --- | --- | --- |
    | Do trees give what single tokens give? | a random text, read along trees with wrong branches | the model |
    | Do chains, of a model with running states? | the same along chains, of which every other one is rejected in part |
    the model |

    Raises:
        UnsupportedModelError: They do not; the message says by how much they differ.
    """
    what = "chains of tokens" if model.has_states else "token trees"
    worst = largest_difference(model)
    if not worst <= TOLERANCE:
        raise UnsupportedModelError(
            f"path={str(model.path)!r}: the model does not give on {what} what it gives token by token, with this "
            f"build of llama.cpp: logits differ by {worst:.2g} standard deviations. Use llama.cpp's own decoding"
        )


def largest_difference(model: LlamaModel) -> float:
    """The largest difference between a logit of a draft and plain decoding's, in standard deviations of the logits."""
    vocabulary = model.vocabulary
    usable = np.setdiff1d(np.arange(len(vocabulary)), [*vocabulary.controls, *vocabulary.ends])  # tokens that are text
    text: list[int] = np.random.default_rng(0).choice(usable, _LENGTH).tolist()
    context = model.acquire(2 * _LENGTH + _LEAVES * (_DEPTH + 1), 2 if model.has_states else _LEAVES)
    if model.has_states:
        draft = chains(random.Random(0), _DEPTH)
    else:
        draft = among_decoys(_DEPTH + 1, _DECOYS, len(vocabulary), usable.tolist())
    found = []
    for drafts in (nothing, draft):
        context.clear()
        runner = LlamaChainRunner(context) if model.has_states else LlamaRunner(context, 1)
        found += follow(runner, [text], _PROMPT, drafts)
    model.release(context)
    plain, drafted = found
    return difference([drafted], [plain]) / float(plain.std())
