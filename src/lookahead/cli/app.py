"""The `lookahead` command: its subcommands, and how errors and signals become exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead.bench.suite_file import read_suite
from lookahead.cli import exit_codes, ranks
from lookahead.cli import options as opt
from lookahead.cli.model_folder import model_folder
from lookahead.cli.prompt import read_prompt, read_prompt_or
from lookahead.cli.settings import BenchSettings, ChatSettings, PromptSettings, TuneSettings
from lookahead.cli.startup import raise_on_interrupt
from lookahead.cli.versions import package_version
from lookahead.demo import DEMO_PROMPT
from lookahead.errors import InvalidArgumentError, LookaheadError

DEMO = Path("demo")
"""For `tune` another name of the demonstration model, unless there is a folder of this name."""

_UsageError: Any = typer.BadParameter.__mro__[1]
"""Base class of everything typer finds wrong with a command line; typer has no public name for it."""


app = typer.Typer(
    name="lookahead",
    help="Lookahead decoding: the same text from a transformers model in fewer steps.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Benchmarks: methods on tasks and models, from one small file; tables and plots.")
app.add_typer(bench, name="bench")


def run(argv: Sequence[str] | None) -> int:
    """Run the command line and return its exit code; see `lookahead.cli.main`."""
    _never_fail_on_encoding()
    try:
        given = sys.argv[1:] if argv is None else list(argv)
        code = app(args=given, prog_name="lookahead", standalone_mode=False, obj=given)
        sys.stdout.flush()  # a full disk or a closed pipe shows here, not at interpreter exit
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich end the process with exit code 1
            return _broken_pipe()
        raise
    except (KeyboardInterrupt, typer.Abort):
        return exit_codes.INTERRUPTED
    except _UsageError as error:
        return _error(error.format_message())
    except (LookaheadError, OSError) as error:
        return _error(str(error))
    return int(code or 0)


def _error(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return exit_codes.ERROR


def _broken_pipe() -> int:
    # Python flushes stdout once more at exit; with nobody reading, that must go nowhere instead of failing.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_codes.BROKEN_PIPE


def _never_fail_on_encoding() -> None:
    """Let a terminal that cannot show a character show `?` instead."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@app.callback(invoke_without_command=True)
def _lookahead(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"lookahead {package_version()}")
        raise typer.Exit
    _help_without_command(context)


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def generate(
    context: typer.Context,
    prompt: opt.PromptArgument = None,
    file: opt.FileOption = None,
    model: opt.ModelOption = None,
    preset: opt.PresetOption = None,
    step_budget: opt.StepBudgetOption = None,
    memory: opt.MemoryOption = None,
    window_size: opt.WindowSizeOption = None,
    ngram_size: opt.NgramSizeOption = None,
    guess_set_size: opt.GuessSetSizeOption = None,
    pool_from_prompt: opt.PoolFromPromptOption = None,
    pool_from_output: opt.PoolFromOutputOption = None,
    seed: opt.SeedOption = None,
    sample: opt.SampleOption = False,
    temperature: opt.TemperatureOption = None,
    top_p: opt.TopPOption = None,
    top_k: opt.TopKOption = None,
    min_p: opt.MinPOption = None,
    sampling_seed: opt.SamplingSeedOption = None,
    repetition_penalty: opt.RepetitionPenaltyOption = None,
    stop: opt.StopOption = None,
    max_new_tokens: opt.MaxNewTokensOption = opt.DEFAULT_MAX_NEW_TOKENS,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = None,
    pack_weights: opt.PackWeightsOption = False,
    parallel: opt.ParallelOption = None,
    json: opt.JsonOption = False,
    no_color: opt.NoColorOption = False,
) -> int:
    """Continue a prompt, greedily unless --sample is given.

    The prompt comes from the argument, from --file or from standard input. On a terminal the tokens of one
    step share a colour. The text goes to standard output, statistics go to standard error.
    """
    config = opt.lookahead_config(
        preset=preset,
        step_budget=step_budget,
        memory=memory,
        pack_weights=pack_weights,
        window_size=window_size,
        ngram_size=ngram_size,
        guess_set_size=guess_set_size,
        pool_from_prompt=pool_from_prompt,
        pool_from_output=pool_from_output,
        seed=seed,
    )
    if step_budget is None and window_size is None and guess_set_size is None:
        config = ranks.scaled(config, parallel)
    model_folder(model)
    sampling = opt.sampling(sample, temperature, top_p, top_k, sampling_seed, min_p)
    stops = opt.stop_texts(stop)
    settings = PromptSettings(
        *(model, config, max_new_tokens, dtype, device, json, no_color, prompt, file),
        *(sampling, repetition_penalty, stops),
    )
    if sampling is not None and sampling.seed is None and ((parallel or 1) > 1 or ranks.started_together()):
        raise InvalidArgumentError("--sample on several processes needs --sampling-seed, so that all draw alike")
    if parallel is not None and parallel > 1 and not ranks.started_together():
        raise_on_interrupt()
        return ranks.start_ranks(parallel, settings, context.obj)
    text = read_prompt(settings)
    # Importing torch takes seconds; help texts and whatever is refused must not wait for it.
    from lookahead.cli.generate import run

    return run(settings, text)


