"""Algorithm 4 of the paper as published: sampling verification by accepting and rejecting.

This is a reference to compare laws with; decoding does not use it. `lookahead.core.step.follow` draws the token first
and then looks whether a candidate holds it, which has the same law, works on trees, and draws once per token of the
output as plain decoding does. Here it is the other way round: candidates come first and are accepted at random,
which takes a random number per candidate, so that the same seed gives other tokens than plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lookahead.errors import InvalidArgumentError

NextDistribution = Callable[[tuple[int, ...]], torch.Tensor]
"""Gives the law of the next token, `[vocabulary]` probabilities, after the text and these further token ids."""


def verify_by_rejection(
    candidates: Sequence[Sequence[int]], next_distribution: NextDistribution, generator: torch.Generator | None = None
) -> list[int]:
    """Decide the next tokens of a text from candidates, so that they have the law of plain sampling.

    The positions are verified one after another. At each the remaining candidates have their turn: the token t of
    the first one is accepted with probability p(t). If it is, the candidates with another token there are dropped,
    and the next position follows. If it is not, p(t) is set to 0, p is normalised again, and it is the turn of the
    next candidate. Where all are rejected, the token is sampled from what is left of p, and verification ends; after
    a candidate that was accepted to its end, one more token is sampled from the distribution after it.

    Source: Fu, Bailis, Stoica, Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    2024, section 3.2, Algorithm 4; its Appendix B proves that the law is kept. The candidates are disjoint n-grams
    there, as here: they may begin alike, and equal tokens are then verified together. (A random number equal to
    p(t) rejects here and accepts there, so that a token of probability 0 is never accepted.)

    Args:
        candidates: Guesses at the next tokens, all of one length: an n-gram each, without its first token, which
            is the last one of the text. May be empty; then one token is sampled.
        next_distribution: Asked once for each position that is verified, and once for the token after it.
        generator: Source of the random numbers; PyTorch's default generator if not given.

    Returns:
        The tokens decided, in order: at least one, at most one more than a candidate holds.

    Raises:
        InvalidArgumentError: The candidates are not of one length.
    """
    remaining = [tuple(candidate) for candidate in candidates]
    if len({len(candidate) for candidate in remaining}) > 1:
        lengths = [len(candidate) for candidate in remaining]
        raise InvalidArgumentError(f"candidates have {lengths} tokens; Algorithm 4 verifies n-grams of one length")
    length = len(remaining[0]) if remaining else 0
    decided: tuple[int, ...] = ()
    while len(decided) < length:
        place = len(decided)
        guesses = [candidate[place] for candidate in remaining]
        token, accepted = _verify_position(guesses, next_distribution(decided), generator)
        decided += (token,)
        if not accepted:
            return list(decided)
        remaining = [candidate for candidate in remaining if candidate[place] == token]
    return [*decided, _draw(_normalised(next_distribution(decided)), generator)]


def _verify_position(
    guesses: Sequence[int], distribution: torch.Tensor, generator: torch.Generator | None
) -> tuple[int, bool]:
    """The token of one position, and whether a guess was accepted for it."""
    left = _normalised(distribution)
    for guess in guesses:
        draw = torch.rand((), generator=generator, dtype=left.dtype, device=left.device)
        if draw < left[guess]:
            return guess, True
        left[guess] = 0.0
        left = _normalised(left)
    return _draw(left, generator), False


def _normalised(distribution: torch.Tensor) -> torch.Tensor:
    """A copy that sums to 1 in float64: a certain token has exactly 1 and is never rejected, so something is left."""
    weights = distribution.double()
    return weights / weights.sum()


def _draw(distribution: torch.Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(distribution, num_samples=1, generator=generator))
