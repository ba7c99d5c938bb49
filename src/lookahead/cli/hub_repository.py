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

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
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

_MESSAGES: tuple[tuple[type[Exception], str], ...] = (
    (
        OfflineModeIsEnabled,
        "{name}: HF_HUB_OFFLINE is set, and the cache {cache} has no complete copy; unset it, or give a local folder",
    ),
    (GatedRepoError, "{name}: access has to be requested; do so on {page}, then log in with hf auth login"),
    (
        RepositoryNotFoundError,
        "{name}: no such folder, and no such model at {page}; check the name, or log in with hf auth login if it is "
        "private",
    ),
    (RevisionNotFoundError, "--revision {revision}: {page} has no such branch, tag or commit"),
    (HFValidationError, "{name}: no such folder, and no repository can have this name"),
)
"""Messages for errors of huggingface_hub, special ones first."""


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
        found = [try_to_load_from_cache(self.repo, name, revision=self._revision) for name in names]
        cached = [Path(file) for file in found if isinstance(file, str)]
        folder = self._cached_folder()
        if folder is not None and len(cached) == len(names) and all(self.commit in file.parts for file in cached):
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
        return (self.get([name]) / name).read_bytes()

    def lacks(self, what: str) -> InvalidArgumentError:
        """Error for a required file that the repository does not have."""
        if self._failure is not None:
            return self._refused(self._failure)
        return InvalidArgumentError(f"--model {self.repo}: {constants.ENDPOINT}/{self.repo} has no {what}")

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
        for kind, message in _MESSAGES:
            if isinstance(error, kind):
                fields = {"name": name, "page": page, "revision": self._revision, "cache": constants.HF_HUB_CACHE}
                return InvalidArgumentError(message.format(**fields))
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
