"""`lookahead batch`: answer a file of prompts, many at once, and go on where an earlier run stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from lookahead.backends.loading import LoadedModel, summary
from lookahead.bench.rows import Prompt, RowsFile, kept_lines, read_prompts
from lookahead.bench.suite import TaskSpec
from lookahead.cli import process
from lookahead.cli.generate import fitted, text_options
from lookahead.cli.loading import load_for_decoding, quiet_libraries
from lookahead.cli.rendering import Consoles, decode, measuring_progress, print_json
from lookahead.cli.settings import BatchSettings
from lookahead.errors import InvalidArgumentError, LookaheadError
from lookahead.serving import Engine, RequestHandle

AHEAD = 2
"""Requests that wait, for each that runs, so that prompts need not all be in memory."""


def run(settings: BatchSettings) -> int:
    """Answer what the file lacks, and return the exit code."""
    consoles = Consoles.create(no_color=settings.no_color)
    prompts = read_prompts(TaskSpec(settings.prompts.stem, settings.prompts), faulty=True)
    asked = {prompt.id: _fingerprint(settings, prompt) for prompt in prompts}
    kept = _kept(settings, asked)
    with quiet_libraries():
        loaded = load_for_decoding(settings, consoles.notes)
        with RowsFile(settings.output, kept, lambda row: row["id"]) as file:
            missing = [prompt for prompt in prompts if prompt.id not in file]
            try:
                _answer(settings, loaded, file, missing, asked, consoles.notes)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
            rows = file.rows
    failed = sum("error" in row for row in rows)
    if settings.json:
        print_json(consoles.out, _report(settings, len(prompts), rows, failed) | {"interrupted": interrupted})
    elif interrupted:
        consoles.notes.print(f"interrupted; {settings.output} has what was finished, the same command goes on")
    elif failed:
        consoles.notes.print(f"{failed} of {len(prompts)} prompts were not answered; their lines say why")
    if interrupted:
        return process.INTERRUPTED
    return process.DIFFERENT if failed else process.OK


def _report(settings: BatchSettings, prompts: int, rows: list[dict[str, Any]], failed: int) -> dict[str, Any]:
    """What the file of answers holds; counts are over all runs that made it."""
    counts = {"prompts": prompts, "answered": len(rows) - failed, "failed": failed}
    sums = {name: sum(row.get(name, 0) for row in rows) for name in ("prompt_tokens", "tokens", "steps")}
    return {"output": str(settings.output), **counts, **sums}


def _answer(
    settings: BatchSettings,
    loaded: LoadedModel,
    file: RowsFile,
    missing: list[Prompt],
    asked: dict[str, str],
    notes: Console,
) -> None:
    """Answer prompts; a line is written as soon as an answer is complete."""
    engine = Engine(loaded.model, settings.config, max_rows=settings.max_rows, kv_bytes=settings.kv_bytes)
    options = text_options(loaded, settings) | {"seed": settings.sampling_seed}
    options |= {"tokenizer": loaded.tokenizer} if settings.stop else {}
    left, open_requests = iter(missing), dict[str, RequestHandle]()

    def submit() -> Iterator[dict[str, Any]]:
        while len(open_requests) < (1 + AHEAD) * settings.max_rows and (prompt := next(left, None)) is not None:
            try:
                open_requests[prompt.id] = _submit(settings, loaded, engine, prompt, **options)
            except Exception as error:  # whatever one prompt makes a tokenizer raise, the others are answered
                message = str(error) if isinstance(error, LookaheadError) else summary(error)
                yield {"id": prompt.id, "error": message, "request": asked[prompt.id]}

    with measuring_progress(notes, auto_refresh=True) as bar:
        task = bar.add_task("answers", total=len(missing))
        while True:
            rows = [*submit(), *_finished(loaded, open_requests, asked)]
            file.append(*rows)
            bar.update(task, advance=len(rows))
            if not open_requests and not rows:
                return
            engine.step()


def _submit(
    settings: BatchSettings, loaded: LoadedModel, engine: Engine, prompt: Prompt, **options: Any
) -> RequestHandle:
    if prompt.fault:
        raise InvalidArgumentError(prompt.fault)
    ids = loaded.tokenizer(prompt.text, return_tensors="pt", verbose=False).input_ids
    text = fitted(loaded, prompt.text, ids, settings.max_new_tokens)
    mask = torch.ones_like(ids)
    return engine.submit(ids, max_new_tokens=text.max_new_tokens, attention_mask=mask, **options)


def _finished(
    loaded: LoadedModel, open_requests: dict[str, RequestHandle], asked: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The lines of requests that are done, which leave."""
    for name in [name for name, handle in open_requests.items() if handle.done]:
        handle = open_requests.pop(name)
        row: dict[str, Any] = {"id": name}
        try:
            handle.result()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        else:
            statistics = handle.statistics
            row |= {"text": decode(loaded.tokenizer, handle.tokens), "finish_reason": handle.finish_reason}
            row |= {"prompt_tokens": statistics.prompt_tokens, "tokens": statistics.tokens, "steps": statistics.steps}
        yield {**row, "request": asked[name]}


def _fingerprint(settings: BatchSettings, prompt: Prompt) -> str:
    """Tells answers to a prompt from those of other models and settings, as far as these decide about the text."""
    names = ("dtype", "max_new_tokens", "stop", "repetition_penalty", "sampling", "sampling_seed")
    identity = [str(settings.model), *(getattr(settings, name) for name in names), prompt.text]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _kept(settings: BatchSettings, asked: dict[str, str]) -> list[dict[str, Any]]:
    """The lines of an earlier run. Errors of prompts that were changed since are left out, to be answered now.

    Raises:
        InvalidArgumentError: The file has answers to something else, or is none of answers.
    """
    kept = []
    for row in kept_lines(settings.output, restart=settings.restart):
        if "id" not in row or "request" not in row:
            raise InvalidArgumentError(f"{settings.output} holds something else than answers; choose another --output")
        if row["request"] == asked.get(row["id"]):
            kept.append(row)
        elif "error" not in row:
            raise InvalidArgumentError(
                f"{settings.output} has an answer to {row['id']!r} of another prompt, model or setting; choose another "
                "--output, or begin anew with --restart"
            )
    return kept
