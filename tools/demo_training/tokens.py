"""The tokens of the source files, and the vocabulary."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo_training.settings import TrainingError, TrainingSettings

SKIPPED_FOLDERS = {"test", "tests", "_tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0


@dataclass(frozen=True)
class SourceFile:
    """One readable Python file.

    Attributes:
        package: Package of the file.
        name: Package and path inside of its root: equal on every machine, so choices by name are equal too.
        text: Its content.
    """

    package: str
    name: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """Windows of tokens, `[windows, sequence_length + 1]`, and the vocabulary.

    Attributes:
        training: Windows to train on.
        validation: Held-out windows.
        tokenizer: The vocabulary.
        facts: Numbers of files and tokens.
    """

    training: NDArray[Any]
    validation: NDArray[Any]
    tokenizer: PreTrainedTokenizerFast
    facts: dict[str, Any]


def find_corpus(settings: TrainingSettings) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return training and held-out files, in an order that depends on the seed and the names only."""
    files, sizes, known = [], Counter[str](), set[str]()
    for file in sorted(_files(settings), key=lambda file: _rank(file.name, settings.seed)):
        size = len(file.text.encode())
        # Copies are left out (vendored code): a copy in training would spoil validation.
        if file.text not in known and sizes[file.package] + size <= settings.max_mb_per_package * 1e6:
            known.add(file.text)
            sizes[file.package] += size
            files.append(file)
    if len(files) < 2:
        raise TrainingError(
            f"--source {' '.join(settings.source) or 'of the running environment'} holds {len(files)} usable Python "
            "files and at least 2 are needed, one of them for validation (tests, empty files, copies and files beyond "
            f"--max-mb-per-package {settings.max_mb_per_package} are left out): give a folder with more"
        )
    held_out, split = 0.0, 0
    while split < len(files) - 1 and held_out < sizes.total() * settings.validation_percent / 100:
        held_out += len(files[split].text.encode())
        split += 1
    return files[split:], files[:split]


def _files(settings: TrainingSettings) -> Iterator[SourceFile]:
    for source in settings.source:
        if not Path(source).is_dir():
            raise TrainingError(f"--source {source} is no folder: give one that holds Python files")
        yield from _files_under(Path(source), "")
    if not settings.source:
        paths = sysconfig.get_paths()
        yield from _files_under(Path(paths["stdlib"]), "standard library")
        for site_packages in sorted({paths["purelib"], paths["platlib"]}):
            yield from _files_under(Path(site_packages), "")


def _files_under(root: Path, package: str) -> Iterator[SourceFile]:
    """Yield the files under a root; without `package`, each direct entry of the root is a package."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            is_test = name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
            if path.suffix == ".py" and not is_test:
                relative = path.relative_to(root)
                owner = package or relative.parts[0].removesuffix(".py")
                try:
                    text = path.read_bytes().decode("utf-8")
                except (OSError, UnicodeDecodeError):
                    continue  # One unreadable file among ten thousand is no reason to stop.
                if text.strip():
                    yield SourceFile(owner, f"{owner}:{relative.as_posix()}", text)


def _rank(name: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()


def write_tokens(folder: Path, settings: TrainingSettings) -> None:
    """Write vocabulary and tokens, so that a run continues with them even if the sources change."""
    training, validation = find_corpus(settings)
    if settings.start_from:
        tokenizer = _given_vocabulary(settings)
    else:
        tokenizer = train_tokenizer([file.text for file in training[: settings.tokenizer_files]], settings.vocab_size)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    counts = {}
    for name, files in (("training", training), ("validation", validation)):
        encodings = tokenizer.encode_batch_fast([file.text for file in files])
        tokens = np.concatenate([np.array([*one.ids, END_OF_TEXT_ID], dtype=np.uint32) for one in encodings])
        np.save(folder / f"{name}.npy", tokens)
        counts[name] = len(tokens)
    facts = {
        "files": len(training) + len(validation),
        "validation_files": len(validation),
        "tokens": sum(counts.values()),
        "validation_tokens": counts["validation"],
    }
    (folder / "data.json").write_text(json.dumps(facts), encoding="utf-8")


def _given_vocabulary(settings: TrainingSettings) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(Path(settings.start_from, "tokenizer.json")))
    except Exception as error:  # the library raises no narrower type
        raise TrainingError(
            f"--start-from {settings.start_from} has no tokenizer.json that can be read ({error}): give the "
            "folder of a model that this tool has written"
        ) from error


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a vocabulary with an entry for every byte, so that it covers all texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    if tokenizer.get_vocab_size() < vocab_size:
        # The model would have unused embeddings.
        raise TrainingError(
            f"--vocab-size {vocab_size} is more than the source files yield, {tokenizer.get_vocab_size()}: "
            "choose at most that, or give more source"
        )
    return tokenizer


def read_tokens(folder: Path, settings: TrainingSettings) -> Tokens:
    """Return the tokens in a folder; held-out windows are spread evenly over all held-out files."""
    length = settings.sequence_length
    windows = {}
    for name in ("training", "validation"):
        tokens = np.load(folder / f"{name}.npy", mmap_mode="r")
        if len(tokens) <= length:
            raise TrainingError(
                f"--sequence-length {length} is too long for the {len(tokens)} {name} tokens: choose a shorter one, "
                f"give more source, or change --validation-percent {settings.validation_percent}"
            )
        windows[name] = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
    held_out = windows["validation"]
    count = min(len(held_out), max(1, settings.validation_tokens // length))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=settings.max_positions,
    )
    facts = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    return Tokens(windows["training"], held_out[np.arange(count) * len(held_out) // count], wrapped, facts)
