"""Algorithm 4 of the paper as published: verification of sampled text by rejection.

A reference to compare distributions with; decoding does not use it. `lookahead.core.step.follow` draws the token first
and then looks for a candidate that holds it. That has the same law, works on trees, and draws once per output token,
like plain decoding. Here each candidate is accepted at random, with a random number per candidate, so the same seed
gives other tokens than plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lookahead.errors import InvalidArgumentError

NextDistribution = Callable[[tuple[int, ...]], torch.Tensor]
"""Return the probabilities of the next token, `[vocabulary]`, after the text and these further token ids."""


def verify_by_rejection(
    candidates: Sequence[Sequence[int]], next_distribution: NextDistribution, generator: torch.Generator | None = None
) -> list[int]:
    """Decide the next tokens of a text from candidates, with the law of plain sampling.

    Positions are verified one after another. At each position the remaining candidates are tried in order: token t of
    the candidate is accepted with probability p(t). Once accepted, candidates with another token there are dropped,
    and the next position follows. Otherwise p(t) is set to 0, p is normalised again, and the next candidate is tried.
    If all are rejected, the token is sampled from the rest of p, and verification ends. After a fully accepted
    candidate, one more token is sampled from the distribution after it.

    Source: Fu, Bailis, Stoica, Zhang, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    2024, section 3.2, Algorithm 4; Appendix B proves that the law is kept. As there, candidates are distinct n-grams
    with possibly equal beginnings, and equal tokens are verified together. (A random number equal to p(t) rejects
    here and accepts there, so a token of probability 0 is never accepted.)

    Args:
        candidates: Guesses at the next tokens, all of one length: n-grams without the first token, which is the last
            one of the text. May be empty; then one token is sampled.
        next_distribution: Called once per verified position, and once for the token after it.
        generator: Source of the random numbers; default: PyTorch's default generator.

    Returns:
        The decided tokens in order: at least one, at most one more than a candidate's length.

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
    """Return the token of one position, and whether it is an accepted guess."""
    left = _normalised(distribution)
    for guess in guesses:
        draw = torch.rand((), generator=generator, dtype=left.dtype, device=left.device)
        if draw < left[guess]:
            return guess, True
        left[guess] = 0.0
        left = _normalised(left)
    return _draw(left, generator), False


def _normalised(distribution: torch.Tensor) -> torch.Tensor:
    """Return a copy that sums to 1 in float64; a certain token has exactly 1 and is never rejected."""
    weights = distribution.double()
    return weights / weights.sum()


def _draw(distribution: torch.Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(distribution, num_samples=1, generator=generator))
