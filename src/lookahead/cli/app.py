"""The `lookahead` command: subcommands, and exit codes for errors and signals."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from lookahead.bench.suite import read_suite
from lookahead.cli.options import Command, Group, Settings, command
from lookahead.cli.settings import (
    BatchSettings,
    BenchSettings,
    ChatSettings,
    CompareSettings,
    DecodingSettings,
    GenerateSettings,
    LawSettings,
    ModelSettings,
    ServeSettings,
    TraceSettings,
    TuneSettings,
    WarmUpSettings,
)
from lookahead.cli.signals import BROKEN_PIPE, DISK_FULL, ERROR, INTERRUPTED, OK, raise_on_interrupt
from lookahead.cli.terminal import Consoles, read_prompt, spinner
from lookahead.core.files import OWN_FOLDER, user_cache
from lookahead.demo import DEMO_PROMPT
from lookahead.errors import InvalidArgumentError, LookaheadError
from lookahead.parallel.launcher import check_memory, started_together
from lookahead.version import __version__

_UsageError: Any = typer.BadParameter.__mro__[1]
"""Base class of typer's errors about a command line; typer has no public name for it."""

_CACHED = {"loops-*": "compiled loops", "findings": "trials", "cost": "curves of step times"}
"""Content of the cache, by patterns of folder names."""