@app.command()
def compare(
    prompt: opt.PromptArgument = None,
    file: opt.FileOption = None,
    model: opt.ModelOption = None,
    preset: opt.PresetOption = None,
    step_budget: opt.StepBudgetOption = None,
    memory: opt.MemoryOption = None,
    window_size: opt.WindowSizeOption = None,
    ngram_size: opt.NgramSizeOption = None,
    guess_set_size: opt.GuessSetSizeOption = None,
    pool_from_prompt: opt.PoolFromPromptOption = None,
    pool_from_output: opt.PoolFromOutputOption = None,
    seed: opt.SeedOption = None,
    sample: opt.SampleOption = False,
    temperature: opt.TemperatureOption = None,
    top_p: opt.TopPOption = None,
    top_k: opt.TopKOption = None,
    min_p: opt.MinPOption = None,
    sampling_seed: opt.SamplingSeedOption = None,
    repetition_penalty: opt.RepetitionPenaltyOption = None,
    stop: opt.StopOption = None,
    max_new_tokens: opt.MaxNewTokensOption = opt.DEFAULT_MAX_NEW_TOKENS,
    dtype: opt.DtypeOption = "float32",
    device: opt.DeviceOption = None,
    pack_weights: opt.PackWeightsOption = False,
    repeats: opt.RepeatsOption = 3,
    json: opt.JsonOption = False,
    no_color: opt.NoColorOption = False,
) -> int:
    """Decode a prompt plainly and with lookahead, side by side.

    Without a prompt a built-in one is used. The exit code is 0 if both outputs are identical, 1 if not. In
    float32 they must be, and so must texts that are drawn under one seed; in shorter types rounding can decide
    between tokens that are nearly equally likely.
    """
    config = opt.lookahead_config(
        preset=preset,
        step_budget=step_budget,
        memory=memory,
        pack_weights=pack_weights,
        window_size=window_size,
        ngram_size=ngram_size,
        guess_set_size=guess_set_size,
        pool_from_prompt=pool_from_prompt,
        pool_from_output=pool_from_output,
        seed=seed,
    )
    model_folder(model)
    sampling = opt.sampling(sample, temperature, top_p, top_k, sampling_seed, min_p)
    stops = opt.stop_texts(stop)
    settings = PromptSettings(
        *(model, config, max_new_tokens, dtype, device, json, no_color, prompt, file),
        *(sampling, repetition_penalty, stops),
    )
    text, is_demo = read_prompt_or(settings, DEMO_PROMPT)
    from lookahead.cli.compare import run  # late, as in `generate`

    return run(settings, text, is_demo, repeats)


