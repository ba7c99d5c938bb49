"""Simulate Windows: hide modules that Windows lacks, as far as other packages work without them here.

Python imports a module of this name at its start, also in child processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

with contextlib.suppress(ImportError):
    import psutil  # noqa: F401  # imported first, as its Linux code imports hidden modules

MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty")
OF_OS = ("fork", "forkpty", "getuid", "killpg", "nice", "sched_getaffinity", "setsid", "sysconf")
OF_SIGNAL = ("SIGALRM", "SIGHUP", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "pthread_sigmask")


class Hidden:
    """Importer that refuses hidden modules."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden)  # type: ignore[arg-type]
for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
    for name in names:
        delattr(module, name)
subprocess.CREATE_NEW_PROCESS_GROUP = 0
