"""The log: lines on standard error. A server goes on where they cannot be written."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any


def write_line(text: str) -> None:
    """Write a line, unless the disk is full, or whoever read the log has gone."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def write_entry(fields: dict[str, Any]) -> None:
    """Write one line of JSON, with the time."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_line(json.dumps({"time": stamp, **fields}, ensure_ascii=True))
