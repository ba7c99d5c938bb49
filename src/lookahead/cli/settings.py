"""What the options of one command line add up to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lookahead.config import LookaheadConfig


@dataclass(frozen=True)
class Settings:
    """The choices that both commands share.

    Attributes:
        prompt: The PROMPT argument; `-` stands for standard input, `None` for no argument.
        file: File to read the prompt from.
        model: Folder of the model, `None` for the demonstration model.
        config: How lookahead decoding drafts.
        max_new_tokens: Most tokens to generate, before clipping to the model's context.
        dtype: Name of the type of the weights, or `"auto"` for the one they were saved in.
        device: Device to run on, `None` for the best one there is.
        json: Print one JSON object instead of text.
        no_color: Never print colours.
    """

    prompt: str | None
    file: Path | None
    model: Path | None
    config: LookaheadConfig
    max_new_tokens: int
    dtype: str
    device: str | None
    json: bool
    no_color: bool
