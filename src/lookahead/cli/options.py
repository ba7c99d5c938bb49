"""The options that both commands share, as annotated types for typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lookahead.config import PRESETS, LookaheadConfig

DEFAULT_MAX_NEW_TOKENS = 128

_SOURCE = "Prompt and model"
_DRAFT = "Drafting (changes the number of steps, never the text)"
_RUN = "Running"
_OUTPUT = "Output"


DTYPES = ("auto", "float32", "bfloat16", "float16")


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _positive_number(text: str) -> int:
    number = _whole_number(text)
    if number < 1:
        raise typer.BadParameter(f"{number} is out of range; it must be at least 1")
    return number


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise typer.BadParameter(f"{text!r} is not known; choose one of {', '.join(DTYPES)}")
    return text


PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="Text to continue, taken as it is; '-' reads standard input.",
        show_default=False,
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="PATH", help="Read the prompt from this UTF-8 file.", rich_help_panel=_SOURCE),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH",
        help="Folder of a causal language model with its tokenizer. Nothing is ever downloaded.",
        show_default="the demonstration model",
        rich_help_panel=_SOURCE,
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help=f"Drafting method: {', '.join(PRESETS)}.",
        show_default=LookaheadConfig.preset,
        rich_help_panel=_DRAFT,
    ),
]
WindowSizeOption = Annotated[
    int | None,
    typer.Option(
        "--window-size",
        "-W",
        metavar="INTEGER",
        parser=_whole_number,
        help="Columns of the lookahead window.",
        show_default=str(LookaheadConfig.window_size),
        rich_help_panel=_DRAFT,
    ),
]
NgramSizeOption = Annotated[
    int | None,
    typer.Option(
        "--ngram-size",
        "-N",
        metavar="INTEGER",
        parser=_whole_number,
        help="Length of the n-grams in the pool.",
        show_default=str(LookaheadConfig.ngram_size),
        rich_help_panel=_DRAFT,
    ),
]
GuessSetSizeOption = Annotated[
    int | None,
    typer.Option(
        "--guess-set-size",
        "-G",
        metavar="INTEGER",
        parser=_whole_number,
        help="N-grams kept for each first token, and so most candidates a step.",
        show_default=str(LookaheadConfig.guess_set_size),
        rich_help_panel=_DRAFT,
    ),
]
PoolFromPromptOption = Annotated[
    bool | None,
    typer.Option(
        "--pool-from-prompt/--no-pool-from-prompt",
        help="Fill the pool with the n-grams of the prompt first.",
        show_default="no",
        rich_help_panel=_DRAFT,
    ),
]
PoolFromOutputOption = Annotated[
    bool | None,
    typer.Option(
        "--pool-from-output/--no-pool-from-output",
        help="Fill the pool with the n-grams of the generated text as well.",
        show_default="no",
        rich_help_panel=_DRAFT,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="INTEGER",
        parser=_whole_number,
        help="Seed of the window's first tokens.",
        show_default=str(LookaheadConfig.seed),
        rich_help_panel=_DRAFT,
    ),
]
MaxNewTokensOption = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="INTEGER",
        parser=_positive_number,
        help="Most tokens to generate.",
        rich_help_panel=_RUN,
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="|".join(DTYPES),
        parser=_dtype,
        help="Type of the weights; 'auto' is the one they were saved in.",
        rich_help_panel=_RUN,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Device to run on, such as cpu, cuda or cuda:1.",
        show_default="cuda where there is one, else cpu",
        rich_help_panel=_RUN,
    ),
]
RepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats",
        metavar="INTEGER",
        parser=_positive_number,
        help="Timed runs of each side; medians are shown.",
        rich_help_panel=_RUN,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=_OUTPUT),
]
NoColorOption = Annotated[
    bool,
    typer.Option("--no-color", help="Print without colours.", rich_help_panel=_OUTPUT),
]


def lookahead_config(**options: str | int | bool | None) -> LookaheadConfig:
    """Configuration from the options that were given; those left out (`None`) keep the library's defaults."""
    return LookaheadConfig.from_dict({name: value for name, value in options.items() if value is not None})
