"""Plain step: one text, one token and no draft. Trees, forests and walks would cost more than the token is worth.

The text, its cache and its random numbers change as in `lookahead.core.step.step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lookahead.backends.forward_result import argmax
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.protocols import NoDrafter
from lookahead.core.statistics import Statistics, StepRecord
from lookahead.core.step import Phase
from lookahead.drafting.auto.drafter import AutoDrafter
from lookahead.errors import not_of_signal


def plain_step(backend: Any, sequence: Any, statistics: Statistics, mark: Callable[[Phase], None]) -> bool:
    """Run the next step of a text, if it is certain to draft nothing, and add its counts to `statistics`.

    Errors of the text's own code are stored in `SequenceState.error`.

    Args:
        backend: Runner of the only row; others than a `ModelRunner` run no plain steps.
        sequence: The `TextSequence`.
        statistics: Counts of the call.
        mark: Called with each part of the step when it is over.

    Returns:
        Whether the step was run. Otherwise nothing has changed, and `step` must run it.
    """
    drafter = sequence.drafter
    drafts_nothing = type(drafter) is NoDrafter or (type(drafter) is AutoDrafter and drafter.rests)
    if not drafts_nothing or sequence.watcher is not None or type(sequence.sampler) is not TextSampler:
        return False
    next_logits = getattr(backend, "next_logits", None)
    length = len(sequence.tokens)
    logits = None if next_logits is None else next_logits(sequence.tokens)
    if logits is None:
        return False
    mark("forward")
    statistics.steps += 1
    try:
        token = _select(sequence, logits)
        sequence.finished = sequence.append(token)
        backend.keep_text(length)
        mark("verify")
        sequence.steps += 1
        if type(drafter) is AutoDrafter:
            drafter.defer(token)
        statistics.record([1], [1])
        for listener in sequence.listeners:
            listener(StepRecord(sequence.index, sequence.steps, [token], 1, sequence.finished))
    except BaseException as error:
        sequence.fail(not_of_signal(error))
    return True


def _select(sequence: TextSequence, logits: torch.Tensor) -> int:
    sampler = sequence.sampler
    sampler.foreseen = None  # of an earlier step
    if not sampler.needs_logits:
        return int(argmax(logits)[0])
    text = None if sampler.ignores_text else sequence.ids
    return sampler.choose(text, logits.to(sequence.device))
