"""What lookahead parallelism counted: who ran how much, and what was sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Counts of one rank since its group began. All ranks count the same steps and exchanges.

    Attributes:
        steps: Decoding steps.
        exchanges: Exchanges in these steps.
        bytes_sent: What this rank told the others in these steps, in bytes, counted once for each of them: with
            any algorithm the backend may use, no rank of the group sends more than that of its own.
        most_bytes: The most that this rank told the others in one step, likewise.
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

    @property
    def imbalance(self) -> float:
        """Mean over the steps of the largest load over the mean load; 1 is perfect."""
        ratios = [max(loads) * len(loads) / sum(loads) for loads in self.loads]
        return sum(ratios) / len(ratios) if ratios else 1.0
