#!/usr/bin/env python
"""Train a small code model, like the one that lookahead ships, from Python files on this machine.

    python tools/train_demo_model.py                                  # the shipped shape, this environment
    python tools/train_demo_model.py --tokens 1000000 --device cpu    # a shorter run
    python tools/train_demo_model.py --source ~/code --output my-model
    python tools/train_demo_model.py --start-from my-model --own-text-weight 1 --output my-model-2   # fewer loops

Ctrl-C stops a run after its step; the same command continues it. Under one seed a run on a CPU is repeatable bit for
bit, stopped or not. transformers' `Trainer` trains, and needs `pip install accelerate`.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser

from demo_training.settings import TrainingError, TrainingSettings, flag, option
from demo_training.tokens import Tokens, read_tokens, write_tokens
from demo_training.trainer import initial_model, run_trainer

EXIT_REFUSED, EXIT_STOPPED = 2, 130
RECORD, WORK = "training.json", "unfinished"


@dataclass(frozen=True)
class Run:
    """Where a training writes, and whether it continues."""

    output: str = option("checkpoints/demo-model", "folder for the model, and for checkpoints until it is finished")
    checkpoint_steps: int = option(100, "steps between checkpoints")
    resume: bool = option(True, "continue the run in the output folder; --no-resume replaces it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = HfArgumentParser([TrainingSettings, Run], description=(__doc__ or "").partition("\n\n")[0])
    try:
        settings, run = parser.parse_args_into_dataclasses(None if arguments is None else list(arguments))
        finished = train(settings, run)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print(f"the model is in {run.output}" if finished else "stopped; the same command continues the run")
    return 0 if finished else EXIT_STOPPED


def train(settings: TrainingSettings, run: Run) -> bool:
    """Train a model, and write it into the output folder; return whether the run is finished.

    Raises:
        TrainingError: The output folder holds something else, or the settings do not fit.
    """
    output = Path(run.output)
    work = output / WORK
    _prepare(output, work, settings, run.resume)
    tokens = read_tokens(work, settings)
    trainer = run_trainer(initial_model(settings), tokens, settings, work, run.checkpoint_steps)
    if trainer.state.global_step < settings.steps:
        return False
    trainer.model.to(getattr(torch, settings.save_dtype)).save_pretrained(output)
    tokens.tokenizer.save_pretrained(output)
    record = json.dumps(_record(trainer, tokens, settings), indent=1, ensure_ascii=False)
    (output / RECORD).write_text(record + "\n", encoding="utf-8")
    shutil.rmtree(work)
    return True


def _prepare(output: Path, work: Path, settings: TrainingSettings, resume: bool) -> None:
    """Write the tokens into the folder of an unfinished run, or check that its settings are the same."""
    file = work / "settings.json"
    mine: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    if resume and file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        names = [name for name in mine if mine[name] != saved.get(name)]
        differences = [f"{flag(name)} {mine[name]} (was {saved.get(name)})" for name in names]
        if differences:
            raise TrainingError(
                f"--output {output} holds a run of other settings: {', '.join(differences)}. Give the same settings to "
                "continue it, another --output to keep it, or --no-resume to train from the start and replace it"
            )
        return
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if names and not names & {RECORD, WORK}:
        raise TrainingError(f"--output {output} holds files that are no model of this tool: choose another folder")
    if resume and RECORD in names:
        raise TrainingError(
            f"--output {output} already holds a finished model: choose another folder, or give --no-resume "
            "to train anew and replace it"
        )
    shutil.rmtree(work, ignore_errors=True)
    write_tokens(work, settings)
    file.write_text(json.dumps(mine), encoding="utf-8")


def _record(trainer: Any, tokens: Tokens, settings: TrainingSettings) -> dict[str, Any]:
    """Return the facts that describe the training and allow to repeat it."""
    used = dataclasses.asdict(settings)
    # Only the names of folders: a model folder is shared, and paths are private.
    used["source"] = [Path(source).name for source in settings.source] or ["running environment"]
    used["start_from"] = Path(settings.start_from).name
    losses = {row["step"]: dict[str, Any]() for row in trainer.state.log_history}
    for row in trainer.state.log_history:
        losses[row["step"]] |= {name: row[name] for name in ("step", "loss", "eval_loss") if name in row}
    return {
        "parameters": trainer.model.num_parameters(),
        "data": tokens.facts,
        "tokens_seen": settings.steps * settings.batch_tokens,
        "losses": list(losses.values()),
        "device": f"{trainer.args.device} ({platform.machine()}, threads: {torch.get_num_threads()})",
        "settings": used,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
