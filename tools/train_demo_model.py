#!/usr/bin/env python
"""Train a small code model, like the one that lookahead ships, from Python files on this machine.

    python tools/train_demo_model.py                                  # the shipped shape, this environment
    python tools/train_demo_model.py --tokens 1000000 --device cpu    # a shorter run
    python tools/train_demo_model.py --source ~/code --output my-model
    python tools/train_demo_model.py --start-from my-model --own-text-weight 1 --output my-model-2   # fewer loops

Ctrl-C stops a run after the step it is in; the same command continues it. Under one seed a run on a CPU is
repeatable bit for bit, stopped or not; on a GPU up to the rounding of kernels that add in no fixed order.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from demo_training.settings import TrainingError, TrainingSettings, flag

EXIT_REFUSED = 2
EXIT_STOPPED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    values = vars(build_parser().parse_args(arguments))
    console = Console(markup=False, highlight=False, soft_wrap=True)
    try:
        chosen = {name: values.pop(name) for name in ("work", "output", "checkpoint_minutes", "resume")}
        if not chosen["checkpoint_minutes"] >= 0:
            raise TrainingError(f"--checkpoint-minutes {chosen['checkpoint_minutes']} must be at least 0")
        # Absolute, so that a run continued from another folder is seen to be the same.
        values["source"] = tuple(str(Path(source).expanduser().resolve()) for source in values["source"])
        if values["start_from"]:
            values["start_from"] = str(Path(values["start_from"]).expanduser().resolve())
        return _train(TrainingSettings(**values), console=console, **chosen)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the last checkpoint, if any", file=sys.stderr)
        return EXIT_STOPPED


def build_parser() -> argparse.ArgumentParser:
    """Build the command line; the recipe's options are the fields of `TrainingSettings`."""
    description, _, notes = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=notes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        metavar="DIR",
        action="append",
        default=[],
        help="folder of Python files, repeatable; each entry directly in it counts as a package "
        "(default: standard library and site-packages of this environment)",
    )
    parser.add_argument(
        "--work",
        metavar="DIR",
        type=Path,
        default=Path("checkpoints/demo-training"),
        help="where the tokenised files are kept for later runs (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("checkpoints/demo-model"),
        help="where the checkpoint and at last the model go (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint-minutes",
        metavar="MINUTES",
        type=float,
        default=5.0,
        help="time between checkpoints; 0 writes one after each step (default: %(default)s)",
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue the checkpoint in the output folder if there is one; --no-resume replaces it "
        "(default: --resume)",
    )
    recipe = parser.add_argument_group("recipe", "what decides the weights; a resumed run must have the same")
    for field in dataclasses.fields(TrainingSettings):
        if "help" in field.metadata:
            choices = field.metadata["choices"]
            recipe.add_argument(
                flag(field.name),
                type=type(field.default),
                default=field.default,
                choices=choices or None,
                metavar=None if choices else {int: "N", float: "X", str: "NAME"}[type(field.default)],
                help=f"{field.metadata['help']} (default: %(default)s)",
            )
    return parser


def _train(
    settings: TrainingSettings, console: Console, work: Path, output: Path, checkpoint_minutes: float, resume: bool
) -> int:
    # Imported here so that --help need not import torch and transformers, which takes seconds.
    from demo_training.checkpoint import CHECKPOINT_NAME, read_checkpoint, restore_checkpoint, save_checkpoint
    from demo_training.model_folder import RECORD_NAME, write_model_folder
    from demo_training.token_data import open_token_data
    from demo_training.trainer import choose_device, start_run, train

    settings = _settled(settings, console)
    device = choose_device(settings.device)
    checkpoint = output / CHECKPOINT_NAME
    state = read_checkpoint(checkpoint, settings) if resume else None
    if resume and state is None and (output / RECORD_NAME).exists():
        raise TrainingError(
            f"--output {output} already holds a finished model: choose another folder, or give --no-resume "
            "to train anew and replace it"
        )
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if not (checkpoint.exists() or RECORD_NAME in names or names <= {f"{CHECKPOINT_NAME}.partial"}):
        raise TrainingError(f"--output {output} holds files that are no model of this tool: choose another folder")
    data = open_token_data(settings, work, state["data_key"] if state else None, console)
    run = start_run(settings, device)
    if state:
        restore_checkpoint(run, state)
        console.print(f"continuing {checkpoint} after step {run.step}/{settings.steps}")
    else:
        # With --no-resume, an early stop must not leave the old run's checkpoint to be continued.
        checkpoint.unlink(missing_ok=True)
    console.print(
        f"{run.model.num_parameters():,} parameters on {device}; {data.facts['tokens']:,} tokens in "
        f"{data.facts['files']:,} files; {settings.steps:,} steps of {settings.batch_tokens:,} tokens"
    )

    def save() -> None:
        save_checkpoint(checkpoint, run, settings, data.key)

    with _training_progress(console) as progress:
        finished = train(run, data, settings, progress, save, save_seconds=60 * checkpoint_minutes)
    if not finished:
        console.print(f"stopped after step {run.step}/{settings.steps}; the same command continues the run")
        return EXIT_STOPPED
    write_model_folder(output, run, data, settings, device)
    checkpoint.unlink(missing_ok=True)
    console.print(f"trained in {run.seconds / 60:.1f} minutes; the model is in {output}")
    return 0


def _settled(settings: TrainingSettings, console: Console) -> TrainingSettings:
    """Replace each `auto` by the chosen value, so that a checkpoint records the actual settings."""
    from demo_training.optimizers import ADAMW_ONLY, choose_optimizer
    from demo_training.trainer import choose_device

    optimizer = choose_optimizer(settings.optimizer)
    if optimizer == ADAMW_ONLY and settings.optimizer == "auto":
        console.print(
            "this torch has no torch.optim.Muon (2.9 and later have): AdamW trains everything, which takes "
            "more tokens to the same loss"
        )
    return dataclasses.replace(settings, optimizer=optimizer, device=str(choose_device(settings.device)))


def _training_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        # A step may take seconds: the default window of 30 seconds would hold too few for an estimate.
        speed_estimate_period=600,
    )


if __name__ == "__main__":
    sys.exit(main())
