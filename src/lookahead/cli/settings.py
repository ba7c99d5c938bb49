"""What the options of one command line add up to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lookahead.config import LookaheadConfig


@dataclass(frozen=True)
class Settings:
    """The choices that all commands share.

    Attributes:
        model: Folder of the model, `None` for the demonstration model.
        config: How lookahead decoding drafts.
        max_new_tokens: Most tokens to generate, before clipping to the model's context.
        dtype: Name of the type of the weights, or `"auto"` for the one they were saved in.
        device: Device to run on, `None` for the best one there is.
        json: Print JSON instead of text.
        no_color: Never print colours.
    """

    model: Path | None
    config: LookaheadConfig
    max_new_tokens: int
    dtype: str
    device: str | None
    json: bool
    no_color: bool


@dataclass(frozen=True)
class PromptSettings(Settings):
    """Settings of the commands that decode one prompt.

    Attributes:
        prompt: The PROMPT argument; `-` stands for standard input, `None` for no argument.
        file: File to read the prompt from.
    """

    prompt: str | None
    file: Path | None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. What is `None` is left to the model's own generation configuration.

    Attributes:
        temperature: Divides the logits.
        top_p: Keep the likeliest tokens that together are at least this probable.
        top_k: Keep this many of the likeliest tokens, 0 for all.
        seed: Seed of the draws of a session, `None` for a new one each time.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None


@dataclass(frozen=True)
class ChatSettings(Settings):
    """Settings of a conversation.

    Attributes:
        system: What the model is told before the first turn.
        template: File with a Jinja template to use instead of the tokenizer's own.
        raw: Put the turns one after another as plain text, without a template.
        sampling: How tokens are drawn, `None` for greedy decoding.
    """

    system: str | None
    template: Path | None
    raw: bool
    sampling: Sampling | None
