"""How much of each draft a step sends, by what drafted tokens cost and bring."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

_LEAST = 0.01
"""A token less likely than this is not sent, whatever it costs."""

_GIVEN = 0.04
"""Part of their tokens that steps may lose, against those that bring the most tokens in a time, to be fewer. Near there
a draft can be much longer for next to nothing; how much, depends on the text."""

_LEAST_SHARE, _GAIN = 0.1, 0.5
"""Part of what a token costs that it has to bring, at least, and how fast that follows what is lost. At first it has to
bring all, with each number of requests anew."""

_MOST = 0.5
"""A token that is likelier than this is sent, whatever it is taken to cost."""

_GUESS = 32.0, 2.0, 1.0
"""What a step, each of its requests and each drafted token are taken to cost beforehand, in drafted tokens: as for a
small model on a CPU."""

_GUESSES = 150.0
"""How much that counts: as so many steps with a token more than others."""

_RATE = 0.03
"""Weight of the latest step in a mean."""

_KEPT = 0.998
"""What a step keeps of its weight in the costs from one to the next."""

_LONGEST = 3.0
"""A step counts no longer than so many usual ones: others use the machine, too."""

_FIRST, _BETWEEN = 16, 8
"""After how many steps, and after so many more each time, what a token costs is worked out anew."""

_SKIPPED = 3
"""First steps that say nothing: something is loaded or compiled in them."""

_PRIOR = 8.0
"""Tokens that count as accepted as often as expected beforehand."""

_FORGOTTEN = 0.02
"""What a step takes from the weight of those before it in how often tokens are accepted."""

_WORTH = 1.05
"""Tokens that each request gets in a step, at least, for looking for drafts to be worth its time."""

_TRIED, _TRIED_AGAIN = 64, 16
"""Steps that are drafted before drafts may rest, at first and after each rest."""

_REST = 512
"""Plain steps of a rest."""


@dataclass(frozen=True)
class VerifiedStep:
    """What a step took and brought.

    Attributes:
        rows: Requests.
        sent: Drafted tokens.
        expected: How many of them were to be accepted.
        lost: How many tokens those drafted ones that were less likely than `ChainLengths.worth` lack of it, in all.
        tokens: Tokens that it added, over all requests.
        seconds: How long it took.
    """

    rows: int
    sent: int
    expected: float
    lost: float
    tokens: int
    seconds: float


class ChainLengths:
    """Sends the drafted tokens that are likely enough to pay for what they add to a step.

    A token that is accepted with probability p brings p tokens, and makes the step longer. In that time steps bring so
    many tokens on the average, of so many requests: with the tokens whose p is more than that, they bring the most in a
    time. So more is sent of one request, whose steps bring few tokens, than of each of many. Less likely ones are sent
    as far as all of them together lose next to nothing (`_GIVEN`), for they make steps fewer.

    What a step of so many requests and drafted tokens takes is a straight line through the steps of late. All of them
    have drafts; that these are not equally long shows what a token costs.

    Attributes:
        rests: Whether the coming step goes without drafts, for next to none are accepted.
        worth: How likely a token has to be to bring what it costs.
        least: How likely a token has to be to be sent.
    """

    def __init__(self) -> None:
        self._accepted = self._expected = _PRIOR
        self._costs = _StepCosts()
        self._tokens, self._sent = 1.0, 0.0  # of a request in a drafted step, on the average
        self._shares = defaultdict[int, float](lambda: 1.0)  # by powers of two of requests
        self._left = _TRIED  # drafted steps until drafts may rest; below 0, plain ones until they go on
        self.rests = False
        self.worth = self.least = _LEAST

    def begin(self, rows: int) -> None:
        """Begin a step of so many requests."""
        rows = max(rows, 1)
        self.rests = self._left < 0
        seconds = self._costs.seconds(rows, rows * self._sent)
        pays = self._costs.of_a_token * rows * self._tokens / seconds if seconds else 0.0
        as_estimated = self._expected / self._accepted
        self.worth = min(pays, _MOST) * as_estimated
        self.least = max(self._shares[rows.bit_length()] * self.worth, _LEAST)

    def book(self, step: VerifiedStep) -> None:
        """Note a step of the same requests as the step before, without prompts."""
        if self._left < 0:
            self._left = self._left + 1 or _TRIED_AGAIN
            return
        self._accepted += step.tokens - step.rows - _FORGOTTEN * (self._accepted - _PRIOR)
        self._expected += step.expected - _FORGOTTEN * (self._expected - _PRIOR)
        self._costs.book(step.rows, step.sent, step.seconds)
        load = step.rows.bit_length()
        share = self._shares[load] + _GAIN * (step.lost / step.tokens - _GIVEN)
        self._shares[load] = min(max(share, _LEAST_SHARE), 1.0)
        self._tokens += _RATE * (step.tokens / step.rows - self._tokens)
        self._sent += _RATE * (step.sent / step.rows - self._sent)
        self._left = max(self._left - 1, 0)
        if not self._left and self._tokens < _WORTH:
            self._left = -_REST


class _StepCosts:
    """Seconds of a step: a constant, so much for each request, so much for each drafted token.

    Attributes:
        of_a_token: What a drafted token adds.
    """

    def __init__(self) -> None:
        self._seen = -_SKIPPED
        # Sums over steps: how many, requests, drafted tokens, their products, seconds and their products.
        self._sums = [0.0] * 9
        self._fixed = self._of_a_request = 0.0
        self.of_a_token = 0.0

    def seconds(self, rows: int, sent: float) -> float:
        """Of a step of so many requests and drafted tokens; 0 if nothing is known."""
        return self._fixed + self._of_a_request * rows + self.of_a_token * sent

    def book(self, rows: int, sent: int, seconds: float) -> None:
        """Note a step."""
        self._seen += 1
        if self._seen <= 0:
            return
        usual = self.seconds(rows, sent)
        seconds = min(seconds, _LONGEST * usual) if usual else seconds
        told = 1, rows, sent, rows * rows, rows * sent, sent * sent, seconds, rows * seconds, sent * seconds
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, told, strict=True)]
        if self._seen <= _FIRST or self._seen % _BETWEEN == 0:
            self._draw_line()

    def _draw_line(self) -> None:
        """Least squares, beside guesses: where all steps are alike, they say nothing else."""
        steps, rows, sent, rows_2, both, sent_2, *products = self._sums
        squares = [[steps, rows, sent], [rows, rows_2 + 1, both], [sent, both, sent_2 + _GUESSES]]
        fixed, of_a_request, of_a_token = _GUESS
        guess = products[0] / (fixed * steps + of_a_request * rows + of_a_token * sent)
        products[1] += of_a_request * guess
        products[2] += of_a_token * guess * _GUESSES
        self._fixed, self._of_a_request, token = np.linalg.solve(squares, products).tolist()
        self.of_a_token = max(token, 0.0)
