"""How many answers are being made, and whether more are taken."""

from __future__ import annotations

from lookahead.server.errors import ApiError

_RETRY_AFTER = 2
"""Seconds after which a client that was sent away may try again."""


class Load:
    """Counts answers, and refuses those for which there is no room.

    Args:
        most: Most answers at once, those that wait included.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.answers = 0

    def take(self, count: int) -> None:
        """Take further answers.

        Raises:
            ApiError: There is no room for them.
        """
        if count > self._most:
            raise ApiError(400, f"{count} answers are more than the {self._most} that this server makes at once", "n")
        if self.answers + count > self._most:
            raise ApiError(
                429,
                f"{self.answers} answers are being made or wait; try again later",
                code="overloaded",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )
        self.answers += count

    def give_back(self, count: int) -> None:
        """Answers have ended."""
        self.answers -= count
