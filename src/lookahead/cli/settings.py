"""What the options of one command line add up to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lookahead.config import LookaheadConfig


class ModelChoice(Protocol):
    """Which model to load, and how; all settings below say so.

    Attributes:
        model: Folder of the model, `None` for the demonstration model.
        dtype: Name of the type of the weights, or `"auto"` for the one they were saved in.
        device: Device to run on, `None` for the best one there is.
    """

    @property
    def model(self) -> Path | None: ...

    @property
    def dtype(self) -> str: ...

    @property
    def device(self) -> str | None: ...


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
class Sampling:
    """How tokens are drawn. What is `None` is left to the model's own generation configuration.

    Attributes:
        temperature: Divides the logits.
        top_p: Keep the likeliest tokens that together are at least this probable.
        top_k: Keep this many of the likeliest tokens, 0 for all.
        seed: Seed of all draws, `None` for a new one each time.
        min_p: Keep tokens that are at least this share as probable as the likeliest one.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    min_p: float | None = None


@dataclass(frozen=True)
class PromptSettings(Settings):
    """Settings of the commands that decode one prompt.

    Attributes:
        prompt: The PROMPT argument; `-` stands for standard input, `None` for no argument.
        file: File to read the prompt from.
        sampling: How tokens are drawn, `None` for greedy decoding.
        repetition_penalty: See `--help`; `None` leaves it to the model's own generation configuration.
        stop: Texts to end after, none to leave it to the model's own generation configuration.
    """

    prompt: str | None
    file: Path | None
    sampling: Sampling | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatSettings(Settings):
    """Settings of a conversation.

    Attributes:
        system: What the model is told before the first turn.
        template: File with a Jinja template to use instead of the tokenizer's own.
        raw: Put the turns one after another as plain text, without a template.
        sampling: How tokens are drawn, `None` for greedy decoding.
        repetition_penalty: See `PromptSettings`.
        stop: See `PromptSettings`.
    """

    system: str | None
    template: Path | None
    raw: bool
    sampling: Sampling | None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class TuneSettings:
    """Settings of a measurement of what steps cost.

    Attributes:
        model: Folder of the model, `None` for the demonstration model.
        dtype: Name of the type of the weights, or `"auto"` for the one they were saved in.
        device: Device to run on, `None` for the best one there is.
        json: Print JSON instead of text.
        no_color: Never print colours.
        contexts: Lengths of the text before a step, `None` for the usual ones that the model has room for.
        nodes: Sizes of the steps, `None` for the usual ones.
        repeats: Steps timed of each size after each length.
        pack_weights: See `LookaheadConfig.pack_weights`.
        plot: PNG file to draw the curves into, `None` for no plot.
        store: Keep the curve for later runs.
        folder: Folder to keep it in, `None` for the user's cache directory.
    """

    model: Path | None
    dtype: str
    device: str | None
    json: bool
    no_color: bool
    contexts: list[int] | None
    nodes: list[int] | None
    repeats: int
    pack_weights: bool
    plot: Path | None
    store: bool
    folder: Path | None


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark.

    Attributes:
        suite: The file that describes it.
        output: File of the raw results.
        data: Folder of the prompt files, `None` for that of `suite`.
        limit: Take only the first so many prompts of each task, `None` for as many as `suite` says.
        restart: Throw earlier results in `output` away.
        device: Device to run on, `None` for the best one there is.
        threads: CPU threads, `None` for as many as torch takes by itself.
        no_color: Never print colours.
    """

    suite: Path
    output: Path
    data: Path | None
    limit: int | None
    restart: bool
    device: str | None
    threads: int | None
    no_color: bool
