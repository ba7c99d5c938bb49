"""When a text is complete."""

from __future__ import annotations

import warnings

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria

from lookahead.backends.prompts import Prompts
from lookahead.backends.transformers.text_sequence import TextSequence
from lookahead.errors import InvalidArgumentError


class StopRule:
    """Evaluates transformers' stopping criteria after every token, as plain decoding does.

    The two that every call has, the end-of-sequence token and the largest length, are evaluated on plain
    numbers, so that they need neither a kernel nor a synchronisation with the device.

    Args:
        criteria: The prepared criteria of the call.

    Attributes:
        has_eos: Whether rows that end are filled up with padding, as transformers does when there is an
            end-of-sequence criterion.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._eos: set[int] = set()
        self._max_length: int | None = None
        self._others = StoppingCriteriaList()
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria and self._max_length is None:
                self._max_length = criterion.max_length
            else:
                self._others.append(criterion)

    @property
    def asks_others(self) -> bool:
        """Whether there are criteria besides those two, which may depend on time or other state."""
        return bool(self._others)

    def ends_by_length(self, sequence: TextSequence) -> bool:
        """Whether `sequence`, which is complete, is so for its length alone."""
        if sequence.tokens[-1] in self._eos or self._max_length is None or sequence.length < self._max_length:
            return False
        texts = (criterion for criterion in self._others if isinstance(criterion, StopStringCriteria))
        return not any(_answer(criterion, criterion(sequence.ids, None)) for criterion in texts)

    def most_tokens(self, width: int, tokens: int) -> int | None:
        """Tokens, padding left out, at which a text is complete at the latest; `None` if that is open.

        Args:
            width: Length of its prompt, padding included.
            tokens: Length of its prompt without.
        """
        return None if self._max_length is None else self._max_length - width + tokens

    def __call__(self, sequence: TextSequence) -> bool:
        """Whether `sequence` is complete with the token it has just got."""
        done = sequence.tokens[-1] in self._eos
        done |= self._max_length is not None and sequence.length >= self._max_length
        scores = None if sequence.sampler.scores is None else tuple(sequence.sampler.scores)
        for criterion in self._others:
            done |= _answer(criterion, criterion(sequence.ids, scores))
        if not done and sequence.last_length is not None and sequence.length >= sequence.last_length:
            # Where transformers would fail and lose the text.
            warnings.warn(
                f"generation stopped at {len(sequence.tokens)} tokens: the model has no position for another one",
                stacklevel=2,
            )
            return True
        return done


def _answer(criterion: object, result: object) -> bool:
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return bool(result)
    if isinstance(result, bool):
        return result
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
    raise InvalidArgumentError(
        f"stopping_criteria: {type(criterion).__name__} returned {shape}; it must return a bool tensor of shape (1,), "
        "one entry for each sequence of the text it was given"
    )


def last_lengths(last_length: int | None, prompts: Prompts, has_eos: bool) -> list[int] | list[None]:
    """Lengths, padding included, at which the model can read no further token of each row.

    Where nothing fills up a row that ended, all of them end with the first.

    Args:
        last_length: Tokens that count after which there is no position for another one, if that is so.
        prompts: What the rows begin with.
        has_eos: Whether rows that end are filled up.
    """
    if last_length is None:
        return [None] * prompts.rows
    ends = [last_length - earlier + hidden for hidden, earlier in zip(prompts.padding, prompts.before, strict=True)]
    return ends if has_eos else [min(ends)] * len(ends)
