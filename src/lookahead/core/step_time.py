"""What a step took and brought, for those who book it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Time and result of a step.

    Attributes:
        nodes: Its nodes over all rows.
        context: The longest text before it, in tokens.
        seconds: How long it took; not a number for a plain step that was not timed.
        tokens: Tokens that it added, over all rows.
        rows: Rows that were not finished.
        drafted: Whether a draft was looked for; without one it was a plain step.
        prompts: Whether it carried tokens of prompts as well.
        looking: Seconds of these for looking for drafts and learning from them, where they are told apart: whatever is
            sent, they are spent, and with many rows they are more than some nodes take.
        certain_nodes, certain_tokens: How many of its nodes were sent because one way through them is accepted whatever
            the model says, and how many tokens that way had. They are sent whether or not drafting pays, and say
            nothing of it.
    """

    nodes: int
    context: int
    seconds: float
    tokens: int
    rows: int
    drafted: bool
    prompts: bool = False
    looking: float = 0.0
    certain_nodes: int = 0
    certain_tokens: int = 0
