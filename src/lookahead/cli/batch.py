"""`lookahead batch`: answer a file of prompts, many at once, and resume a run that was stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from lookahead.backends.loading import LoadedModel, summary
from lookahead.bench.rows import Prompt, RowsFile, kept_lines, read_prompts
from lookahead.bench.suite import TaskSpec
from lookahead.cli.generate import arguments_of, fitted, text_options
from lookahead.cli.loading import load_for_decoding
from lookahead.cli.settings import BatchSettings
from lookahead.cli.signals import DIFFERENT, INTERRUPTED, OK
from lookahead.cli.terminal import Consoles, counts_line, decode, measuring_progress, print_json
from lookahead.errors import InvalidArgumentError, LookaheadError
from lookahead.serving import Engine, RequestHandle

AHEAD = 2
"""Waiting requests per running one; bounds the prompts in memory."""


def run(settings: BatchSettings, consoles: Consoles) -> int:
    """Answer the prompts that the output file has no answer to, and return the exit code."""
    prompts = read_prompts(TaskSpec(settings.prompts.stem, settings.prompts), faulty=True)
    fingerprints = {prompt.id: _fingerprint(settings, prompt) for prompt in prompts}
    interrupted = False
    _finished_rows(settings, fingerprints)
    loaded = load_for_decoding(settings, consoles.notes)
    finished = _finished_rows(settings, fingerprints)  # again: the file may have changed meanwhile
    begin = perf_counter()
    with RowsFile(settings.output, finished, lambda row: row["id"]) as file:
        earlier = len(file.rows)
        missing = [prompt for prompt in prompts if prompt.id not in file]
        with measuring_progress(consoles.notes, auto_refresh=True) as bar:
            task = bar.add_task("answers", total=len(missing))
            try:
                for rows in _answers(settings, loaded, missing):
                    file.append(*({**row, "request": fingerprints[row["id"]]} for row in rows))
                    bar.update(task, advance=len(rows))
            except KeyboardInterrupt:
                interrupted = True
        answers = file.rows
    failed = sum("error" in row for row in answers)
    answered = len(answers) - failed
    if settings.json:  # counts cover all runs that wrote the file
        counts = {"prompts": len(prompts), "answered": answered, "failed": failed}
        print_json(
            consoles.out, {"output": str(settings.output), **counts, **_sums(answers), "interrupted": interrupted}
        )
    else:
        new = [row for row in answers[earlier:] if "error" not in row]
        sums = _sums(new)
        consoles.notes.print(
            f"{settings.output}: {answered} of {len(prompts)} prompts answered, {len(new)} of them now"
        )
        consoles.notes.print(counts_line(sums["tokens"], sums["steps"], perf_counter() - begin), style="dim")
        if failed:
            consoles.notes.print(f"{failed} of {len(prompts)} prompts were not answered; their lines say why")
        if interrupted:
            consoles.notes.print("interrupted; run the same command again to resume")
    if interrupted:
        return INTERRUPTED
    return DIFFERENT if failed else OK


def _sums(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {name: sum(row.get(name, 0) for row in rows) for name in ("prompt_tokens", "tokens", "steps")}


def _answers(settings: BatchSettings, loaded: LoadedModel, prompts: list[Prompt]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of the requests that each step finished, and error rows of prompts that cannot be answered."""
    engine = Engine(loaded.model, settings.config, max_rows=settings.max_rows, kv_bytes=settings.kv_bytes)
    pending, running = iter(prompts), dict[str, RequestHandle]()
    while True:
        rows: list[dict[str, Any]] = []
        while len(running) < (1 + AHEAD) * settings.max_rows and (prompt := next(pending, None)) is not None:
            try:
                running[prompt.id] = _submit(settings, loaded, engine, prompt)
            except Exception as error:  # a tokenizer may raise anything; the other prompts are still answered
                rows.append(
                    {"id": prompt.id, "error": str(error) if isinstance(error, LookaheadError) else summary(error)}
                )
        done = [name for name, handle in running.items() if handle.done]
        rows += [_row(loaded, name, running.pop(name)) for name in done]
        if not running and not rows:
            return
        yield rows
        engine.step()


def _submit(settings: BatchSettings, loaded: LoadedModel, engine: Engine, prompt: Prompt) -> RequestHandle:
    if prompt.fault:
        raise InvalidArgumentError(prompt.fault)
    ids = loaded.tokenizer(prompt.text, return_tensors="pt", verbose=False).input_ids
    arguments = arguments_of(loaded, fitted(loaded, prompt.text, ids, settings.max_new_tokens))
    return engine.submit(**arguments, **text_options(loaded, settings), seed=settings.sampling_seed)


def _row(loaded: LoadedModel, name: str, handle: RequestHandle) -> dict[str, Any]:
    try:
        handle.result()
    except Exception as error:
        return {"id": name, "error": f"{type(error).__name__}: {error}"}
    counts = handle.statistics
    row = {"id": name, "text": decode(loaded.tokenizer, handle.tokens), "finish_reason": handle.finish_reason}
    return row | {"prompt_tokens": counts.prompt_tokens, "tokens": counts.tokens, "steps": counts.steps}


def _fingerprint(settings: BatchSettings, prompt: Prompt) -> str:
    """Hash of the prompt, the model and the settings that affect the text."""
    names = ("dtype", "max_new_tokens", "stop", "repetition_penalty", "sampling", "sampling_seed")
    source = settings.local_model
    model = source.origin if source is not None and source.origin else str(settings.model)
    identity = [model, *(getattr(settings, name) for name in names), prompt.text]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _is_answer(row: dict[str, Any]) -> bool:
    """Whether a row has the fields of an answer or an error, and a fingerprint."""
    answer = {"text", "finish_reason", "tokens", "steps"} <= row.keys()
    return {"id", "request"} <= row.keys() and (answer or "error" in row)


def _finished_rows(settings: BatchSettings, fingerprints: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of an earlier run, without errors of prompts that have changed since: those are answered again.

    Raises:
        InvalidArgumentError: The file has answers of another prompt, model or setting, or lines that are not answers.
    """
    if settings.output.resolve() == settings.prompts.resolve():
        raise InvalidArgumentError(f"--output {settings.output} is the file of prompts; choose another one")
    rows = []
    for row in kept_lines(settings.output, _is_answer, restart=settings.restart):
        if not _is_answer(row):
            raise InvalidArgumentError(
                f"{settings.output} contains lines that are not answers; choose another --output"
            )
        if row["request"] == fingerprints.get(row["id"]):
            rows.append(row)
        elif "error" not in row:
            raise InvalidArgumentError(
                f"{settings.output} has an answer to {row['id']!r} for another prompt, model or setting; choose "
                "another --output, or start over with --restart"
            )
    return rows
