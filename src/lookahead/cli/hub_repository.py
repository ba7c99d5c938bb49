"""Repository of the Hugging Face Hub, in the Hub's own cache; failures become errors of one line."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from logging import CRITICAL
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import tqdm

from lookahead.errors import InvalidArgumentError

_SECONDS = 10.0
"""Time limit of a request to the Hub, in seconds."""


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Turn the log of huggingface_hub off: it reports retries, and errors are reported here."""
    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


class _Bar(tqdm):
    """Progress bar for the total of bytes, on a terminal only. Other bars of huggingface_hub are hidden."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        visible = options.get("name") == "huggingface_hub.snapshot_download" and sys.stderr.isatty()
        settings = {"desc": "downloading", "leave": False, "bar_format": None, "disable": not visible}
        super().__init__(*arguments, **{**options, **settings})  # type: ignore[no-untyped-call]

    def set_description(self, *arguments: Any, **options: Any) -> None:
        """Ignore new descriptions."""


class Repository:
    """One commit of a repository: from the Hub or, if the Hub cannot be reached, from the cache.

    Failures become an `InvalidArgumentError`.

    Args:
        repo: Name of the repository.
        revision: Branch, tag or commit; the main branch if not given.

    Attributes:
        repo: Name of the repository.
        commit: Hash of the commit.
        names: File names of the commit; offline, its files in the cache.
    """

    def __init__(self, repo: str, revision: str | None) -> None:
        self.repo, self._revision = repo, revision or constants.DEFAULT_REVISION
        self._failure: Exception | None = None
        try:
            info = HfApi().model_info(repo, revision=revision, timeout=_SECONDS)
            self.commit, self.names = str(info.sha), [file.rfilename for file in info.siblings or ()]
        except Exception as error:  # errors of the HTTP client, which depends on the version of huggingface_hub
            if isinstance(error, RevisionNotFoundError):
                raise self._refused(error) from error
            self._failure, folder = error, self._cached_folder()
            if folder is None:
                raise self._refused(error) from error
            self.commit = folder.name
            self.names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]

    def get(self, names: Sequence[str]) -> Path:
        """Download missing files, with a progress bar on a terminal, and return the folder."""
        if all(self._cached_file(name) for name in names):
            folder = self._cached_folder()
            assert folder is not None
            return folder
        if self._failure is not None:
            raise self._refused(self._failure)
        patterns = [escape(name) for name in names]
        try:
            folder = Path(
                snapshot_download(self.repo, revision=self._revision, allow_patterns=patterns, tqdm_class=_Bar)
            )
        except Exception as error:
            raise self._refused(error, downloading=True) from error
        self.commit = folder.name  # a branch may have moved meanwhile
        return folder

    def read(self, name: str) -> bytes:
        """Read a small file."""
        path = self._cached_file(name)
        try:
            if path is None:
                path = Path(hf_hub_download(self.repo, name, revision=self._revision, tqdm_class=_Bar))
            return path.read_bytes()
        except Exception as error:
            raise self._refused(error, downloading=True) from error

    def lacks(self, what: str) -> InvalidArgumentError:
        """Error for a required file that the repository does not have."""
        if self._failure is not None:
            return self._refused(self._failure)
        return InvalidArgumentError(f"--model {self.repo}: {constants.ENDPOINT}/{self.repo} has no {what}")

    def _cached_file(self, name: str) -> Path | None:
        """Path of the file in the cache; `None` if the cache does not have it for this commit."""
        file = try_to_load_from_cache(self.repo, name, revision=self._revision)
        return Path(file) if isinstance(file, str) and self.commit in Path(file).parts else None

    def _cached_folder(self) -> Path | None:
        try:
            # Without patterns a partial download is found too; its files are checked one by one.
            path = snapshot_download(self.repo, revision=self._revision, local_files_only=True, allow_patterns=[])
        except (OSError, ValueError):  # ValueError: a name that no repository can have
            return None
        return Path(path)

    def _refused(self, error: Exception, downloading: bool = False) -> InvalidArgumentError:
        """Error in one line for an error of huggingface_hub."""
        page, name = f"{constants.ENDPOINT}/{self.repo}", f"--model {self.repo}"
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if isinstance(error, OfflineModeIsEnabled):
            return InvalidArgumentError(
                f"{name}: HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} has no complete copy; unset "
                "it, or give a local folder"
            )
        if isinstance(error, GatedRepoError):
            return InvalidArgumentError(
                f"{name}: access has to be requested; do so on {page}, then log in with hf auth login"
            )
        if isinstance(error, RepositoryNotFoundError):
            return InvalidArgumentError(
                f"{name}: no such folder, and no such model at {page}; check the name, or log in with hf auth login if "
                "it is private"
            )
        if isinstance(error, RevisionNotFoundError):
            return InvalidArgumentError(f"--revision {self._revision}: {page} has no such branch, tag or commit")
        if isinstance(error, HFValidationError):
            return InvalidArgumentError(f"{name}: no such folder, and no repository can have this name")
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return InvalidArgumentError(
                f"{name}: no space left in {constants.HF_HUB_CACHE} ({reason}); set HF_HOME to move the cache"
            )
        if downloading:
            return InvalidArgumentError(
                f"{name}: the download failed ({reason}); run the command again to download the rest"
            )
        return InvalidArgumentError(
            f"{name}: no such folder, the cache has no complete copy, and {constants.ENDPOINT} does not answer "
            f"({reason})"
        )
