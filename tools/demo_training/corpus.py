"""The source files that a model is trained on."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from demo_training.settings import TrainingError, TrainingSettings

SKIPPED_FOLDERS = {"test", "tests", "_tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
STANDARD_LIBRARY = "standard library"


@dataclass(frozen=True)
class SourceFile:
    """One readable Python file."""

    path: Path
    package: str
    name: str
    """Package and path inside its root; equal on every machine, so choices by name are equal too."""
    digest: str
    size: int

    def text(self) -> str:
        """Return the content of the file."""
        return self.path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Corpus:
    """Training and validation files, in the order of the token stream."""

    training: list[SourceFile]
    validation: list[SourceFile]

    def megabytes_by_package(self) -> dict[str, float]:
        """Return the size of each package, the largest first."""
        sizes: dict[str, int] = {}
        for file in self.training + self.validation:
            sizes[file.package] = sizes.get(file.package, 0) + file.size
        ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
        return {package: round(size / 1e6, 2) for package, size in ordered}


def find_corpus(settings: TrainingSettings) -> Corpus:
    """Find, cap and split the source files, in an order that depends on the seed and the names only."""
    shuffled = sorted(_unique(_all_files(settings)), key=lambda file: _rank(file.name, settings.seed))
    files = list(_capped(shuffled, settings.max_mb_per_package * 1e6))
    where = " ".join(settings.source) or "the running environment"
    if len(files) < 2:
        raise TrainingError(
            f"--source {where} holds {len(files)} usable Python files and at least 2 are needed, one of them "
            "for validation (tests, empty files, copies and what is over --max-mb-per-package "
            f"{settings.max_mb_per_package} are left out): give a folder with more"
        )
    held_out_size = sum(file.size for file in files) * settings.validation_percent / 100
    split, held_out = 0, 0
    while split < len(files) - 1 and held_out < held_out_size:
        held_out += files[split].size
        split += 1
    return Corpus(training=files[split:], validation=files[:split])


def _all_files(settings: TrainingSettings) -> Iterator[SourceFile]:
    if settings.source:
        for source in settings.source:
            root = Path(source)
            if not root.is_dir():
                raise TrainingError(f"--source {source} is no folder: give one that holds Python files")
            yield from _files_under(root, package=None)
        return
    paths = sysconfig.get_paths()
    yield from _files_under(Path(paths["stdlib"]), package=STANDARD_LIBRARY)
    for site_packages in sorted({paths["purelib"], paths["platlib"]}):
        yield from _files_under(Path(site_packages), package=None)


def _files_under(root: Path, package: str | None) -> Iterator[SourceFile]:
    """Yield the files under a root; without `package`, each direct entry of the root is a package."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if not name.endswith(".py") or _is_test(name):
                continue
            path = Path(folder, name)
            relative = path.relative_to(root)
            file_package = package or relative.parts[0].removesuffix(".py")
            try:
                content = path.read_bytes()
                content.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # One unreadable file among ten thousand is no reason to stop.
            if content.strip():
                yield SourceFile(
                    path=path,
                    package=file_package,
                    name=f"{file_package}:{relative.as_posix()}",
                    digest=hashlib.sha256(content).hexdigest(),
                    size=len(content),
                )


def _is_test(name: str) -> bool:
    return name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"


def _unique(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    """Omit exact copies (vendored code): a copy in training would spoil validation."""
    seen: set[str] = set()
    for file in files:
        if file.digest not in seen:
            seen.add(file.digest)
            yield file


def _capped(files: Iterable[SourceFile], limit: float) -> Iterator[SourceFile]:
    """Yield files of a package until the next would exceed the limit."""
    taken: dict[str, int] = {}
    for file in files:
        total = taken.get(file.package, 0) + file.size
        if total <= limit:
            taken[file.package] = total
            yield file


def _rank(name: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()
