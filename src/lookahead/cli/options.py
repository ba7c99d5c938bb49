"""The options of all commands, as annotated types for typer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from lookahead.cli.settings import Sampling
from lookahead.config import PAPER, PRESETS, LookaheadConfig
from lookahead.errors import InvalidArgumentError

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_MAX_ANSWER_TOKENS = 512

_SOURCE = "Prompt and model"
_DRAFT = "Drafting (changes the number of steps, never the text)"
_CONVERSATION = "Conversation"
_SAMPLING = "Sampling"
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


def _positive(text: str) -> float:
    return _number(text, 0, math.inf, "above 0")


def _probability(text: str) -> float:
    return _number(text, 0, 1, "above 0 and at most 1")


def _number(text: str, above: float, most: float, allowed: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None
    if not above < number <= most or math.isinf(number):
        raise typer.BadParameter(f"{text} is out of range; it must be {allowed}")
    return number


def _count(text: str) -> int:
    number = _whole_number(text)
    if number < 0:
        raise typer.BadParameter(f"{number} is out of range; it must be at least 0")
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
        show_default="auto, or the method whose sizes are given",
        rich_help_panel=_DRAFT,
    ),
]
StepBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--step-budget",
        metavar="INTEGER",
        parser=_whole_number,
        help="Nodes of every step, the root included.",
        show_default="as many as pay",
        rich_help_panel=_DRAFT,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="FILE",
        help="Keep what is learned about the model's predictions in this file, and draft from it.",
        show_default="none, begin anew each time",
        rich_help_panel=_DRAFT,
    ),
]
PackWeightsOption = Annotated[
    bool,
    typer.Option(
        "--pack-weights",
        help="On a CPU, keep a second copy of the weights in the order that is fastest to multiply.",
        rich_help_panel=_RUN,
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
        show_default=str(PAPER["window_size"]),
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
        show_default=str(PAPER["ngram_size"]),
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
        show_default=str(PAPER["guess_set_size"]),
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
ChatPoolFromPromptOption = Annotated[
    bool | None,
    typer.Option(
        "--pool-from-prompt/--no-pool-from-prompt",
        help="Fill the pool with the n-grams of the conversation: answers repeat what was said before.",
        show_default="yes with --preset paper",
        rich_help_panel=_DRAFT,
    ),
]
PoolFromOutputOption = Annotated[
    bool | None,
    typer.Option(
        "--pool-from-output/--no-pool-from-output",
        help="Fill the pool with the n-grams of the generated text as well.",
        show_default="as --pool-from-prompt",
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
ParallelOption = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        metavar="INTEGER",
        parser=_positive_number,
        help="Decode on this many processes of this machine, each with the model on a device of its own. Sizes grow "
        "with it where none is given. For several machines start this command with torchrun instead.",
        show_default="this process alone",
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
SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="TEXT",
        help="What the model is told before the first turn.",
        show_default=False,
        rich_help_panel=_CONVERSATION,
    ),
]
TemplateOption = Annotated[
    Path | None,
    typer.Option(
        "--template",
        metavar="FILE",
        help="Chat template in Jinja, instead of the one that comes with the tokenizer.",
        show_default=False,
        rich_help_panel=_CONVERSATION,
    ),
]
RawOption = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Use no chat template: every turn is appended on a new line and the model goes on right where it ends. "
        "The default for the demonstration model, which has no template.",
        rich_help_panel=_CONVERSATION,
    ),
]
SampleOption = Annotated[
    bool,
    typer.Option(
        "--sample/--greedy",
        help="Draw tokens, or take the likeliest ones. What the options below leave open is as in the model's own "
        "generation configuration.",
        show_default="greedy",
        rich_help_panel=_SAMPLING,
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="NUMBER",
        parser=_positive,
        help="Divides the logits: less than 1 for likelier tokens.",
        show_default="the model's",
        rich_help_panel=_SAMPLING,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="NUMBER",
        parser=_probability,
        help="Draw from the likeliest tokens that together are at least this probable.",
        show_default="the model's",
        rich_help_panel=_SAMPLING,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        metavar="INTEGER",
        parser=_count,
        help="Draw from this many of the likeliest tokens, 0 for all.",
        show_default="the model's",
        rich_help_panel=_SAMPLING,
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        metavar="NUMBER",
        parser=_probability,
        help="Draw from tokens that are at least this share as probable as the likeliest one.",
        show_default="the model's",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="NUMBER",
        parser=_positive,
        help="Above 1 makes tokens less likely that are in the text already; greedy decoding heeds it, too.",
        show_default="the model's",
        rich_help_panel=_SAMPLING,
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End after this text; give it several times for several.",
        show_default="the model's",
        rich_help_panel=_RUN,
    ),
]
SamplingSeedOption = Annotated[
    int | None,
    typer.Option(
        "--sampling-seed",
        "--sample-seed",
        metavar="INTEGER",
        parser=_count,
        help="Seed of all draws.",
        show_default="a new one every time",
        rich_help_panel=_SAMPLING,
    ),
]
ContextsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--context",
        "-c",
        metavar="INTEGER",
        parser=_positive_number,
        help="Tokens of text before the step; give it several times for several lengths.",
        show_default="128, 512 and 2048, as far as the model has room",
        rich_help_panel=_RUN,
    ),
]
NodesOption = Annotated[
    list[int] | None,
    typer.Option(
        "--nodes",
        metavar="INTEGER",
        parser=_positive_number,
        help="Tokens of one step; give it several times for several sizes. A step of 1 is always measured.",
        show_default="1, 2, 4, ... 128",
        rich_help_panel=_RUN,
    ),
]
TuneRepeatsOption = Annotated[
    int,
    typer.Option(
        "--repeats",
        metavar="INTEGER",
        parser=_positive_number,
        help="Timed steps of each size at each length; medians count.",
        rich_help_panel=_RUN,
    ),
]
TunePackWeightsOption = Annotated[
    bool,
    typer.Option(
        "--pack-weights",
        help="Measure with packed weights, on CPUs only; curves with and without are kept apart.",
        rich_help_panel=_RUN,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the curves and the memory limit into this PNG file.",
        show_default=False,
        rich_help_panel=_OUTPUT,
    ),
]
StoreOption = Annotated[
    bool,
    typer.Option("--store/--no-store", help="Keep the curve for later runs.", rich_help_panel=_OUTPUT),
]
StoreFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--store-folder",
        metavar="PATH",
        help="Folder to keep the curve in.",
        show_default="in the user's cache directory",
        rich_help_panel=_OUTPUT,
    ),
]
SuiteArgument = Annotated[
    Path,
    typer.Argument(metavar="SUITE", help="TOML file that names models, tasks and methods.", show_default=False),
]
ResultsArgument = Annotated[
    list[Path],
    typer.Argument(metavar="RESULTS", help="Raw results (JSON lines, also as .gz); several count as one."),
]
ResultsFileOption = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Raw results as JSON lines; what the file has already is not measured again.",
        show_default=False,
        rich_help_panel=_OUTPUT,
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        help="Folder of the prompt files.",
        show_default="the folder of SUITE",
        rich_help_panel=_SOURCE,
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="INTEGER",
        parser=_positive_number,
        help="Take only the first so many prompts of each task.",
        show_default=False,
        rich_help_panel=_SOURCE,
    ),
]
RestartOption = Annotated[
    bool,
    typer.Option("--restart", help="Throw earlier results in the file away.", rich_help_panel=_OUTPUT),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="INTEGER",
        parser=_positive_number,
        help="CPU threads.",
        show_default="as many as torch takes",
        rich_help_panel=_RUN,
    ),
]
MarkdownOption = Annotated[
    Path | None,
    typer.Option(
        "--markdown",
        metavar="FILE",
        help="Write the tables into this file; in a page that has markers for them, between those.",
        show_default="to standard output",
        rich_help_panel=_OUTPUT,
    ),
]
PlotsOption = Annotated[
    Path | None,
    typer.Option(
        "--plots",
        metavar="FOLDER",
        help="Draw plots as PNG files into this folder.",
        show_default="no plots",
        rich_help_panel=_OUTPUT,
    ),
]
ChatJsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object for each turn.", rich_help_panel=_OUTPUT),
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


def sampling(
    sample: bool,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    min_p: float | None,
) -> Sampling | None:
    """How tokens are drawn, `None` for greedy decoding; refuses options that greedy decoding would ignore."""
    if sample:
        return Sampling(temperature, top_p, top_k, seed, min_p)
    given = {"--temperature": temperature, "--top-p": top_p, "--top-k": top_k, "--min-p": min_p}
    given["--sampling-seed"] = seed
    for option, value in given.items():
        if value is not None:
            raise InvalidArgumentError(f"{option} {value} is about sampling, but decoding is greedy; add --sample")
    return None


def stop_texts(given: list[str] | None) -> tuple[str, ...]:
    """The texts of `--stop`; an empty one would end every text at once."""
    for text in given or ():
        if not text:
            raise InvalidArgumentError("--stop '' is empty; give the text to end after")
    return tuple(given or ())
