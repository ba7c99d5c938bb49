"""Counts of lookahead parallelism: nodes by rank, and bytes sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Counts of one rank since its group began. All ranks count the same steps and exchanges.

    Attributes:
        steps: Decoding steps.
        exchanges: Exchanges in these steps.
        bytes_sent: Bytes that this rank sent in these steps, counted once for each receiver: with
            any algorithm the backend may use, no rank of the group sends more than that of its own.
        most_bytes: The most bytes that this rank sent in one step, counted in the same way.
        start_bytes: The same for what is compared and made equal at the start of each call.
        loads: For each step the nodes that each rank ran, over all rows of the batch, prompt tokens not counted.
        redundant: For each step how many of all these were there in duplicate.
    """

    steps: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    most_bytes: int = 0
    start_bytes: int = 0
    loads: list[list[int]] = field(default_factory=list)
    redundant: list[int] = field(default_factory=list)

    @property
    def bytes_per_step(self) -> float:
        """Mean number of bytes that this rank sends in a step."""
        return self.bytes_sent / self.steps if self.steps else 0.0