app = typer.Typer(
    name="lookahead",
    help="Lookahead decoding: the same text from a transformers model in fewer steps.",
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(cls=Group, help="Benchmarks: methods on tasks and models, from one small file.")
app.add_typer(bench, name="bench")

cache = typer.Typer(cls=Group, help="Files that the library keeps: compiled loops, and measurements of this machine.")
app.add_typer(cache, name="cache")


def run(argv: Sequence[str] | None) -> int:
    """Run the command line and return its exit code; see `lookahead.cli.main`."""
    _never_fail_on_encoding()
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = app(args=arguments, prog_name="lookahead", standalone_mode=False, obj=arguments)
        sys.stdout.flush()  # report a full disk or a closed pipe here, not at interpreter exit
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich end the process with exit code 1
            return _broken_pipe()
        raise
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _UsageError as error:
        return _error(_about_usage(error))
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exception(error)
        return _error(_in_words(error))
    return int(code or 0)


def _error(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return ERROR


def _about_usage(error: Any) -> str:
    """Message of an error in the command line, with the command that explains it."""
    message: str = error.format_message()
    if message.startswith("Invalid value"):  # says which values are valid
        return message
    return f"{message.rstrip('.')}; {getattr(error.ctx, 'command_path', 'lookahead')} --help shows the arguments"


def _in_words(error: Exception) -> str:
    """Message of an error, with the type of an error that is not from this library."""
    if isinstance(error, LookaheadError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (*DISK_FULL, errno.EROFS):  # the file's name, if it has one
        name = error.filename or "standard output"
        return f"cannot write to {name}: {error.strerror}; make room, or choose another file"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{error.strerror}: {error.filename!s:.100}...; choose a shorter one"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _broken_pipe() -> int:
    # Python flushes stdout once more at exit, which would fail without a reader.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _never_fail_on_encoding() -> None:
    """Print `?` for characters that the terminal cannot show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@app.callback(invoke_without_command=True)
def _lookahead(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"lookahead {__version__}")
        raise typer.Exit
    _help_without_command(context)


@cache.callback(invoke_without_command=True)
@bench.callback(invoke_without_command=True)
def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@command(app, GenerateSettings)
def generate(settings: GenerateSettings) -> int:
    """Continue a prompt, greedily unless --sample is given.

    The prompt comes from the argument, from --file or from standard input. On a terminal the tokens of one
    step share a colour. The text goes to standard output, statistics go to standard error.
    """
    ranks = settings.parallel or 1
    if settings.sample and settings.sampling_seed is None and (ranks > 1 or started_together()):
        raise InvalidArgumentError("--sample on several processes needs --sampling-seed, so that all sample the same")
    if ranks > 1 and not started_together():
        return _start_ranks(ranks, settings)
    return _start("generate", settings, read_prompt(settings.prompt, settings.file))


def _start_ranks(count: int, settings: GenerateSettings) -> int:
    """Check the settings, and run the same command line on `count` ranks."""
    raise_on_interrupt()
    if not hasattr(signal, "pthread_sigmask"):
        raise InvalidArgumentError(f"--parallel {count} is not supported on Windows; leave it out")
    from lookahead.parallel.launcher import run_ranks

    check_memory(settings.config, count)
    model = settings.find_model(Consoles(no_color=settings.no_color).notes)  # downloaded once, not by each rank
    if model.is_gguf or model.is_mlx:
        raise InvalidArgumentError(
            f"--parallel {count} applies to transformers models only; leave it out for a GGUF file or a model of MLX"
        )
    if settings.device not in (None, "cpu"):
        from lookahead.backends.loading import check_device  # late, as it imports torch

        check_device(settings.device)
    text = read_prompt(settings.prompt, settings.file)  # here, as ranks cannot share standard input
    return run_ranks(count, "lookahead.cli:main", settings.argv, text.encode())


def _start(module: str, settings: ModelSettings, *arguments: Any, entry: str = "run") -> int:
    """Run function `entry` of a command's module, with the output of other libraries off.

    The module is imported last: torch takes seconds, and help texts and errors must not wait for it.
    """
    if isinstance(settings, DecodingSettings) and settings.page is not None:
        from lookahead.trace import check_path

        check_path(settings.page)
    consoles = Consoles(no_color=settings.no_color)
    settings = replace(settings, local_model=settings.find_model(consoles.notes))
    with spinner(consoles.notes, "loading the model"):
        run = getattr(import_module(f"lookahead.cli.{module}"), entry)
    from lookahead.cli.loading import quiet_libraries

    with quiet_libraries(settings.in_options):
        code: int = run(settings, consoles, *arguments)
    return code


@command(app, CompareSettings)
def compare(settings: CompareSettings) -> int:
    """Decode a prompt plainly and with lookahead, side by side.

    Without a prompt a built-in one is used. The exit code is 0 if both outputs are identical, 1 if not. In
    float32 they must be identical, also when sampled with one seed. In 16-bit types rounding can decide
    between tokens that are nearly equally likely.
    """
    return _start("compare", settings, read_prompt(settings.prompt, settings.file, DEMO_PROMPT))


@command(app, TraceSettings)
def trace(settings: TraceSettings) -> int:
    """Continue a prompt, and write a page that shows every step of it.

    One HTML file, which works without a network: the text, the tree of each step with the source of every node, the
    accepted tokens, and the time of each part. Without a prompt a built-in one is used. After Ctrl-C the page shows
    the steps so far.
    """
    return _start("generate", settings, read_prompt(settings.prompt, settings.file, DEMO_PROMPT))


@command(app, ChatSettings)
def chat(settings: ChatSettings) -> int:
    """Talk with a model, until its context is full.

    Type turns, or pipe them in, one per line. /reset forgets the conversation, /help lists the commands, /exit or
    Ctrl-D ends. Ctrl-C stops an answer, and the conversation continues from there; at the prompt, or with piped
    input, it ends the chat. Tokens that are in the cache are not computed again.
    """
    return _start("chat", settings)


@command(app, BatchSettings)
def batch(settings: BatchSettings) -> int:
    """Answer a file of prompts, many at once.

    Each prompt gets the same text as in a run of its own. An answer is written as soon as it is complete; the same
    command resumes an earlier run that was stopped. The exit code is 1 if a prompt could not be answered.
    """
    return _start("batch", settings)


@command(app, ServeSettings)
def serve(settings: ServeSettings) -> int:
    """Serve a model over HTTP, with the API of OpenAI.

    Requests share forward passes, and each gets the same text as in a run of its own. SIGTERM or Ctrl-C lets running
    requests finish; a second one fails them, and a third one ends the server at once.
    """
    return _start("serve", settings)


@command(app, TuneSettings)
def tune(settings: TuneSettings) -> int:
    """Measure the time of a step by its size, and keep the curve for later runs.

    Steps of several sizes are timed after texts of several lengths. The curve is stored for this model, type, device
    and these versions; without a stored curve the decoder learns it in its first steps.
    """
    return _start("tune", settings)


@command(app, WarmUpSettings, "warm-up")
def warm_up(settings: WarmUpSettings) -> int:
    """Do the one-time work of a first call, for example while a container image is built.

    Compile the drafting loops, try the model and measure the time of its steps. Results are kept in the user's cache,
    for this kind of processor; the folders are printed.
    """
    return _start("tune", settings, entry="warm_up")


@command(bench, BenchSettings, "run")
def bench_run(settings: BenchSettings) -> int:
    """Measure every method on every task and model of a benchmark.

    Every output is compared with plain `model.generate`; the exit code is 1 if one differs that must be identical.
    Each result is written to disk at once, and the same command resumes an earlier run that was stopped.
    """
    described = read_suite(settings.suite, settings.data)
    from lookahead.cli.bench import run  # late, as in `_start`

    return run(settings, described)


@command(bench, LawSettings, "law")
def bench_law(settings: LawSettings) -> int:
    """Fit the scaling law of the paper (Eq. 7) to measured rows.

    RESULTS is the output of `bench run` with the paper's method at several N and W = G, and n-grams from the window
    only.
    """
    from lookahead.cli.bench import fit_law  # late, as in `_start`

    return fit_law(settings)


@command(cache, Settings, "show")
def cache_show(settings: Settings) -> int:
    """Print the folder and the size of these files."""
    out, folder = Consoles(no_color=settings.no_color).out, user_cache() / OWN_FOLDER
    out.print(str(folder))
    for names, content in _CACHED.items():
        out.print(f"  {decimal(sum(map(_bytes_in, folder.glob(names)))):>8}  {content}")
    return OK


@command(cache, Settings, "clear")
def cache_clear(settings: Settings) -> int:
    """Remove these files; later runs compile and measure anew.

    Models of the Hub (see `hf cache`) and memory files are stored elsewhere and stay.
    """
    folder = user_cache() / OWN_FOLDER
    size, target = _bytes_in(folder), folder.resolve()
    if target.exists():
        shutil.rmtree(target)
    if folder.is_symlink():  # later runs write to its target, so it has to exist
        target.mkdir(exist_ok=True)
    Consoles(no_color=settings.no_color).out.print(f"removed {decimal(size)} in {folder}")
    return OK


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@app.command("help", cls=Command)
def _help(
    names: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="Its name, as in `bench run`.")] = None,
) -> int:
    """Show the help text of a command."""
    return run([*(names or ()), "--help"])