@app.command()
def chat(
    model: opt.ModelOption = None,
    system: opt.SystemOption = None,
    template: opt.TemplateOption = None,
    raw: opt.RawOption = False,
    preset: opt.PresetOption = None,
    step_budget: opt.StepBudgetOption = None,
    memory: opt.MemoryOption = None,
    window_size: opt.WindowSizeOption = None,
    ngram_size: opt.NgramSizeOption = None,
    guess_set_size: opt.GuessSetSizeOption = None,
    pool_from_prompt: opt.ChatPoolFromPromptOption = None,
    pool_from_output: opt.PoolFromOutputOption = None,
    seed: opt.SeedOption = None,
    sample: opt.SampleOption = False,
    temperature: opt.TemperatureOption = None,
    top_p: opt.TopPOption = None,
    top_k: opt.TopKOption = None,
    min_p: opt.MinPOption = None,
    sampling_seed: opt.SamplingSeedOption = None,
    repetition_penalty: opt.RepetitionPenaltyOption = None,
    stop: opt.StopOption = None,
    max_new_tokens: opt.MaxNewTokensOption = opt.DEFAULT_MAX_ANSWER_TOKENS,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = None,
    pack_weights: opt.PackWeightsOption = False,
    json: opt.ChatJsonOption = False,
    no_color: opt.NoColorOption = False,
) -> int:
    """Talk with a model, in as many turns as its context holds.

    Turns are typed, or piped in, one a line. /reset forgets the conversation, /help lists the commands, /exit or
    Ctrl-D ends. Ctrl-C stops an answer, and the conversation goes on from there; at the prompt, or where turns are
    piped in, it ends the chat. Nothing that is in the cache already is computed again.
    """
    config = opt.lookahead_config(
        preset=preset,
        step_budget=step_budget,
        memory=memory,
        pack_weights=pack_weights,
        window_size=window_size,
        ngram_size=ngram_size,
        guess_set_size=guess_set_size,
        pool_from_prompt=pool_from_prompt,
        pool_from_output=pool_from_output,
        seed=seed,
    )
    if config.preset == "auto" and memory is None:
        config = replace(config, memory="process")  # turns learn from each other
    if config.preset == "paper" and pool_from_prompt is None:
        config = replace(config, pool_from_prompt=True)  # answers repeat what was said before
    sampling = opt.sampling(sample, temperature, top_p, top_k, sampling_seed, min_p)
    stops = opt.stop_texts(stop)
    model_folder(model)
    settings = ChatSettings(
        *(model, config, max_new_tokens, dtype, device, json, no_color),
        *(system, template, raw, sampling, repetition_penalty, stops),
    )
    from lookahead.cli.chat import run  # late, as in `generate`

    return run(settings)


@app.command()
def tune(
    model: opt.ModelOption = None,
    contexts: opt.ContextsOption = None,
    nodes: opt.NodesOption = None,
    repeats: opt.TuneRepeatsOption = 7,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = None,
    pack_weights: opt.TunePackWeightsOption = False,
    plot: opt.PlotOption = None,
    store: opt.StoreOption = True,
    store_folder: opt.StoreFolderOption = None,
    json: opt.JsonOption = False,
    no_color: opt.NoColorOption = False,
) -> int:
    """Measure what a step costs, and keep the curve for later runs.

    Steps of several sizes are timed after texts of several lengths, beside what reading the weights alone takes on
    this machine. The curve is stored for this model, type, device and these versions; without a stored one the
    decoder learns it in its first steps.
    """
    if model == DEMO and not DEMO.exists():
        model = None
    model_folder(model)
    settings = TuneSettings(
        model, dtype, device, json, no_color, contexts, nodes, repeats, pack_weights, plot, store, store_folder
    )
    from lookahead.cli.tune import run  # late, as in `generate`

    return run(settings)


@bench.command("run")
def bench_run(
    suite: opt.SuiteArgument,
    output: opt.ResultsFileOption,
    data: opt.DataOption = None,
    limit: opt.LimitOption = None,
    restart: opt.RestartOption = False,
    device: opt.DeviceOption = None,
    threads: opt.ThreadsOption = None,
    no_color: opt.NoColorOption = False,
) -> int:
    """Measure every method on every task and model of a benchmark.

    Every output is compared with that of plain `model.generate`; the exit code is 1 if one differs that must not.
    Each result is on the disk at once, and the same command goes on where an earlier one was stopped.
    """
    settings = BenchSettings(suite, output, data, limit, restart, device, threads, no_color)
    described = read_suite(suite, data)
    from lookahead.cli.bench import run  # late, as in `generate`

    return run(settings, described)


@bench.command("report")
def bench_report(
    results: opt.ResultsArgument,
    markdown: opt.MarkdownOption = None,
    plots: opt.PlotsOption = None,
    no_color: opt.NoColorOption = False,
) -> int:
    """Make tables and plots of raw results.

    The exit code is 1 if an output differs from plain decoding that must not.
    """
    from lookahead.cli.bench import make_report  # late, as in `generate`

    return make_report(results, markdown, plots, no_color)
