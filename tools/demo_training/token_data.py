"""The tokenised corpus, written once to the work folder and read as a numpy memmap."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from demo_training.corpus import Corpus, SourceFile, find_corpus
from demo_training.settings import TrainingError, TrainingSettings
from demo_training.tokenizer import END_OF_TEXT_ID, train_tokenizer

FILES_PER_BATCH = 64


class TokenData:
    """A folder of tokens in windows of one sequence plus the next token."""

    def __init__(self, folder: Path, settings: TrainingSettings) -> None:
        self.folder = folder
        self.key = folder.name
        self.facts: dict[str, Any] = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._settings = settings
        dtype = np.dtype(self.facts["dtype"])
        self._training = np.memmap(folder / "training.bin", dtype=dtype, mode="r")
        self._validation = np.memmap(folder / "validation.bin", dtype=dtype, mode="r")
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        if self._windows(self._training) < 1:
            raise TrainingError(
                f"--sequence-length {settings.sequence_length} is too long for the source files, which hold "
                f"{len(self._training)} training tokens: choose a shorter one, or give more source"
            )
        if self._windows(self._validation) < 1:
            raise TrainingError(
                f"--validation-percent {settings.validation_percent} gives {len(self._validation)} tokens, "
                f"too few for --sequence-length {settings.sequence_length}: hold out more"
            )

    def batch(self, step: int) -> npt.NDArray[np.int64]:  # [batch_size, sequence_length + 1]
        """Return the windows of a step; they only depend on seed and step, so resuming needs no state."""
        size = self._settings.batch_size
        chosen = [self._window_in_order(index) for index in range(step * size, (step + 1) * size)]
        return self._cut(self._training, chosen)

    def own_text_windows(self, number: int) -> npt.NDArray[np.int64]:
        """Return the windows for the prompts of a set of own texts, [own texts, sequence_length]."""
        rows = self._settings.own_text_rows * self._settings.own_text_steps
        generator = np.random.default_rng((self._settings.seed, number, rows))
        chosen = generator.integers(0, self._windows(self._training), rows).tolist()
        return self._cut(self._training, chosen)[:, :-1]

    def validation_batches(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the same held-out windows each time, spread evenly over all held-out files.

        Each batch is at most [batch_size, sequence_length + 1].
        """
        settings = self._settings
        available = self._windows(self._validation)
        count = min(available, max(1, settings.validation_tokens // settings.sequence_length))
        chosen = [index * available // count for index in range(count)]
        for start in range(0, count, settings.batch_size):
            yield self._cut(self._validation, chosen[start : start + settings.batch_size])

    def _window_in_order(self, index: int) -> int:
        epoch, offset = divmod(index, self._windows(self._training))
        if epoch != self._epoch:
            generator = np.random.default_rng((self._settings.seed, epoch))
            self._order = generator.permutation(self._windows(self._training))
            self._epoch = epoch
        return int(self._order[offset])

    def _windows(self, tokens: npt.NDArray[Any]) -> int:
        return (len(tokens) - 1) // self._settings.sequence_length

    def _cut(self, tokens: npt.NDArray[Any], windows: list[int]) -> npt.NDArray[np.int64]:
        length = self._settings.sequence_length
        return np.stack([tokens[window * length : (window + 1) * length + 1] for window in windows]).astype(np.int64)


def open_token_data(settings: TrainingSettings, work: Path, key: str | None, console: Console) -> TokenData:
    """Return the tokens of the sources, and write them if necessary.

    `key` names the tokens of a resumed checkpoint. Training continues with these tokens, even if the sources have
    changed since, for example because a package was installed.
    """
    if key and (work / key).is_dir():
        return TokenData(work / key, settings)
    with console.status("reading the source files"):
        corpus = find_corpus(settings)
    vocabulary = _given_vocabulary(settings)
    folder = data_folder(work, corpus, settings, vocabulary)
    if key and folder.name != key:
        raise TrainingError(
            f"--work {work} does not hold the tokens of the checkpoint ({key}), and the source files have "
            "changed since: give the folder it was started with, or --no-resume to train from the start"
        )
    if not folder.is_dir():
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            write_token_data(folder, corpus, settings, progress, vocabulary)
    return TokenData(folder, settings)


def _given_vocabulary(settings: TrainingSettings) -> Tokenizer | None:
    """Return the vocabulary of the initial model; `None` if a new one has to be trained."""
    if not settings.start_from:
        return None
    path = Path(settings.start_from, "tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise TrainingError(
            f"--start-from {settings.start_from} has no tokenizer.json that can be read ({error}): give the "
            "folder of a model that this tool has written"
        ) from error


def data_folder(work: Path, corpus: Corpus, settings: TrainingSettings, vocabulary: Tokenizer | None) -> Path:
    """Return the folder of this corpus's tokens; its name includes everything that they depend on."""
    origin = vocabulary.to_str() if vocabulary else f"{settings.vocab_size} {settings.tokenizer_files}"
    digest = hashlib.sha256(origin.encode())
    for part in (corpus.training, corpus.validation):
        digest.update(b"\n")
        for file in part:
            digest.update(f"{file.name} {file.digest}\n".encode())
    return work / f"tokens-{digest.hexdigest()[:16]}"


def write_token_data(
    folder: Path, corpus: Corpus, settings: TrainingSettings, progress: Progress, vocabulary: Tokenizer | None
) -> None:
    """Train the vocabulary, if it is None, and write the tokens; the folder gets its name once it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = vocabulary
    if tokenizer is None:
        task = progress.add_task("training the vocabulary", total=None)
        tokenizer = train_tokenizer(
            (file.text() for file in corpus.training[: settings.tokenizer_files]), settings.vocab_size
        )
        progress.remove_task(task)
    tokenizer.save(str(partial / "tokenizer.json"))
    dtype = np.dtype(np.uint16 if settings.vocab_size <= 2**16 else np.uint32)
    task = progress.add_task("tokenising files", total=len(corpus.training) + len(corpus.validation))
    counts = {}
    for name, files in (("training", corpus.training), ("validation", corpus.validation)):
        with (partial / f"{name}.bin").open("wb") as output:
            for tokens in _encoded(files, tokenizer, progress, task):
                output.write(np.asarray(tokens, dtype=dtype).tobytes())
            counts[name] = output.tell() // dtype.itemsize
    progress.remove_task(task)
    every_file = corpus.training + corpus.validation
    facts = {
        "dtype": dtype.name,
        "files": len(every_file),
        "validation_files": len(corpus.validation),
        "bytes": sum(file.size for file in every_file),
        "tokens": counts["training"] + counts["validation"],
        "validation_tokens": counts["validation"],
        "megabytes_by_package": corpus.megabytes_by_package(),
    }
    (partial / "data.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    os.replace(partial, folder)


def _encoded(files: list[SourceFile], tokenizer: Tokenizer, progress: Progress, task: TaskID) -> Iterator[list[int]]:
    for start in range(0, len(files), FILES_PER_BATCH):
        batch = files[start : start + FILES_PER_BATCH]
        encodings = tokenizer.encode_batch_fast([file.text() for file in batch])
        yield list(itertools.chain.from_iterable([*encoding.ids, END_OF_TEXT_ID] for encoding in encodings))
        progress.advance(task, len(batch))
